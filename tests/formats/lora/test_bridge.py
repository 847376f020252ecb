"""Adapters that Megatron-Bridge saved, against its own exporter and its own merge."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ftckpt
from ftckpt.checkpoint import Kind
from ftckpt.errors import CorruptError, FtckptError, NotFoundError, UnsupportedError
from ftckpt.formats.lora.bridge import BridgeAdapter, read_adapter, require_readable
from tests.builders.archives import extract
from tests.formats.lora.samples import all_of, rounded
from tests.json_run import ftckpt_json
from tests.test_docs import validate

ARCHIVE = Path(__file__).parents[2] / "data" / "adapters" / "bridge_adapters.tar.xz"
DOCS = Path(__file__).parents[3] / "docs"
SCALE, STEP, CONFIG = 1.5, "iter_0000001", "run_config.yaml"
PREFIX = "base_model.model."
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all samples."""
    folder = tmp_path_factory.mktemp("bridge")
    extract(ARCHIVE, folder)
    return folder


def taken(data: Path, kind: str, out: Path, *, hf: bool = True) -> dict[str, Array]:
    """Take an adapter out, and return its tensors without PEFT's prefix."""
    config = str(data / "base" / "hf" / "config.json") if hf else ""
    ftckpt.convert(
        str(data / kind / STEP), str(out), "safetensors", only="adapter",
        names="hf" if hf else "", config=config,
    )  # fmt: skip
    return {name.removeprefix(PREFIX): value for name, value in all_of(str(out)).items()}


@pytest.mark.parametrize("kind", ["lora", "canonical"])
def test_it_is_what_bridge_exports_and_merges(data: Path, kind: str, tmp_path: Path) -> None:
    adapter = taken(data, kind, tmp_path / "adapter")
    truth = all_of(str(data / kind / "peft.safetensors"))
    assert adapter.keys() == truth.keys()
    assert all(np.array_equal(adapter[name], truth[name]) for name in truth)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 6, False)
    assert ("down_proj" in config["target_modules"]) == (kind == "canonical")

    base = data / "base" / "hf"
    ftckpt.convert(
        str(base), str(tmp_path / "out"), "safetensors", adapter=[str(tmp_path / "adapter")]
    )
    made, before = all_of(str(tmp_path / "out")), all_of(str(base))
    theirs = all_of(str(data / kind / "merged.safetensors"))
    assert made.keys() == theirs.keys()
    for name, weight in theirs.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in adapter:
            assert np.array_equal(made[name], weight), name
            continue
        product = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        # Ours rounds once, Bridge's the product, its multiple and the sum.
        assert np.array_equal(made[name], rounded(before[name] + SCALE * product, "bfloat16"))
        added = rounded(SCALE * rounded(product, "bfloat16"), "bfloat16")
        assert np.array_equal(weight, rounded(before[name] + added, "bfloat16"))
        bound = 2**-8 * 2 * (np.abs(made[name]) + np.abs(SCALE * product))
        assert (np.abs(made[name] - weight) <= bound * 1.02).all()


def test_dora_is_merged_as_bridges_forward_pass_has_it(data: Path, tmp_path: Path) -> None:
    taken(data, "dora", tmp_path / "adapter", hf=False)
    base, out = data / "base" / STEP, tmp_path / "out"
    ftckpt.convert(
        str(base), str(out), "safetensors", adapter=[str(tmp_path / "adapter")], only="model"
    )
    made, truth = all_of(str(out)), all_of(str(data / "dora" / "merged.safetensors"))
    for name, weight in truth.items():
        assert (np.abs(made[name] - weight) <= 2**-7 * np.abs(weight)).all(), name
    # Split for Hugging Face it is the same rows.
    taken(data, "dora", tmp_path / "hf")
    ftckpt.convert(
        str(data / "base" / "hf"), str(tmp_path / "split"), "safetensors",
        adapter=[str(tmp_path / "hf")],
    )  # fmt: skip
    split = all_of(str(tmp_path / "split"))
    for layer in range(2):
        parts = [split[f"model.layers.{layer}.mlp.{one}_proj.weight"] for one in ("gate", "up")]
        joined = made[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
        assert np.array_equal(np.concatenate(parts), joined)


def test_the_commands_of_the_page_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").symlink_to(data / "base" / "hf")
    shutil.copytree(data / "lora" / STEP, tmp_path / "run" / "iter_0001000")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "convert.md").read_text().split("#### Megatron-Bridge")[1]
    lines = page.split("```sh\n")[1].split("```")[0].splitlines()
    for line in lines:
        assert ftckpt_json(*shlex.split(line)[1:])["result"]["code"] == 0
    assert len(lines) == 2


def test_inspect_names_it(data: Path) -> None:
    document = ftckpt_json("inspect", str(data / "lora" / STEP))
    validate(document)
    assert document["adapter"] == {
        "kind": "LoRA", "rank": 4, "alpha": 6, "alone": True,
        "targets": ["linear_qkv", "linear_proj", "linear_fc1"],
    }  # fmt: skip
    assert "adapter" not in ftckpt_json("inspect", str(data / "base" / STEP))


