"""The files that a step lacks and the steps beside it have, whatever holds them.

All names below a step count, each number in them left out: that of `trainer_state_30.json` is the
step's, that of `rng_state_1.pth` a rank's, of which there must be as many as beside. A file counts
as parts do where its name tells state (`meta.json`, `orchestrator/progress.pt`, `rng.pt`): without
it no run goes on from there. What describes the model or the job (`config.json`, a tokenizer) is
alike in all steps and can be taken from another one, and an export can be made again, so that their
loss is a warning.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.findings import listed
from ftckpt.own_files import is_own
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.state_files import numbers_in, tells_state, without_numbers
from ftckpt.storage.store import EntryKind, Store

if TYPE_CHECKING:
    from .roots import Candidate, Child, Root

# Steps on each side that are looked at until there are enough.
_TRIED = 3
# A step of more names is one of a large job: not all of them are at hand.
_NAMES = 4096
# Levels below a step that are looked at, and folders of one level.
_DEPTH, _FOLDERS = 3, 16
_DIGITS = 18
_HOLDS = "holds files"
_OF_LAYERS = re.compile(r"(?<![a-z])(?:layers?|blocks?|experts?)[-_.]?#")
# Names without numbers -> those that have them.
Names = Mapping[str, Set[str]]


class Held(NamedTuple):
    """The files below a step.

    Attributes:
        names: each name without numbers, and those that have it.
        levels: how many levels were looked at whole: a file of a deeper one is not known to lack.
    """

    names: Names
    levels: int


class SmallFiles(NamedTuple):
    """What a step lacks.

    Attributes:
        message: as a sentence.
        certain: whether two steps show that its save was not finished, or lost it.
        of_ranks: how many files of a kind the steps beside have, where a job of fewer ranks would
            have saved what is there; 0 otherwise.
        of_several: whether others of its kind are there, which no run begins to save without it.
    """

    message: str
    certain: bool
    of_ranks: int = 0
    of_several: bool = False


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
        return any(
            len(held) > len(mine.get(shape, ())) and tells_state(shape) is not None
            for other in nearest
            for shape, held in _held(store, other).names.items()
        )
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
    (mine, levels), *others = (_held_in(root, one) for one in steps)
    theirs = [
        {shape: names for shape, names in one.names.items() if shape.count("/") < levels}
        for one in others
    ]
    # One rank's `rng_state.pth` is `rng_state_0.pth` in a job of several.
    own = {_of_any_ranks(shape) for shape in mine}
    absent = {
        shape: tells_state(shape)
        for shape in theirs[0]
        if _of_any_ranks(shape) not in own and all(shape in their for their in theirs)
    }
    state = sorted(shape for shape, told in absent.items() if told)
    lost = state or sorted(shape for shape, told in absent.items() if told is False)
    fewer = [] if state else _fewer(mine, theirs)
    certain = bool(before) and len(sides) > 1
    having = f"{' and '.join(one.path for one in sides)} {'have' if len(sides) > 1 else 'has'}"
    here = root.url_of(child.candidate)
    if fewer:
        shape = fewer[0]
        names = sorted(theirs[0][shape] - mine[shape])[: len(theirs[0][shape]) - len(mine[shape])]
        what = f"{here} lacks {listed(names, 3)}, which {having}"
        # A job of fewer ranks has fewer files of ranks; no model has fewer layers than before.
        if certain and (_OF_LAYERS.search(shape) or not _is_counted(mine[shape], theirs[0][shape])):
            what = f"{what}: its save was not finished, or it was lost"
            return SmallFiles(what, certain=True, of_several=True)
        what = f"{what}: the job had fewer ranks, or it was lost"
        return SmallFiles(what, False, len(theirs[0][shape]) if certain else 0)
    if not lost or (len(sides) == 1 and not state):
        return None
    what = f"{here} lacks {listed(_shown(lost, mine), 3)}, which {having}"
    if not state:
        return SmallFiles(f"{what}: it was lost, or nothing needs it", certain=False)
    if certain:
        return SmallFiles(f"{what}: its save was not finished, or it was lost", certain=True)
    return SmallFiles(f"{what}: it was lost, or is not saved every time", certain=False)


def _of_any_ranks(shape: str) -> str:
    return re.sub(r"[._-]?#", "", shape)


def _fewer(mine: Names, theirs: Sequence[Names]) -> list[str]:
    """Return the kinds of files of state of which a step has some, and those beside it more."""
    return sorted(
        shape
        for shape, held in mine.items()
        if tells_state(shape)
        and len({len(their.get(shape, ())) for their in theirs}) == 1
        and len(theirs[0].get(shape, ())) > len(held)
    )


def _is_counted(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether names are those of ranks without a gap, as a job of so few would have them.

    `others` are those of a step beside, which show the number of the first rank.
    """
    first = min(numbers_in(name)[-1:] for name in others)
    numbers = sorted(numbers_in(name)[-1:] for name in names)
    return first != () and numbers == [(first[0] + n,) for n in range(len(numbers))]


def _shown(lost: Sequence[str], mine: Names) -> list[str]:
    """Return the folders of lost files if nothing of the folder is left, else the files."""
    held = {part for shape in mine for part in _folders_of(shape)}
    found = (next((f for f in _folders_of(name) if f not in held), name) for name in lost)
    return sorted(set(found))


def _folders_of(path: str) -> list[str]:
    return [path[: match.end()] for match in re.finditer("/", path)]


def _saved(root: Root, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first two of these steps that are checkpoints."""
    folders = (one for one in candidates[:_TRIED] if one.entry.kind is EntryKind.DIRECTORY)
    return [one for one in folders if root.recognise(one) is not None][:2]


def _held_in(root: Root, candidate: Candidate) -> Held:
    """Return the names of a step of a root, which several of its neighbours ask for."""
    path = candidate.entry.path
    return root.known.answer(_HOLDS, candidate.path, lambda: _held(root.store, path))


def tell_names(root: Root, candidate: Candidate, store: Store) -> None:
    """Tell a root the names of a step that `store` has listed."""
    root.known.told(_HOLDS, candidate.path, _held(store, candidate.entry.path))


def _held(store: Store, path: str) -> Held:
    """Return the files below a step.

    Of folders inside those that a large store has many of, the names are not asked for.
    """
    found: dict[str, set[str]] = defaultdict(set)
    above = [""]
    for level in range(_DEPTH):
        folders, cut = [], False
        for prefix in above:
            names = store.names(f"{path}/{prefix}".strip("/"), _NAMES)
            cut = cut or len(names) >= _NAMES
            for name, kind in names.items():
                if is_own(name):
                    continue
                if kind is not EntryKind.DIRECTORY:
                    found[without_numbers(prefix + name)].add(prefix + name)
                elif not name.startswith((".", "__")):
                    folders.append(f"{prefix}{name}/")
        if cut:
            return Held(found, level)
        if len(folders) > _FOLDERS:
            return Held(found, level + 1)
        above = folders
    return Held(found, _DEPTH)
