"""Find the parts of a folder, by names first (see `folders`).

What the names in a folder say: parts of one checkpoint, or checkpoints side by side.

A trainer calls the parts of a step by what is in them (`model`, `optim`, `rng`, `actor`), and
several checkpoints of one folder by when or why they were saved (`step-10`, `best`, `last`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ftckpt.checkpoint import CommitState, ImpliedCount
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.discovery.recognise import recognise as recognise_in
from ftckpt.discovery.step_names import step_in_name, worded_step
from ftckpt.findings import listed
from ftckpt.formats.safetensors.names import SUFFIX
from ftckpt.formats.state.side_by_side import (
    OF_PIECE,
    OPTIMIZERS,
    STATES,
    VERSIONS,
    alike,
    saves_beside,
)
from ftckpt.formats.trainer_dirs.names import TRAINED
from ftckpt.own_files import MANIFEST, is_own
from ftckpt.storage.state_files import is_marker, may_hold_tensors, parts_among, without_numbers

# What a job trains beside its model, or for it.
COMPANIONS = ("critic", "value", "ref", "reference", "discriminator", "teacher", "target")
# What is made of a model that is trained: without it, nobody trained it as a model.
AVERAGES = ("ema",)
# Models that one job trains side by side; the trained one first, and last what may be either.
OWNERS = (*TRAINED, *COMPANIONS, "reward", *AVERAGES)
_MODELS = frozenset(
    {
        "model", "models", "module", "weights", "net", "network", "params", "pretrained",
        "backbone", "adapter", "lora", *OWNERS,
    }
)  # fmt: skip
_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"\d+")


def implied_by(path: str) -> ImpliedCount | None:
    """Return which pieces of a save a file is one of, by its path; None if it says none."""
    match = next((m for m in OF_PIECE.finditer(path) if "of" not in m[0].lower()), None)
    if match is None:
        return None
    digits = re.search(r"\d+$", match[0])
    assert digits is not None
    return ImpliedCount(path[: match.end() - len(digits[0])], path[match.end() :])


@lru_cache(maxsize=4096)
def words(name: str) -> frozenset[str]:
    """Return the words of a file's or folder's name, without what follows its last dot."""
    stem = name.rpartition(".")[0] or name
    return frozenset(_WORD.findall(stem.lower()))


def is_version(name: str) -> bool:
    """Say whether a name tells when or why something was saved: the whole of a checkpoint."""
    return bool(words(name) & VERSIONS) or worded_step(name) is not None


def is_one_of_many(name: str) -> bool:
    """Say whether a name has such a word and a number: `epoch_3`, one of a series."""
    return bool(words(name) & VERSIONS) and _NUMBER.search(OF_PIECE.sub("", name)) is not None


def role(name: str) -> str:
    """Return what a part holds, by its name: the optimizer, other state, or a model; "" if unknown.

    A name with a number other than a rank's may be one of a series, and says nothing.
    """
    found = words(name)
    if is_version(name) or _NUMBER.search(OF_PIECE.sub("", name.rpartition(".")[0] or name)):
        return ""
    if found & OPTIMIZERS:
        return "optimizer"
    if found & STATES:
        return "state"
    return owner(name) or ("model" if found & _MODELS else "")


def owner(name: str) -> str:
    """Return the model that a part belongs to where a job trains several; "" for the only one."""
    found = words(name)
    return next((one for one in OWNERS if one in found), "")


# Levels below a folder at which a part may lie: `policy/optimizer/optim` is three.
_DEPTH = 3
# More folders than these are not looked into, and more names are not those of parts.
_FOLDERS = 64
_NAMES = 256
# Words for a checkpoint, whatever it is of.
_ANY = ("checkpoint", "ckpt")
# Words for what holds several checkpoints.
_CONTAINERS = ("checkpoints", "ckpts", "backups", "saves")


class FolderPart(NamedTuple):
    """A part that a format recognises.

    Attributes:
        place: its folder, relative to the checkpoint's; or its file.
        format: what reads it; None for a file, whose content has to say it.
        commit: whether it is finished, by its names.
        kinds: the names of its files of tensors and its markers, each number as `#`.
    """

    place: str
    format: Format | None
    commit: CommitState
    kinds: frozenset[str]


def recognised(listing: Listing, formats: Sequence[Format]) -> Recognition | None:
    """Return what a directory is as a folder of parts; None if it is none."""
    if not _may_be_one(listing):
        return None
    parts = find_parts(listing, formats)
    places = [part.place for part in parts]
    named = _is_named(listing) or _is_rest(listing, places) or _is_of_two_models(listing)
    if not parts or not (named or _tell_parts(places)):
        return None
    commits = {part.commit for part in parts}
    commit = CommitState.NO_MARKER
    if CommitState.UNCOMMITTED in commits:
        commit = CommitState.UNCOMMITTED
    elif commits == {CommitState.COMMITTED}:
        commit = CommitState.COMMITTED
    kinds = _markers(listing, "").union(*(part.kinds for part in parts))
    reason = f"holds {listed([part.place for part in parts], 3)}"
    return Recognition("bundle", reason, commit, parts=tuple(sorted(kinds)), by_names=True)


def _is_named(listing: Listing) -> bool:
    """Whether something says that the folder is one checkpoint, whatever its parts are called."""
    if listing.is_sibling or MANIFEST in listing.files:
        return True
    return step_in_name(listing.called) is not None


def _may_be_one(listing: Listing) -> bool:
    """Judge by the names of one level: no series of steps lies there, and enough tells parts."""
    some = listing.at_hand
    steps = {worded_step(name) for name in (*some.directories, *some.files) if not is_own(name)}
    steps -= {None, step_in_name(listing.called)}
    if steps:
        return False
    if _is_named(listing):
        return True
    if listing.some is not None or len(listing.directories) > _NAMES:
        return False
    if any(name.isdecimal() for name in listing.directories):
        return False
    places = [*_folders(listing), *loose_files(listing, any_name=False)]
    return _tell_parts(places) or _is_rest(listing, places) or _is_of_two_models(listing)


def _is_rest(listing: Listing, places: Sequence[str]) -> bool:
    """Whether a folder that is named as one of many saves holds a part: the others may be lost.

    `2026-11-01_10-00-00-backup-1000-10-0` is one of OneTrainer's; `checkpoints-2026` holds some.
    """
    words = listing.called.lower()
    return (
        is_one_of_many(listing.called)
        and not any(plural in words for plural in _CONTAINERS)
        and any(role(place.partition("/")[0]) for place in places)
    )


def _tell_parts(places: Sequence[str]) -> bool:
    """Whether names tell at least two parts of one checkpoint, among them state or two models."""
    roles = [one for place in places if (one := role(place.partition("/")[0]))]
    tops = {place.partition("/")[0] for place in places}
    told = set(roles)
    models = told & set(OWNERS)
    return (
        len(tops) > 1
        and len(roles) > 1
        and (bool(told & {"optimizer", "state"}) or len(models) > 1)
    )


def _is_of_two_models(listing: Listing) -> bool:
    """Whether two folders hold a model each, and one is trained for the other.

    audiotools saves `dac/` (the class in small letters) beside `discriminator/`, each with files of
    the same names, an optimizer's among them. Exports side by side have none.
    """
    folders = _folders(listing)
    if len(folders) != 2 or len({bool(words(one) & set(COMPANIONS)) for one in folders}) != 2:
        return False
    one, other = (parts_among(listing.inside(folder).files) for folder in folders)
    return bool(one & other) and any(role(name) == "optimizer" for name in one | other)


def _folders(listing: Listing, *, of_a_step: bool = False) -> list[str]:
    """Return the folders that may be parts.

    What is called `best` or `step-3` is a checkpoint itself, but in a folder whose name says a step
    in words all that is not of another step is a part, as is all further down (`of_a_step`). Inside
    a part (`model/ckpt`) a word for any checkpoint says neither when nor why it was saved.
    """
    own = step_in_name(listing.called)
    worded = of_a_step or worded_step(listing.called) is not None
    inside = role(listing.called) != ""
    return sorted(
        name
        for name in listing.directories
        if not name.startswith((".", "__"))
        and (
            worded
            or not (is_version(name) or name.isdecimal())
            or (inside and name.lower() in _ANY)
        )
        and not _is_of_series(name, own)
    )


def loose_files(listing: Listing, *, any_name: bool) -> list[str]:
    """Return the files of one level that are parts themselves; none if they are of a series.

    `any_name`: whether their folder is known to be of one checkpoint; else their names must tell.
    """
    files = sorted(n for n in listing.files if may_hold_tensors(n) and not n.startswith("."))
    own, several = step_in_name(listing.called), len(files) > 1
    series = {name for name in files if several and _is_of_series(name, own)}
    if not any_name and not series:
        series = _saves(listing, files)
    if series or (not any_name and several and any(is_version(name) for name in files)):
        return []
    return files if any_name else [name for name in files if role(name)]


def _saves(listing: Listing, files: Sequence[str]) -> set[str]:
    """Return the files that are saves beside each other: numbers tell, and headers if there are."""
    torch = (name for name in files if not name.endswith(SUFFIX))
    return {name for group in alike(torch) for name in group} | saves_beside(listing)


def _is_of_series(name: str, own: int | None) -> bool:
    step = worded_step(name)
    return is_one_of_many(name) if step is None else step != own


def find_parts(listing: Listing, formats: Sequence[Format]) -> list[FolderPart]:
    """Return the parts of a folder: what formats recognise below it, and files that lie loose.

    Looks into at most 64 folders; a folder that holds a series of steps counts as none.
    """
    found: list[FolderPart] = []
    # A bare number may be a run's as well: its files are parts only where their names say so.
    of_a_step = worded_step(listing.called) is not None
    any_name = of_a_step or MANIFEST in listing.files
    _find(listing, "", formats, _DEPTH, [_FOLDERS], found, any_name, of_a_step)
    return found


def _find(
    listing: Listing,
    prefix: str,
    formats: Sequence[Format],
    depth: int,
    left: list[int],
    found: list[FolderPart],
    any_name: bool,
    of_a_step: bool,
) -> None:
    loose = loose_files(listing, any_name=any_name)
    found += (
        FolderPart(
            prefix + n, None, CommitState.NO_MARKER, frozenset({without_numbers(prefix + n)})
        )
        for n in loose
    )
    if not depth:
        return
    for name in _folders(listing, of_a_step=of_a_step):
        if not left[0]:
            return
        left[0] -= 1
        inner = listing.inside(name)
        known = recognise_in(formats, inner)
        if known is not None:
            place = prefix + name
            kinds = parts_among(inner.files, f"{place}/") or frozenset({without_numbers(place)})
            found.append(FolderPart(place, known[0], known[1].commit, kinds))
        elif not any(worded_step(one) is not None for one in inner.at_hand.directories):
            _find(inner, f"{prefix}{name}/", formats, depth - 1, left, found, True, of_a_step)


def _markers(listing: Listing, prefix: str) -> frozenset[str]:
    """Return the names by which trainers mark a save as finished."""
    return frozenset(without_numbers(prefix + n) for n in listing.files if is_marker(n))
