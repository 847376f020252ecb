"""The candidates of a root, newest first: by the step in their content.

A name only decides which headers to read first in a large root, and counts if the content shows no
step.
"""

from __future__ import annotations

import heapq
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NoStateError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UnverifiedError,
    UsageError,
)
from ftckpt.manifest.locate import is_thinned
from ftckpt.own_files import FOLDER, GO_ON, TRANSFER, under_way
from ftckpt.storage.state_files import numbers_in
from ftckpt.storage.store import Entry, EntryKind, join

from .counts import averages_among, counts_in, with_places
from .listing import files_of, open_part
from .lone_manifests import HINT, alone
from .neighbours import lacking
from .root_marker import not_understood
from .roots import Candidate, Child, Root, concurrently, newest_names_first
from .series import LAST, is_trainers, newest_first, roles_in
from .siblings import NO_STEP, Looked, among_siblings, with_steps
from .step_names import finished_name, is_put_aside
from .unordered import averages_by_value, between, in_order, outside, paired, rank_by_name

# Number of candidates whose headers are read at once; a smaller root is ordered by content alone.
BATCH = 64

# With these codes a checkpoint is surely not good, so an older one may be chosen. NOT_FOUND: it was
# deleted since the root was listed.
WALKED_OVER = frozenset({ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.NOT_FOUND})

# No step is larger: a walk up to it has those with a step alone.
_ANY_STEP = 10**18

# Number of existing steps that the error of an absent one names.
_NEAREST = 5

# Files of no known layout may be a save in flight for this many seconds after the newest.
_IN_FLIGHT = 24 * 3600


