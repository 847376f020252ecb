"""The candidates of a root, newest first: by the step in their content.

A name is only used to decide which headers to read first in a large root, and where the content
says nothing.
"""

from __future__ import annotations

import heapq
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .checkpoint import Checkpoint
from .errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnavailableError,
)
from .opening import open_child
from .roots import Candidate, Child, Root, concurrently, newest_names_first

# Headers of so many candidates are read at once; a smaller root is ordered by content alone.
BATCH = 64

# An older checkpoint may be taken instead of one that ends with these: it is surely not good.
# NOT_FOUND is one that was deleted since the root was listed.
WALKED_OVER = frozenset({ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.NOT_FOUND})

# How many steps the error of one that is absent names.
_NEAREST = 5


class Looked(NamedTuple):
    """A candidate whose headers were read.

    Attributes:
        candidate: its name.
        child: what formats recognise; None where none does.
        step: what the content says.
        error: why the headers could not be read.
    """

    candidate: Candidate
    child: Child | None = None
    step: int | None = None
    error: FtckptError | None = None

    @property
    def rank(self) -> float:
        """Its step for ordering.

        What could not be read and has no step in its name may be the newest of all; what was read
        and shows no step anywhere is taken last.
        """
        known = self.candidate.step if self.step is None else self.step
        if known is not None:
            return known
        return -1 if self.error is None else math.inf

    @property
    def known_step(self) -> int | None:
        """The step by content, else by name."""
        return self.candidate.step if self.step is None else self.step


@dataclass
class Walk:
    """State of one walk over a root."""

    root: Root
    foreign: list[str] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)

    def newest_first(self, limit: int | None = None) -> Iterator[Looked]:
        """Yield candidates by descending step, reading no more headers than the order needs."""
        waiting = newest_names_first(self.root.candidates)
        if limit is not None and len(waiting) > BATCH:
            waiting = [c for c in waiting if c.step is None or c.step <= limit]
        nameless = sum(c.step is None for c in waiting)
        size = max(BATCH, nameless + BATCH if nameless else 0)
        pool: list[tuple[float, bool, int, str, Looked]] = []
        while waiting or pool:
            # Whatever is not opened yet is at most as new as its name says.
            if waiting and (not pool or -pool[0][0] <= (waiting[0].step or math.inf)):
                for looked in self._look_all(waiting[:size]):
                    # Of equals, the one whose name says its step, then the one named latest.
                    own = looked.candidate
                    strange, named = own.step != looked.known_step, -(own.step or 0)
                    entry = (-looked.rank, strange, named, own.path, looked)
                    heapq.heappush(pool, entry)
                waiting, size = waiting[size:], BATCH
                continue
            looked = heapq.heappop(pool)[4]
            if limit is None or 0 <= looked.rank <= limit or looked.rank == math.inf:
                yield looked

    def _look_all(self, candidates: Sequence[Candidate]) -> Iterator[Looked]:
        for looked in concurrently(self.root.store, self._look, candidates):
            if looked is not None:
                self.looked.append(looked)
                yield looked

    def _look(self, candidate: Candidate) -> Looked | None:
        looked = look(self.root, candidate)
        if looked is None:
            self.foreign.append(candidate.path)
        return looked


def look(root: Root, candidate: Candidate) -> Looked | None:
    """Recognise a candidate and read the step from its content; None where it is foreign."""
    if candidate.staging:
        message = f"{root.url_of(candidate)} is, by its name, a save that is not finished"
        return Looked(candidate, error=IncompleteError(message))
    child = None
    try:
        child = root.recognise(candidate)
        if child is None:
            if root.is_dropped(candidate):
                return Looked(candidate, error=_dropped(root, candidate))
            if candidate.step is None:
                return None
            raise IncompleteError(
                f"{root.url_of(candidate)} holds nothing that a format knows",
                hint="perhaps a save that has just begun",
            )
        if candidate.step is None and not child.parts[0].recognition.supported:
            return None
        steps = [_step(checkpoint) for checkpoint in open_child(root, child)]
        return Looked(candidate, child, steps[0])
    except NotFoundError as error:
        return Looked(candidate, child, error=gone(root, candidate, error))
    except FtckptError as error:
        return Looked(candidate, child, error=error)


def _dropped(root: Root, candidate: Candidate) -> NotFoundError:
    return NotFoundError(
        f"{root.url_of(candidate)} was dropped and is to be reclaimed",
        hint=shlex.join(["ftckpt", "gc", "undelete", root.url, candidate.path]) + " has it back",
    )


def gone(root: Root, candidate: Candidate, error: NotFoundError) -> FtckptError:
    """Return `error` if the root does not list the candidate any more, else that it does.

    A name that is listed and holds nothing is no proof that it was removed: one of the two
    listings is behind.
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


def _step(checkpoint: Checkpoint) -> int | None:
    try:
        return checkpoint.step
    except CorruptError:
        return None  # the check that follows says so with its place


def newest_child(root: Root) -> Child:
    """Return the newest recognised checkpoint of a root, good or not.

    Raises:
        NotFoundError: there is none.
        FtckptError: one that may be the newest could not be reached.
    """
    for looked in Walk(root).newest_first():
        if looked.child is not None:
            return looked.child
        if looked.error is not None and looked.error.exit_code not in WALKED_OVER:
            raise looked.error
    raise NotFoundError(f"{root.url} holds no checkpoint of any known format")


def child_of_step(root: Root, step: int) -> Child:
    """Return the checkpoint of one step: the name says so, or no name does and the content does.

    Raises:
        NotFoundError: there is none.
    """
    for candidate in root.candidates:
        if candidate.step == step and not candidate.staging:
            child = root.recognise(candidate)
            if child is not None:
                return child
    for looked in Walk(root).newest_first():
        if looked.step == step and looked.child is not None:
            return looked.child
    steps = sorted(
        {c.step for c in root.candidates if c.step is not None}, key=lambda s: abs(s - step)
    )
    near = ", ".join(map(str, sorted(steps[:_NEAREST])))
    hint = f"by name it has {near}" if len(steps) <= _NEAREST else f"the nearest by name: {near}"
    raise NotFoundError(f"{root.url} has no step {step}", hint=hint if steps else "")
