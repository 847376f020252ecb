"""The step in the name of a checkpoint: a hint, because its content decides.

Files of different names that make up one step, in a directory that other steps share.

    model_000030.pt, meta_000030.json, optim_000030_rank0.pt, optim_000030_rank1.pt   nanochat
    model_000030.pt, meta_000030.json, optim_000030.pt                  nanochat until late 2025
    model030000.pt, ema_0.9999_030000.pt, opt030000.pt                  guided-diffusion

A name alone may be of any program (`model_0000059.pth` is a whole checkpoint of detectron2's), so
files are a set only if two of them, of different names, have the same digits. A rank's optimizer is
one by its name: no program keeps a whole checkpoint under it.

Sources: nanochat/checkpoint_manager.py (`save_checkpoint`); guided_diffusion/train_util.py.

Files that are one rank's piece of a save, by their names, in a layout that no format knows.

    weights_tp_rank_world_size=0_2_pp_rank_world_size=1_2.pth    picotron
    model_tp0_pp1.pt, optimizer_tp0_pp1_zo0.pt                   InternEvo
    ckpt_mp0_v1.tar, ckpt_mp1_v1.tar                             makani

A piece opens as a file of its own and is not a save, let alone the newest. Known
layouts are read as the folder that they lie in, or as a step (`is_file_of_step`); what is left here
is named, and none of it is a candidate.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable
from functools import lru_cache
from typing import NamedTuple

from ftckpt.own_files import weights_of
from ftckpt.storage.state_files import without_numbers

from .recognise import COMPRESSED

_DIGITS = r"(?P<step>\d{1,15})"


class _Kind(NamedTuple):
    """How one program names the files of a step.

    Attributes:
        model: pattern of the weights' file, with the group `step`.
        others: patterns of the rest; the group `rank` for a file of each rank.
        likely: what probably lies beside the weights; `{}` stands for the digits.
        main: the weights' file; `{}` stands for the digits.
    """

    model: str
    others: tuple[str, ...]
    likely: tuple[str, ...]
    main: str


_KINDS = (
    _Kind(
        rf"model_{_DIGITS}\.pt",
        (
            rf"meta_{_DIGITS}\.json",
            rf"optim_{_DIGITS}\.pt",
            rf"optim_{_DIGITS}_rank(?P<rank>\d{{1,7}})\.pt",
        ),
        ("meta_{}.json", "optim_{}.pt", "optim_{}_rank0.pt"),
        "model_{}.pt",
    ),
    _Kind(
        r"model(?P<step>\d{6,15})\.pt",
        (r"opt(?P<step>\d{6,15})\.pt", r"ema_\d?\.\d+_(?P<step>\d{6,15})\.pt"),
        ("opt{}.pt", "ema_0.9999_{}.pt"),
        "model{}.pt",
    ),
)


class SetMember(NamedTuple):
    """What a file's name says of its set.

    Attributes:
        kind: the number of the program that names files so.
        digits: of the step, as they are written.
        place: the pattern that the name fits: 0 for the weights, else from 1.
        rank: the number of the rank; None where the file is not a rank's.
    """

    kind: int
    digits: str
    place: int
    rank: int | None = None

    @property
    def step(self) -> int:
        """The step."""
        return int(self.digits)

    @property
    def model(self) -> str:
        """The name of the weights' file of the same step."""
        return _KINDS[self.kind].main.format(self.digits)


def set_member(name: str) -> SetMember | None:
    """Return what a name says if it may be of a set; None if it cannot."""
    for number, kind in enumerate(_KINDS):
        for place, pattern in enumerate((kind.model, *kind.others)):
            if match := re.fullmatch(pattern, name):
                rank = match.groupdict().get("rank")
                return SetMember(number, match["step"], place, int(rank) if rank else None)
    return None


