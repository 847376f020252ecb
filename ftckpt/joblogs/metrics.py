"""The incidents of a run as metrics in Prometheus' text format, for node_exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ftckpt.health.prometheus import Gauge, text_of

from .report import IncidentReport

COUNT = Gauge("ftckpt_incidents", "Incidents in the logs, by class and component.")
BY_NODE = Gauge("ftckpt_incidents_by_node", "Incidents in the logs, by node.")
LEMON = Gauge("ftckpt_incidents_lemon", "1 for a node that fails more often than chance explains.")
EXPOSED = Gauge("ftckpt_incidents_exposed_seconds", "Time in which the job could fail.")
MTBF = Gauge("ftckpt_incidents_mtbf_seconds", "Between failures: value, and 95 % limits.")
RECOVERY = Gauge("ftckpt_incidents_recovery_seconds", "Until training continued: median, p90.")
TREND = Gauge("ftckpt_incidents_recovery_trend", "Its slope in seconds a day: value, low, high.")
AWAY = Gauge("ftckpt_incidents_recovery_total_seconds", "All recoveries that are known.")
REDONE = Gauge("ftckpt_incidents_rewound_steps", "Steps that had to be done again.")
LOST = Gauge("ftckpt_incidents_rewound_seconds", "What these steps had taken.")
STEP = Gauge("ftckpt_incidents_step_seconds", "A training step: p50, p99.")
STRAGGLER = Gauge("ftckpt_incidents_straggler_seconds", "Median step of a rank that is too slow.")
LAST = Gauge("ftckpt_incidents_last_timestamp_seconds", "When the last incident struck.")
AT = Gauge("ftckpt_incidents_timestamp_seconds", "When the logs were read.")

_ORDER = (
    COUNT, BY_NODE, LEMON, EXPOSED, MTBF, RECOVERY, TREND, AWAY, REDONE, LOST, STEP, STRAGGLER,
    LAST, AT,
)  # fmt: skip
_Sample = tuple[Gauge, Mapping[str, str], float | None]


def metrics(report: IncidentReport, run: str, now: float) -> str:
    """Return the metrics of a report; what no log says has no sample.

    `run` labels them all; `now` is when the logs were read.
    """
    return text_of([*_samples(report, {"run": run}, now)], _ORDER)


def _samples(report: IncidentReport, labels: Mapping[str, str], now: float) -> Iterator[_Sample]:
    components = {one.fault.name: one.fault.component for one in report.incidents}
    for rate in report.classes:
        what = {"class": rate.name, "component": components.get(rate.name, "unknown")}
        yield COUNT, {**labels, **what}, rate.incidents
    for rate in report.nodes:
        yield BY_NODE, {**labels, "node": rate.name}, rate.incidents
    for lemon in report.lemons:
        yield LEMON, {**labels, "node": lemon.node}, 1.0
    yield EXPOSED, labels, report.exposed_s
    total = report.total
    for which, rate_of in (("value", total.per_second), ("low", total.high), ("high", total.low)):
        yield MTBF, {**labels, "which": which}, 1 / rate_of if rate_of else None
    if (recovery := report.recovery) is not None:
        until = {**labels, "until": recovery.until.value}
        yield RECOVERY, {**until, "which": "median"}, recovery.median_s
        yield RECOVERY, {**until, "which": "p90"}, recovery.p90_s
        yield AWAY, until, recovery.total_s
        if (trend := recovery.trend) is not None:
            for which, slope in (
                ("value", trend.per_day), ("low", trend.low), ("high", trend.high),
            ):  # fmt: skip
                finite = abs(slope) < float("inf")
                yield TREND, {**until, "which": which}, slope if finite else None
    if report.wasted is not None:
        yield REDONE, labels, report.wasted.steps
        yield LOST, labels, report.wasted.seconds
    if (steps := report.steps) is not None:
        yield STEP, {**labels, "which": "p50"}, steps.p50_s
        yield STEP, {**labels, "which": "p99"}, steps.p99_s
        for rank in steps.stragglers:
            yield STRAGGLER, {**labels, "rank": str(rank.rank)}, rank.p50
    times = [one.time for one in report.incidents if one.time is not None]
    yield LAST, labels, max(times, default=None)
    yield AT, labels, now
