"""The rows below the verdict of a replay."""

from __future__ import annotations

from ftckpt.commands.replay.answer import text
from ftckpt.replay.compare.attribution import ReplayCause
from ftckpt.replay.compare.differences import Difference, ItemDifference
from ftckpt.replay.compare.logs import Comparison
from ftckpt.replay.compare.verdict import Judgement, Verdict


def test_the_headline_is_the_top_row() -> None:
    differs = (ItemDifference("x", "1", "2"),)
    rows = tuple(Difference(8, 0, event, differs, 1) for event in ("rng_start", "batch", "loss"))
    across = Comparison("U", "A", 8, 9, (8, 9), (0,), {}, rows)
    cause = ReplayCause("data", 8, "batch", (0,), "the batch of step 7")
    said = text(
        Judgement(Verdict.STATE, "not exact: dataloader position", 8, 9, (cause,), (across,))
    )
    table = said[said.index("what differs") :].splitlines()
    assert [line.split()[2] for line in table[2:]] == ["batch", "random", "loss"]
