"""The answer of `incidents` as JSON: times in seconds, rates per second, unknown is null."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftckpt.joblogs.grouping import Incident
    from ftckpt.joblogs.report import IncidentReport, Rate
    from ftckpt.joblogs.sources import Read


def iso_time(time: float) -> str:
    """Return a time in UTC, to the second."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def document(report: IncidentReport, read: Read) -> dict[str, Any]:
    """Return the fields of the document."""
    steps, recovery = report.steps, report.recovery
    return {
        "logs": read.logs,
        "ignored": read.ignored,
        "began": report.began,
        "ended": report.ended,
        "exposed_s": report.exposed_s,
        "confidence": report.confidence,
        "total": _rate(report.total),
        "classes": _rates(report.classes),
        "components": _rates(report.components),
        "nodes": _rates(report.nodes),
        "nodes_known": report.nodes_known,
        "lemons": report.lemons,
        "recovery": recovery,
        "steps": None
        if steps is None
        else {
            "count": steps.count,
            "p50_s": steps.p50_s,
            "p99_s": steps.p99_s,
            "ranks": steps.ranks,
            "ranks_dropped": steps.dropped,
            "stragglers": [one.rank for one in steps.stragglers],
        },
        "wasted": report.wasted,
        "planned_ends": report.planned,
        "incidents": [_incident(one) for one in report.incidents],
        "survived": [_incident(one) for one in report.survived],
    }


def _rates(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    return [_rate(one) for one in rates]


def _rate(rate: Rate) -> dict[str, Any]:
    return {
        "name": rate.name,
        "incidents": rate.incidents,
        "exposed": rate.exposed,
        "per_s": rate.per_second,
        "low_per_s": rate.low,
        "high_per_s": rate.high,
        "mtbf_s": rate.mtbf_s,
    }


def _incident(one: Incident) -> dict[str, Any]:
    return {
        "time": one.time,
        "utc": None if one.time is None else iso_time(one.time),
        "class": one.fault.name,
        "component": one.fault.component,
        "node": one.node or None,
        "rank": one.rank,
        "signs": one.signs,
        "lines": one.lines,
        "ranks": one.ranks,
        "recovery_s": one.recovery_s,
        "until": one.until,
        "rewound_steps": one.rewound,
        "exposed": one.exposed,
    }
