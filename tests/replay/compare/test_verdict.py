"""The matrix of verdicts, attribution, and that nothing incomplete ever passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.replay.compare.logs import compare
from ftckpt.replay.compare.verdict import Judgement, Verdict, judge
from ftckpt.replay.record.log import ENDED, EVENTS, ORDER, Log, StepRecord, written
from tests.replay.made import Change, events, log, stream

U = log(range(1, 9), "U")


def judged(change: Change | None = None, *, again: Change | None = None) -> Judgement:
    a = log(range(5, 9), "A", change=change)
    b = log(range(5, 9), "B", change=again or change)
    return judge([U, log(range(1, 9), "U'")], [a, b], 5, 8)


def setting(event: str, item: str, value: Any, step: int = 5) -> Change:
    def change(now: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        if now >= step:
            of[event][item] = value

    return change


def test_the_matrix() -> None:
    other = setting("loss", "0", written(2.0, "float32"))
    assert judged().verdict is Verdict.EXACT
    assert judged(other).verdict is Verdict.STATE
    assert judged(again=other).verdict is Verdict.UNSEEDED
    noisy = log(range(1, 9), "U'", change=other)
    everything = judge([U, noisy], [log(range(5, 9), change=other)] * 2, 5, 8)
    assert everything.verdict is Verdict.FRAMEWORK
    assert everything.causes == ()


@given(st.integers(5, 8), st.sampled_from(["params", "optimizer", "lr", "batch", "loss", "grad"]))
def test_the_first_difference_is_found_where_it_is(step: int, event: str) -> None:
    name = next(iter(events(step, 0)[event]))
    found = judged(setting(event, name, f"float32[2]:{'f' * 32}", step))
    assert found.verdict is Verdict.STATE
    assert (found.causes[0].step, found.causes[0].event) == (step, event)


def test_differences_come_in_causal_order() -> None:
    def everything(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        for items in of.values():
            for name in items:
                items[name] = "x"

    a = log(range(5, 9), "A", ranks=2, change=everything)
    found = compare(log(range(1, 9), "U", ranks=2), a, 5, 8).differences
    places = [(d.step, ORDER[d.event], d.rank) for d in found]
    assert places == sorted(places)
    assert len(places) == 4 * 7 * 2


def test_a_state_of_another_step_is_a_stale_or_a_torn_checkpoint() -> None:
    def stale(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of |= {k: v for k, v in events(step - 1, rank).items() if k in ("params", "optimizer")}

    def torn(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["params"] = events(step - 1, rank)["params"]

    assert judged(stale).causes[0].reason.startswith("stale: it holds the state after step 3")
    cause = judged(torn).causes[0]
    assert cause.component == "checkpoint"
    assert cause.reason == "torn: model weights of step 3, optimizer state of step 4"


def test_the_schedule_off_by_one_shows_at_the_boundary() -> None:
    found = judged(setting("lr", "0.0", written(0.05), step=7))
    assert [(c.component, c.step) for c in found.causes] == [("scheduler", 7)]


def test_a_batch_that_was_seen_before_is_named() -> None:
    def again(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["batch"] = events(step - 4, rank)["batch"]

    found = judged(again)
    assert found.causes[0].component == "data"
    assert found.causes[0].reason == "another batch: the batch of step 1"


def test_extra_draws_and_a_stream_not_restored_are_told_apart() -> None:
    def drawn(extra: int) -> Judgement:
        return judged(lambda step, rank, of: of.update(
            rng_start={"python": stream(2 * step + extra)}
        ))  # fmt: skip

    assert drawn(2).causes[0].component == "rng-draw"
    assert drawn(-8).causes[0].component == "rng-python"
    assert drawn(5000).causes[0].component == "rng-python"


def test_reductions_are_told_from_what_they_reduce() -> None:
    def local(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["grad_local"] = of["grad"]

    def reduced(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["grad_local"] = dict(of["grad"])
        of["grad"] = {"w": "float32[2]:0"}

    u = log(range(1, 9), "U", change=local)
    found = judge([u, u], [log(range(5, 9), "A", change=reduced)] * 2, 5, 8)
    assert found.causes[0].component == "collective"
    assert judged(setting("grad", "w", "float32[2]:0")).causes[0].component == "computation"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_a_pass(bad: float) -> None:
    change = setting("loss", "0", written(bad, "float32"), step=7)
    u = log(range(1, 9), "U", change=change)
    found = judge([u, u], [log(range(5, 9), "A", change=change)] * 2, 5, 8)
    assert found.verdict is Verdict.NOT_COMPARED
    assert "at step 7" in found.sentence


@pytest.mark.parametrize(
    ("restart", "said"),
    [
        (log(range(5, 8), "A"), "A logged 3 of the 4 steps; step 8 is the first that is missing"),
        (log((5, 7, 8), "A"), "step 6 is the first that is missing"),
        (Log("A", {}, None), "A has no log of rank 0"),
        (Log("A", log(range(5, 9), "A").steps, 2), "A has no log of rank 1"),
    ],
)  # fmt: skip
def test_what_is_missing_is_never_a_pass(restart: Log, said: str) -> None:
    found = judge([U, U], [restart, restart], 5, 8)
    assert found.verdict is Verdict.NOT_COMPARED
    assert any(said in problem for problem in found.problems)


def test_logs_without_a_common_event_show_nothing() -> None:
    empty = Log("A", {0: {step: StepRecord(step, 0, {}) for step in range(5, 9)}}, 1)
    none = Log("U", {0: {step: StepRecord(step, 0, {}) for step in range(1, 9)}}, 1)
    assert judge([none, none], [empty, empty], 5, 8).verdict is Verdict.NOT_COMPARED


def test_tensors_that_were_read_in_one_run_alone_are_not_compared() -> None:
    def sparse(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        if step % 2 == 0:
            for event in EVENTS:
                if event.heavy:
                    of.pop(event.key, None)

    found = judged(sparse)
    assert found.verdict is Verdict.EXACT
    assert (6, "params", 0) not in found.comparisons[-1].grid
    assert (7, "params", 0) in found.comparisons[-1].grid


def test_the_input_stands_for_a_batch_that_no_loader_drew() -> None:
    def given(wrong: float) -> Change:
        def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
            of["input"] = of.pop("batch")
            of["loss"] = {"0": written(wrong / step)}

        return change

    u = log(range(1, 9), "U", change=given(1))
    found = judge([u], [log(range(5, 9), "A", change=given(2))], 5, 8)
    assert "; input equal, loss differs by " in found.sentence


def test_conditions_that_two_runs_did_not_share_are_said() -> None:
    def under(name: str, **conditions: object) -> Log:
        return replace(log(range(1, 9), name), conditions=conditions)

    u, a = under("U", threads=2, torch="2.6"), under("A", threads=1, torch="2.6")
    assert judge([u, u], [a, a], 5, 8).notes == ("threads: 2 in U, 1 in A",)
    noisy = log(range(1, 9), "U'", change=setting("loss", "0", written(2.0, "float32")))
    u = under("U", deterministic=False, cudnn_benchmark=True)
    found = judge([u, noisy], [u, u], 5, 8)
    assert ["use_deterministic_algorithms" in found.notes[0], "fast" in found.notes[1]] == [
        True
    ] * 2


def test_rounded_numbers_are_compared_by_value() -> None:
    a = Log("a", {0: {1: StepRecord(1, 0, {"loss": {"loss": "decimal 2.50"}})}})
    b = Log("b", {0: {1: StepRecord(1, 0, {"loss": {"loss": "decimal 2.5"}})}})
    c = Log("c", {0: {1: StepRecord(1, 0, {"loss": {"loss": "decimal 2.4"}})}})
    assert compare(a, b, 1, 1).equal
    assert compare(a, c, 1, 1).differences[0].words == "loss (2.4 instead of 2.50)"


def test_a_stream_that_is_restored_before_anything_draws_from_it_is_a_note() -> None:
    def change(late: bool) -> Change:
        def restored_late(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
            of["rng"] = {"python": stream(2 * step)}
            if late and step == 5:
                of["rng_start"] = {"python": stream(0, seed=9)}

        return restored_late

    u = log(range(1, 9), "U", change=change(late=False))
    a = [log(range(5, 9), name, change=change(late=True)) for name in "AB"]
    found = judge([u, u], a, 5, 8)
    assert found.verdict is Verdict.EXACT, found.sentence
    assert found.notes[0].startswith("Python RNG: differs as step 5 begins and never matters")
    assert [d.event for d in found.comparisons[-1].passing] == ["rng_start"]

    # It hides nothing: the batch is another one, and no stream was drawn from for it.
    def skips(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        change(late=True)(step, rank, of)
        of["batch"] = events(step - 4, rank)["batch"]

    found = judge([u, u], [log(range(5, 9), "A", change=skips)] * 2, 5, 8)
    assert [(c.component, c.event) for c in found.causes] == [("data", "batch")]


def test_a_stream_that_stays_different_counts_though_all_else_is_equal() -> None:
    def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["rng_start"]["numpy"] = stream(0, seed=9)

    def right(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["rng_start"]["numpy"] = stream(4)

    u = log(range(1, 9), "U", change=right)
    found = judge([u, u], [log(range(5, 9), "A", change=change)] * 2, 5, 8)
    assert [c.component for c in found.causes] == ["rng-numpy"]


def test_a_position_is_named_beside_a_stream_that_does_not_explain_it() -> None:
    def lost(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["rng_start"] = {"python": stream(2 * step + 2)}
        of["batch"] = events(step - 4, rank)["batch"]

    assert [c.component for c in judged(lost).causes] == ["data", "rng-draw"]


def test_state_that_is_written_over_before_it_is_used_is_a_note() -> None:
    def wrong(steps: tuple[int, ...]) -> Change:
        def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
            of["buffers"] = {"mean": f"float32[1]:{9 if step in steps else step}"}

        return change

    u = log(range(1, 9), "U", ranks=2, change=wrong(()))
    once = log(range(5, 9), "A", ranks=2, change=wrong((5,)))
    found = judge([u, u], [once, once], 5, 8)
    assert found.verdict is Verdict.EXACT, found.sentence
    assert "buffers: differs as step 5 begins and never matters" in found.notes[0]
    lasting = log(range(5, 9), "A", ranks=2, change=wrong((5, 6, 7, 8)))
    assert judge([u, u], [lasting, lasting], 5, 8).causes[0].component == "buffers"


def test_a_checkpoint_of_a_step_whose_tensors_were_not_read_is_stale_by_its_numbers() -> None:
    def sparse(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of["scheduler"] = {"last_epoch": str(step)}
        if 1 < step < 5:
            for event in ("params", "optimizer", "grad"):
                of.pop(event)

    def stale(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        of |= events(step - 2, rank) | {"scheduler": {"last_epoch": str(step - 2)}}

    u = log(range(1, 9), "U", change=sparse)

    def restored_later(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        stale(step, rank, of)
        of["rng_start"] = events(1, rank)["rng_start"]

    late = judge([u], [log(range(5, 9), "A", change=restored_later)], 5, 8).causes
    assert late[-1].reason.endswith("by its learning-rate schedule"), late
    [cause] = judge([u], [log(range(5, 9), "A", change=stale)], 5, 8).causes
    assert (cause.component, cause.held, cause.seen) == ("checkpoint", 3, False)
    assert cause.reason == (
        "stale: it holds the state after step 2 instead of 4, by its learning-rate schedule and "
        "random streams"
    )


def counting(shown: dict[int, int], name: str = "step") -> Change:
    def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        if step in shown:
            of["counter"] = {name: f"{shown[step]} {step}"}

    return change


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({4: 4}, {7: 8}, "step is 8 after step 7 instead of 7"),  # one save, and it saves earlier
        ({4: 4, 8: 8}, {8: 9}, "step is 9 after step 8 instead of 8"),
        ({2: 80, 4: 160}, {6: 280}, "step is 280 after step 6 instead of 240"),  # counts batches
        ({4: 4}, {8: 8}, ""),
        ({4: 160}, {6: 280}, ""),  # one number says nothing of what it counts
        ({2: 7, 4: 7}, {6: 7}, ""),
        ({}, {6: 7}, ""),
    ],
)
def test_a_step_counter_is_weighed_by_the_steps_that_were_made(
    ours: dict[int, int], theirs: dict[int, int], said: str
) -> None:
    u = log(range(1, 9), "U", change=counting(ours))
    a = log(range(5, 9), "A", change=counting(theirs))
    found = judge([u, u], [a, a], 5, 8)
    if not said:
        assert found.verdict is Verdict.EXACT, found.sentence
        return
    assert found.verdict is Verdict.STATE
    assert [(c.component, c.reason) for c in found.causes] == [("step", said)]


def test_a_restart_that_ends_before_or_after_its_step_counts_wrong() -> None:
    def ends(run: Log, after: int) -> Log:
        last = StepRecord(after + 1, 0, {}, (ENDED,), partial=True)
        steps = {s: r for s, r in run.steps[0].items() if s <= after} | {after + 1: last}
        return replace(run, steps={0: steps})

    u = ends(log(range(1, 9), "U"), 8)
    early, goes_on = ends(log(range(5, 9), "A"), 7), log(range(5, 10), "A")
    found = judge([u, u], [early, early], 5, 8, ends=True)
    assert (found.verdict, found.causes[0].component) == (Verdict.STATE, "step")
    assert "ended by itself after step 7" in found.sentence
    found = judge([u, u], [goes_on, goes_on], 5, 8, ends=True)
    assert (found.verdict, found.causes[0].component) == (Verdict.STATE, "step")
    assert "counts too few" in found.sentence
    # Other commands may end where they like, and fewer steps are never a pass.
    assert judge([u, u], [goes_on, goes_on], 5, 8).verdict is Verdict.EXACT
    assert judge([u, u], [early, early], 5, 8).verdict is Verdict.NOT_COMPARED
