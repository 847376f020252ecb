"""Roots: places with checkpoints as children, and perhaps pointers to one of them.

A root needs only one level of names; a child is listed on demand. A name is a hint: the content
gives a checkpoint's step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from ftckpt.checkpoint import CommitState
from ftckpt.errors import (
    FtckptError,
    NoStateError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ftckpt.findings import listed
from ftckpt.own_files import weights_of
from ftckpt.storage.state_files import without_numbers
from ftckpt.storage.store import Entry, EntryKind, Store, join

from .dropped import Tomb, read_tombs
from .listing import listing_of_directory, open_part
from .pointers import Pointer, is_pointer, links_beside, may_name, read_pointers, small_texts, stem
from .recognise import Listing, UnopenedPart
from .series import newest_first, roles_in
from .shared_state import is_shared_state
from .step_names import (
    FILE_OF_ROLE,
    FILE_OF_STEP,
    SUFFIXES,
    finished_name,
    folders_of_ranks,
    pieces_among,
    sets_among,
    step_in_name,
    unfinished_marker,
)

_TEXTS, _VALUES = "small texts", "values of small texts"
# In the memo of a root: names of files that are pieces of a save.
PIECES = "pieces"
# What is asked of a candidate: what it is in its root, and by itself.
_IS, _ALONE = "is", "is by itself"
# A text with more names is a list of what was saved.
_MOST_NAMED = 8

T = TypeVar("T")
R = TypeVar("R")


class Answers:
    """What was asked of the candidates of one listing: each question is answered once.

    Threads that ask the same at the same time wait for one of them. An error is not an answer.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], Any] = {}
        self._finding: dict[tuple[str, str], Lock] = {}

    def answer(self, question: str, path: str, find: Callable[[], T]) -> T:
        """Return what is known, or else what `find` returns."""
        key = question, path
        if key not in self._answers:
            with self._finding.setdefault(key, Lock()):
                if key not in self._answers:
                    self._answers[key] = find()
        found: T = self._answers[key]
        return found

    def told(self, question: str, path: str, answer: object) -> None:
        """Note what somebody has found by the way."""
        self._answers[question, path] = answer


# Number of directories without a step in their name that are searched for `checkpoint/step-N`.
_DEEPER = 16

# Siblings that are asked what they are, for one that no format knows.
_SIBLINGS = 8

# Common at the top of mounted volumes, and not readable.
LOST_AND_FOUND = "lost+found"

# Number of children that are listed at once.
_BATCH = 64


class Candidate(NamedTuple):
    """A name in a root that may be a checkpoint.

    Attributes:
        path: relative to the root.
        step: in the name, None without one.
        staging: whether the name marks an unfinished save.
    """

    path: str
    entry: Entry
    step: int | None
    staging: bool


class Child(NamedTuple):
    """A candidate that a format recognises."""

    candidate: Candidate
    part: UnopenedPart

    @property
    def is_aside(self) -> bool:
        """Whether it is of an unreadable format and names no step: an export beside the saves.

        It counts as foreign while there is any other.
        """
        return self.candidate.step is None and not self.part.recognition.supported


