"""The answer of `replay run` and `replay compare`, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.commands.cli.invocation import Result
from ftckpt.commands.cli.render import block, pairs, table
from ftckpt.errors import ExitCode
from ftckpt.replay.record.log import BY_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.replay.compare.attribution import ReplayCause
    from ftckpt.replay.compare.logs import Comparison
    from ftckpt.replay.compare.verdict import Judgement

# How many differences an answer lists: the first ones are the causes.
_SHOWN = 12


def remarks(judgement: Judgement) -> list[tuple[str, str]]:
    """Return what stands beside the sentence, each with the word that says what it is."""
    missing = [cause for cause in judgement.causes if cause.missing]
    return [
        *(("why", f"{one.title}: {one.consequence}") for one in missing if one.consequence),
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
        parts.append(_first_differences(unlike, judgement.causes))
    return block(*parts, between="\n\n")


def _equal(comparison: Comparison) -> str:
    if comparison.equal:
        return "cannot be said" if comparison.problems else "yes"
    return f"no, from step {comparison.differences[0].step}"


def _first_differences(comparison: Comparison, causes: Sequence[ReplayCause]) -> str:
    """Return the rows; what the sentence above calls the cause comes first."""
    first = {(one.step, one.event) for one in causes[:1]}
    rows = sorted(comparison.differences, key=lambda d: (d.step, d.event) not in first)
    cells = [
        [d.step, d.rank, BY_KEY[d.event].title, f"{len(d.items)} of {d.of}",
         f"{d.items[0].name}: {d.items[0].words}"]
        for d in rows[:_SHOWN]
    ]  # fmt: skip
    more = len(comparison.differences) - len(cells)
    shown = table(["step>", "rank>", "what differs, the cause first", "items>", "first"], cells)
    return block(shown, *([f"... and {more} more"] if more else []))


def result(judgement: Judgement) -> Result:
    """Return how the verb ends."""
    hints = {
        ExitCode.OK: "",
        ExitCode.UNVERIFIED: "nothing was shown either way",
        ExitCode.DIFFERENT: "docs/replay.md says how to save it",
    }
    return Result(judgement.code, judgement.sentence, hints[judgement.code])
