"""The small files that a step lacks and the steps beside it have.

They count as parts do where their names tell state (`meta.json`, `trainer_state.json`): without it
no run goes on from there. What describes the model or the job (`config.json`, a tokenizer) is alike
in all steps and can be taken from another one, so that its loss is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.findings import listed
from ftckpt.own_files import is_own
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.state_files import tells_state, without_numbers
from ftckpt.storage.store import EntryKind, Store

if TYPE_CHECKING:
    from .roots import Candidate, Child, Root

# Steps on each side that are looked at until there are enough.
_TRIED = 3
# A step of more names is one of a large job: not all of them are at hand.
_NAMES = 4096
_DIGITS = 18
_HOLDS = "holds small files"


class SmallNames(NamedTuple):
    """The names at the top of a step that a small file or a folder may have.

    Attributes:
        names: without numbers; a folder has a slash behind.
        all: whether all names were looked at.
    """

    names: frozenset[str]
    all: bool


class SmallFiles(NamedTuple):
    """What a step lacks.

    Attributes:
        message: as a sentence.
        certain: whether two steps show that its save was not finished, or lost it.
    """

    message: str
    certain: bool


def lost_small_files(
    root: Root, child: Child, older: Sequence[Candidate], newer: Sequence[Candidate]
) -> SmallFiles | None:
    """Return the small files that a step lacks, and the steps on both sides of it have.

    Of the newest step, the two before it must have them. Of the oldest it is a warning, as where
    there is one other step: a run often saves less at first. A step is whole whether another one
    can be listed or not.

    Args:
        root: with the step.
        child: the step.
        older: the steps before it, the nearest first.
        newer: the steps after it, the nearest first.
    """
    try:
        return _lost(root, child, older, newer)
    except FtckptError:
        return None


def may_lack_some(url: str, options: StoreOptions) -> bool:
    """Say whether a directory lacks a small file of one whose name differs in numbers alone.

    Nothing is recognised for that, so that a step that lacks nothing costs some names.
    """
    above, name = split(url.rstrip("/"))
    shape = without_numbers(name)
    if shape == name:
        return False
    try:
        store = open_store(above, options)
        beside = [
            other
            for other, kind in store.names("", _NAMES).items()
            if kind is EntryKind.DIRECTORY and other != name and without_numbers(other) == shape
        ]
        if not beside:
            return False
        mine = _held(store, name).names
        nearest = sorted(beside, key=lambda other: _distance(other, name))[:_TRIED]
        return any(_held(store, one).names - mine for one in nearest)
    except FtckptError:
        return False


def _distance(one: str, other: str) -> list[int]:
    pairs = zip(re.findall(r"\d+", one), re.findall(r"\d+", other), strict=True)
    return [abs(int(a[:_DIGITS]) - int(b[:_DIGITS])) for a, b in pairs]


def _lost(
    root: Root, child: Child, older: Sequence[Candidate], newer: Sequence[Candidate]
) -> SmallFiles | None:
    if not (older or newer):
        return None
    before, after = _saved(root, older), _saved(root, newer)
    sides = [*before[:1], *after[:1]] if before and after else [*before, *after]
    if not sides:
        return None
    steps = (child.candidate, *sides)
    mine, *theirs = (_held_in(root, one) for one in steps)
    if not mine.all:
        return None
    absent = frozenset.intersection(*(one.names for one in theirs)) - mine.names
    state = sorted(name for name in absent if tells_state(name))
    lost = state or sorted(absent)
    if not lost or (len(sides) == 1 and not state):
        return None
    having = f"{' and '.join(one.path for one in sides)} {'have' if len(sides) > 1 else 'has'}"
    what = f"{root.url_of(child.candidate)} lacks {listed(lost, 3)}, which {having}"
    if not state:
        return SmallFiles(f"{what}: it was lost, or nothing needs it", certain=False)
    if before and len(sides) > 1:
        return SmallFiles(f"{what}: its save was not finished, or it was lost", certain=True)
    return SmallFiles(f"{what}: it was lost, or is not saved every time", certain=False)


def _saved(root: Root, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first two of these steps that are checkpoints."""
    folders = (one for one in candidates[:_TRIED] if one.entry.kind is EntryKind.DIRECTORY)
    return [one for one in folders if root.recognise(one) is not None][:2]


def _held_in(root: Root, candidate: Candidate) -> SmallNames:
    """Return the names of a step of a root, which several of its neighbours ask for."""
    path = candidate.entry.path
    return root.known.answer(_HOLDS, candidate.path, lambda: _held(root.store, path))


def tell_names(root: Root, candidate: Candidate, store: Store) -> None:
    """Tell a root the names of a step that `store` has listed."""
    root.known.told(_HOLDS, candidate.path, _held(store, candidate.entry.path))


def _held(store: Store, path: str) -> SmallNames:
    """Return the names at the top of a step.

    The number of `trainer_state_30.json` is the step's.
    """
    names = store.names(path, _NAMES)
    small = (
        without_numbers(name) + "/" * (kind is EntryKind.DIRECTORY)
        for name, kind in names.items()
        if not is_own(name) and (kind is EntryKind.DIRECTORY or tells_state(name) is not None)
    )
    telling = frozenset(name for name in small if tells_state(name) is not None)
    return SmallNames(telling, len(names) < _NAMES)
