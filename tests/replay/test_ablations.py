"""Each component that a restart forgets is named: a real training, one left out at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.replay.compare.verdict import Judgement, Verdict, judge, look
from ftckpt.replay.processes import Settings, values_file
from ftckpt.replay.record.log import Log, read_log, value_of
from ftckpt.replay.record.tensors import tensor_digest
from tests.replay.trainings import run_lists, training

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
    "torn": ("checkpoint", "optimizer"),
    "late": ("scheduler", "scheduler"),
    "ema": ("ema", "ema"),
}


# An item of each event that holds tensors.
LOOKS = {
    "params": "0.weight", "buffers": "1.running_mean", "optimizer": "0.weight.exp_avg",
    "ema": "0.module.0.weight", "batch": "0", "input": "0", "grad": "4.bias",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(root: Path) -> Callable[[str], Log]:
    """Run the training once for each ablation, all from one checkpoint; returns their logs."""

    def run(name: str, steps: int, drop: str = "", save_at: int = 0, at: int = 0) -> dict[str, Any]:
        settings = Settings(log=str(root / name), at=at)
        made = "made" if at else name
        place = root / (f"{drop}-state" if drop in ("stale", "torn") else f"{made}-state")
        return training(settings, place, steps, save_at=save_at, drop=drop)

    run_lists(
        root,
        [run("made", AT, save_at=AT), run("stale-made", AT, "stale", save_at=AT),
         run("torn-made", AT, "torn", save_at=AT)],
        [run("u", LAST), run("u2", LAST), run("noise", LAST, "noise")],
    )  # fmt: skip
    names = [*ABLATIONS, "none", "none-again", "unseeded", "unseeded-again"]
    restarts = [
        run(name, LAST, name.removesuffix("-again").replace("none", ""), at=AT) for name in names
    ]
    for name, event, drop in (
        *((f"look-{event}", event, "") for event in LOOKS),
        ("look-nudge", "params", "nudge"),
    ):
        settings = Settings(
            log=str(root / name), at=AT,
            look_step=AT + 1, look_event=event, look_items=LOOKS[event],
        )  # fmt: skip
        restarts.append(training(settings, root / "made-state", AT + 1, drop=drop))
    run_lists(root, restarts[::2], restarts[1::2])
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
        ("torn", "torn: optimizer state of step 3, model weights of step 4"),
        ("late", "learning-rate schedule (of another step: as it was after step 3)"),
        ("optimizer", "optimizer state not restored: as at the start of training"),
        ("cursor", "another batch"),
        ("scaler", "loss equal and never differs"),
        ("buffers", "loss equal and never differs"),
        ("torch", "torch RNG not restored: "),
    ],
)
def test_the_sentence_says_how(runs: Callable[[str], Log], ablation: str, words: str) -> None:
    assert words in judged(runs, ablation).sentence


def test_an_element_that_differs_is_found(runs: Callable[[str], Log], root: Path) -> None:
    judgement = judge([runs("u")], [runs("look-nudge")], AT + 1, AT + 1)
    assert [(c.component, c.event, c.step) for c in judgement.causes] == [
        ("weights", "params", AT + 1)
    ]
    logs = root / "look-params", root / "look-nudge"
    [found] = look(*logs, AT + 1, 0, "params", ("0.weight",))
    assert (found.shape, found.index, found.ulps, found.changed) == ((16, 8), (3, 5), 1, 1)
    state = torch.load(root / "made-state" / "state-0.pt", weights_only=False)
    assert value_of(found.reference) == state["model"]["0.weight"][3, 5]


@pytest.mark.parametrize("event", LOOKS)
def test_values_are_kept_of_what_was_digested(
    runs: Callable[[str], Log], root: Path, event: str
) -> None:
    digest = runs(f"look-{event}").steps[0][AT + 1].events[event][LOOKS[event]]
    assert digest == runs("u").steps[0][AT + 1].events[event][LOOKS[event]]
    head, _, data = values_file(root / f"look-{event}", 0, 0).read_bytes().partition(b"\n")
    told = json.loads(head)
    kept = torch.frombuffer(bytearray(data), dtype=getattr(torch, told["dtype"]))
    assert tensor_digest(kept.reshape(told["shape"])) == digest


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