@dataclass
class Walk:
    """State of one walk over a root.

    Attributes:
        foreign: names that are not checkpoints.
        looked: candidates whose headers were read.
        unsupported: checkpoints of unreadable formats without a step in their name; they count as
            foreign while there is any other.
    """

    root: Root
    foreign: list[str] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)
    unsupported: list[Child] = field(default_factory=list)
    _counts: dict[str, dict[str, int]] = field(default_factory=dict)
    _averaged: list[Looked] = field(default_factory=list)

    def newest_first(self, limit: int | None = None) -> Iterator[Looked]:
        """Yield candidates by descending step, reading only the headers that the order needs.

        What somebody has put aside comes after all others: its headers may be what is wrong; and so
        do averages of the weights beside them.
        """
        averages = averages_among(c.path for c in self.root.candidates if not c.staging)
        aside = [c for c in self.root.candidates if is_put_aside(c.path) or c.path in averages]
        own = set(aside)
        yield from self._ordered([c for c in self.root.candidates if c not in own], limit)
        averaged, self._averaged = self._averaged, []
        yield from (one for one in averaged if limit is None or one.rank <= limit)
        if aside:
            yield from self._ordered(aside, limit)

    def look_at_nameless(self) -> list[Looked]:
        """Read the headers of the candidates whose names say no step, and that may be halves."""
        named = (c for c in self.root.candidates if c.step is None and not is_put_aside(c.path))
        return list(self._look_all(list(named)))

    def _ordered(self, candidates: Sequence[Candidate], limit: int | None) -> Iterator[Looked]:
        waiting = newest_names_first(candidates)
        if limit is not None and len(waiting) > BATCH:
            waiting = [c for c in waiting if c.step is None or c.step <= limit]
        nameless = sum(c.step is None for c in waiting)
        size = max(BATCH, nameless + BATCH if nameless else 0)
        pool: list[tuple[float, bool, int, int, tuple[float, ...], str, Looked]] = []
        begun = False
        apart: list[Looked] = []
        pointed = {pointer.target for pointer in self.root.pointers}
        while waiting or pool:
            # An unopened candidate is at most as new as its name says.
            if waiting and (not pool or -pool[0][0] <= (waiting[0].step or math.inf)):
                for looked in self._look_all(waiting[:size]):
                    # Of equals, the one whose name has its step, then the one named latest, then
                    # the highest of a series.
                    own = looked.candidate
                    strange, named = own.step != looked.known_step, -(own.step or 0)
                    above = newest_first(own.path)
                    role = rank_by_name(own.path) if looked.known_step is None else 0
                    entry = (-looked.rank, strange, named, role, above, own.path, looked)
                    heapq.heappush(pool, entry)
                waiting, size = waiting[size:], BATCH
                # Names without a step are read first, and only those can be halves.
                every = [] if begun else [entry[-1] for entry in pool]
                self._averaged += averages_by_value(self.root, every)
                if self._averaged:
                    late = {one.candidate.path for one in self._averaged}
                    pool = [entry for entry in pool if entry[-1].candidate.path not in late]
                    heapq.heapify(pool)
                half = paired(self.root, every) if every else None
                if every and limit is None:
                    torn, apart = self._torn(outside(every))
                    yield from torn
                begun = True
                if half is not None:
                    yield half
                continue
            if pool[0][-1].rank == NO_STEP and limit is None:  # and so all that are left
                yield from in_order(self.root, [entry[-1] for entry in pool])
                return
            looked = heapq.heappop(pool)[-1]
            if looked.known_step is not None and looked.candidate.path in pointed:
                apart = []  # a restart takes these, and the one before where this one is damaged
            if apart and looked.error is None:
                yield from between(self.root, looked, apart)
                return
            if limit is None or 0 <= looked.rank <= limit or looked.rank == math.inf:
                yield looked

    def _torn(self, apart: Sequence[Looked]) -> tuple[list[Looked], list[Looked]]:
        """Return those without a place that surely lack a part, perhaps their step; and others."""
        torn, others = list[Looked](), list[Looked]()
        for one in apart:
            assert one.child is not None
            try:
                lost = lacking(self.root, one.child, None, self.root.candidates)
            except FtckptError:
                lost = None
            if lost is not None and lost.certain:
                torn.append(one._replace(error=IncompleteError(lost.message)))
            else:
                others.append(one)
        return torn, others

    def _look_all(self, candidates: Sequence[Candidate]) -> Iterator[Looked]:
        found = [x for x in concurrently(self.root.store, self._look, candidates) if x is not None]
        found += self._lost_among(found, candidates)
        found += self._unread_last(found)
        found = with_places(with_steps(self.root, found), self._counts)
        self.looked += found
        yield from found

    def _unread_last(self, found: Sequence[Looked]) -> list[Looked]:
        """Return what a trainer calls its newest save and no format reads, unless one is read.

        It stands for the newest: an older one, or the best, is not taken in silence.
        """
        if any(one.error is None and _is_last(one.candidate) for one in found):
            return []
        last = [child for child in self.unsupported if _is_last(child.candidate)]
        self.unsupported = [child for child in self.unsupported if child not in last]
        names = {child.candidate.path for child in last}
        self.foreign = [name for name in self.foreign if name not in names]
        return [Looked(c.candidate, c, error=_not_read(self.root, c)) for c in last]

    def _lost_among(
        self, found: Sequence[Looked], candidates: Sequence[Candidate]
    ) -> Iterator[Looked]:
        """Yield what no format knows among siblings that one does: it may have lost a part."""
        foreign = set(self.foreign)
        steps: dict[str, int | None] = {one.candidate.path: one.known_step for one in found}
        steps |= {c.path: None for c in candidates if c.path in foreign}
        places = among_siblings(steps)
        for candidate in candidates:
            if candidate.path not in foreign:
                continue
            place = places.get(candidate.path)
            is_placed = place is not None and place.rank is not None
            if is_placed or self.root.parted_sibling(candidate) is not None:
                self.foreign.remove(candidate.path)
                yield _of_no_format(self.root, candidate)

    def _look(self, candidate: Candidate) -> Looked | None:
        looked = look(self.root, candidate, self._counts)
        if looked is None:
            self.foreign.append(candidate.path)
        elif looked.child is not None and looked.child.is_aside:
            self.foreign.append(candidate.path)
            self.unsupported.append(looked.child)
            return None
        return looked


