"""Streams that no run seeds and no step draws from decide nothing; every other one counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftckpt.replay.compare.logs import idle_streams
from ftckpt.replay.compare.verdict import Judgement, Verdict, judge
from ftckpt.replay.record.log import Log
from tests.replay.made import Change, log, stream


def numpy(seed: int, draws: Callable[[int], int] = lambda step: 0) -> Change:
    """Give a run a NumPy generator: how it was seeded, and its draws before each step."""

    def change(step: int, rank: int, of: dict[str, dict[str, object]]) -> None:
        of["rng_start"]["numpy"] = stream(draws(step), seed)

    return change


def judged(u: Log, again: Log, a: Log, b: Log) -> Judgement:
    idle = idle_streams([u, again], [a, b])
    return judge([u, again], [a, b], 5, 8, idle=idle)


def run(name: str, change: Change) -> Log:
    return log(range(1, 9) if name.startswith("U") else range(5, 9), name, change=change)


def test_what_nobody_seeds_and_nobody_draws_from_is_left_out_and_named() -> None:
    names = ("U", "U'", "A", "B")
    found = judged(*(run(name, numpy(seed)) for seed, name in enumerate(names)))
    assert found.verdict is Verdict.EXACT, found.sentence
    assert found.notes == ("NumPy RNG: seeded by nobody, and nothing drew from it: left out",)
    assert found.comparisons[0].grid  # the other streams are compared as before


def test_a_stream_that_was_seeded_counts_though_nothing_draws_from_it_yet() -> None:
    found = judged(*(run(name, numpy(name in "AB")) for name in ("U", "U'", "A", "B")))
    assert found.verdict is Verdict.STATE
    assert [cause.component for cause in found.causes] == ["rng-numpy"]


@pytest.mark.parametrize("drawing", ["U", "U'", "A", "B"])
def test_a_stream_that_one_run_draws_from_counts(drawing: str) -> None:
    def change(name: str, seed: int) -> Change:
        return numpy(seed, lambda step: int(name == drawing and step == 8))

    names = ("U", "U'", "A", "B")
    found = judged(*(run(name, change(name, seed)) for seed, name in enumerate(names)))
    assert found.verdict is Verdict.FRAMEWORK
    assert found.idle == ()


def test_one_rank_that_draws_is_enough() -> None:
    def change(seed: int) -> Change:
        def of_rank(step: int, rank: int, of: dict[str, dict[str, object]]) -> None:
            of["rng_start"]["numpy"] = stream(step * rank, seed)

        return of_rank

    u, again = (log(range(1, 9), "U", ranks=2, change=change(seed)) for seed in (1, 2))
    assert idle_streams([u, again], []) == ()
    assert idle_streams([Log("U", {0: u.steps[0]}), Log("U'", {0: again.steps[0]})], []) == (
        "numpy",
    )
