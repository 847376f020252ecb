"""The step in the name of a checkpoint: a hint, because its content decides."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache

from ftckpt.own_files import weights_of

from .recognise import COMPRESSED
from .step_sets import set_member

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