def set_around(name: str, is_beside: Callable[[str], bool]) -> SetMember | None:
    """Return what a name says if its file is one of a set; None if nothing beside it shows that.

    Args:
        name: of a file.
        is_beside: whether a file of a name lies in the same directory.
    """
    member = set_member(name)
    if member is None or member.rank is not None:
        return member
    kind = _KINDS[member.kind]
    likely = (one.format(member.digits) for one in (*kind.likely, kind.main))
    return member if any(one != name and is_beside(one) for one in likely) else None


def set_of(member: SetMember, names: Iterable[str]) -> dict[str, SetMember]:
    """Return the files of one set among the names of a directory."""
    found = {name: other for name in names if (other := set_member(name)) is not None}
    mine = (member.kind, member.digits)
    return {n: other for n, other in found.items() if (other.kind, other.digits) == mine}


def sets_among(names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the files of sets: name -> the name that stands for the set, and the step.

    The weights' file stands for it, else the first of the others that may be a checkpoint.
    """
    groups: dict[tuple[int, str], dict[str, SetMember]] = {}
    for name in names:
        if (member := set_member(name)) is not None:
            groups.setdefault((member.kind, member.digits), {})[name] = member
    found: dict[str, tuple[str, int]] = {}
    for held in groups.values():
        places = {member.place for member in held.values()}
        if len(places) < 2 and all(member.rank is None for member in held.values()):
            continue
        states = [name for name in held if not name.endswith(".json")] or list(held)
        first = min(states, key=lambda n: (held[n].place, held[n].rank or 0, n))
        found |= {name: (first, held[name].step) for name in held}
    return found


# A trainer's prefix for the purpose of a checkpoint.
_ROLE = r"(?:(?:best|final|initial|last|latest|release)[-_])?"
# Lightning writes any logged value as `name=value` before and after `step=100`.
_LOGGED = (
    r"(?!(?:global_)?step=)[A-Za-z][A-Za-z0-9_.]*=[-+]?"
    r"(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)"
)
# Names of one step, as trainers spell them; each must match the whole name, so that `step-10.tmp`
# or `old-step-10` is never taken for step 10.
_STEP_NAMES = (
    # torchtitan, DeepSpeed, verl; scripts write the epoch before it
    rf"{_ROLE}(?:epoch[-_]?[0-9]+[-_])?(?:global_?)?steps?[-_=]?([0-9]+)",
    rf"{_ROLE}iter_([0-9]+)",  # Megatron
    rf"{_ROLE}(?:checkpoint|ckpt)[-_]([0-9]+)",  # transformers, accelerate
    rf"{_ROLE}(?:{_LOGGED}-)*(?:global_)?step=([0-9]+)(?:-{_LOGGED})*(?:-v[0-9]+)?",  # Lightning
    r"([0-9]+)",
)
# NeMo 2 (nemo/lightning/pytorch/callbacks/model_checkpoint.py) writes the model before Lightning's
# values. Its `step` is the one in progress when the values were logged: the content has one more.
_NEMO = (
    rf"[A-Za-z0-9][A-Za-z0-9_.-]*?--(?:{_LOGGED}-)*step=([0-9]+)(?:-{_LOGGED})*(?:-last)?"
    r"(?:-v[0-9]+)?"
)
# What people write before or after the name of a checkpoint that is not to be taken: with a number
# or a date after it, or with a reason after a word that asks for one (`step-40.bad-nan`).
_WRONG = (
    r"(?:bad|broken|corrupt(?:ed)?|damaged|failed|wrong|diverged|quarantined?|invalid"
    r"|reject(?:ed)?)"
)
_SPARE = r"(?:old|disabled|ignored?|bak|backup|orig|do[-_]?not[-_]?use)"
_ASIDE = re.compile(
    rf"(?:{_WRONG}|{_SPARE})[-_.](?P<after>.+)"
    rf"|(?P<before>.+?)[-_.](?:{_WRONG}[0-9]*(?:[-_.][a-z0-9]+)*|{_SPARE}[0-9]*(?:[-_.][0-9]+)*)",
    re.IGNORECASE,
)
# Names of unfinished saves, of trainers and stores.
_STAGING = re.compile(
    r"tmp[-_.](?P<after>.*)"
    r"|(?P<before>.*?)(?:[-_.](?:ftckpt-|orbax-checkpoint-)?tmp(?:[-_.][\w.-]*)?"
    r"|\.(?:partial|incomplete|inprogress|staging|part|reserving-\w+))"
)
# NeMo marks `NAME` by a file `NAME-unfinished` while it saves or removes it; when it starts, it
# removes what is still marked. The marker of a file has no suffix and no word for the averaged
# weights: of `NAME-EMA.ckpt` it is `NAME-unfinished` (NeMo 2:
# nemo/lightning/pytorch/callbacks/model_checkpoint.py; NeMo 1: nemo/utils/callbacks/
# nemo_model_checkpoint.py, format_checkpoint_unfinished_marker_path).
_UNFINISHED = "-unfinished"
_AVERAGED = "-EMA"
# One file of several that make up a step, in a directory that other steps share.
FILE_OF_STEP = re.compile(
    r"(?:(?:[A-Za-z]+(?:_[A-Za-z]+)*[_-])?(?:global_)?(?:step|iter)[_-]?|(?:ckpt|checkpoint)[_-]"
    r"(?:[0-9]{1,15}_)?|(?=[^.]*\.(?:rank|shard)[_-]?[0-9])(?:[A-Za-z][A-Za-z0-9_-]*?[_-])?)"
    r"(?P<step>[0-9]{1,15})[_.-]"
    r"(?:(?:pp_?|pipeline_?)?stage|shard|rank)[_-]?(?P<rank>[0-9]{1,7})(?:[_-]of[_-]?[0-9]{1,7})?"
    r"\.(?:pt|pth|bin|ckpt)(?:\.(?:zst|lz4|gz))?"
)
# One of several files of the last save, the best one and so on, in a directory that others share.
FILE_OF_ROLE = re.compile(
    r"(?P<save>(?:[A-Za-z]+[_-])*?(?:best|last|latest|final|initial)(?:[_-][A-Za-z]+)*?)[_.-]"
    r"(?:shard|rank)[_-]?(?P<rank>[0-9]{1,7})(?P<after>(?:[_-]of[_-]?[0-9]{1,7})?\.(?:pt|pth|bin))"
)
_TORCH = (".pt", ".pth", ".ckpt")
# One file may have been compressed as a whole; `metrics.csv.gz` is none.
SUFFIXES = (
    *_TORCH, ".bin", ".safetensors", ".tar", ".pkl",
    *(one + packed for one in (*_TORCH, ".safetensors") for packed in COMPRESSED),
)  # fmt: skip


@lru_cache(maxsize=1 << 16)  # names of one root are asked about again and again while it changes
def step_in_name(name: str) -> int | None:
    """Return the step that a directory's or file's name says; None unless the whole name does."""
    name = weights_of(name) or name
    if match := FILE_OF_STEP.fullmatch(name):
        return int(match["step"])
    stem = stem_of(name)
    for pattern in (*_STEP_NAMES, _NEMO):
        match = re.fullmatch(pattern, stem)
        if match is not None and len(match[1]) <= 18:
            return int(match[1])
    return None


def stem_of(name: str) -> str:
    """Return a name without what says the kind of its file; the longest suffix counts."""
    return next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)


def worded_step(name: str) -> int | None:
    """Return the step that a name says in words: a bare number may be a node's, or one of many."""
    return None if name.isdecimal() else step_in_name(name)


def says_other_step(name: str, step: int) -> bool:
    """Say whether a name says another step than the content of its checkpoint."""
    said = step_in_name(name)
    if said is None or said == step:
        return False
    return said + 1 != step or re.fullmatch(_NEMO, name) is None


@lru_cache(maxsize=1 << 16)
def is_put_aside(name: str) -> bool:
    """Say whether somebody renamed the checkpoint of a step so that no trainer takes it.

    `step-40.bad`, `old-step-40.pt`: its content still says the step. `backup-40` may be the name
    that a trainer gives each save.
    """
    match = _ASIDE.fullmatch(stem_of(weights_of(name) or name))
    rest = "" if match is None else match["before"] or match["after"]
    return rest != "" and (worded_step(rest) is not None or is_put_aside(rest))


def finished_name(name: str) -> str:
    """Return the name that a save gets when it is finished; the name itself if it says nothing."""
    unfinished = _STAGING.fullmatch(name)
    if unfinished is None:
        return name
    return unfinished["before"] or unfinished["after"] or ""


def is_file_of_step(name: str) -> bool:
    """Say whether a file is one of several of a step, as its name tells (see `FILE_OF_STEP`)."""
    return FILE_OF_STEP.fullmatch(name) is not None or set_member(name) is not None


def unfinished_marker(name: str, beside: Container[str]) -> str:
    """Return the marker, among the names beside a save, that says it is unfinished; "" if none."""
    if name.endswith(_UNFINISHED):
        return ""
    stem = stem_of(name)
    stems = dict.fromkeys((name, stem, stem.removesuffix(_AVERAGED)))
    return next((s + _UNFINISHED for s in stems if s + _UNFINISHED in beside), "")


# A word for a place in a grid of ranks, what counts there, and the numbers: `tp_rank_00`, `mp0`,
# `rank_world_size=0_2`, `rank_0_of_2`, `-0-of-2`.
_PLACE = re.compile(
    r"(?<![a-z])(?:rank|shard|tp|pp|mp|dp|cp|zo|gpu|proc(?:ess)?)"
    r"(?:[-_]?(?:rank|world[-_]?size|size))*[-_=]?(?P<rank>\d+)"
    r"(?:(?:(?<=size=\d)|(?<=size=\d\d)|[-_]of)[-_]?(?P<world>\d+))?(?![a-z0-9])"
    r"|(?<![a-z0-9])(?P<piece>\d+)[-_]of[-_](?P<pieces>\d+)(?![a-z0-9])",
    re.IGNORECASE,
)


# A folder with what one rank saves of each step. Sweeps call folders by other numbers (`gpu0`).
_FOLDER = re.compile(
    r"(?:[a-z]+[-_])*rank[-_=]?(\d+)|(?:(?:tp|pp|mp)[-_=]?(\d+))(?:[-_](?:tp|pp|mp)[-_=]?\d+)*",
    re.IGNORECASE,
)


def is_folder_of_rank(name: str) -> bool:
    """Whether a folder's name says a rank."""
    return _FOLDER.fullmatch(name) is not None


def folders_of_ranks(names: Iterable[str]) -> list[str]:
    """Return the names of folders that differ in the rank alone; none where only one does."""
    found = {name: match for name in sorted(names) if (match := _FOLDER.fullmatch(name))}
    shapes = {without_numbers(name) for name in found}
    places = [(int(match[1] or match[2]),) for match in found.values()]
    return list(found) if len(shapes) == 1 and _are_numbered(places) else []


def pieces_among(names: Iterable[str]) -> frozenset[str]:
    """Return the files among names that are pieces: several differ in the place alone.

    One alone is a piece where its name says that there are more; else it may be what the first rank
    saves for all.
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    told = set()
    for name in names:
        if not name.endswith(SUFFIXES) or is_file_of_step(name) or FILE_OF_ROLE.fullmatch(name):
            continue
        places = list(_PLACE.finditer(name))
        if places:
            groups[_PLACE.sub("@", name)][name] = tuple(_number(place) for place in places)
            if any(int(place["world"] or place["pieces"] or 1) > 1 for place in places):
                told.add(name)
    return frozenset(told.union(*(g for g in groups.values() if _are_numbered(g.values()))))


def _are_numbered(places: Collection[tuple[int, ...]]) -> bool:
    """Whether several are numbered as ranks are: from 0, or from 1 without a gap.

    A LoRA's rank is a number of another kind: `lora_rank8`, `lora_rank16`.
    """
    numbers = {number for place in places for number in place}
    return len(places) > 1 and (0 in numbers or numbers == set(range(1, len(numbers) + 1)))


def _number(place: re.Match[str]) -> int:
    return int(place["rank"] or place["piece"])