def look(
    root: Root, candidate: Candidate, counts: dict[str, dict[str, int]] | None = None
) -> Looked | None:
    """Recognise a candidate and read the step from its content; None if it is foreign.

    Its counters are added to `counts` where its content says no step, and where a sibling whose
    name is a word (`model_last.pt`) may have the same ones.
    """
    if candidate.staging:
        by = "by its name" if finished_name(candidate.path) != candidate.path else "by its marker"
        message = f"{root.url_of(candidate)} is, {by}, a save that is not finished"
        return Looked(candidate, error=IncompleteError(message))
    child = None
    try:
        child = root.recognise(candidate)
        if child is None:
            if root.is_dropped(candidate):
                return Looked(candidate, error=_dropped(root, candidate))
            if (whole := root.whole(candidate)) is not None:
                stands = f"{root.url_of(candidate)} does not count: {root.url_of(whole)} is there"
                return Looked(candidate, error=NotFoundError(stands))
            if candidate.step is None:
                return None
            return _of_no_format(root, candidate)
        if child.is_aside:
            return Looked(candidate, child)
        opened = open_part(root.store, child.part)
        found = _with_content(Looked(candidate, child), opened)
        if counts is not None and not found.damaged and _may_order(found):
            counts[candidate.path] = counts_in(opened)
        return found
    except NoStateError:
        return None
    except NotFoundError as error:
        return Looked(candidate, child, error=gone(root, candidate, error))
    except FtckptError as error:
        return Looked(candidate, child, error=error)


def _is_last(candidate: Candidate) -> bool:
    return is_trainers(candidate.path) and bool(roles_in(candidate.path) & LAST)


def _not_read(root: Root, child: Child) -> UnsupportedError:
    url, reason = root.url_of(child.candidate), child.part.recognition.reason
    return UnsupportedError(f"{url} is not read by this version: {reason}")


def _may_order(looked: Looked) -> bool:
    nameless = looked.candidate.step is None and looked.candidate.entry.kind is EntryKind.FILE
    return looked.step is None or nameless


def steps_of(root: Root, children: Sequence[Child]) -> dict[str, int | None]:
    """Return the steps of checkpoints by path; opens those whose names say none."""
    nameless = [child.candidate for child in children if child.candidate.step is None]
    looked = concurrently(root.store, partial(look, root), nameless)
    looked += [
        Looked(child.candidate, child) for child in children if child.candidate.step is not None
    ]
    known = with_steps(root, [one for one in looked if one is not None])
    found = {one.candidate.path: one.known_step for one in known}
    return {child.candidate.path: found.get(child.candidate.path) for child in children}


def _of_no_format(root: Root, candidate: Candidate) -> Looked:
    """Distinguish a save that has just begun from an unknown layout.

    Raises:
        NotFoundError: it is gone.
    """
    url, entry = root.url_of(candidate), candidate.entry
    is_file = entry.kind is EntryKind.FILE
    inside = [entry] if is_file else root.store.children(entry.path)
    if not inside or (is_file and not entry.size):
        return Looked(
            candidate,
            error=IncompleteError(f"{url} is empty", hint="perhaps a save that has just begun"),
        )
    if _is_transfer(root, inside):
        begun = IncompleteError(under_way(url), hint=GO_ON, file=TRANSFER)
        return Looked(candidate, error=begun)
    lone = "" if is_file else alone(root.store, entry.path)
    if lone:
        lost = CorruptError(f"in {url} {lone}", hint=HINT, kind="missing-file")
        return Looked(candidate, error=lost)
    shown = ", ".join(sorted(e.path.rpartition("/")[2] for e in inside)[:_NEAREST])
    more = f" and {len(inside) - _NEAREST} more" if len(inside) > _NEAREST else ""
    error = UnsupportedError(
        f"{url} has a layout that is not known: it holds {shown}{more}",
        hint="ftckpt help and docs/formats.md list the formats; perhaps a save has just begun",
    )
    times = [e.mtime for e in (entry, *inside) if e.mtime is not None]
    return Looked(candidate, error=error, unknown=time.time() - max(times, default=0) < _IN_FLIGHT)


