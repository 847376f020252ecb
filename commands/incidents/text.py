"""The answer of `incidents` for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ftckpt.amounts import brief_duration
from ftckpt.commands.cli.render import block, pairs, table
from ftckpt.findings import counted, listed
from ftckpt.joblogs.grouping import iso_time

if TYPE_CHECKING:
    from ftckpt.joblogs.grouping import Incident
    from ftckpt.joblogs.report import IncidentReport, Rate

_NEWEST = 20
_NODES = 10
UNKNOWN = "unknown"
UNTIL = {
    "recorded": "as recorded",
    "step": "to the next step",
    "start": "to the next start",
}


def headline(report: IncidentReport) -> str:
    """Return the answer in one sentence."""
    said = counted(len(report.incidents), "incident")
    if report.exposed_s is None:
        return f"{said}; no log says for how long the job could fail"
    said += f" in {brief_duration(report.exposed_s)} in which the job could fail"
    total = report.total
    if total.mtbf_s is None:
        assert total.high
        return f"{said}: less than one in {brief_duration(1 / total.high)} (95 %)"
    return f"{said}: one in {brief_duration(total.mtbf_s)} (95 %: {between(total)})"


def between(rate: Rate) -> str:
    """Return the confidence limits of the mean time between failures, the shorter first."""
    if rate.low is None or rate.high is None:
        return UNKNOWN
    longest = brief_duration(1 / rate.low) if rate.low else "any time"
    return f"{brief_duration(1 / rate.high)} to {longest}"


def text_of(report: IncidentReport, zone: str, *, everything: bool) -> str:
    """Return the whole answer; `zone` is that of times without one."""
    parts: list[str] = [headline(report), pairs([*rows_of(report)])]
    if report.incidents:
        parts.append(
            _rates("class", report.classes, [_component(report, one) for one in report.classes])
        )
        parts.append(_rates("component", report.components))
        parts.append(_rates("node", report.nodes[:_NODES]))
        if len(report.nodes) > _NODES:
            more = f"and {len(report.nodes) - _NODES} nodes more (--json lists them)"
            parts[-1] = block(parts[-1], more)
        parts.append(_list(report.incidents if everything else report.incidents[-_NEWEST:]))
        if len(report.incidents) > _NEWEST and not everything:
            more = f"and {len(report.incidents) - _NEWEST} before them (--all)"
            parts[-1] = block(parts[-1], more)
    notes = [*notes_of(report, zone)]
    return block(*parts, *([block(*notes)] if notes else []), between="\n\n")


def rows_of(report: IncidentReport) -> Iterator[tuple[str, str]]:
    """Yield what is known besides the counts, as names and words."""
    lines = sum(log.lines for log in report.logs)
    kinds = listed(list(dict.fromkeys(log.kind for log in report.logs)))
    yield "logs", f"{counted(len(report.logs), 'file')} ({kinds}), {lines:,} lines"
    if report.began is None or report.ended is None:
        yield "time", UNKNOWN
    else:
        yield "time", f"{iso_time(report.began)} to {iso_time(report.ended)}"
    yield "recovery", _recovery(report)
    yield "done again", _wasted(report)
    yield "steps", _steps(report)


def _recovery(report: IncidentReport) -> str:
    recovery = report.recovery
    if recovery is None:
        return UNKNOWN
    said = (
        f"median {brief_duration(recovery.median_s)}, nine of ten within "
        f"{brief_duration(recovery.p90_s)}, {brief_duration(recovery.total_s)} in all "
        f"({UNTIL[recovery.until]}; known of {recovery.count} of {len(report.incidents)})"
    )
    trend = recovery.trend
    if trend is None:
        return block(said, f"trend {UNKNOWN}: too few")
    limits = f"95 %: {trend.low:+.3g} to {trend.high:+.3g}"
    word = "no clear trend"
    if trend.clear:
        word = "getting slower" if trend.per_day > 0 else "getting faster"
    return block(said, f"{word}: {trend.per_day:+.3g} s a day ({limits})")


def _wasted(report: IncidentReport) -> str:
    wasted = report.wasted
    if wasted is None:
        return UNKNOWN
    seconds = UNKNOWN if wasted.seconds is None else brief_duration(wasted.seconds)
    said = f"{wasted.steps:,} steps, {seconds} of work, after {wasted.incidents}"
    return f"{said} of {counted(wasted.incidents + wasted.unknown, 'incident')}"


def _steps(report: IncidentReport) -> str:
    steps = report.steps
    if steps is None:
        return UNKNOWN
    said = (
        f"P50 {seconds_of(steps.p50_s)}, P99 {seconds_of(steps.p99_s)}, {steps.count:,.0f} counted"
    )
    if not steps.ranks:
        return f"{said}; by rank {UNKNOWN}"
    slow = [f"{one.rank} (P50 {seconds_of(one.p50)})" for one in steps.stragglers]
    return f"{said}, {counted(len(steps.ranks), 'rank')}; stragglers: {listed(slow) or 'none'}"


def seconds_of(seconds: float) -> str:
    """Return the duration of a step, to three digits."""
    return f"{seconds:.3g} s" if seconds < 1000 else brief_duration(seconds)


def _component(report: IncidentReport, rate: Rate) -> str:
    found = {i.fault.component for i in report.incidents if i.fault.name == rate.name}
    return ", ".join(sorted(found))


def _rates(what: str, rates: Sequence[Rate], extra: Sequence[str] = ()) -> str:
    rows = []
    for place, one in enumerate(rates):
        mean = UNKNOWN if one.per_second is None else "-"
        mean = mean if one.mtbf_s is None else brief_duration(one.mtbf_s)
        row: list[object] = [one.name, one.incidents, mean, between(one)]
        rows.append([*row, extra[place]] if extra else row)
    columns = [what, "incidents>", "one in>", "95 %"]
    return table([*columns, "component"] if extra else columns, rows)


def _list(incidents: Sequence[Incident]) -> str:
    rows = [
        (
            one.utc or UNKNOWN,
            one.fault.name,
            one.node or UNKNOWN,
            UNKNOWN if one.recovery_s is None else brief_duration(one.recovery_s),
            UNKNOWN if one.rewound is None else f"{one.rewound:,}",
            one.lines,
            "; ".join(one.signs),
        )
        for one in incidents
    ]
    return table(["time", "class", "node", "recovery>", "steps again>", "lines>", "signs"], rows)


def notes_of(report: IncidentReport, zone: str) -> Iterator[str]:
    """Yield what a reader of the numbers must know."""
    for lemon in report.lemons:
        yield (
            f"{lemon.node} fails more often than chance explains: {lemon.incidents} incidents, and "
            f"{lemon.expected:.2g} is the mean of {report.nodes_known} nodes"
        )
    if report.survived:
        yield (
            f"{counted(len(report.survived), 'sign')} of failures that training survived, or that "
            "nothing confirms, are not counted (--json lists them)"
        )
    down = sum(not one.exposed for one in report.incidents)
    if down and report.exposed_s is not None:
        yield f"{down} of the incidents struck a job that was down already: no rate counts them"
    if report.planned:
        yield f"{counted(report.planned, 'end')} by a person, a time limit or the end of the work"
    if any(log.zoneless for log in report.logs):
        yield f"times without a zone were read as {zone} (--timezone)"
    if any(log.yearless for log in report.logs):
        yield "times without a year are of the year before their file was last written"
    long = sum(log.long for log in report.logs)
    if long:
        yield f"{counted(long, 'line')} longer than 64 KiB: only the beginning was looked at"
    if report.ignored:
        yield f"{counted(report.ignored, 'event')} of other kinds not used"
    if report.side_by_side > 1:
        yield f"{report.side_by_side} jobs ran side by side: their times add up"
    for log in report.logs:
        if not log.entries:
            yield f"{log.path}: no line says anything that is known"
