"""Directories of the Hugging Face Trainer and of accelerate whose state DeepSpeed keeps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftckpt.checkpoint import CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.findings import Severity, Strictness
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made, Truth
from tests.formats.trainer_dirs.test_reader import FORMAT, truth_of
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "trainer_dirs"
NAMES = ("trainer_zero2", "trainer_zero3")
# The Python that has transformers, accelerate and DeepSpeed, if it is not this one.
PEER = os.environ.get("FTCKPT_PEER_TRAINER", "")


def checked(folder: Path, level: Level = Level.VALUES) -> VerifyReport:
    return verify(open_checkpoint(folder), VerifyOptions(level=level))


def kinds(report: VerifyReport) -> set[str]:
    return {found.kind for found in report.findings if found.code is not ExitCode.OK}


def require_truth(path: Path, name: str) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 2
    expected = load_file(DATA / f"{name}.safetensors")
    for key, tensor in expected.items():
        assert read_tensor(checkpoint, key) == truth_of(tensor).data, key
    more = checkpoint.tensors.keys() - expected.keys()
    assert all(k.startswith("extra:rng") or k.endswith(".step") for k in more), more


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    to = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(DATA / name, to)
    (to / "zero_to_fp32.py").write_text("# DeepSpeed's script\n")
    return to


def test_it_is_one_checkpoint(folder: Path, name: str) -> None:
    require_truth(folder, name)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "bundle"
    assert checkpoint.commit.state is CommitState.COMMITTED
    assert (checkpoint.topology.dp, checkpoint.topology.world_size) == (2, 2)
    assert set(checkpoint.members()) == set(checkpoint.source.entries)
    assert checkpoint.objects["rng_state_1"].rank == 1
    report = checked(folder)
    assert report.code is ExitCode.OK, report.findings
    assert not [f for f in report.findings if f.severity != "note"]


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_converted_one_holds_the_same(folder: Path, name: str, to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = ftckpt_json("convert", str(folder), str(out), "--to", to)
    assert answer["result"]["code"] == 0, answer["result"]
    require_truth(out, name)
    assert ftckpt_json("diff", str(folder), str(out))["result"]["code"] == 0


def test_a_copy_and_a_seal_take_all_of_it(folder: Path, tmp_path: Path) -> None:
    assert ftckpt_json("copy", str(folder), str(tmp_path / "copy"))["result"]["code"] == 0
    assert {p.name for p in folder.iterdir()} <= {p.name for p in (tmp_path / "copy").iterdir()}
    assert ftckpt_json("seal", str(folder))["result"]["code"] == 0
    (folder / "zero_to_fp32.py").write_text("# another script\n")
    assert checked(folder, Level.CONTENT).code is ExitCode.CORRUPT


def test_the_root_finds_it(folder: Path) -> None:
    root = str(folder.parent)
    assert ftckpt_json("latest", root)["result"]["code"] == 0
    assert ftckpt_json("status", root)["result"]["code"] == 0
    assert ftckpt_json("gc", root, "--keep-last", "1")["result"]["code"] == 0


def test_reshard_names_what_has_ranks(folder: Path, tmp_path: Path) -> None:
    answer = ftckpt_json("reshard", str(folder), str(tmp_path / "one"), "--dp", "1")
    assert answer["result"]["code"] == ExitCode.UNSUPPORTED
    assert answer["result"]["hint"].endswith(f"{folder}/global_step2")
    tag = str(folder / "global_step2")
    assert ftckpt_json("reshard", tag, str(tmp_path / "one"), "--dp", "1")["result"]["code"] == 0


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    file = next((folder / "global_step2").glob("*optim_states.pt"))
    flip(file, len(file.read_bytes()) // 2)
    assert checked(folder, Level.CONTENT).code is ExitCode.CORRUPT


def test_a_flipped_bit_of_the_second_copy_is_found(folder: Path, name: str) -> None:
    # A safetensors file has no checksum: what proves it is the same weight in DeepSpeed's file.
    file = folder / "model.safetensors"
    flip(file, len(file.read_bytes()) - 40)
    report = checked(folder)
    if name == "trainer_zero2":
        assert report.code is ExitCode.CORRUPT
        assert kinds(report) == {"copy-differs"}
        return
    strict = VerifyOptions(level=Level.VALUES, strict=frozenset({Strictness.MASTERS}))
    assert verify(open_checkpoint(folder), strict).code is ExitCode.CORRUPT
    assert any(f.kind == "master-differs" for f in report.findings)


def test_a_trained_weight_that_the_second_copy_lacks_is_found(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").unlink()  # says it, too, where no other file has the weight
    report = checked(folder, Level.STRUCTURE)
    assert [(f.kind, f.file) for f in report.findings if f.code] == [
        ("missing-tensor", "model.safetensors")
    ]


@pytest.mark.parametrize(
    "lost", ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "rng_state_1.pth"]
)
def test_a_lost_rank_is_found(folder: Path, lost: str) -> None:
    next(folder.rglob(lost)).unlink()
    report = checked(folder, Level.STRUCTURE)
    assert report.code is ExitCode.CORRUPT
    assert "missing-rank" in kinds(report)


def test_the_files_of_another_save_are_found(folder: Path) -> None:
    (folder / "global_step2").rename(folder / "global_step4")
    (folder / "latest").write_text("global_step4")
    report = checked(folder, Level.STRUCTURE)
    assert report.code is ExitCode.CORRUPT
    assert "mixed-steps" in kinds(report)


def test_an_engine_that_fell_behind_the_trainer_is_no_damage(folder: Path) -> None:
    # Real jobs have `checkpoint-1200/global_step1192`: issue 7405 of DeepSpeed.
    root = folder.parent
    places = [Path(shutil.copytree(folder, root / f"checkpoint-{step}")) for step in (3, 4)]
    for number, place in enumerate(places):
        state = json.loads((place / "trainer_state.json").read_bytes())
        state["global_step"] = 3 + number
        (place / "trainer_state.json").write_text(json.dumps(state))
    report = checked(places[1])
    assert report.code is ExitCode.OK
    told = [f for f in report.findings if f.kind in ("clocks-differ", "step-disagrees")]
    assert [(f.kind, f.severity) for f in told] == [("clocks-differ", Severity.WARNING)]
    assert ftckpt_json("latest", str(root))["path"] == str(places[1])
    strict = VerifyOptions(level=Level.STRUCTURE, strict=frozenset({Strictness.STEPS}))
    assert verify(open_checkpoint(places[1]), strict).code is ExitCode.CORRUPT


def test_weights_of_another_step_are_found(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert {f.kind for f in checked(folder).findings} & {"copy-differs", "master-differs"}


def test_weights_of_another_shape_are_found(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "shape-mismatch" in kinds(checked(folder, Level.STRUCTURE))


def test_weights_under_other_names_are_kept_apart(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["renamed.weight"] = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert "renamed.weight" not in checkpoint.tensors
    assert "extra:huggingface:renamed.weight" in checkpoint.tensors
    assert any("kept apart" in note.message for note in checkpoint.notes)


def test_an_adapter_is_the_weights_of_the_tag(tmp_path: Path) -> None:
    # PEFT leaves the name of the adapter out of the file that the Trainer saves.
    shutil.copytree(DATA / "trainer_zero2", tmp_path / "checkpoint-2")
    folder = tmp_path / "checkpoint-2"
    (folder / "model.safetensors").unlink()
    model = next((folder / "global_step2").glob("mp_rank*"))
    state: dict[str, Any] = torch.load(model, weights_only=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    adapter = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    renamed = {adapter if k == name else k: v for k, v in state["module"].items()}
    state["module"] = renamed
    state["param_shapes"] = [
        {adapter if k == name else k: v for k, v in group.items()}
        for group in state["param_shapes"]
    ]
    torch.save(state, model)
    short = adapter.replace(".default", "")
    save_file({short: renamed[adapter].clone()}, folder / "adapter_model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert [p.replica for p in checkpoint.tensors[adapter].pieces] == [0, 1]
    assert short not in checkpoint.tensors


@pytest.mark.parametrize(
    ("text", "kind"),
    [("global_step9", "pointer-dangling"), (None, "missing-file"), ("", "bad-index")],
)
def test_a_tag_that_cannot_be_found_is_damage(folder: Path, text: str | None, kind: str) -> None:
    # transformers names no tag when it loads: without `latest` DeepSpeed loads nothing.
    (folder / "latest").unlink()
    if text is not None:
        (folder / "latest").write_text(text)
    result = ftckpt_json("verify", str(folder), "--level", "structure")["result"]
    assert result["code"] == ExitCode.CORRUPT
    assert kind in json.dumps(ftckpt_json("verify", str(folder), "--level", "structure"))


def test_several_tags_are_told_apart_by_the_pointer(folder: Path) -> None:
    shutil.copytree(folder / "global_step2", folder / "global_step1")
    assert checked(folder, Level.STRUCTURE).code is ExitCode.OK
    (folder / "latest").unlink()
    assert ftckpt_json("verify", str(folder))["result"]["code"] == ExitCode.UNSUPPORTED


def test_a_save_that_did_not_finish(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()
    assert ftckpt_json("verify", str(folder))["result"]["code"] == ExitCode.INCOMPLETE
    for file in folder.glob("rng_state*"):
        file.unlink()
    # Weights, arguments and a tag: the Trainer has not come to the rest.
    assert ftckpt_json("verify", str(folder))["result"]["code"] == ExitCode.INCOMPLETE


class TestBundleWithDeepSpeed(FormatTests):
    format = FORMAT
    construct = (
        "from ftckpt.formats.trainer_dirs import Bundle\n"
        "from ftckpt.formats.dcp import Dcp\n"
        "from ftckpt.formats.safetensors import Safetensors\n"
        "from ftckpt.formats.torchsave import TorchSave\n"
        "form = Bundle((Dcp(), Safetensors(), TorchSave()))"
    )
    truncated = frozenset({"bad-zip", "truncated-file"})
    empty = frozenset({"bad-zip", "truncated-file"})

    missing = frozenset({"missing-rank"})

    def victims(self, path: Path) -> list[str]:
        """DeepSpeed's files alone: nothing says that weights were saved a second time."""
        return [file for file in super().victims(path) if file.startswith("global_step")]

    def make(self, root: Path) -> list[Made]:
        return [self._made(root, name) for name in NAMES]

    def _made(self, root: Path, name: str) -> Made:
        folder = root / name / "checkpoint-2"
        shutil.copytree(DATA / name, folder)
        held = load_file(DATA / f"{name}.safetensors")
        truth = {key: truth_of(tensor) for key, tensor in held.items()}
        for key in held:
            if key.startswith("master:"):
                step = Truth("float32", (), truth_of(torch.tensor(2.0)).data)
                truth[f"optimizer:{key.removeprefix('master:')}.step"] = step
        for rank in range(2):
            state = torch.load(folder / f"rng_state_{rank}.pth", weights_only=False)
            truth[f"extra:rng_state_{rank}:cpu"] = truth_of(state["cpu"])
        return Made(folder, truth)


