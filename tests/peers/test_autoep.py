"""DeepSpeed loads the experts of AutoEP that were written for it, and trains on.

`FTCKPT_PEER_DEEPSPEED` names the Python of an environment that has it; see `test_deepspeed.py`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.formats.deepspeed.sets import tensors_of
from tests.peers.test_deepspeed import ENVIRONMENT, PYTHON, ftckpt

JOB = Path(__file__).with_name("autoep_job.py")
SAVED, LAST = 2, 5
# Other ranks add the same numbers in another order.
CLOSE = 1e-4

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="FTCKPT_PEER_DEEPSPEED names no Python with DeepSpeed"),
]


class Answer(NamedTuple):
    """What a job says: losses of each rank, its memory after loading or at saving, and at last."""

    losses: list[list[str]]
    held: dict[str, Any]
    end: dict[str, Any]


_numbers = count()


def train(root: Path, stage: int, ep: int, world: int = 4, **given: Any) -> Answer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root.mkdir(exist_ok=True)
    out = root / f"answer{next(_numbers)}.json"
    spec = {"world": world, "ep": ep, "stage": stage, "load": None, "universal": False,
            "steps": [SAVED, LAST], "save": None, "to": str(root / "run"), "out": str(out),
            "port": port} | given  # fmt: skip
    environment = os.environ | ENVIRONMENT
    command = [PYTHON, str(JOB), json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    held, end = (tensors_of(Path(f"{out}.{name}.safetensors")) for name in ("held", "end"))
    return Answer(json.loads(out.read_text()), held, end)


class Whole(NamedTuple):
    """A job of two ranks that share experts, which nothing interrupted; its checkpoint."""

    stage: int
    answer: Answer
    checkpoint: Path


@pytest.fixture(scope="module", params=[1, 2, 3])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("autoep")
    answer = train(root, request.param, 2, steps=[0, LAST], save=SAVED)
    assert any(key.startswith("exp_avg_sq:") for key in answer.held)
    return Whole(request.param, answer, root / "run" / f"global_step{SAVED}")


def assert_near(answer: Answer, whole: Whole, last: int = LAST) -> None:
    steps = last - SAVED
    losses = [float.fromhex(loss) for rank in answer.losses for loss in rank[:steps]]
    before = [float.fromhex(loss) for rank in whole.answer.losses for loss in rank[SAVED:last]]
    assert losses == pytest.approx(before, abs=CLOSE)


def of_optimizer(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if ":" in key}


@pytest.mark.parametrize("ep", [1, 4])
def test_other_ranks_share_the_experts_and_give_them_back(
    ep: int, whole: Whole, tmp_path: Path
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    ftckpt("reshard", str(whole.checkpoint), str(there), "--ep", str(ep))
    answer = train(tmp_path, whole.stage, ep, load=str(there))
    assert answer.held == whole.answer.held
    assert_near(answer, whole)
    ftckpt("reshard", str(there), str(back), "--ep", "2")
    answer = train(tmp_path, whole.stage, 2, load=str(back))
    assert answer.held == whole.answer.held
    assert answer.losses == [rank[SAVED:] for rank in whole.answer.losses]
    assert answer.end == whole.answer.end


def test_fewer_ranks_of_another_stage_hold_every_bit(whole: Whole, tmp_path: Path) -> None:
    stage, there = whole.stage % 3 + 1, tmp_path / "there"
    ftckpt("reshard", str(whole.checkpoint), str(there), "--dp", "2", "--zero-stage", str(stage))
    answer = train(tmp_path, stage, 2, 2, load=str(there))
    assert of_optimizer(answer.held) == of_optimizer(whole.answer.held)


def test_a_universal_checkpoint_loads_on_any_ranks(whole: Whole, tmp_path: Path) -> None:
    there = tmp_path / "there"
    ftckpt("convert", str(whole.checkpoint), str(there), "--to", "deepspeed-universal")
    answer = train(tmp_path, whole.stage, 4, load=str(there), universal=True)
    assert of_optimizer(answer.held) == of_optimizer(whole.answer.held)
    # A job of stage 3 has one counter of steps for all sub-groups, which each of them advances.
    assert_near(answer, whole, SAVED + 1 if whole.stage == 3 else LAST)