def _is_transfer(root: Root, inside: Sequence[Entry]) -> bool:
    """Whether an ftckpt copy has begun there and has no data yet, or no marker data."""
    own = next((e for e in inside if e.path.endswith(f"/{FOLDER}")), None)
    if own is None or own.link is not None:
        return False
    try:
        root.store.stat(own.path + TRANSFER.removeprefix(FOLDER))
    except NotFoundError:
        return False
    return True


def _dropped(root: Root, candidate: Candidate) -> NotFoundError:
    return NotFoundError(
        f"{root.url_of(candidate)} was dropped and is to be reclaimed",
        hint=shlex.join(["ftckpt", "gc", "undelete", root.url, candidate.path]) + " has it back",
    )


def gone(root: Root, candidate: Candidate, error: NotFoundError) -> FtckptError:
    """Return `error` if the root does not list the candidate any more, else a listing error.

    A listed name without content is not proof of removal: one of the two listings is out of date.
    """
    try:
        listed = any(e.path == candidate.entry.path for e in root.store.children(root.base))
    except NotFoundError:
        return error
    except FtckptError as other:
        return other
    if not listed:
        return error
    return UnavailableError(
        f"{root.url_of(candidate)} is listed, and nothing is found in it",
        hint="it is being removed, or a listing is behind: try again",
    )


def _with_content(looked: Looked, checkpoint: Checkpoint) -> Looked:
    try:
        return looked._replace(step=checkpoint.step)
    except CorruptError:
        return looked._replace(damaged=True)  # the check that follows reports it with its place


def newest_child(
    root: Root, note: Callable[[str], None] = lambda _: None, *, over_finished: bool = True
) -> Child:
    """Return the newest committed checkpoint of a root, damaged or not.

    A root means this one if a verb needs one checkpoint. If none is committed, it is the newest
    that a format recognises. One that gc has thinned, or that somebody has put aside, is taken only
    without any other. `note` is called for newer uncommitted ones.

    Args:
        root: to search.
        note: takes a sentence.
        over_finished: whether to pass over an uncommitted one that the trainer calls finished: its
            pointer names it, or it is the one that is written over (`latest/`). No save in flight,
            it has lost something.

    Raises:
        NotFoundError: there are none.
        UnsupportedError: the newest has an unknown layout.
        FtckptError: a possible newest one was unreachable.
    """
    walk = Walk(root)
    uncommitted: list[Child] = []
    spare: list[Child] = []  # thinned, or put aside
    newer: list[str] = []
    called = {pointer.target for pointer in root.pointers}
    called |= {one.path for one in root.candidates if _is_last(one)}
    for looked in walk.newest_first():
        error = looked.error
        if is_put_aside(looked.candidate.path):  # these come last
            spare += [looked.child] if looked.child is not None else []
        elif error is not None and error.exit_code is ExitCode.INCOMPLETE:
            if looked.child is not None and not over_finished and looked.candidate.path in called:
                return looked.child
            newer.append(f"{root.url_of(looked.candidate)} is newer and not committed")
            uncommitted += [looked.child] if looked.child is not None else []
        elif looked.child is not None and _is_thinned(root, looked.child):
            newer.append(f"{root.url_of(looked.candidate)} holds weights alone")
            spare.append(looked.child)
        elif looked.child is not None:
            for line in newer:
                note(line)
            return looked.child
        elif looked.unknown:
            assert error is not None
            newer.append(error.message)
        elif error is not None and error.exit_code not in WALKED_OVER:
            raise error
        elif error is not None:
            newer.append(error.message)
    for child in (*spare[:1], *uncommitted, *walk.unsupported):
        return child
    raise NotFoundError(f"{root.url} holds no checkpoint of any known format")