# What the Trainer's own load says.


def _train(out: Path, stage: int, steps: int, *resume: str) -> dict[str, float]:
    script = str(DATA / "deepspeed_job.py")
    launch = [PEER or sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["--nproc_per_node", "2", script, str(out), str(stage), str(steps), *resume]
    subprocess.run([*launch, *arguments], check=True, capture_output=True, timeout=400,
                   env=environment)  # fmt: skip
    losses: dict[str, float] = json.loads((out / "losses.json").read_text())
    return losses


def _copied(folder: Path, to: Path) -> None:
    assert ftckpt_json("copy", str(folder), str(to))["result"]["code"] == 0


def _other_stage(folder: Path, to: Path) -> None:
    """A copy whose tag is another stage's."""
    _copied(folder, to)
    shutil.rmtree(to / "global_step2")
    (to / "ftckpt.manifest.json").unlink()
    tag = str(folder / "global_step2")
    answer = ftckpt_json("reshard", tag, str(to / "global_step2"), "--zero-stage", "3")
    assert answer["result"]["code"] == 0, answer["result"]


@pytest.mark.peer
@pytest.mark.parametrize(
    ("first", "then", "make"), [(2, 2, _copied), (3, 3, _copied), (2, 3, _other_stage)]
)
def test_the_trainer_goes_on_with_the_same_losses(
    first: int, then: int, make: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    if not PEER and not all(find_spec(n) for n in ("transformers", "deepspeed", "accelerate")):
        pytest.skip("transformers, accelerate or DeepSpeed is not installed")
    whole = _train(tmp_path / "whole", first, 4)
    folder = tmp_path / "whole" / "checkpoint-2"
    checkpoint = open_checkpoint(folder)
    for key, tensor in load_file(tmp_path / "whole" / "truth-2.safetensors").items():
        assert read_tensor(checkpoint, key) == truth_of(tensor).data, key
    made = tmp_path / "made" / "checkpoint-2"
    made.parent.mkdir()
    make(folder, made)
    resumed = _train(tmp_path / "again", then, 4, str(made))
    assert {s: resumed[s] for s in ("3", "4")} == {s: whole[s] for s in ("3", "4")}
    ends = [load_file(tmp_path / run / "truth-4.safetensors") for run in ("whole", "again")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
