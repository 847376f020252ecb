"""What a plan takes of the logs of a run: costs of saves and steps, failures and their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftckpt.errors import UsageError

from .collect import LogEntryKind
from .grouping import Until
from .report import UNKNOWN, IncidentReport


@dataclass(frozen=True, slots=True)
class RunLog:
    """The content of logs, in seconds and bytes; None for what they lack.

    Attributes:
        saves: their number.
        failures: their number.
        classes: failures by the log's class, "" without one.
        components: failures that count towards the rate, by component; "" where the log says none.
        nodes: likewise by node, "" without one.
        span_s: from the start to the end, or from the first time to the last.
        exposed_s: the part of it in which the job could fail: without detection, restarts and the
            time between an end and the next start.
        exposed_failures: failures in that part.
        save_s: mean time that training waited for a save.
        snapshot_s: mean blocking part of background saves.
        flush_s: mean background part.
        nbytes: of the newest save.
        detect_s: mean from a failure until it was noticed.
        restart_s: mean from there until training continued.
        whole_recovery: whether `restart_s` begins at the failure, detection included.
        step_s: median of a step.
        ignored: number of lines with other events.
    """

    saves: int = 0
    failures: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    span_s: float | None = None
    exposed_s: float | None = None
    exposed_failures: int = 0
    save_s: float | None = None
    snapshot_s: float | None = None
    flush_s: float | None = None
    nbytes: float | None = None
    detect_s: float | None = None
    restart_s: float | None = None
    whole_recovery: bool = False
    step_s: float | None = None
    ignored: int = 0


def run_log_of(report: IncidentReport, name: str) -> RunLog:
    """Return what a plan takes of a report.

    Raises:
        UsageError: the logs end before they start.
    """
    log = report.collection
    span = None
    if report.began is not None and report.ended is not None:
        starts = [one.time for one in log.starts if one.time is not None]
        ends = [one.time for one in log.ends if one.time is not None]
        span = (ends[-1] if ends else report.ended) - min(starts, default=report.began)
        if span < 0:
            raise UsageError(f"{name} ends before it starts")
    detect, restart, whole = log.detects.value, log.restarts.value, False
    if detect is None and restart is None and report.recovery is not None:
        # What was measured to the next start ends before the restart, to the next step after it.
        if report.recovery.until is Until.START:
            detect = report.recovery.mean_s
        else:
            restart, whole = report.recovery.mean_s, True
    exposed = [one for one in report.incidents if one.exposed]
    return RunLog(
        saves=log.events[LogEntryKind.SAVE],
        failures=len(report.incidents),
        classes=_count(one.fault.name for one in report.incidents),
        components=_count(one.fault.component for one in exposed),
        nodes=_count(one.node for one in exposed),
        span_s=span or None,
        exposed_s=report.exposed_s,
        exposed_failures=len(exposed) if report.exposed_s else 0,
        save_s=log.waited.value,
        snapshot_s=log.snapshots.value,
        flush_s=log.flushes.value,
        nbytes=log.nbytes,
        detect_s=detect,
        restart_s=restart,
        whole_recovery=whole,
        step_s=log.steps.quantile(0.5),
        ignored=log.events[LogEntryKind.OTHER],
    )


def _count(names: Iterable[str]) -> dict[str, int]:
    """Return how often each name occurs, the most frequent first; "" for unknown."""
    return dict(Counter("" if name == UNKNOWN else name for name in names).most_common())
