"""Layouts of the sixth round: whose count a number is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ftckpt
from ftckpt.checkpoint import CommitState
from ftckpt.discovery.listing import listing_of_directory
from ftckpt.errors import ExitCode
from ftckpt.formats.safetensors import Safetensors
from ftckpt.inspection.training_state import STEP
from ftckpt.storage import open_store


@pytest.mark.parametrize(
    "name",
    [
        "random_states_0.step",  # accelerate's calls in one process: 0 after sd-scripts' saves
        "ema.num_updates",  # NequIP: updates of the average
        "rank_0.random_states_0.step",
    ],
)
def test_the_count_of_an_average_or_a_generator_is_not_the_trainers(name: str) -> None:
    assert STEP.known is not None
    assert STEP.hint is not None
    assert not STEP.known.search(name)
    assert STEP.hint.search(name)  # it may stand in for it: cannot tell


@pytest.mark.parametrize(
    "name", ["num_updates", "step", "trainer_state.json:global_step", "state.iteration"]
)
def test_a_trainers_own_count_still_is_found(name: str) -> None:
    assert STEP.known is not None
    assert STEP.known.search(name)


def test_an_export_is_said_to_be_unread(tmp_path: Path) -> None:
    """trlx writes `hf_model/` beside accelerate's state: a verdict on the state is not about it."""
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "hf_model").mkdir()
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "hf_model" / "pytorch_model.bin")
    (tmp_path / "hf_model" / "config.json").write_text("{}")
    report = ftckpt.verify(str(tmp_path))
    assert report.code is ExitCode.OK
    assert "1 tensor in 1 file:" in report.message
    (said,) = [one for one in report.findings if one.kind == "stray-file"]
    assert said.file == "hf_model"
    assert "an export (2 files), and was not read" in said.message


def test_a_base_that_was_copied_into_a_run_makes_no_checkpoint_of_it(tmp_path: Path) -> None:
    """F5-TTS copies what it starts from beside its saves."""
    run = tmp_path / "run"
    run.mkdir()
    for step in (5000, 10000):
        state = {"model_state_dict": {"w": torch.full((4, 4), step)}, "update": step}
        torch.save(state, run / f"model_{step}.pt")
    save_file({"w": torch.ones(4, 4)}, run / "pretrained_model_1250000.safetensors")
    found = ftckpt.latest(str(run))
    assert found.path == str(run / "model_10000.pt")
    assert {one.path.rpartition("/")[2] for one in ftckpt.ls(str(run))} >= {
        "model_5000.pt", "model_10000.pt",
    }  # fmt: skip


@pytest.mark.parametrize("index", [True, False])
def test_shards_stay_a_checkpoint_beside_numbered_files(tmp_path: Path, index: bool) -> None:
    names = [f"weights-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    for n, name in enumerate(names):
        save_file({f"w{n}": torch.ones(2)}, tmp_path / name)
    if index:
        told = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(names)}}
        (tmp_path / "weights.safetensors.index.json").write_text(json.dumps(told))
    for n in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"probe_{n}.pt")
    found = Safetensors().recognise(listing_of_directory(open_store(str(tmp_path)), ""))
    assert found is not None
    assert found.commit is (CommitState.COMMITTED if index else CommitState.UNCOMMITTED)