def _is_thinned(root: Root, child: Child) -> bool:
    """Whether it holds the weights alone; asked of one, because it takes a listing."""
    try:
        return is_thinned(files_of(root.store, child.part.entry))
    except (NotFoundError, IncompleteError):
        return False  # it is going, as opening it will show


def choose_child(root: Root, which: str, note: Callable[[str], None] = lambda _: None) -> Child:
    """Return the child of a root for `@STEP`; the newest committed for "" and "latest".

    `note` is called for newer uncommitted ones.

    Raises:
        NotFoundError: the step does not exist.
    """
    return child_of_step(root, int(which)) if which.isdecimal() else newest_child(root, note)


def nothing_known(root: Root, hint: str = "") -> FtckptError:
    """Return the error for a root without a readable checkpoint.

    `hint` is used if the place holds nothing at all.

    Returns:
        CorruptError for a manifest whose data are all gone, IncompleteError for a transfer that has
            shown no file yet, UnsupportedError for anything that may be a checkpoint of an
            unreadable format or layout, else NotFoundError.
    """
    lone = alone(root.store, root.base)
    if lone:
        return CorruptError(f"in {root.url} {lone}", hint=HINT, kind="missing-file")
    with suppress(NotFoundError):
        root.store.stat(join(root.base, TRANSFER))
        return IncompleteError(under_way(root.url), hint=GO_ON, file=TRANSFER)
    named = [c for c in newest_names_first(root.candidates) if not c.staging]
    named = [c for c in named if c.step is not None] + [c for c in named if c.step is None]
    for candidate in named[:BATCH]:
        looked = look(root, candidate)
        if looked is None:
            continue
        if isinstance(looked.error, UnsupportedError) or _is_alone(looked):
            assert looked.error is not None
            return looked.error
        if looked.child is not None and looked.child.is_aside:
            return _not_read(root, looked.child)
    strange = not_understood(root, hint)
    if strange is not None:
        return strange
    return NotFoundError(f"{root.url} holds no checkpoint of any known format", hint=hint)


def _has_number(looked: Looked, step: int) -> bool:
    return step in numbers_in(looked.candidate.path)


def _is_alone(looked: Looked) -> bool:
    return looked.child is None and isinstance(looked.error, CorruptError)


def child_of_step(root: Root, step: int) -> Child:
    """Return the checkpoint of one step: by its name, or by its content if no name has the step.

    Raises:
        NotFoundError: there is none of this step.
        UsageError: what holds it is saved in several series.
        UnverifiedError: one without a step has the number in its name.
        UnsupportedError: one that says no step cannot be read.
    """
    for candidate in root.candidates:
        if candidate.step == step and not candidate.staging:
            child = root.recognise(candidate)
            if child is not None:
                return child
    half: FtckptError | None = None
    walk = Walk(root)
    for looked in walk.newest_first(_ANY_STEP):
        if isinstance(looked.error, UsageError):
            half = looked.error
        if looked.step == step and looked.child is not None:
            if half is not None:
                raise half
            return looked.child
    stepless = [one for one in walk.looked if one.known_step is None]
    for one in stepless:  # it may be of this step
        if isinstance(one.error, UnsupportedError) and one.child is not None:
            raise one.error
    called = [one for one in stepless if _has_number(one, step)]
    if called:
        url = root.url_of(called[0].candidate)
        raise UnverifiedError(
            f"whether {url} is of step {step} is not known: nothing but the number in its name"
            " says so",
            hint=f"name {url}",
        )
    steps = sorted(
        {c.step for c in root.candidates if c.step is not None}, key=lambda s: abs(s - step)
    )
    near = ", ".join(map(str, sorted(steps[:_NEAREST])))
    hint = f"by name it has {near}" if len(steps) <= _NEAREST else f"the nearest by name: {near}"
    raise NotFoundError(f"{root.url} has no step {step}", hint=hint if steps else "")
