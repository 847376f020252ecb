"""A root: a place that has checkpoints as children, and perhaps pointers to one of them.

Only names of one level are listed to know a root; a child is listed when it is asked about. A name
is a hint: the step of a checkpoint is what its content says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ftckpt.errors import FtckptError, NotFoundError, UsageError
from ftckpt.storage.store import Entry, EntryKind, Store, join

from .dropped import Tomb, read_tombs
from .pointers import Pointer, is_pointer, links_beside, read_pointers
from .recognise import UnopenedPart
from .step_names import FILE_OF_STEP, SUFFIXES, step_in_name

T = TypeVar("T")
R = TypeVar("R")

# How many directories without a step in their name are looked into for `checkpoint/step-N`.
_DEEPER = 16

# How many children are asked about at once.
_BATCH = 64

# What trainers and stores call a save that is not finished.
_STAGING = re.compile(
    r"tmp[-_.](?P<after>.*)"
    r"|(?P<before>.*?)(?:[-_.](?:ftckpt-|orbax-checkpoint-)?tmp(?:[-_.][\w.-]*)?"
    r"|\.(?:partial|incomplete|inprogress|staging|part))"
)
# NeMo 2 marks `NAME` by a file `NAME-unfinished` while it saves or removes it; when it starts, it
# removes what is still marked (nemo/lightning/pytorch/callbacks/model_checkpoint.py).
_UNFINISHED = "-unfinished"
# Not a checkpoint, not readable, and in the top of many a mounted volume.
_SYSTEM = frozenset({"lost+found"})


class Candidate(NamedTuple):
    """A name in a root that may be a checkpoint.

    Attributes:
        path: relative to the root.
        entry: the directory or file.
        step: what the name says, None where it says nothing.
        staging: whether the name says that a save is not finished.
    """

    path: str
    entry: Entry
    step: int | None
    staging: bool


class Child(NamedTuple):
    """A candidate that formats recognise.

    Attributes:
        candidate: its name.
        parts: one for most; several where a step holds several models (`actor`, `critic`).
    """

    candidate: Candidate
    parts: tuple[UnopenedPart, ...]


@dataclass(frozen=True)
class Root:
    """Names and pointers of a root.

    Attributes:
        store: where it lies.
        base: path of the directory that holds the checkpoints, "" for the store's own URL.
        candidates: what may be a checkpoint, in the order of names.
        pointers: what names one of them.
        foreign: other names; never touched, reported.
        ask: recognises one directory or file.
        tombs: of candidates that were dropped where they stand, by path; see `is_dropped`.
    """

    store: Store
    base: str
    candidates: tuple[Candidate, ...]
    pointers: tuple[Pointer, ...]
    foreign: tuple[str, ...]
    ask: Callable[[Entry], UnopenedPart | None]
    tombs: Mapping[str, Tomb] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """What the user would type."""
        return self.store.describe(self.base)

    def url_of(self, candidate: Candidate) -> str:
        """Return the path or URL of a candidate, as the user would type it."""
        return self.store.describe(join(self.base, candidate.path))

    def is_dropped(self, candidate: Candidate) -> bool:
        """Say whether a candidate is trash, although its data still stand in an object store."""
        tomb = self.tombs.get(candidate.path)
        if tomb is None:
            return False
        entry = candidate.entry
        try:
            return tomb.holds(
                [entry] if entry.kind is EntryKind.FILE else self.store.walk(entry.path)
            )
        except NotFoundError:
            return False

    def recognise(self, candidate: Candidate) -> Child | None:
        """List one candidate and ask the formats about it; None where none knows it.

        A step that no format knows may hold one checkpoint a model (`global_step_10/actor`). What
        was dropped is none any more.
        """
        if self.is_dropped(candidate):
            return None
        part = self.ask(candidate.entry)
        if part is not None:
            return Child(candidate, (part,))
        if candidate.step is None or candidate.entry.kind is not EntryKind.DIRECTORY:
            return None
        try:
            below = self.store.children(candidate.entry.path)
        except NotFoundError:
            return None
        found = (self.ask(e) for e in below if e.kind is EntryKind.DIRECTORY)
        parts = tuple(part for part in found if part is not None)
        return Child(candidate, parts) if parts else None

    def recognise_all(self, candidates: Iterable[Candidate]) -> list[Child | FtckptError | None]:
        """Ask about many candidates at once; an error stands in the place of its candidate."""

        def one(candidate: Candidate) -> Child | FtckptError | None:
            try:
                return self.recognise(candidate)
            except FtckptError as error:
                return error

        return concurrently(self.store, one, list(candidates))

    def children(self) -> list[Child]:
        """Return all recognised children: the newest name first, names without a step last.

        What its name says is not finished is left out.

        Raises:
            FtckptError: a child could not be listed; absence is never concluded from that.
        """
        found = self.recognise_all(_named_first(c for c in self.candidates if not c.staging))
        for child in found:
            if isinstance(child, FtckptError):
                raise child
        return [child for child in found if isinstance(child, Child)]

    def holds_checkpoints(self) -> bool:
        """Say whether any child is recognised; lists as few of them as that takes.

        Raises:
            FtckptError: none is, and one could not be listed.
        """
        waiting = _named_first(self.candidates)
        errors = []
        # Most often the first is one; where it is not, a request each in turn would take minutes.
        for size in (1, *([_BATCH] * (len(waiting) // _BATCH + 1))):
            found = self.recognise_all(waiting[:size])
            if any(isinstance(child, Child) for child in found):
                return True
            errors += [child for child in found if isinstance(child, FtckptError)]
            waiting = waiting[size:]
        if errors:
            raise errors[0]
        return False


def read_root(store: Store, ask: Callable[[Entry], UnopenedPart | None]) -> Root:
    """Read the names of one level, and the pointers.

    Where nothing there is a step but one directory inside holds steps, as in
    `outputs/checkpoint/step-N`, that directory is the root.

    Raises:
        UsageError: several directories inside hold steps: which root is meant?
    """
    found = read_runs(store, ask, most=_DEEPER)
    if len(found) > 1:
        raise UsageError(
            f"{store.url} holds several roots",
            hint="name one of them: " + ", ".join(r.url for r in found[:8]),
        )
    return found[0]


def read_runs(
    store: Store, ask: Callable[[Entry], UnopenedPart | None], *, most: int | None = None
) -> list[Root]:
    """Return the root that a place is, or else every directory in it that holds steps.

    Args:
        store: opened at the place.
        ask: recognises one directory or file.
        most: how many directories are looked into; None for all.
    """
    root = _read_level(store, "", ask)
    if any(c.step is not None for c in root.candidates) or root.pointers:
        return [root]
    if any(root.recognise(c) is not None for c in root.candidates[:_DEEPER]):
        return [root]
    plain = [c for c in root.candidates if c.entry.kind is EntryKind.DIRECTORY]
    deeper = [_read_level(store, c.entry.path, ask) for c in plain[:most]]
    found = [r for r in deeper if r.pointers or any(c.step is not None for c in r.candidates)]
    return [r for r in found if r.holds_checkpoints()] or [root]


def read_again(root: Root) -> Root:
    """Return a root as it is now: its names and its pointers are listed again.

    Raises:
        NotFoundError: it is not there any more.
    """
    return _read_level(root.store, root.base, root.ask)


def _read_level(store: Store, base: str, ask: Callable[[Entry], UnopenedPart | None]) -> Root:
    skip = len(base) + 1 if base else 0
    entries = {e.path[skip:]: e for e in store.children(base)}
    links = links_beside(store, base, entries)
    candidates, foreign = [], []
    for name, entry in entries.items():
        if is_pointer(name, entry, links) or (
            name.endswith(_UNFINISHED) and name.removesuffix(_UNFINISHED) in entries
        ):
            continue
        unfinished = _STAGING.fullmatch(name)
        staging = unfinished is not None or name + _UNFINISHED in entries
        step = step_in_name(
            name if unfinished is None else unfinished["before"] or unfinished["after"] or ""
        )
        if _may_be_checkpoint(name, entry, step):
            candidates.append(Candidate(name, entry, step, staging))
        else:
            foreign.append(name)
    candidates = _one_of_each_step(candidates)
    pointers = read_pointers(store, entries, links, {c.path: c.step for c in candidates}, ask)
    tombs = read_tombs(store, base, entries)
    return Root(store, base, tuple(candidates), tuple(pointers), tuple(foreign), ask, tombs)


def _one_of_each_step(candidates: list[Candidate]) -> list[Candidate]:
    """Leave one file of each step whose files lie side by side: the first names the checkpoint."""
    first: dict[int, tuple[int, str]] = {}
    numbers = {c.path: m for c in candidates if (m := FILE_OF_STEP.fullmatch(c.path))}
    for path, match in numbers.items():
        place = int(match["rank"]), path
        step = int(match["step"])
        first[step] = min(first.get(step, place), place)
    return [
        c
        for c in candidates
        if c.path not in numbers or first[int(numbers[c.path]["step"])][1] == c.path
    ]


def _may_be_checkpoint(name: str, entry: Entry, step: int | None) -> bool:
    """By its name alone: the heads of ten thousand log files are not worth a request each."""
    if entry.kind is EntryKind.SPECIAL or name.startswith((".", "__")) or name in _SYSTEM:
        return False
    if entry.kind is EntryKind.DIRECTORY:
        return True
    return name.endswith(SUFFIXES) or (step is not None and not name.isdecimal())


def _named_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (c.step is None, -(c.step or 0), c.path))


def newest_names_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Order by the step in the name, the largest first; names without a step come first of all."""
    return sorted(candidates, key=lambda c: (c.step is not None, -(c.step or 0), c.path))


def concurrently(store: Store, do: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply `do` to each item, with as many requests in flight as the store is worth."""
    if len(items) < 2 or store.traits.parallel < 2:
        return [do(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(len(items), store.traits.parallel), "ftckpt-root")
    try:
        return list(pool.map(do, items))
    finally:
        # After a signal nobody waits for listings that have not begun.
        pool.shutdown(wait=False, cancel_futures=True)
