"""Small files that the steps beside one have and it lacks; and one folder that is not read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ftckpt
from ftckpt.discovery import small_files
from ftckpt.errors import ExitCode
from ftckpt.storage.state_files import tells_state
from tests.json_run import ftckpt_json

OK, INCOMPLETE, UNSUPPORTED = ExitCode.OK, ExitCode.INCOMPLETE, ExitCode.UNSUPPORTED


def put(path: Path, **fields: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))


def plain(step: Path, number: int) -> None:
    """Weights and documents alone: no format knows this trainer."""
    step.mkdir(parents=True)
    save_file({"layer.weight": torch.full((4, 4), float(number))}, str(step / "model.safetensors"))
    for name in ("config.json", "tokenizer.json", "meta.json", "eval_results.json", "README.md"):
        put(step / name, step=number)


def onetrainer(step: Path, number: int) -> None:
    """Nerogar/OneTrainer `GenericTrainer.__backup`."""
    (step / "lora").mkdir(parents=True)
    (step / "optimizer").mkdir()
    weight = torch.nn.Parameter(torch.full((4, 4), float(number)))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    for _ in range(number):
        optimizer.step()
    save_file({"layer.weight": weight.data}, str(step / "lora" / "lora.safetensors"))
    torch.save(optimizer.state_dict(), step / "optimizer" / "optimizer.pt")
    put(step / "meta.json", train_progress={"global_step": number})
    put(step / "onetrainer_config" / "args.json", training_method="LORA")


def run(tmp_path: Path, write: object = plain, numbers: Iterable[int] = (10, 20, 30)) -> list[Path]:
    assert callable(write)
    name = "step_{}" if write is plain else "2026-11-{0}_10-00-00-backup-{0}-0-0"
    steps = [tmp_path / "run" / name.format(number) for number in numbers]
    for step, number in zip(steps, numbers, strict=True):
        write(step, number)
    return steps


def judged(step: Path) -> tuple[int, set[str]]:
    answer = ftckpt_json("verify", str(step))
    kinds = {one["kind"] for one in answer["findings"]}
    return answer["result"]["code"], kinds & {"missing-part", "state-unknown"}


def chosen(step: Path) -> str:
    return str(ftckpt_json("latest", str(step.parent)).get("path") or "").rpartition("/")[2]


@pytest.mark.parametrize("write", [plain, onetrainer])
@pytest.mark.parametrize("number", [1, 2])
def test_state_that_the_steps_beside_have_is_lost(
    write: object, number: int, tmp_path: Path
) -> None:
    steps = run(tmp_path, write)
    assert {judged(step)[0] for step in steps} == {OK}
    (steps[number] / "meta.json").unlink()
    assert judged(steps[number]) == (INCOMPLETE, {"missing-part"})
    assert chosen(steps[0]) == (steps[1] if number == 2 else steps[2]).name
    plan = ftckpt.gc(str(steps[0].parent), keep_last=1, min_survivors=1).plan
    if number == 2 and write is plain:  # what is left to start from is the one before it
        assert {one.entry.name for one in plan.drop} == {steps[0].name}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_what_describes_the_model_is_a_warning(name: str, tmp_path: Path) -> None:
    steps = run(tmp_path)
    (steps[2] / name).unlink()
    assert judged(steps[2]) == (OK, {"state-unknown"})
    assert chosen(steps[0]) == steps[2].name


def test_a_lost_folder_of_settings_is_a_warning(tmp_path: Path) -> None:
    steps = run(tmp_path, onetrainer)
    (steps[2] / "onetrainer_config" / "args.json").unlink()
    (steps[2] / "onetrainer_config").rmdir()
    assert judged(steps[2]) == (OK, {"state-unknown"})


@pytest.mark.parametrize("name", ["eval_results.json", "README.md"])
def test_results_and_notes_are_not_missed(name: str, tmp_path: Path) -> None:
    steps = run(tmp_path)
    (steps[2] / name).unlink()
    assert judged(steps[2]) == (OK, set())


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_run_may_save_less_from_some_step_on(first: int, tmp_path: Path) -> None:
    steps = run(tmp_path, numbers=(10, 20, 30, 40, 50))
    for step in steps[first:]:
        (step / "meta.json").unlink()
    assert [judged(step) for step in steps[:4]] == [(OK, set())] * 4


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_run_may_save_more_from_some_step_on(first: int, tmp_path: Path) -> None:
    steps = run(tmp_path, numbers=(10, 20, 30, 40, 50))
    for step in steps[:first]:
        (step / "meta.json").unlink()
    assert {judged(step)[0] for step in steps} == {OK}


def test_a_part_that_the_next_step_lacks_too_proves_nothing(tmp_path: Path) -> None:
    steps = run(tmp_path, onetrainer, (10, 20, 30, 40))
    for step in steps[2:]:
        (step / "optimizer" / "optimizer.pt").unlink()
        (step / "optimizer").rmdir()
    assert judged(steps[2]) == (OK, {"state-unknown"})
    assert judged(steps[1]) == (OK, set())


@pytest.mark.parametrize("lost", ["lora", "optimizer"])
def test_a_part_of_a_save_that_only_its_name_tells_is_lost(lost: str, tmp_path: Path) -> None:
    """What is left tells no parts, and the name of the folder that it is a save."""
    steps = run(tmp_path, onetrainer)
    shutil.rmtree(steps[2] / lost)
    assert judged(steps[2]) == (INCOMPLETE, {"missing-part"})
    assert len(ftckpt.ls(str(steps[0].parent))) == 3


def test_one_step_alone_has_no_neighbours(tmp_path: Path) -> None:
    (step,) = run(tmp_path, numbers=(10,))
    (step / "meta.json").unlink()
    assert judged(step) == (OK, set())


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("meta.json", True),
        ("trainer_state.json", True),
        ("train_progress.yaml", True),
        ("training_args.json", False),
        ("config.json", False),
        ("chat_template.jinja", False),
        ("onetrainer_config/args.json", False),
        ("orchestrator/progress.pt", True),
        ("rng.pt", True),
        ("rng_state_#.pth", True),
        ("consolidated/consolidated.pth", False),
        ("model-#-of-#.safetensors", None),
        ("hf/optimizer.pt", None),
        ("model.safetensors.index.json", None),
        ("train_results.json", None),
        ("trainer_log.jsonl", None),
        ("README.txt", None),
        ("logs/state.json", None),
        (".hidden.json", None),
        ("model.safetensors", False),
    ],
)
def test_what_a_small_file_tells_by_its_name(name: str, state: bool | None) -> None:
    assert tells_state(name) is state


def test_one_folder_that_is_not_read_is_refused_by_ls(tmp_path: Path) -> None:
    """Its root may hold others that are read: these are not asked about."""
    (step, *_) = run(tmp_path)
    export = step.parent / "tensorflow"
    export.mkdir()
    (export / "checkpoint").write_text('model_checkpoint_path: "ckpt-1"\n')
    (export / "ckpt-1.index").write_bytes(bytes(8))
    (export / "ckpt-1.data-00000-of-00001").write_bytes(bytes(8))
    answer = ftckpt_json("ls", str(export))
    assert answer["result"]["code"] == UNSUPPORTED
    assert "TensorFlow" in answer["result"]["message"]
    assert len(ftckpt_json("ls", str(step))["checkpoints"]) == 1
    assert len(ftckpt_json("ls", str(step.parent))["checkpoints"]) == 3


@pytest.mark.parametrize("lost", ["ema/ema_model.safetensors", "ema"])
def test_a_folder_of_weights_beside_a_trainers_state_is_missed(lost: str, tmp_path: Path) -> None:
    """SimpleTuner and diffusers' scripts save `ema/` or `unet_ema/` beside accelerate's state."""
    steps = []
    for number in (10, 20, 30):
        step = tmp_path / "run" / f"checkpoint-{number}"
        onetrainer(step, number)
        (step / "optimizer" / "optimizer.pt").rename(step / "optimizer.bin")
        (step / "optimizer").rmdir()
        (step / "lora" / "lora.safetensors").rename(step / "pytorch_lora_weights.safetensors")
        (step / "lora").rmdir()
        (step / "ema").mkdir()
        shutil.copy(step / "pytorch_lora_weights.safetensors", step / "ema/ema_model.safetensors")
        torch.save({"step": number}, step / "random_states_0.pkl")
        steps.append(step)
    assert "missing-part" not in judged(steps[2])[1]
    gone = steps[2] / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    code, kinds = judged(steps[2])
    assert (code, "missing-part" in kinds) == (INCOMPLETE, True)


def test_what_was_not_looked_at_is_not_lacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of more names, or more folders, than are looked at: the rest of them may be there."""
    *_, last = run(tmp_path)
    for number in range(20):
        put(last / f"shard_{number:02}" / "log.txt")
    for step in last.parent.iterdir():
        put(step / "zz" / "rng_state.json", step=1)
    (last / "zz" / "rng_state.json").rename(last / "zz" / "other.json")
    assert ftckpt.verify(str(last)).code is not ExitCode.INCOMPLETE  # 21 folders: none is opened
    monkeypatch.setattr(small_files, "_FOLDERS", 64)
    assert ftckpt.verify(str(last)).code is ExitCode.INCOMPLETE
    monkeypatch.setattr(small_files, "_NAMES", 20)
    (last / "meta.json").unlink()
    assert ftckpt.verify(str(last)).code is not ExitCode.INCOMPLETE
    monkeypatch.setattr(small_files, "_NAMES", 4096)
    assert ftckpt.verify(str(last)).code is ExitCode.INCOMPLETE
