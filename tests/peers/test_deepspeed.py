"""DeepSpeed loads what was written for it, holds every bit of it, and trains on.

`FTCKPT_PEER_DEEPSPEED` names the Python of an environment that has it; `deepspeed.sh` makes one.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ftckpt.checkpoint.read_tensor import read_tensor
from tests.formats.deepspeed.sets import opened, tensors_of

PYTHON = os.environ.get("FTCKPT_PEER_DEEPSPEED", "")
JOB = Path(__file__).with_name("deepspeed_job.py")
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
SAVED, LAST = 3, 6
TRAINED = ("embed.weight", "up.weight", "up.bias", "down.weight", "gain")
# DeepSpeed's script, without what only its command line needs.
MERGE = """
import sys
sys.path.insert(0, sys.argv[1])
from zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
state = get_fp32_state_dict_from_zero_checkpoint(sys.argv[2], sys.argv[3])
save_file({name: value.clone() for name, value in state.items()}, sys.argv[4])
"""
UNIVERSAL = """
import sys
from types import SimpleNamespace
from deepspeed.checkpoint import ds_to_universal
ds_to_universal.main(SimpleNamespace(
    input_folder=sys.argv[1], output_folder=sys.argv[2], num_extract_workers=1,
    num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
"""

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="FTCKPT_PEER_DEEPSPEED names no Python with DeepSpeed"),
]


class Answer(NamedTuple):
    """What a job says.

    Attributes:
        losses: of each rank.
        step: at which it ended.
        note: the client's.
        held: its memory after loading or at saving.
        end: its memory in the end.
    """

    losses: list[list[str]]
    step: int
    note: str | None
    held: dict[str, Any]
    end: dict[str, Any]


def run(arguments: list[str]) -> None:
    done = subprocess.run(
        [PYTHON, *arguments], env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


_numbers = count()


def train(root: Path, stage: int, world: int, *, bf16: bool = True, **given: Any) -> Answer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root.mkdir(exist_ok=True)
    out = root / f"answer{next(_numbers)}.json"
    spec = {"world": world, "zero": {"stage": stage}, "bf16": bf16, "load": None,
            "universal": False, "stages": 0, "steps": [SAVED, LAST], "save": None,
            "to": str(root / "run"), "out": str(out), "port": port} | given  # fmt: skip
    run([str(JOB), json.dumps(spec)])
    held, end = (tensors_of(Path(f"{out}.{name}.safetensors")) for name in ("held", "end"))
    return Answer(**json.loads(out.read_text()), held=held, end=end)


def ftckpt(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ftckpt", *arguments], check=True, capture_output=True)


def of_optimizer(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if ":" in key}


class Whole(NamedTuple):
    """A job that nothing interrupted; the checkpoint that it made on the way."""

    stage: int
    bf16: bool
    answer: Answer
    checkpoint: Path


@pytest.fixture(
    scope="module", params=[(1, True), (2, True), (3, False), (3, True)],
    ids=["1-bf16", "2-bf16", "3-fp32", "3-bf16"],
)  # fmt: skip
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    stage, bf16 = request.param
    answer = train(root, stage, 4, bf16=bf16, steps=[0, LAST], save=SAVED)
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert answer.held.keys() >= {f"{kind}:{name}" for kind in kinds for name in TRAINED}
    assert all(any(answer.held[key].data) for key in of_optimizer(answer.held))
    return Whole(stage, bf16, answer, root / "run" / f"global_step{SAVED}")


def test_fewer_ranks_hold_every_bit_and_train_on(whole: Whole, tmp_path: Path) -> None:
    """And back on as many they go on as if nothing had happened."""
    two, four = tmp_path / "two", tmp_path / "four"
    ftckpt("reshard", str(whole.checkpoint), str(two), "--dp", "2")
    answer = train(tmp_path, whole.stage, 2, bf16=whole.bf16, load=str(two))
    assert answer.held == whole.answer.held
    assert (answer.step, answer.note) == (LAST, "ours")
    losses = [float.fromhex(loss) for rank in answer.losses for loss in rank]
    assert len(losses) == 2 * (LAST - SAVED)
    assert all(math.isfinite(loss) for loss in losses)
    ftckpt("reshard", str(two), str(four), "--dp", "4")
    answer = train(tmp_path, whole.stage, 4, bf16=whole.bf16, load=str(four))
    assert_goes_on(answer, whole)


def assert_goes_on(answer: Answer, whole: Whole) -> None:
    """What was loaded, every loss and what memory holds in the end are the uninterrupted job's."""
    assert answer.held == whole.answer.held
    assert answer.losses == [rank[SAVED:] for rank in whole.answer.losses]
    assert answer.end == whole.answer.end
    assert answer.end != answer.held


def merged(place: Path, script: Path, out: Path) -> dict[str, Any]:
    """Let DeepSpeed consolidate a checkpoint, by the script that it left in a folder."""
    run(["-c", MERGE, str(script), str(place.parent), place.name, str(out)])
    return tensors_of(out)


def test_its_own_consolidation_is_ours(whole: Whole, tmp_path: Path) -> None:
    """Of another number of ranks it is that of the source, the job's memory, and what we read."""
    place = tmp_path / "root" / "global_step3"
    place.parent.mkdir()
    ftckpt("reshard", str(whole.checkpoint), str(place), "--dp", "3")
    script = whole.checkpoint.parent
    theirs = merged(place, script, tmp_path / "merged.safetensors")
    assert theirs == merged(whole.checkpoint, script, tmp_path / "source.safetensors")
    memory = {k.removeprefix("master:"): v for k, v in whole.answer.held.items()}
    masters = {k: v for k, v in whole.answer.held.items() if k.startswith("master:")}
    assert masters.items() <= {f"master:{k}": v for k, v in theirs.items()}.items()
    assert theirs.keys() - memory.keys() <= {"head.weight"}  # which is tied
    ours = opened(place)
    names = {ours.tensors[key].name for key in ours.tensors if is_weight(key)}
    # Its script finds no frozen parameters of a job of stage 1.
    assert theirs.keys() == names - ({"frozen.weight"} if whole.stage == 1 else set())
    for name, value in theirs.items():
        key = f"master:{name}" if f"master:{name}" in ours.tensors else name
        assert (ours.tensors[key].dtype.name, ours.tensors[key].shape) == value[:2], name
        assert read_tensor(ours, key) == value.data, name


def is_weight(key: str) -> bool:
    return ":" not in key or key.startswith("master:")


def test_a_universal_checkpoint_loads_on_any_ranks(whole: Whole, tmp_path: Path) -> None:
    """And goes on as from what DeepSpeed's own converter makes.

    No job goes on bitwise from that: stage 3 gives every group the settings of the first and one
    counter of steps to all, and stages 1 and 2 fail on a rank that holds nothing but padding.
    """
    ours, theirs = tmp_path / "ours_universal", tmp_path / "theirs_universal"
    ftckpt("convert", str(whole.checkpoint), str(ours), "--to", "deepspeed-universal")
    run(["-c", UNIVERSAL, str(whole.checkpoint), str(theirs)])
    given: dict[str, Any] = {"bf16": whole.bf16, "universal": True}
    answer = train(tmp_path, whole.stage, 3, load=str(ours), **given)
    assert of_optimizer(answer.held) == of_optimizer(whole.answer.held)
    assert trained_weights(answer) == trained_weights(whole.answer)
    assert (answer.step, answer.note) == (LAST, "ours")
    assert answer == train(tmp_path, whole.stage, 3, load=str(theirs), **given)


def trained_weights(answer: Answer) -> dict[str, Any]:
    """Return the weights as the network computes with them; stage 3 holds them in no one place."""
    return {k: v for k, v in answer.held.items() if f"master:{k}" in answer.held}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_stage_holds_the_same(stage: int, whole: Whole, tmp_path: Path) -> None:
    if stage == whole.stage:
        pytest.skip("the same stage")
    place = tmp_path / "other"
    ftckpt("reshard", str(whole.checkpoint), str(place), "--dp", "2", "--zero-stage", str(stage))
    answer = train(tmp_path, stage, 2, bf16=whole.bf16, load=str(place))
    assert of_optimizer(answer.held) == of_optimizer(whole.answer.held)
    weights = whole.answer.held.keys() & answer.held.keys()
    assert {k: answer.held[k] for k in weights} == {k: whole.answer.held[k] for k in weights}
    assert answer.step == LAST


def test_a_plain_trainers_file_becomes_a_job(tmp_path: Path) -> None:
    """The same network, trained without DeepSpeed."""
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import make_deepspeed as kept\n"
        "torch.manual_seed(3); model = kept.Tiny(); optimizer = kept.optimizer_of(model, 'off')\n"
        "for step in range(2):\n"
        "    optimizer.zero_grad(); model(torch.tensor([1, step, 4])).backward()\n"
        "    optimizer.step()\n"
        "state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': 2}\n"
        "torch.save(state, sys.argv[2])\n"
    )
    file, place = tmp_path / "step2.pt", tmp_path / "universal"
    data = JOB.parents[1] / "data" / "deepspeed"
    subprocess.run([sys.executable, "-c", program, str(data), str(file)], check=True)
    ftckpt("convert", str(file), str(place), "--to", "deepspeed-universal")
    answer = train(tmp_path, 2, 2, bf16=False, load=str(place), universal=True, steps=[2, 4])
    assert answer.step == 4
    state = torch.load(file)
    names = [name for name in state["model"] if name in TRAINED]
    wanted = {f"master:{name}": state["model"][name] for name in names}
    for name, moments in zip(names, state["optimizer"]["state"].values(), strict=True):
        wanted |= {f"{kind}:{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
    assert answer.held.keys() >= wanted.keys()
    for key, value in wanted.items():
        assert answer.held[key].data == value.numpy().tobytes(), key


# --- by an example ------------------------------------------------------------------------------


def example(root: Path, stage: int, world: int, **given: Any) -> Path:
    """Let a job save before its first step."""
    train(root, stage, world, steps=[0, 1], save=0, to=str(root / "example"), **given)
    return root / "example" / "global_step0"


@pytest.mark.parametrize("form", ["torchsave", "dcp", "safetensors"])
def test_another_formats_state_becomes_a_job_by_its_example(
    form: str, whole: Whole, tmp_path: Path
) -> None:
    """On other partitions of another stage, and back on as many as if nothing had happened."""
    there, other = tmp_path / "there", whole.stage % 2 + 1
    ftckpt("convert", str(whole.checkpoint), str(there), "--to", form)
    two = tmp_path / "two"
    first = example(tmp_path / "two-of", other, 2, bf16=whole.bf16)
    ftckpt("convert", str(there), str(two), "--like", str(first))
    answer = train(tmp_path, other, 2, bf16=whole.bf16, load=str(two))
    assert of_optimizer(answer.held) == of_optimizer(whole.answer.held)
    assert (answer.step, answer.note) == (LAST, "ours")
    four = tmp_path / "four"
    first = example(tmp_path / "four-of", whole.stage, 4, bf16=whole.bf16)
    ftckpt("convert", str(there), str(four), "--to", "deepspeed", "--like", str(first))
    answer = train(tmp_path, whole.stage, 4, bf16=whole.bf16, load=str(four))
    assert_goes_on(answer, whole)


@pytest.mark.parametrize(("stages", "world"), [(1, 2), (4, 4), (3, 3)])
def test_a_pipeline_of_other_stages_holds_the_same_and_trains_on(
    stages: int, world: int, tmp_path: Path
) -> None:
    """Two stages of two partitions become others, and come back."""
    before = train(tmp_path, 1, 4, stages=2, steps=[0, LAST], save=SAVED)
    source = tmp_path / "run" / f"global_step{SAVED}"
    other, back = tmp_path / "other", tmp_path / "back"
    first = example(tmp_path / "other-of", 1, world, stages=stages)
    ftckpt("reshard", str(source), str(other), "--like", str(first))
    answer = train(tmp_path, 1, world, stages=stages, load=str(other))
    assert answer.held == before.held
    assert (answer.step, answer.note) == (LAST, "ours")
    if world // stages == 2:  # the same batches, so the same numbers
        losses = before.losses[0][SAVED:]
        assert all(rank == losses for rank in answer.losses)
    first = example(tmp_path / "back-of", 1, 4, stages=2)
    ftckpt("reshard", str(other), str(back), "--like", str(first))
    answer = train(tmp_path, 1, 4, stages=2, load=str(back))
    assert answer.held == before.held
    assert answer.losses == [rank[SAVED:] for rank in before.losses]
