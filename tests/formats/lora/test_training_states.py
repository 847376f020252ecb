"""The adapter is taken out of training states that DeepSpeed, DCP and the Trainer wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ftckpt
from ftckpt.errors import NotFoundError, UsageError
from tests.formats.lora.samples import (
    adapters_of,
    all_of,
    base_of,
    in_training,
    unpacked,
    values,
)

DATA = Path(__file__).parents[2] / "data"
TRUTH = {
    f"base_model.model.{module}.{saved}": f"base_model.model.{module}.{stored}"
    for module, saved, stored in (
        *(
            (m, f"lora_{x}.weight", f"lora_{x}.default.weight")
            for m in ("up", "down")
            for x in "AB"
        ),
        ("head", "weight", "modules_to_save.default.weight"),
    )
}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("job", ["lora_z2", "lora_z3", "lora_left"])
def test_out_of_deepspeed(job: str, masters: bool, tmp_path: Path) -> None:
    source = ftckpt.open_checkpoint(str(DATA / "deepspeed" / job / "global_step2"))
    out = tmp_path / "out"
    ftckpt.convert(source, str(out), "safetensors", only="adapter", from_master=masters)
    assert sorted(p.name for p in out.iterdir()) == [
        "adapter_model.safetensors", "ftckpt.manifest.json",
    ]  # fmt: skip
    made = all_of(str(out))
    assert made.keys() == TRUTH.keys()
    for name, stored in TRUTH.items():
        key = stored if stored in source and not masters else f"master:{stored}"
        assert np.array_equal(made[name], values(source, key)), name


def test_out_of_a_trainers_directory_it_loads_as_an_adapter(tmp_path: Path) -> None:
    source, out = DATA / "trainer_dirs" / "trainer_peft", tmp_path / "out"
    ftckpt.convert(str(source), str(out), "safetensors", only="adapter")
    assert sorted(p.name for p in out.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "ftckpt.manifest.json",
    ]  # fmt: skip
    before, after = all_of(str(source / "adapter_model.safetensors")), all_of(str(out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["dora", "lora", "gpt2", "experts"])
def test_out_of_dcp_it_is_the_adapter_that_peft_saves(name: str, tmp_path: Path) -> None:
    case = unpacked(tmp_path) / name
    in_training(case, tmp_path / "step-1")
    out = tmp_path / "out"
    state, beside = str(tmp_path / "step-1"), str(case / "adapter")
    ftckpt.convert(state, str(out), "safetensors", only="adapter", beside=beside)
    before, after = all_of(str(case / "adapter")), all_of(str(out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    # And so it merges.
    for number, adapter in enumerate((str(out), *adapters_of(case))):
        ftckpt.convert(base_of(case), str(tmp_path / str(number)), "safetensors", adapter=[adapter])
    made = [(tmp_path / n / "model.safetensors").read_bytes() for n in "01"]
    assert made[0] == made[1]


def test_what_holds_none_or_several_is_refused(tmp_path: Path) -> None:
    case = unpacked(tmp_path) / "lora"
    out = str(tmp_path / "out")
    with pytest.raises(NotFoundError, match="no tensors of an adapter"):
        ftckpt.convert(base_of(case), out, "safetensors", only="adapter")
    for name in ("one", "two"):
        in_training(case, tmp_path / name, name)
    from safetensors.numpy import save_file

    both = all_of(str(tmp_path / "one")) | all_of(str(tmp_path / "two"))
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(UsageError, match="2 adapters: one, two"):
        ftckpt.convert(str(tmp_path / "both.safetensors"), out, "safetensors", only="adapter")
    ftckpt.convert(
        str(tmp_path / "both.safetensors"), out, "safetensors", only="adapter", drop=["*.two.*"]
    )
    assert all_of(out).keys() == all_of(str(case / "adapter")).keys()
    with pytest.raises(UsageError, match="convert"):
        ftckpt.reshard(str(tmp_path / "one"), str(tmp_path / "o"), only="adapter", dp=2)


def test_the_files_of_another_folder_go_with_the_weights(tmp_path: Path) -> None:
    case = unpacked(tmp_path) / "lora"
    base, other, out = Path(base_of(case)), tmp_path / "other", tmp_path / "out"
    other.mkdir()
    (base / "config.json").rename(other / "config.json")
    (other / "tokenizer.json").write_text("{}")
    (other / "model.safetensors.index.json").write_text("{}")
    (other / "adapter_config.json").write_text("{}")
    ftckpt.convert(str(base), str(out), "safetensors", beside=str(other), dtype="fp32")
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "ftckpt.manifest.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert ftckpt.verify(str(out), level="content").code == 0
    (other / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        ftckpt.convert(str(base), str(tmp_path / "o"), "safetensors", beside=str(other))
    with pytest.raises(UsageError, match="beside"):
        ftckpt.convert(str(base), str(tmp_path / "o"), "torchsave", beside=str(other))


def test_a_merged_model_is_loaded_without_an_adapter(tmp_path: Path) -> None:
    case = unpacked(tmp_path) / "lora"
    shutil.copy(case / "adapter" / "adapter_config.json", base_of(case))
    out = tmp_path / "out"
    ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case))
    assert not (out / "adapter_config.json").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
