"""Choose the newest step that passes in any of several tiers.

A tier that could not be read may hold the newest step of all. So nothing is taken while one is
away, unless the caller allows it; what the other tiers hold is told either way. Of one step the
nearest copy is taken, and where that one is damaged or cannot be read, the next.

Wait for a save in flight before choosing, so that a restart does not lose its work.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, FtckptError, worst
from ftckpt.findings import Finding

from .candidates import Walk, look
from .listing import open_part
from .roots import Candidate, Root
from .select import Check, Note, Selection, SelectionRules, Skipped, TierReport, select
from .siblings import Looked
from .step_names import is_put_aside

# A tier that was read and has nothing to give: it hides no newer step.
_EMPTY = frozenset({ExitCode.NOT_FOUND, ExitCode.REFUSED})


class Tier(NamedTuple):
    """One of several roots that hold the checkpoints of one run.

    Attributes:
        url: as typed.
        root: as it was read; None where it could not be.
        error: why not.
    """

    url: str
    root: Root | None
    error: FtckptError | None = None


@dataclass(frozen=True)
class TierSelection:
    """What was chosen of several tiers.

    Attributes:
        chosen: the checkpoint, or why none was chosen.
        tiers: what each had to give, as they were named.
    """

    chosen: Selection
    tiers: tuple[TierReport, ...]


class _Copy(NamedTuple):
    rank: float
    number: int
    looked: Looked


def select_tiers(
    tiers: Sequence[Tier],
    check: Check,
    rules: SelectionRules,
    note: Note = lambda _: None,
    *,
    allow_missing: bool = False,
) -> TierSelection:
    """Choose the newest step that passes in any of several tiers.

    Args:
        tiers: the nearest first.
        check: see `selection.select`.
        rules: how far to walk back; a step counts once, however many tiers have it.
        note: told of tiers that are away, and why newer copies were not taken.
        allow_missing: choose although a tier is away.
    """
    walks = [None if t.root is None else Walk(t.root) for t in tiers]
    limit = rules.step_at_most
    streams = [_copies(n, walk, limit) for n, walk in enumerate(walks) if walk is not None]
    copies = heapq.merge(*streams, key=lambda copy: -copy.rank)
    first = next(copies, None)
    reports = [_report(tier, walk, check, rules) for tier, walk in zip(tiers, walks, strict=True)]
    away = [report for report in reports if report.away]
    for report in away:
        note(f"tier away ({report.code.name}): {report.tier}: {report.message}")
    if away and not allow_missing:
        return TierSelection(_refused(tiers, away, first), tuple(reports))
    if first is None:
        return TierSelection(_nothing(reports), tuple(reports))
    chosen = _choose(tiers, _chain(first, copies), check, rules, note)
    if away and chosen.path is not None:
        names = ", ".join(report.tier for report in away)
        note(f"taking {chosen.path}, although {names} may hold a newer step")
    elif away:
        chosen = replace(chosen, code=worst([chosen.code, *(r.code for r in away)]))
    return TierSelection(chosen, tuple(reports))


def _copies(number: int, walk: Walk, limit: int | None) -> Iterator[_Copy]:
    for looked in walk.newest_first(limit):
        if is_put_aside(looked.candidate.path):
            return  # these come last
        yield _Copy(looked.rank, number, looked)


def _chain(first: _Copy, rest: Iterable[_Copy]) -> Iterator[_Copy]:
    yield first
    yield from rest


def _report(tier: Tier, walk: Walk | None, check: Check, rules: SelectionRules) -> TierReport:
    """Return what a tier has to give; its first candidates have been looked at."""
    if tier.error is not None:
        return TierReport(tier.url, True, None, tier.error.exit_code, tier.error.message)
    assert walk is not None
    assert tier.root is not None
    ranks = [one.rank for one in walk.looked]
    steps = [int(rank) for rank in ranks if 0 <= rank < math.inf]
    if walk.looked:
        return TierReport(tier.url, False, max(steps, default=None), ExitCode.OK, "")
    try:
        found = select(tier.root, check, rules)
    except FtckptError as error:
        return TierReport(tier.url, True, None, error.exit_code, error.message)
    return TierReport(tier.url, found.code not in _EMPTY, None, found.code, found.message)


def _refused(tiers: Sequence[Tier], away: Sequence[TierReport], first: _Copy | None) -> Selection:
    code = worst(report.code for report in away)
    names = " and ".join(report.tier for report in away)
    message = f"{names} could not be read and may hold the newest checkpoint"
    if first is None:
        return Selection(code, message, "the other tiers hold no checkpoint")
    root = tiers[first.number].root
    assert root is not None
    known = first.looked.known_step
    step = "" if known is None else f" (step {known})"
    newest = f"{root.url_of(first.looked.candidate)}{step}"
    return Selection(
        code,
        f"{message}; the newest elsewhere, not verified, is {newest}",
        "--allow-missing-tier takes the newest that passes elsewhere",
    )


def _nothing(reports: Sequence[TierReport]) -> Selection:
    """Return why no tier has a checkpoint; NOT_FOUND only if each is known to hold none yet."""
    code = worst(report.code for report in reports)
    first = next(report for report in reports if report.code is code)
    return Selection(code, f"no tier holds a checkpoint: {first.message}")


def _choose(
    tiers: Sequence[Tier], copies: Iterator[_Copy], check: Check, rules: SelectionRules, note: Note
) -> Selection:
    skipped: list[Skipped] = []
    findings: list[Finding] = []
    given_up = 0
    for _, group in groupby(copies, key=lambda copy: copy.rank):
        stopped: Selection | None = None
        for number, several in groupby(group, key=lambda copy: copy.number):
            root = tiers[number].root
            assert root is not None
            found, stops = _try(root, [copy.looked for copy in several], check, rules, note)
            skipped += found.skipped
            findings += found.findings
            if found.path is not None:
                return replace(found, skipped=tuple(skipped), findings=tuple(findings))
            if stops and rules.stop_at_unsafe and found.code is ExitCode.UNSAFE:
                return replace(found, skipped=tuple(skipped), findings=tuple(findings))
            if stops:
                note(f"not taken ({found.code.name}): {found.message}")
                stopped = stopped or found
        if stopped is not None:  # no other tier has this step whole
            return replace(stopped, skipped=tuple(skipped), findings=tuple(findings))
        given_up += 1
        if rules.max_fallback is not None and given_up > rules.max_fallback:
            break
    code = worst(one.code for one in skipped)
    first = next(one for one in skipped if one.code is code)
    if code is ExitCode.NOT_FOUND:  # each was removed while it was looked at: no first start
        code = ExitCode.REFUSED
    return Selection(
        code,
        f"no checkpoint of any tier passes: {first.path}: {first.message}"
        if rules.max_fallback is None
        else f"none of the newest {given_up} steps passes in any tier, and --max-fallback allows "
        f"{rules.max_fallback}; {first.path}: {first.message}",
        skipped=tuple(skipped),
        findings=tuple(findings),
    )


def _try(
    root: Root, looked: Sequence[Looked], check: Check, rules: SelectionRules, note: Note
) -> tuple[Selection, bool]:
    """Try the entries of one step in one tier; say whether one stops the search there."""
    notes: list[str] = []

    def told(line: str) -> None:
        notes.append(line)
        note(line)

    entries = tuple(one.candidate for one in looked)
    found = select(
        replace(root, candidates=entries), check, replace(rules, max_fallback=None), told,
        every=root.candidates,
    )  # fmt: skip
    return found, found.path is None and len(notes) < len(found.skipped)


# Seconds between looks: a save that is nearly done is seen soon, a long one costs few requests.
_FIRST, _GROWTH, _LONGEST = 0.5, 1.5, 30.0


def select_waiting(
    read: Callable[[], Root],
    check: Check,
    rules: SelectionRules,
    timeout: float,
    note: Note = lambda _: None,
    *,
    say: Note | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Selection:
    """Do as `selection.select`, but while a newer checkpoint is uncommitted, wait for it first.

    Args:
        read: reads the root anew.
        check: see `select`.
        rules: see `select`.
        timeout: seconds to wait in all after the first look; then the best that there is, wins.
        note: see `select`.
        say: told what is waited for; None for `note`.
        sleep: waits a number of seconds.
        clock: returns seconds of a monotonic clock.

    Raises:
        FtckptError: the root could not be listed.
    """
    end: float | None = None
    passed: set[str] = set()

    def check_once(checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
        # What passed is committed and does not change; reading it again on every look would
        # take the bandwidth that the save needs.
        url = checkpoint.source.url
        if url in passed:
            return ExitCode.OK, ""
        answer = check(checkpoint, root)
        if answer[0] is ExitCode.OK:
            passed.add(url)
        return answer

    while True:
        root = read()
        said: list[str] = []
        found = select(root, check_once, rules, said.append)
        # The first look may take long, on a large root; the wait begins after it.
        end = clock() + timeout if end is None else end
        if not found.pending or clock() >= end:
            for line in said:
                note(line)
            if found.pending:
                names = ", ".join(root.url_of(c) for c in found.pending)
                note(f"waited {timeout:g} s in vain for {names}")
            return found
        (say or note)("waiting for " + ", ".join(root.url_of(c) for c in found.pending))
        delay = _FIRST
        while clock() < end:
            sleep(max(0.0, min(delay, end - clock())))
            delay = min(delay * _GROWTH, _LONGEST)
            if not all(_in_flight(root, c, check) for c in found.pending):
                break


def _in_flight(root: Root, candidate: Candidate, check: Check) -> bool:
    """Look again at one candidate: whether it is still there and still not committed."""
    try:
        if candidate.staging:
            root.store.stat(candidate.entry.path)
            return True
        looked = look(root, candidate)
        if looked is not None and looked.unknown:
            return True
        if looked is None or looked.error is not None or looked.child is None:
            error = None if looked is None else looked.error
            return error is not None and error.exit_code is ExitCode.INCOMPLETE
        code, _ = check(open_part(root.store, looked.child.part), root)
    except FtckptError as error:
        code = error.exit_code
    return code is ExitCode.INCOMPLETE
