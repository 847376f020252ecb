"""Two ranks on gloo: each has its log and random streams, and what one forgets is that one's."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.replay.compare.logs import compare
from ftckpt.replay.compare.verdict import Verdict, judge
from ftckpt.replay.processes import Settings
from ftckpt.replay.record.log import Log, read_log
from ftckpt.replay.run.one_run import End, run
from tests.replay.trainings import HERE, run_lists, training

AT, LAST = 3, 6


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Log]:
    """Run on two ranks: without interruption, restarted, and with a rank that forgets."""
    root: Path = tmp_path_factory.mktemp("ranks")
    lists: list[list[dict[str, Any]]] = [[], []]
    for name, steps, save_at, at, drops in (
        ("made", AT, AT, 0, ("", "")),
        ("u", LAST, 0, 0, ("", "")),
        ("exact", LAST, 0, AT, ("", "")),
        ("forgets", LAST, 0, AT, ("", "torch")),
    ):
        port = free_port()
        for rank, drop in enumerate(drops):
            settings = Settings(log=str(root / name), at=at)
            place = root / ("made-state" if at or save_at else "u-state")
            lists[rank].append(
                training(settings, place, steps, save_at=save_at, drop=drop, RANK=str(rank),
                         WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            )  # fmt: skip
    run_lists(root, *lists)
    return lambda name: read_log(root / name, name)


def test_two_ranks_restart_exactly(runs: Callable[[str], Log]) -> None:
    judgement = judge([runs("u")], [runs("exact")], AT + 1, LAST)
    assert judgement.verdict is Verdict.EXACT, judgement.sentence
    assert judgement.comparisons[0].ranks == (0, 1)
    assert "2 ranks" in judgement.sentence
    # They are two trainings, not one logged twice.
    first, second = (runs("u").steps[rank][AT].events for rank in (0, 1))
    assert first["params"] == second["params"]
    assert first["rng_start"] != second["rng_start"]
    assert first["batch"] != second["batch"]


def test_gradients_are_recorded_before_and_after_their_reduction(
    runs: Callable[[str], Log],
) -> None:
    for step in range(1, LAST + 1):
        first, second = (runs("u").steps[rank][step].events for rank in (0, 1))
        assert first["grad_local"].keys() == first["grad"].keys()
        assert all(
            first["grad_local"][name] != second["grad_local"][name] for name in first["grad"]
        )
        assert first["grad"] == second["grad"]


def test_the_rank_that_forgets_is_named(runs: Callable[[str], Log]) -> None:
    judgement = judge([runs("u")], [runs("forgets")], AT + 1, LAST)
    assert [(c.component, c.step, c.ranks) for c in judgement.causes] == [
        ("rng-torch", AT + 1, (1,))
    ]
    assert "on rank 1" in judgement.sentence


def test_what_torchrun_starts_is_recorded_and_ended(
    runs: Callable[[str], Log], tmp_path: Path
) -> None:
    outcome = run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", free_port(), str(HERE / "train.py"), "--save-at", "100000"],
        Settings(log=str(tmp_path / "log"), last=2), cwd=tmp_path, output=tmp_path / "output.txt",
        timeout=120,
    )  # fmt: skip
    assert outcome.end is End.RECORDED, outcome
    log = read_log(tmp_path / "log")
    assert (log.ranks, log.world_size, log.finished()) == ((0, 1), 2, (1, 2))
    assert compare(runs("u"), log, 1, 2).equal


def test_a_rank_without_a_log_is_never_a_pass(runs: Callable[[str], Log]) -> None:
    whole = runs("exact")
    half = Log("half", {0: whole.steps[0]}, whole.world_size)
    judgement = judge([runs("u")], [half], AT + 1, LAST)
    assert judgement.verdict is Verdict.NOT_COMPARED
    assert "half has no log of rank 1" in judgement.problems
