"""Real resumes, right and broken, in the frameworks that people train with.

A right one is exact, five times of five; fifteen broken ones are each named. What is short takes a
right and a broken one of FSDP2, each run once (`--campaign full`: all, of each, run twice). Hugging
Face's Trainer and Lightning run where they are installed, or where FTCKPT_FRAMEWORKS_PYTHON names
an interpreter that has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ftckpt.replay.compare.verdict import Verdict
from tests import campaign
from tests.replay.trials import Trials

HERE = Path(__file__).parent / "frameworks"
AT = 6
# What a restart leaves out, or what its checkpoint was saved without: the component to be named.
BREAKS = {
    "cursor": "data", "model": "weights", "buffers": "buffers", "optimizer": "moments",
    "scheduler": "scheduler", "late": "scheduler", "python": "rng-python", "numpy": "rng-numpy",
    "torch": "rng-torch", "draw": "rng-draw", "ema": "ema", "stale2": "checkpoint",
    "stale5": "checkpoint", "torn": "checkpoint", "step": "step",
}  # fmt: skip
SAVED = ("stale2", "stale5", "torn")
TORCH = {
    "ddp": ("dcp_train.py", "--wrap", "ddp"),
    "fsdp2": ("dcp_train.py", "--wrap", "fsdp2"),
    "torchrun": ("torchrun_train.py",),
}
PEERS = {"trainer": ("trainer_train.py", "transformers"),
         "lightning": ("lightning_train.py", "lightning")}  # fmt: skip
# Taken before the tests' own environment is cleaned.
PYTHON = os.environ.get("FTCKPT_FRAMEWORKS_PYTHON", sys.executable)
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "127.0.0.1:0")  # fmt: skip
# It and each rank import torch; what is short has one process do it.
LAUNCHER = _TORCHRUN if campaign.examples(0, 1) else (str(HERE / "launched.py"),)


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[2]))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trials]:
    root = tmp_path_factory.mktemp("frameworks")
    made, runs = {}, campaign.examples(1, 2)
    for name, (program, *words) in TORCH.items():
        command = (sys.executable, *LAUNCHER, str(HERE / program), *words)
        made[name] = Trials(root / name, command, AT, saves=SAVED, runs=runs)
    for name, (program, _) in PEERS.items():
        made[name] = Trials(root / name, (PYTHON, str(HERE / program)), AT, saves=SAVED, runs=runs)
    for name in made:
        (root / name).mkdir()
    return made


@cache
def installed(module: str) -> bool:
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", found], check=False, timeout=120).returncode == 0


def require(framework: str) -> None:
    if framework in PEERS and not installed(PEERS[framework][1]):
        pytest.skip(f"{PEERS[framework][1]} is not installed")


ALL = [*TORCH, *(pytest.param(name, marks=pytest.mark.peer) for name in PEERS)]


EACH = ALL if campaign.examples(0, 1) else ["fsdp2"]


@pytest.mark.parametrize("number", range(campaign.examples(1, 5)))
@pytest.mark.parametrize("framework", EACH)
def test_a_right_resume_is_exact(trials: dict[str, Trials], framework: str, number: int) -> None:
    require(framework)
    tried = trials[framework].tried(number=number)
    assert tried.judgement.verdict is Verdict.EXACT, tried.judgement.sentence
    assert tried.at == AT
    compared = {event for _, event, _ in tried.judgement.comparisons[-1].grid}
    assert {"params", "buffers", "optimizer", "scheduler", "rng_start", "batch", "loss",
            "grad"} <= compared  # fmt: skip


@pytest.mark.parametrize("drop", list(BREAKS)[: campaign.examples(1, len(BREAKS))])
@pytest.mark.parametrize("framework", EACH)
def test_a_broken_resume_is_named(trials: dict[str, Trials], framework: str, drop: str) -> None:
    require(framework)
    judgement = trials[framework].tried(drop).judgement
    assert judgement.verdict is Verdict.STATE, judgement.sentence
    named = [cause.component for cause in judgement.causes]
    assert BREAKS[drop] in named, judgement.sentence
    # A Trainer that counts too far has skipped as many batches: two things are wrong.
    assert named[0] == BREAKS[drop] or (framework, drop) == ("trainer", "step"), judgement.sentence
