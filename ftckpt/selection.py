"""Which checkpoint of a root to restart from: the newest that passes, and why not a newer one.

Newest means the step in the content. A name is only used to decide which headers to read first in
a large root, and where the content says nothing. Older checkpoints are taken over damaged and
unfinished ones alone: one that could not be reached might be good, so it stops the search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .checkpoint import Checkpoint
from .errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    worst,
)
from .findings import Finding, finding
from .opening import open_child
from .roots import Candidate, Child, Root, concurrently, newest_names_first

# Headers of so many candidates are read at once; a smaller root is ordered by content alone.
BATCH = 64

Check = Callable[[Checkpoint], tuple[ExitCode, str]]
Note = Callable[[str], None]


class Skipped(NamedTuple):
    """A newer checkpoint that was walked over.

    Attributes:
        path: as a user would type it.
        step: by content, else by name; None where neither says.
        code: why, as an exit code.
        message: why, in words.
    """

    path: str
    step: int | None
    code: ExitCode
    message: str


class PointerReport(NamedTuple):
    """A pointer compared with what is there.

    Attributes:
        name: the file or link.
        says: its text.
        target: the path that is meant, None where it is not there.
        step: the step that is meant, None where not known.
        agrees: whether it means the checkpoint that was chosen; None where none was.
    """

    name: str
    says: str
    target: str | None
    step: int | None
    agrees: bool | None


@dataclass(frozen=True)
class Selection:
    """What was chosen, or why nothing was.

    Attributes:
        code: OK, or the code that `latest` ends with.
        message: one sentence.
        hint: what to do next, or "".
        path: the chosen checkpoint as a user would type it.
        step: its step; None where nothing shows it.
        format: its format.
        skipped: the newer ones that were walked over, newest first; the last is the one that
            stopped the search, where one did.
        pointers: every pointer of the root.
        findings: names and pointers that disagree with the content.
        foreign: names in the root that are no checkpoint.
        pending: the skipped ones that are not committed: `--wait` waits for them.
    """

    code: ExitCode
    message: str
    hint: str = ""
    path: str | None = None
    step: int | None = None
    format: str | None = None
    skipped: tuple[Skipped, ...] = ()
    pointers: tuple[PointerReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    foreign: tuple[str, ...] = ()
    pending: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Rules:
    """How far `select` may go.

    Attributes:
        not_newer_than: the largest step that may be chosen.
        max_fallback: how many checkpoints may be walked over; None for any number.
        skip_unverified: walk over those that lack the evidence asked for.
        skip_unsafe: walk over hostile ones.
    """

    not_newer_than: int | None = None
    max_fallback: int | None = None
    skip_unverified: bool = False
    skip_unsafe: bool = False

    def walks_over(self, code: ExitCode) -> bool:
        """Say whether an older checkpoint may be taken instead of one that ends with `code`.

        NOT_FOUND is one that was deleted since the root was listed.
        """
        return (
            code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)
            or (code is ExitCode.UNVERIFIED and self.skip_unverified)
            or (code is ExitCode.UNSAFE and self.skip_unsafe)
        )


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
class _Walk:
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
        pool: list[tuple[float, bool, str, Looked]] = []
        while waiting or pool:
            # Whatever is not opened yet is at most as new as its name says.
            if waiting and (not pool or -pool[0][0] <= (waiting[0].step or math.inf)):
                for looked in self._look_all(waiting[:size]):
                    # Of equals, the one whose name says its step comes before a `last.ckpt`.
                    strange = looked.candidate.step != looked.known_step
                    entry = (-looked.rank, strange, looked.candidate.path, looked)
                    heapq.heappush(pool, entry)
                waiting, size = waiting[size:], BATCH
                continue
            looked = heapq.heappop(pool)[3]
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
    except FtckptError as error:
        return Looked(candidate, child, error=error)


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
    for looked in _Walk(root).newest_first():
        if looked.child is not None:
            return looked.child
        if looked.error is not None and not Rules().walks_over(looked.error.exit_code):
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
    for looked in _Walk(root).newest_first():
        if looked.step == step and looked.child is not None:
            return looked.child
    raise NotFoundError(f"{root.url} has no step {step}")


def select(root: Root, check: Check, rules: Rules, note: Note = lambda _: None) -> Selection:
    """Choose the newest checkpoint of a root that passes.

    Args:
        root: where to look.
        check: verifies an open checkpoint; returns its exit code and a sentence. It may raise any
            FtckptError instead.
        rules: how far to walk back.
        note: told, as it happens, why each newer one was not taken.

    Returns:
        The choice, or the code and sentence to fail with; failures of single checkpoints and of
        their storage are part of the answer, not raised.
    """
    walk = _Walk(root)
    skipped: list[Skipped] = []
    pending: list[Candidate] = []
    chosen: Looked | None = None
    end: tuple[ExitCode, str, str] | None = None
    for looked in walk.newest_first(rules.not_newer_than):
        path = root.url_of(looked.candidate)
        code, message, hint = _try(root, looked, check)
        if code is ExitCode.OK:
            chosen = looked
            end = (code, message, hint)
            break
        skipped.append(Skipped(path, looked.known_step, code, message))
        if not rules.walks_over(code):
            end = (code, _placed(path, message), hint or _flag(code))
            break
        note(f"skipped ({code.name}): {_placed(path, message)}")
        if code is ExitCode.INCOMPLETE:
            pending.append(looked.candidate)
        if rules.max_fallback is not None and len(skipped) > rules.max_fallback:
            end = (
                worst(s.code for s in skipped),
                f"the newest {len(skipped)} do not pass, and --max-fallback allows "
                f"{rules.max_fallback}; the last: {_placed(path, message)}",
                "",
            )
            break
    if end is None:
        end = _nothing(root, skipped, rules)
    pointers = tuple(_pointers(root, walk.looked, chosen))
    return Selection(
        *end,
        path=None if chosen is None else root.url_of(chosen.candidate),
        step=None if chosen is None else chosen.known_step,
        format=None if chosen is None or not chosen.child else chosen.child.parts[0].format.name,
        skipped=tuple(skipped),
        pointers=pointers,
        findings=(*_names(root, walk.looked), *_disagreements(pointers, chosen)),
        foreign=tuple(sorted([*root.foreign, *walk.foreign])),
        pending=tuple(pending),
    )


def _try(root: Root, looked: Looked, check: Check) -> tuple[ExitCode, str, str]:
    if looked.error is not None:
        return looked.error.exit_code, looked.error.message, looked.error.hint
    assert looked.child is not None
    try:
        # Opened again rather than kept: the headers of 64 checkpoints do not fit in memory.
        answers = [check(checkpoint) for checkpoint in open_child(root, looked.child)]
    except FtckptError as error:
        return error.exit_code, error.message, error.hint
    code = worst(code for code, _ in answers)
    return code, next(message for its, message in answers if its is code), ""


def _flag(code: ExitCode) -> str:
    if code is ExitCode.UNVERIFIED:
        return "ftckpt seal records evidence; --skip-unverified walks over this one"
    if code is ExitCode.UNSAFE:
        return "look at it with ftckpt verify; --skip-unsafe walks over this one"
    return "an older checkpoint is not taken while a newer one may be good"


def _nothing(root: Root, skipped: Sequence[Skipped], rules: Rules) -> tuple[ExitCode, str, str]:
    if not skipped:
        limit = "" if rules.not_newer_than is None else f" of step {rules.not_newer_than} or before"
        return ExitCode.NOT_FOUND, f"{root.url} holds no checkpoint{limit}", ""
    code = worst(s.code for s in skipped)
    first = next(s for s in skipped if s.code is code)
    return code, f"no checkpoint of {root.url} passes: {_placed(first.path, first.message)}", ""


def _placed(path: str, message: str) -> str:
    """Return a sentence that says where; many say it already."""
    return message if path in message else f"{path}: {message}"


def _names(root: Root, looked: Sequence[Looked]) -> Iterator[Finding]:
    for one in looked:
        said = one.candidate.step
        if one.step is not None and said is not None and said != one.step:
            yield finding(
                "step-name",
                f"{root.url_of(one.candidate)} holds step {one.step}, not {said}",
                file=one.candidate.path,
            )


def _pointers(
    root: Root, looked: Sequence[Looked], chosen: Looked | None
) -> Iterator[PointerReport]:
    steps = {one.candidate.path: one.known_step for one in looked}
    for pointer in root.pointers:
        step = steps.get(pointer.target or "", pointer.step)
        agrees = None
        if chosen is not None:
            same = step is not None and step == chosen.known_step
            agrees = not pointer.dangling and (same or pointer.target == chosen.candidate.path)
        yield PointerReport(pointer.name, pointer.says, pointer.target, step, agrees)


def _disagreements(pointers: Sequence[PointerReport], chosen: Looked | None) -> Iterator[Finding]:
    for pointer in pointers:
        says = f"{pointer.name} says {pointer.says!r}"
        if pointer.target is None:
            yield finding("pointer-dangling", f"{says}, which is not there", file=pointer.name)
        elif pointer.agrees is False and chosen is not None:
            yield finding(
                "pointer-disagrees",
                f"{says}, the newest that passes is {chosen.candidate.path}",
                file=pointer.name,
            )