@dataclass(frozen=True)
class Root:
    """Names and pointers of a root.

    Attributes:
        base: path of the directory that holds the checkpoints, "" for the store's own URL.
        candidates: possible checkpoints, in the order of names.
        foreign: other names; reported, never touched.
        ask: recognises one directory or file.
        tombs: of candidates that were dropped in place, by path; see `is_dropped`.
        known: what candidates are, as they were first looked at. To look anew, read the root again
            or give it new `Answers`.
        memo: what was read of this listing and is asked for more than once, by who asks.
    """

    store: Store
    base: str
    candidates: tuple[Candidate, ...]
    pointers: tuple[Pointer, ...]
    foreign: tuple[str, ...]
    ask: Callable[[Entry], UnopenedPart | None]
    tombs: Mapping[str, Tomb] = field(default_factory=dict)
    known: Answers = field(default_factory=Answers, compare=False, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def url(self) -> str:
        """What the user would type."""
        return self.store.describe(self.base)

    def url_of(self, candidate: Candidate) -> str:
        """Return the path or URL of a candidate, as the user would type it."""
        return self.store.describe(join(self.base, candidate.path))

    def named_in_texts(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the small texts that name one of some names, with these names (see `small_texts`).

        The text that describes one save (`step_3.json`) is none, nor is a list of many.

        Raises:
            UnavailableError, DeniedError: something could not be read.
        """
        if _VALUES not in self.memo:
            self.memo[_VALUES] = small_texts(self.store, self.memo.get(_TEXTS, {}))
        known = {
            text: tuple(sorted(n for n in said & set(names) if stem(n) != stem(text)))
            for text, said in self.memo[_VALUES].items()
        }
        return {text: told for text, told in known.items() if 0 < len(told) <= _MOST_NAMED}

    def is_dropped(self, candidate: Candidate) -> bool:
        """Whether a candidate is trash whose data still exist in an object store."""
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

    def whole(self, candidate: Candidate) -> Candidate | None:
        """Return the finished checkpoint whose weights a candidate holds; None if none stands.

        While it stands, it alone is the checkpoint of its step (`ftckpt.own_files.WEIGHTS`).
        """
        name = weights_of(candidate.path)
        whole = next((c for c in self.candidates if c.path == name), None) if name else None
        child = None if whole is None or whole.staging else self.recognise(whole)
        torn = child is None or child.part.recognition.commit is CommitState.UNCOMMITTED
        return None if torn else whole

    def recognise(self, candidate: Candidate) -> Child | None:
        """List one candidate, once, and return it if a format knows it, else None.

        Candidates that were dropped give None, and so do the weights of one that stands whole.
        """
        return self.known.answer(_IS, candidate.path, lambda: self._recognised(candidate))

    def tell(self, candidate: Candidate, alone: UnopenedPart | None, child: Child | None) -> None:
        """Note what a candidate is that somebody has listed: by itself, and in its root.

        `child` is None where only the first is known.
        """
        self.known.told(_ALONE, candidate.path, alone)
        if child is not None:
            self.known.told(_IS, candidate.path, child)

    def _recognised(self, candidate: Candidate) -> Child | None:
        if self.is_dropped(candidate) or self.whole(candidate) is not None:
            return None
        part = self._alone(candidate) or self.as_sibling(candidate)
        return None if part is None else Child(candidate, part)

    def as_sibling(
        self, candidate: Candidate, listing: Listing | None = None
    ) -> UnopenedPart | None:
        """Return what a directory is by what its siblings are: it may have lost a part.

        `listing` is the directory's, where it is at hand. One whose name says no more than that it
        is a save (`latest`) must also have files of the same names as they have.
        """
        sibling = self.parted_sibling(candidate)
        alike = sibling is not None
        known = [sibling] if sibling is not None else self._parted_saves(candidate)
        if not known:
            return None
        if listing is None:
            listing = listing_of_directory(self.store, candidate.entry.path)
        listing = replace(listing, is_sibling=True)
        for one in known:
            found = one.format.recognise(listing)
            if found is not None and (alike or set(found.parts) & set(one.recognition.parts)):
                return one._replace(entry=candidate.entry, recognition=found)
        return None

    def parted_sibling(self, candidate: Candidate) -> UnopenedPart | None:
        """Return one of several parts whose name differs from a directory's in numbers alone.

        A few of the siblings are asked, those with the longest and highest names first.
        """
        shape = without_numbers(candidate.path)
        if candidate.entry.kind is not EntryKind.DIRECTORY or shape == candidate.path:
            return None
        siblings = self._of_shapes().get(shape, [])
        return next(self._parted(candidate, siblings), None)

    def _parted_saves(self, candidate: Candidate) -> list[UnopenedPart]:
        """Return some saves of several parts, for one that has a name as saves have it.

        That is a name with a role or a number; one of both has a role.
        """
        if candidate.entry.kind is not EntryKind.DIRECTORY:
            return []
        named, numbered = self._saves()
        if roles_in(candidate.path):
            return list(self._parted(candidate, [*named, *numbered]))
        is_numbered = re.search(r"\d", candidate.path) is not None
        return list(self._parted(candidate, named)) if is_numbered else []

    def _saves(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the directories whose names have a role, and others with a number."""
        found: tuple[list[Candidate], list[Candidate]] | None = self.memo.get("saves")
        if found is None:
            every = [one for siblings in self._of_shapes().values() for one in siblings]
            named = [one for one in every if roles_in(one.path)]
            plain = (one for one in every if not roles_in(one.path))
            found = named, [one for one in plain if re.search(r"\d", one.path)]
            self.memo["saves"] = found
        return found

    def _parted(
        self, candidate: Candidate, siblings: Iterable[Candidate]
    ) -> Iterator[UnopenedPart]:
        others = (c for c in siblings if c.path != candidate.path)
        for other in islice(others, _SIBLINGS):
            try:
                part = self._alone(other)
            except NotFoundError:  # it has gone: that says nothing of this one
                continue
            if part is not None and part.recognition.by_names:
                yield part

    def _alone(self, candidate: Candidate) -> UnopenedPart | None:
        """Return what a candidate is by itself."""
        return self.known.answer(_ALONE, candidate.path, partial(self.ask, candidate.entry))

    def _of_shapes(self) -> Mapping[str, list[Candidate]]:
        """Return the directories that may be checkpoints, by their names without numbers."""
        found: dict[str, list[Candidate]] | None = self.memo.get("shapes")
        if found is None:
            found = defaultdict(list)
            names = sorted(self.candidates, key=lambda c: (len(c.path), c.path), reverse=True)
            for one in names:
                if one.entry.kind is EntryKind.DIRECTORY and not one.staging:
                    found[without_numbers(one.path)].append(one)
            self.memo["shapes"] = found
        return found

    def recognise_all(self, candidates: Iterable[Candidate]) -> list[Child | FtckptError | None]:
        """Recognise many candidates at once; an error stands in the place of its candidate."""

        def one(candidate: Candidate) -> Child | FtckptError | None:
            try:
                return self.recognise(candidate)
            except FtckptError as error:
                return error

        return concurrently(self.store, one, list(candidates))

    def children(self) -> list[Child]:
        """Return all recognised children: the newest name first, names without a step last.

        Leaves out names of unfinished saves.

        Raises:
            FtckptError: a child could not be listed; that is not absence.
        """
        found = self.recognise_all(_named_first(c for c in self.candidates if not c.staging))
        for child in found:
            if isinstance(child, FtckptError):
                raise child
        return [child for child in found if isinstance(child, Child)]

    def holds_checkpoints(self) -> bool:
        """Whether any child is recognised; lists as few of them as possible.

        A file that holds no state of a training is none: results of an evaluation have numbers,
        too.

        Raises:
            FtckptError: none is, and one could not be listed.
        """
        waiting = _named_first(self.candidates)
        errors = []
        # Usually the first is one; if not, one request after the other would take minutes.
        for size in (1, *([_BATCH] * (len(waiting) // _BATCH + 1))):
            found = self.recognise_all(waiting[:size])
            if any(isinstance(child, Child) and self._holds_state(child) for child in found):
                return True
            errors += [child for child in found if isinstance(child, FtckptError)]
            waiting = waiting[size:]
        if errors:
            raise errors[0]
        return False

    def _holds_state(self, child: Child) -> bool:
        """Whether what was recognised is a checkpoint, as far as its content can be read."""
        is_file = child.candidate.entry.kind is EntryKind.FILE
        if not is_file or not child.part.recognition.supported:
            return True
        try:
            open_part(self.store, child.part)
        except NoStateError:
            return False
        except FtckptError:
            return True
        return True


def saves_among(children: Sequence[Child]) -> list[Child]:
    """Return the children that count as checkpoints of their root (see `Child.is_aside`)."""
    return [child for child in children if not child.is_aside] or list(children)


def read_root(store: Store, ask: Callable[[Entry], UnopenedPart | None]) -> Root:
    """Read the names of one level, and the pointers.

    If nothing there is a step but one directory inside holds steps, as in
    `outputs/checkpoint/step-N`, that directory is the root.

    Raises:
        UsageError: several directories inside hold steps, or some beside checkpoints whose names
            say none: a trainer's export of one model, and the states of each.
    """
    found = read_runs(store, ask, most=_DEEPER)
    if len(found) == 1 and not found[0].base:
        found += _beside(found[0])
    if len(found) > 1:
        below = [root.url for root in found if root.base]
        saves = [found[0].url_of(c) for c in found[0].candidates if c.entry.kind is EntryKind.FILE]
        own = [] if found[0].base else saves
        what = f"saves of its own ({listed(own, 3)}) and roots" if own else "several roots"
        raise UsageError(
            f"{store.url} holds {what}",
            hint="name one of them: " + ", ".join([*below[:8], *own[:3]]),
        )
    return found[0]


def _beside(root: Root) -> list[Root]:
    """Return the roots inside one whose own checkpoints have names without a step.

    Which of them is meant cannot be told. A name with a number is of a checkpoint of its own.
    """
    if root.pointers or any(c.step is not None for c in root.candidates):
        return []
    plain = [
        c
        for c in root.candidates
        if c.entry.kind is EntryKind.DIRECTORY and not re.search(r"\d", c.path)
    ]
    if len(plain) == len(root.candidates):
        return []
    unknown = [c.entry.path for c in plain[:_DEEPER] if root.recognise(c) is None]
    return _with_steps(root.store, unknown, root.ask)


def read_runs(
    store: Store, ask: Callable[[Entry], UnopenedPart | None], *, most: int | None = None
) -> list[Root]:
    """Return the root at a place, or else every directory in it that holds steps.

    `most` limits the number of directories that are searched; None: all.

    Raises:
        UnsupportedError: each rank has a directory with its pieces of the steps.
    """
    root = _read_level(store, "", ask)
    if any(c.step is not None for c in root.candidates) or root.pointers:
        return [root]
    if any(root.recognise(c) is not None for c in root.candidates[:_DEEPER]):
        return [root]
    plain = [c for c in root.candidates if c.entry.kind is EntryKind.DIRECTORY]
    found = _with_steps(store, [c.entry.path for c in plain[:most]], ask)
    ranks = folders_of_ranks(run.base for run in found)
    if ranks and len(ranks) == len(found):
        raise of_each_rank(store.url, ranks)
    return found or [root]


def of_each_rank(url: str, ranks: Sequence[str]) -> UnsupportedError:
    """Return the error for a place where each rank has a folder, in no layout that is known."""
    return UnsupportedError(
        f"{url} holds a folder of each rank ({listed(ranks, 3)}): what lies in one is a piece of"
        " each save, in a layout that is not known",
        hint="docs/formats.md lists the formats; the program that wrote them reads them",
    )


def _with_steps(
    store: Store, folders: Iterable[str], ask: Callable[[Entry], UnopenedPart | None]
) -> list[Root]:
    """Return the folders that hold steps, as roots."""
    found = [_read_level(store, folder, ask) for folder in folders]
    found = [r for r in found if r.pointers or any(c.step is not None for c in r.candidates)]
    return [r for r in found if r.holds_checkpoints()]


def read_again(root: Root) -> Root:
    """Read a root's names and pointers again.

    Raises:
        NotFoundError: it is gone.
    """
    return _read_level(root.store, root.base, root.ask)


def has_gone(root: Root, candidate: Candidate) -> bool:
    """Say whether a candidate was removed or dropped since its root was read.

    A failed look says nothing: then it has not gone.
    """
    try:
        return not stands_now(root, candidate.path)
    except NotFoundError:
        return True
    except FtckptError:
        return False


def stands_now(root: Root, path: str) -> bool:
    """Say whether a root has a candidate at this moment that is not dropped.

    Raises:
        NotFoundError: the root is gone.
    """
    now = read_again(root)
    same = next((one for one in now.candidates if one.path == path), None)
    return same is not None and not now.is_dropped(same)


def names_in(store: Store, ask: Callable[[Entry], UnopenedPart | None]) -> Root:
    """Return the names and pointers of one level, whatever lies there."""
    return _read_level(store, "", ask)


def _read_level(store: Store, base: str, ask: Callable[[Entry], UnopenedPart | None]) -> Root:
    skip = len(base) + 1 if base else 0
    entries = {e.path[skip:]: e for e in store.children(base)}
    links = links_beside(store, base, entries)
    candidates, foreign = [], []
    sets = sets_among(entries)
    marks = {marker for name in entries if (marker := unfinished_marker(name, entries))}
    pieces = pieces_among(n for n, e in entries.items() if e.kind is EntryKind.FILE) - set(sets)
    for name, entry in entries.items():
        if name in sets:
            first, step_ = sets[name]
            if name == first:
                candidates.append(Candidate(name, entry, step_, False))
            continue
        if is_shared_state(name, entries):
            continue
        if is_pointer(name, entry, links) or name in marks:
            continue
        staging = finished_name(name) != name or bool(unfinished_marker(name, entries))
        step = step_in_name(finished_name(name))
        if name not in pieces and _may_be_checkpoint(name, entry, step):
            candidates.append(Candidate(name, entry, step, staging))
        else:
            foreign.append(name)
    candidates = _one_of_each_step(candidates)
    steps = {c.path: c.step for c in candidates}
    pointers = read_pointers(store, base, entries, links, steps, ask)
    tombs = read_tombs(store, base, entries)
    found = Root(store, base, tuple(candidates), tuple(pointers), tuple(foreign), ask, tombs)
    found.memo[PIECES] = pieces
    found.memo[_TEXTS] = {n: entries[n] for n in foreign if may_name(n, entries[n])}
    return found


def _one_of_each_step(candidates: list[Candidate]) -> list[Candidate]:
    """Keep one file of each save whose files lie side by side: the first names the checkpoint."""
    first: dict[int | str, tuple[int, str]] = {}
    saves: dict[str, int | str] = {}
    for c in candidates:
        if match := FILE_OF_STEP.fullmatch(c.path):
            saves[c.path] = int(match["step"])
        elif match := FILE_OF_ROLE.fullmatch(c.path):
            saves[c.path] = match["save"] + match["after"]
        if match:
            place = int(match["rank"]), c.path
            first[saves[c.path]] = min(first.get(saves[c.path], place), place)
    return [c for c in candidates if c.path not in saves or first[saves[c.path]][1] == c.path]


def _may_be_checkpoint(name: str, entry: Entry, step: int | None) -> bool:
    """Judge by name alone: the heads of ten thousand log files are not worth a request each."""
    if entry.kind is EntryKind.SPECIAL or name.startswith((".", "__")) or name == LOST_AND_FOUND:
        return False
    if entry.kind is EntryKind.DIRECTORY:
        return True
    return name.endswith(SUFFIXES) or (step is not None and not name.isdecimal())


def _named_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    def order(candidate: Candidate) -> tuple[bool, int, tuple[float, ...], str]:
        step, path = candidate.step, candidate.path
        return step is None, -(step or 0), newest_first(path) if step is None else (), path

    return sorted(candidates, key=order)


def newest_names_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Order by the step in the name, the largest first; names without a step come first of all."""
    return sorted(candidates, key=lambda c: (c.step is not None, -(c.step or 0), c.path))


def concurrently(store: Store, do: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply `do` to each item, with as many requests in flight as suits the store."""
    if len(items) < 2 or store.traits.parallel < 2:
        return [do(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(len(items), store.traits.parallel), "ftckpt-root")
    try:
        return list(pool.map(do, items))
    finally:
        # After a signal nobody waits for listings that have not begun.
        pool.shutdown(wait=False, cancel_futures=True)
