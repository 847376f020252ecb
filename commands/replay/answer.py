"""The answer of `replay run` and `replay compare`, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Result
from ftckpt.commands.cli.render import block, pairs, table
from ftckpt.errors import ExitCode
from ftckpt.replay.compare.verdict import Judgement, Verdict
from ftckpt.replay.record.events import BY_KEY

if TYPE_CHECKING:
    from ftckpt.replay.compare.differences import Difference
    from ftckpt.replay.compare.logs import Comparison

# How many differences an answer lists: the first ones are the causes.
_SHOWN = 12
_ITEMS = 5


def record(judgement: Judgement) -> dict[str, Any]:
    """Return the fields of the JSON document."""
    return {
        "verdict": judgement.verdict.name.lower(),
        "compared": {"first": judgement.first, "last": judgement.last},
        "causes": [
            {
                "component": cause.component,
                "title": cause.title,
                "step": cause.step,
                "event": cause.event,
                "ranks": cause.ranks,
                "reason": cause.reason,
                "consequence": consequence(cause.component),
            }
            for cause in judgement.causes
        ],
        "comparisons": [_comparison(one) for one in judgement.comparisons],
        "closeups": [asdict(one) for one in judgement.closeups],
        "notes": judgement.notes,
        "problems": judgement.problems,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "reference": comparison.reference,
        "other": comparison.other,
        "equal": comparison.equal,
        "steps": len(comparison.steps),
        "ranks": comparison.ranks,
        "events": sorted({event for _, event, _ in comparison.grid}),
        "differences": len(comparison.differences),
        "first": [_difference(one) for one in comparison.at_first_step()],
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "step": difference.step,
        "rank": difference.rank,
        "event": difference.event,
        "items": len(difference.items),
        "of": difference.of,
        "shown": [
            {"name": item.name, "words": item.words, "reference": _value(item.reference),
             "other": _value(item.other)}
            for item in difference.items[:_ITEMS]
        ],
    }  # fmt: skip


def _value(value: Any) -> Any:
    return value.get("digest") if isinstance(value, dict) else value


def consequence(component: str) -> str:
    """Say what goes wrong without a component of the state; "" where the table does not know."""
    from ftckpt.inspection.training_state import TABLE

    return next((row.consequence for row in TABLE if row.key == component), "")


def remarks(judgement: Judgement) -> list[tuple[str, str]]:
    """Return what stands beside the sentence, each with the word that says what it is."""
    missing = [cause for cause in judgement.causes if cause.missing]
    known = [(cause.title, consequence(cause.component)) for cause in missing]
    return [
        *(("why", f"{title}: {said}") for title, said in known if said),
        *(("where", one.words) for one in judgement.closeups),
        *(("note", note) for note in judgement.notes),
        *(("problem", problem) for problem in judgement.problems),
    ]


def text(judgement: Judgement) -> str:
    """Return the answer for a terminal: verdict, comparisons, what differs first."""
    rows = [("verdict", judgement.verdict.value), ("", judgement.sentence), *remarks(judgement)]
    parts: list[str] = [pairs(rows)]
    if judgement.comparisons:
        parts.append(
            table(
                ["run", "against", "steps>", "ranks>", "equal"],
                [[c.other, c.reference, len(c.steps), len(c.ranks), _equal(c)]
                 for c in judgement.comparisons],
            )
        )  # fmt: skip
    unlike = next((c for c in judgement.comparisons if not c.equal), None)
    if unlike is not None:
        parts.append(_first_differences(unlike))
    return block(*parts, between="\n\n")


def _equal(comparison: Comparison) -> str:
    if comparison.equal:
        return "cannot be said" if comparison.problems else "yes"
    return f"no, from step {comparison.differences[0].step}"


def _first_differences(comparison: Comparison) -> str:
    cells = [
        [d.step, d.rank, BY_KEY[d.event].title, f"{len(d.items)} of {d.of}",
         f"{d.items[0].name}: {d.items[0].words}"]
        for d in comparison.differences[:_SHOWN]
    ]  # fmt: skip
    more = len(comparison.differences) - len(cells)
    shown = table(["step>", "rank>", "what differs, in causal order", "items>", "first"], cells)
    return block(shown, *([f"... and {more} more"] if more else []))


def result(judgement: Judgement) -> Result:
    """Return how the verb ends."""
    if judgement.verdict is Verdict.EXACT:
        return Result(ExitCode.OK, judgement.sentence)
    if judgement.verdict is Verdict.NOT_COMPARED:
        return Result(ExitCode.UNVERIFIED, judgement.sentence, "nothing was shown either way")
    return Result(ExitCode.DIFFERENT, judgement.sentence, "docs/replay.md says how to save it")
