"""Names that match nothing: of wrappers around a model, or of one rank's part of an adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftckpt.errors import ExitCode
from tests.faults.cli import here

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def llama() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16),
        "model.norm.weight": (16,),
    }  # fmt: skip
    for layer in (0, 1):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (16, 16), f"{at}self_attn.k_proj.weight": (8, 16),
            f"{at}self_attn.v_proj.weight": (8, 16), f"{at}self_attn.o_proj.weight": (16, 16),
            f"{at}mlp.gate_proj.weight": (24, 16), f"{at}mlp.up_proj.weight": (24, 16),
            f"{at}mlp.down_proj.weight": (16, 24), f"{at}input_layernorm.weight": (16,),
            f"{at}post_attention_layernorm.weight": (16,),
        }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def adapter(layers: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(layers):
        for name in ("q_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            found[f"{at}.lora_A.weight"] = torch.randn(8, 16)
            found[f"{at}.lora_B.weight"] = torch.randn(16, 8)
    return found


def folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def within(name: str) -> str:
    return name.replace("layers.", "_orig_mod.layers.") if "layers." in name else name


WAYS = {
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module.": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "within": within,
}


def unknown(path: Path) -> list[str]:
    found = here("verify", path)
    assert found.code == ExitCode.OK
    return [f["message"] for f in found.document["findings"] if f["kind"] == "state-unknown"]


@pytest.mark.parametrize("way", WAYS)
def test_names_of_a_wrapper_are_told_and_mended(way: str, tmp_path: Path) -> None:
    tensors = llama()
    path = folder(tmp_path / "in", {WAYS[way](name): one for name, one in tensors.items()})
    said = next(message for message in unknown(path) if "--rename" in message)
    table = re.search(r"rename = \[.*\]", said)
    assert table is not None
    (tmp_path / "names.toml").write_text(table[0])
    words = ("--to", "safetensors", "--rename", tmp_path / "names.toml")
    assert here("convert", path, tmp_path / "out", *words).code == ExitCode.OK
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    assert here("convert", path, tmp_path / "hf", "--to", "safetensors", "--names", "hf").code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("prefix", ["actor.", "base_model.model."])
def test_another_prefix_of_a_family_that_is_known(prefix: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", {prefix + name: one for name, one in llama().items()})
    (said,) = unknown(path)
    assert f'from = "{prefix}*"' in said


def test_a_wrapper_of_a_family_that_is_not_known(tmp_path: Path) -> None:
    config = {"model_type": "nobodys", "architectures": ["NobodysModel"]}
    path = folder(tmp_path / "in", {"_orig_mod.w": torch.ones(2)}, config)
    (said,) = unknown(path)
    assert 'from = "_orig_mod.*"' in said
    words = ("--to", "safetensors", "--names", "hf")
    assert here("convert", path, tmp_path / "out", *words).code == ExitCode.OK
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w"}


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_names_of_the_model_itself_are_right(suffix: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", llama())
    if suffix == ".bin":
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    assert unknown(path) == []


def test_a_module_that_is_called_module_is_no_wrapper(tmp_path: Path) -> None:
    config = {"model_type": "nobodys", "architectures": ["NobodysModel"]}
    tensors = {"module.w": torch.ones(2), "head.w": torch.ones(2)}
    assert unknown(folder(tmp_path / "in", tensors, config)) == []


def test_weights_that_a_trainer_reads_by_its_own_names(tmp_path: Path) -> None:
    path = folder(tmp_path / "in", {"_orig_mod.w": torch.ones(2)}, {"lr": 1e-3})
    assert unknown(path) == []


def test_pickled_weights_under_names_of_a_wrapper(tmp_path: Path) -> None:
    path = folder(tmp_path / "in", llama())
    tensors = {f"module.{n}": one for n, one in load_file(path / "model.safetensors").items()}
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    (said,) = unknown(path)
    assert 'from = "module.*"' in said


# --- adapters -----------------------------------------------------------------------------------


def of_peft(path: Path, tensors: dict[str, torch.Tensor], file: str, **config: Any) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(ADAPTER | config))
    if file.endswith(".safetensors"):
        save_file(tensors, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def slices(tensors: dict[str, torch.Tensor], ranks: int = 2) -> dict[str, torch.Tensor]:
    """Return the rows that the first rank of FSDP has."""
    return {name: one.chunk(ranks)[0].clone() for name, one in tensors.items()}


def trainers(path: Path) -> None:
    """Make a folder that of a Trainer's checkpoint."""
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    torch.save({"last_epoch": 10}, path / "scheduler.pt")


def test_an_adapter_under_names_of_a_wrapper(tmp_path: Path) -> None:
    tensors = {f"_orig_mod.{name}": one for name, one in adapter().items()}
    path = of_peft(tmp_path / "in", tensors, "adapter_model.safetensors")
    (said,) = unknown(path)
    assert "all 8 names" in said
    assert 'rename = [{from = "_orig_mod.*", to = "*"}]' in said
    assert unknown(of_peft(tmp_path / "ok", adapter(), "adapter_model.safetensors")) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "pytorch_model_fsdp.bin"])
@pytest.mark.parametrize("called", ["", ".default"])
def test_one_ranks_slice_of_an_adapter(called: str, file: str, ranks: int, tmp_path: Path) -> None:
    tensors = {re.sub(r"(lora_.)", rf"\1{called}", name): one for name, one in adapter().items()}
    path = of_peft(tmp_path / "checkpoint-10", slices(tensors, ranks), file)
    trainers(path)
    found = here("verify", path)
    assert found.code == ExitCode.CORRUPT
    assert "one rank's slice" in str(found.document["findings"])
    whole = of_peft(tmp_path / "checkpoint-20", tensors, file)
    trainers(whole)
    assert here("verify", whole).code == ExitCode.OK


def test_a_slice_that_nothing_records_is_a_warning(tmp_path: Path) -> None:
    path = of_peft(tmp_path / "in", slices(adapter()), "adapter_model.safetensors", r=None)
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert any("no pair" in message for message in unknown(path))