def changed(data: Path, kind: str, place: Path, *pairs: tuple[str, str]) -> Path:
    """Copy a sample, with other text in its configuration."""
    shutil.copytree(data / kind, place)
    file = place / STEP / CONFIG
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return place / STEP


PEFT = "_target_: megatron.bridge.peft.lora.LoRA"
TWO = ("  tensor_model_parallel_size: 1", "  tensor_model_parallel_size: 2")


@pytest.mark.parametrize(
    ("kind", "pairs", "error", "words"),
    [
        ("lora", [("  dim: 4", "  dim: 8")], CorruptError, "rank 4"),
        ("lora", [("  dim: 4", "  dim: four")], CorruptError, "four"),
        ("lora", [("  dim: 4", "  dim: 4\n  dim: 4")], CorruptError, "two values"),
        ("lora", [(PEFT, "_target_: mine.LoRA")], UnsupportedError, "mine.LoRA"),
        ("lora", [("  dim: 4", "  dim: 4\n  root: true")], UnsupportedError, "root"),
        ("lora", [TWO, ("gated_linear_unit: true", "gated_linear_unit: false")],
         UnsupportedError, "linear_fc1"),
        ("canonical", [TWO], UnsupportedError, "linear_fc1"),
        ("dora", [TWO], UnsupportedError, "linear_fc1"),
        ("canonical", [], UnsupportedError, "adapter_q"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(
    data: Path, kind: str, pairs: Sequence[tuple[str, str]], error: type[FtckptError],
    words: str, tmp_path: Path,
) -> None:  # fmt: skip
    path = changed(data, kind, tmp_path / "changed", *pairs)
    with pytest.raises(error, match=words):
        ftckpt.convert(str(path), str(tmp_path / "out"), "safetensors", only="adapter")
    assert not (tmp_path / "out").exists()


def test_a_joined_gate_of_two_ranks_is_whole(data: Path, tmp_path: Path) -> None:
    """Megatron stores the gate's rows of all ranks before the other layer's."""
    path = changed(data, "lora", tmp_path / "changed", TWO)
    ftckpt.convert(str(path), str(tmp_path / "out"), "safetensors", only="adapter")
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_without_its_configuration_rank_and_alpha_come_from_beside(
    data: Path, tmp_path: Path
) -> None:
    path = changed(data, "lora", tmp_path / "changed")
    (path / CONFIG).unlink()
    assert ftckpt_json("inspect", str(path))["adapter"]["rank"] is None
    with pytest.raises(UnsupportedError, match="an unknown number"):
        ftckpt.convert(str(path), str(tmp_path / "out"), "safetensors", only="adapter")
    with pytest.raises(NotFoundError, match="Megatron-Bridge"):
        ftckpt.convert(
            str(data / "base" / "hf"), str(tmp_path / "out"), "safetensors", adapter=[str(path)]
        )


def of_names(shapes: Mapping[str, Sequence[int]]) -> Any:
    infos = {
        name: SimpleNamespace(name=name, shape=shape, component="model", kind=Kind.PARAM)
        for name, shape in shapes.items()
    }
    return SimpleNamespace(tensors=infos, source=SimpleNamespace(url="here"))


A, B = "adapter.linear_in.weight", "adapter.linear_out.weight"
LAYER = "decoder.layers.0"


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        ({f"{LAYER}.mlp.experts.linear_fc1.{A}": (4, 16), f"{LAYER}.mlp.experts.linear_fc1.{B}":
          (48, 4)}, UnsupportedError, "experts"),
        ({f"{LAYER}.self_attention.linear_proj.{A}": (4, 16)}, CorruptError, "lost"),
        ({f"{LAYER}.self_attention.linear_proj.{A}": (4, 16), "output_layer.weight": (32, 16),
          f"{LAYER}.self_attention.linear_proj.{B}": (16, 4)}, UnsupportedError, "output_layer"),
        ({f"{LAYER}.mamba.in_proj.adapter.adapter_x.linear_in.weight": (4, 16)},
         UnsupportedError, "adapter_x"),
    ],
)  # fmt: skip
def test_tensors_of_no_known_use_are_refused(
    shapes: Mapping[str, Sequence[int]], error: type[FtckptError], words: str
) -> None:
    adapter = BridgeAdapter("LoRA", 4, 6.0, ["linear_proj"], 0.0, 1, True)
    with pytest.raises(error, match=words):
        require_readable(adapter, of_names(shapes), shapes)


def test_a_pattern_of_layers_lists_each_module(data: Path, tmp_path: Path) -> None:
    path = changed(data, "lora", tmp_path / "c", ("  - linear_qkv", "  - '*.layers.*.linear_qkv'"))
    found = read_adapter(ftckpt.open_checkpoint(str(path)))
    assert found is not None
    assert found.targets[0] == "*.layers.*.linear_qkv"
    ftckpt.convert(str(path), str(tmp_path / "out"), "safetensors", only="adapter")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert "decoder.layers.1.mlp.linear_fc1" in said["target_modules"]
