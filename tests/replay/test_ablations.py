"""Each component that a restart forgets is named: a real training, one left out at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.replay.judging import Judgement, Verdict, judge
from ftckpt.replay.records import Log, read_log
from ftckpt.replay.settings import Settings

HERE = Path(__file__).parent
AT, LAST = 4, 12

# What is left out at the restart: the component that must be named, and the event that shows it.
ABLATIONS = {
    "model": ("weights", "params"),
    "buffers": ("buffers", "buffers"),
    "optimizer": ("moments", "optimizer"),
    "scheduler": ("scheduler", "scheduler"),
    "python": ("rng-python", "rng_start"),
    "numpy": ("rng-numpy", "rng_start"),
    "torch": ("rng-torch", "rng_start"),
    "cursor": ("data", "batch"),
    "scaler": ("scaler", "scaler"),
    "draw": ("rng-draw", "rng_start"),
    "stale": ("checkpoint", "params"),
    "ema": ("ema", "ema"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Log]:
    """Run the training once for each ablation, all from one checkpoint; returns their logs."""
    root = tmp_path_factory.mktemp("runs")

    def training(name: str, steps: int, drop: str = "", save: str = "", at: int = 0) -> object:
        settings = Settings(log=str(root / name), at=at, dense_from=1)
        place = root / f"{name}-state" if save else root / (
            "stale-made-state" if drop == "stale" else "made-state"
        )  # fmt: skip
        arguments = ["--dir", str(place), "--steps", str(steps), "--drop", drop]
        arguments += ["--save-at", save or "100000"]
        return {"arguments": arguments, "environment": settings.environment()}

    def restart(name: str, drop: str) -> object:
        return training(name, LAST, drop=drop, at=AT)

    first = [
        [training("made", AT, save=str(AT)), training("stale-made", AT, "stale", str(AT))],
        [training("u", LAST, save="99999"), training("u2", LAST, save="99999")],
        [training("noise", LAST, "noise", "99999")],
    ]
    names = [*ABLATIONS, "none", "none-again", "unseeded", "unseeded-again"]
    restarts = [restart(name, name.removesuffix("-again").replace("none", "")) for name in names]
    for lists in (first, [restarts[::2], restarts[1::2]]):
        file = root / "lists.json"
        file.write_text(json.dumps(lists))
        done = subprocess.run(
            [sys.executable, HERE / "forks.py", file],
            capture_output=True, text=True, timeout=300, check=False,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return lambda name: read_log(root / name, name)


def judged(runs: Callable[[str], Log], restart: str, again: str = "") -> Judgement:
    restarts = [runs(restart), runs(again or restart)]
    return judge([runs("u"), runs("u2")], restarts, AT + 1, LAST)


def test_a_restart_that_restores_everything_is_exact(runs: Callable[[str], Log]) -> None:
    judgement = judged(runs, "none", "none-again")
    assert judgement.verdict is Verdict.EXACT, judgement.sentence
    assert judgement.sentence == "the restart is exact for 8 steps (5 to 12, 1 rank)"
    assert [*judgement.causes, *judgement.notes, *judgement.problems] == []
    # Not for want of anything to compare.
    compared = {event for comparison in judgement.comparisons for _, event, _ in comparison.grid}
    assert {"params", "buffers", "optimizer", "ema", "scheduler", "lr", "scaler", "rng_start",
            "batch", "rng", "input", "loss", "grad"} == compared  # fmt: skip


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_what_a_restart_forgets_is_named(runs: Callable[[str], Log], ablation: str) -> None:
    judgement = judged(runs, ablation)
    assert judgement.verdict is Verdict.STATE, judgement.sentence
    component, event = ABLATIONS[ablation]
    shown = [(c.component, c.event, c.step, c.ranks) for c in judgement.causes]
    assert shown == [(component, event, AT + 1, (0,))], judgement.sentence
    assert judgement.causes[0].title in judgement.sentence


@pytest.mark.parametrize(
    ("ablation", "words"),
    [
        ("draw", "extra random draws (torch RNG: one extra 64-bit draw), first seen at step 5"),
        ("stale", "stale: it holds the state after step 3 instead of 4"),
        ("optimizer", "optimizer state not restored: as at the start of training"),
        ("cursor", "another batch"),
        ("scaler", "loss equal and never differs"),
        ("buffers", "loss equal and never differs"),
        ("torch", "torch RNG not restored: "),
    ],
)
def test_the_sentence_says_how(runs: Callable[[str], Log], ablation: str, words: str) -> None:
    assert words in judged(runs, ablation).sentence


def test_restarts_that_differ_are_unseeded(runs: Callable[[str], Log]) -> None:
    judgement = judged(runs, "unseeded", "unseeded-again")
    assert judgement.verdict is Verdict.UNSEEDED
    assert judgement.causes == ()
    assert "step 5" in judgement.sentence
    assert "torch: seeded with" in judgement.sentence


def test_a_training_that_does_not_repeat_itself_is_called_that(
    runs: Callable[[str], Log],
) -> None:
    judgement = judge([runs("u"), runs("noise")], [runs("torch"), runs("torch")], AT + 1, LAST)
    assert judgement.verdict is Verdict.FRAMEWORK
    assert judgement.causes == ()  # nothing is attributed, though the restart forgot its RNG too
    # Whatever the restart would show.
    same = judge([runs("u"), runs("noise")], [runs("none"), runs("none")], AT + 1, LAST)
    assert same.verdict is Verdict.FRAMEWORK


def test_a_repetition_that_was_not_run_is_said(runs: Callable[[str], Log]) -> None:
    judgement = judge([runs("u")], [runs("none")], AT + 1, LAST)
    assert judgement.verdict is Verdict.EXACT
    assert len(judgement.notes) == 2


def test_digests_agree_across_processes(runs: Callable[[str], Log]) -> None:
    first, second = runs("u").steps[0], runs("u2").steps[0]
    assert {n: r.events for n, r in first.items()} == {n: r.events for n, r in second.items()}
