"""The answer of `status` for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftckpt.health import Health, Status, SurveyedEntry


def document(found: Status) -> dict[str, Any]:
    """Return the fields of the JSON document."""
    return {
        "now": found.now,
        "runs": [_run(run, found) for run in found.runs],
        "alerts": [alert._asdict() for alert in found.alerts],
    }


def _run(run: Health, found: Status) -> dict[str, Any]:
    durable, kept = run.durable, found.kept
    return {
        "root": run.survey.url,
        "newest": _held(run.newest),
        "newest_with": (run.survey.order or ())[1 : run.survey.together],
        "doubt": run.survey.doubt,
        "last": _held(run.last),
        "age_s": run.age_s,
        "verified": _held(run.survey.verified),
        "verified_age_s": run.verified_age_s,
        "interval": run.rhythm,
        "writing": run.writing,
        "growth_bytes_per_day": run.growth,
        "bytes": run.nbytes,
        "counts": run.counts,
        "thinned": len(run.thinned),
        "leftovers": [
            *run.survey.leftovers,
            *run.survey.dead_parts,
            *run.survey.uploads,
        ],
        "free": run.survey.free,
        "tier": None
        if durable is None
        else {
            "root": durable.url,
            "newest": _held(durable.newest),
            "missing": [held.entry.name for held in durable.missing],
            "unfinished": [held.entry.name for held in durable.unfinished],
        },
        "scrub": None
        if run.scrubbed is None
        else {
            "ledger": run.scrubbed.ledger,
            "saves": run.scrubbed.saves,
            "read": run.scrubbed.read,
            "longest": run.scrubbed.longest,
            "unread_s": run.scrubbed.unread_s,
            "unproven": run.scrubbed.unproven,
            "bad": [
                {"path": url, "code": check.code, "message": check.reason}
                for url, check in run.scrubbed.bad
            ],
        },
        "alerts": [alert._asdict() for alert in run.alerts],
        "saves": [
            (_held(held) or {}) | _fate(held.entry.name, found, kept) for held in run.survey.held
        ],
    }


def _held(held: SurveyedEntry | None) -> dict[str, Any] | None:
    if held is None:
        return None
    contents = held.entry.contents
    return {
        "name": held.entry.name,
        "step": held.entry.step,
        "class": held.entry.entry_class,
        "format": held.entry.format,
        "bytes": None if contents is None else contents.nbytes,
        "files": None if contents is None else contents.files,
        "began": held.began,
        "finished": held.finished,
        "pinned": bool(held.entry.pins),
        "thinned": bool(held.entry.thinned),
    }


def _fate(name: str, found: Status, kept: Mapping[str, bool] | None) -> dict[str, Any]:
    return {} if kept is None else {"keep": kept.get(name), "thin": name in found.thins}
