"""Saves within a window of accumulation, and steps at which the script does not save."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.replay.compare.verdict import Verdict
from ftckpt.replay.run.trial import Tried
from tests.replay.trials import Trials

PROGRAM = Path(__file__).parent / "frameworks" / "window_train.py"
Try = Callable[..., Tried]


def command(*words: str) -> tuple[str, ...]:
    return (sys.executable, str(PROGRAM), *words)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[3]))


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Save after two of four backward passes of step 4; killed after it."""
    root = tmp_path_factory.mktemp("within")
    return Trials(root, command("--save-pass", "2"), at=4, steps=3, runs=1)


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Save after steps 1 and 3; killed after step 5."""
    root = tmp_path_factory.mktemp("between")
    return Trials(root, command("--save-at", "1", "3"), at=5, steps=3, runs=1)


def test_a_save_within_a_window_that_restores_its_gradients_is_exact(within: Trials) -> None:
    tried = within.tried()
    assert tried.judgement.verdict is Verdict.EXACT, tried.judgement.sentence
    assert tried.judgement.sentence == "the restart is exact for 3 steps (4 to 6, 1 rank)"
    assert tried.at == 3
    assert tried.judgement.notes[-1] == (
        "the save lies within step 4, after 2 of its backward passes: that step is compared from "
        "there on"
    )
    assert not any("never matters" in note for note in tried.judgement.notes)
    # Not for want of anything to compare.
    shown = {event for step, event, _ in tried.judgement.comparisons[-1].grid if step == 4}
    assert {"grad_start", "masters", "params", "optimizer", "input", "loss", "grad"} <= shown
    uninterrupted = tried.logs["baseline-1"].steps[0]
    assert [len(uninterrupted[step].events["loss"]) for step in (3, 4, 5)] == [4, 2, 4]


def test_gradients_that_a_restart_forgets_are_named(within: Trials) -> None:
    judgement = within.tried("grads").judgement
    assert judgement.verdict is Verdict.STATE
    shown = [(c.component, c.step) for c in judgement.causes]
    assert shown == [("accumulated", 4)], judgement.sentence


def test_the_newest_save_counts_where_the_script_does_not_save_at_that_step(
    between: Trials,
) -> None:
    tried = between.tried()
    assert (tried.judgement.verdict, tried.at) == (Verdict.EXACT, 3), tried.judgement.sentence
    note = "the run was killed after step 5; its newest save is of step 3"
    assert tried.judgement.notes[-1] == note


@pytest.mark.parametrize(("drop", "component", "step", "said"), [
    ("masters", "masters", 4, "4 of 4"),
    ("step", "step", 5, "the restart ended by itself after step 5"),
])  # fmt: skip
def test_what_it_forgets_is_named(
    between: Trials, drop: str, component: str, step: int, said: str
) -> None:
    judgement = between.tried(drop).judgement
    assert judgement.verdict is Verdict.STATE
    found = [cause for cause in judgement.causes if cause.component == component]
    assert [cause.step for cause in found] == [step], judgement.sentence
    assert said in found[0].reason


def test_a_step_that_only_makes_the_optimizers_state_is_not_counted(tmp_path: Path) -> None:
    tried = Trials(tmp_path, command(), at=3, steps=2, runs=1).tried("dummy")
    assert (tried.judgement.verdict, tried.at) == (Verdict.EXACT, 3), tried.judgement.sentence


def test_a_save_that_is_not_seen_shows_in_the_state(tmp_path: Path) -> None:
    tried = Trials(tmp_path, command("--io", "pickle"), at=5, steps=4, runs=1).tried()
    assert (tried.judgement.verdict, tried.at) == (Verdict.EXACT, 3), tried.judgement.sentence
    assert tried.judgement.sentence == "the restart is exact for 2 steps (4 to 5, 1 rank)"
    assert "no save was seen" in tried.judgement.notes[-1]


def test_a_step_before_the_first_save_shows_nothing(tmp_path: Path) -> None:
    judgement = Trials(tmp_path, command(), at=2, runs=1).tried().judgement
    assert judgement.verdict is Verdict.NOT_COMPARED
    assert "had saved nothing by the end of step 2" in judgement.sentence
