"""The answer of `plan` as JSON: all times in seconds, all shares as fractions, full precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.planning import IntervalRule, Plan, Tiered

from .notes import Notes

if TYPE_CHECKING:
    from ftckpt.planning.models.outcome import Outcome
    from ftckpt.planning.simulation import Agreement, Simulated


def record(plan: Plan, notes: Notes) -> dict[str, Any]:
    """Return the fields of the document."""
    question, outcome = plan.question, plan.outcome
    failures, forecasts = question.failures, {f.rule: f for f in plan.forecasts}
    limits = None
    if failures.confidence is not None:
        low, high = failures.mtbf_limits
        limits = {"confidence": failures.confidence, "low_mtbf_s": low, "high_mtbf_s": high}
    young = forecasts.get(IntervalRule.YOUNG)
    return {
        "inputs": notes.inputs,
        "remarks": notes.remarks,
        "rates": {
            "total_per_s": failures.rates.per_second,
            "mtbf_s": failures.mtbf,
            "share": failures.rates.share,
            "ci": limits,
        },
        "interval": plan.interval,
        "goodput": split(outcome) | {"ci": plan.goodput_limits, "predicted": plan.predicted},
        "waste_first_order": None if young is None else 1 - young.predicted,
        "rules": plan.forecasts,
        "tiers": _tiers(question.model) if isinstance(question.model, Tiered) else [],
        "constraints": plan.constraints,
        "improvements": plan.improvements,
        "storage": plan.upkeep,
        "money": None if plan.money is None else plan.money._asdict(),
        "weights": None,
        "simulation": None,
    }


def split(outcome: Outcome) -> dict[str, Any]:
    """Return where the wall time goes, in fractions of it."""
    return {
        "model": outcome.model,
        "value": outcome.useful,
        "save": outcome.save,
        "lost": outcome.lost,
        "detection": outcome.detection,
        "restart": outcome.restart,
        "detect_restart": outcome.detection + outcome.restart,
        "waiting": outcome.waiting,
    }


def simulation_record(found: Simulated, verdict: Agreement) -> dict[str, Any]:
    """Return what a simulation says."""
    return {
        "interval_s": found.outcome.interval,
        "law": found.law,
        "runs": found.runs,
        "failures": found.failures,
        "segments": found.segments,
        "unreached": found.unreached,
        "mean": found.mean,
        "se": found.error,
        "spread": found.spread,
        "p10": found.p10,
        "p90": found.p90,
        "split": split(found.outcome),
        "closed": verdict.closed,
        "z": verdict.z,
        "agrees": verdict.agrees,
    }


def _tiers(model: Tiered) -> list[dict[str, Any]]:
    gaps = {t.name: model.pattern.gap(place) for place, t in enumerate(model.pattern.tiers)}
    return [
        {
            "name": tier.name,
            "used": tier.name in gaps,
            "interval_s": gaps.get(tier.name),
            "cost_s": tier.cost,
            "restore_s": tier.restart,
            "covers": tier.covers,
        }
        for tier in model.tiers
    ]
