"""Megatron-FSDP's own saves of jobs that were trained on a GPU (tests/data/megatron_fsdp/trained).

`torch-dense` counts steps beside each moment (torch's Adam), `fused-experts` in the groups (apex's
FusedAdam). Beside the first lies what the same job saved without Megatron-FSDP, in torch_dist.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.pickles.inert import Inert
from ftckpt.inspection.resume import resume_check
from tests.builders.checkpoints import open_checkpoint
from tests.formats.dcp.writing import save
from tests.formats.megatron.torch_dist.test_reader import unpacked
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "megatron_fsdp" / "trained"
SAMPLES = ("torch-dense", "fused-experts")
WEIGHTS = {"torch-dense": 15, "fused-experts": 29}
STATE = {"torch-dense": 3, "fused-experts": 2}  # of each weight; torch's Adam has a step too
RANDOM = "rng_state."
GENERATORS = ("rng-python", "rng-numpy", "rng-torch", "rng-cuda")


def a_save(name: str, to: Path, how: str = "fsdp") -> Path:
    return unpacked(DATA / f"{name}.tar.xz", to) / how / "iter_0000003"


def done(*words: object) -> list[str]:
    """Run a command that must succeed without a warning; return what its work notes."""
    answer = ftckpt_json(*map(str, words))
    assert answer["result"]["code"] == 0, answer
    findings = answer.get("findings", [])
    assert {one["severity"] for one in findings} <= {"note"}, findings
    return list(answer.get("notes", ()))


def said(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the objects say, without arguments and random streams."""
    names = [n for n in checkpoint.objects if n != "args" and not n.startswith(RANDOM)]
    return {name: repr(checkpoint.load_object(name)) for name in names}


def stored(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return name, shape and type of each tensor but those of random streams."""
    return {
        key: (info.stored_name, info.shape, info.dtype.name)
        for key, info in checkpoint.tensors.items()
        if not info.component.startswith("extra:")
    }


def same(first: Checkpoint, second: Checkpoint) -> None:
    """Hold that a job finds the same in both: names, types, bits, settings."""
    assert stored(first) == stored(second)
    assert said(first) == said(second)
    for key in stored(first):
        assert read_tensor(first, key) == read_tensor(second, key), key


@pytest.mark.parametrize("name", SAMPLES)
def test_it_is_read_and_sound(name: str, tmp_path: Path) -> None:
    path = a_save(name, tmp_path)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.step) == ("megatron-fsdp", 3)
    weights = [key for key in stored(checkpoint) if ":" not in key]
    assert len(weights) == WEIGHTS[name]
    assert len(stored(checkpoint)) == len(weights) * (1 + STATE[name])
    for level in ("structure", "content", "values"):
        done("verify", path, "--strict", "--level", level)
    answer = ftckpt_json("inspect", str(path))
    found = {item["key"]: item["presence"] for item in answer["resume"]}
    assert {key for key, one in found.items() if one == "present"} == {
        "weights", "moments", "scheduler", *GENERATORS, "data", "step",
    }  # fmt: skip
    # The weights are fp32, and the arguments say that the job computed in bfloat16.
    assert [i["key"] for i in answer["resume"] if not i["needed"]] == ["masters", "scaler"]


@pytest.mark.parametrize(("args", "needed"), [
    ({"fp16": False, "loss_scale": None}, False),
    ({"fp16": False, "loss_scale": 1024.0}, True),
    ({"fp16": True, "loss_scale": None}, True),
    ({}, True),
])  # fmt: skip
def test_a_loss_scale_is_due_by_the_arguments(
    args: dict[str, object], needed: bool, tmp_path: Path
) -> None:
    model = {"module.embedding.word_embeddings.weight": torch.ones(4, 2)}
    path = save({"model": model, "args": Namespace(**args)}, tmp_path / "ckpt")
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "megatron-fsdp"
    assert {one.key: one.needed for one in resume_check(checkpoint)}["scaler"] is needed


@pytest.mark.parametrize("name", SAMPLES)
def test_resharded_there_and_back(name: str, tmp_path: Path) -> None:
    path, two, one = a_save(name, tmp_path), tmp_path / "two", tmp_path / "one"
    notes = [*done("reshard", path, two, "--dp", 2), *done("reshard", two, one, "--dp", 1)]
    assert ["--no-load-rng" in note for note in notes] == [True, True]
    for made, ranks in ((two, 2), (one, 1)):
        same(open_checkpoint(path), open_checkpoint(made))
        assert len(list(made.glob("*.distcp"))) == ranks
    done("verify", two, "--strict", "--level", "values")
    found = {item["key"]: item["presence"] for item in ftckpt_json("inspect", str(two))["resume"]}
    absent = {key for key, presence in found.items() if presence == "absent"}
    assert absent == {"masters", *GENERATORS, "scaler"}


@pytest.mark.parametrize("name", SAMPLES)
def test_to_torch_dist_and_back(name: str, tmp_path: Path) -> None:
    path, dist, back = a_save(name, tmp_path), tmp_path / "dist", tmp_path / "back"
    done("convert", path, dist, "--to", "megatron-dist")
    done("convert", dist, back, "--to", "megatron-fsdp", "--dp", 3)
    same(open_checkpoint(path), open_checkpoint(back))


def test_a_torch_dist_save_of_the_job_becomes_one_of_megatron_fsdp(tmp_path: Path) -> None:
    """The job's own two saves after three steps: of one form, with values of their own."""
    path, base = a_save("torch-dense", tmp_path), a_save("torch-dense", tmp_path, "base")
    done("verify", base, "--level", "values")
    notes = done("convert", base, tmp_path / "out", "--to", "megatron-fsdp")
    assert any("the fp32 masters are the weights" in note for note in notes)
    own, made = open_checkpoint(path), open_checkpoint(tmp_path / "out")
    assert stored(own) == stored(made)
    assert said(own) == said(made)
    source = open_checkpoint(base)
    word = "embedding.word_embeddings.weight"
    assert read_tensor(made, word) == read_tensor(source, f"master:{word}")
    args = made.load_object("args")
    assert isinstance(args, Inert)
    assert (args.state["ckpt_format"], args.state["use_megatron_fsdp"]) == ("fsdp_dtensor", True)
