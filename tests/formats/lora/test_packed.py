"""Adapters of packed experts, merged into a base that stores a module each, as PEFT merges them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ftckpt
from ftckpt.errors import FtckptError, UsageError
from tests.builders.archives import extract
from tests.formats.lora.samples import all_of, change_config, rounded

ARCHIVE = Path(__file__).parents[2] / "data" / "adapters" / "packed_experts.tar.xz"
LAYER = "model.layers.1.mlp.experts"
SCALE, RANK, EXPERTS = 1.5, 2, 3


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Return the folder of all samples, to be changed."""
    extract(ARCHIVE, tmp_path)
    return tmp_path


def merged(case: Path) -> Path:
    ftckpt.convert(
        str(case / "base"), str(case / "out"), "safetensors", adapter=[str(case / "adapter")]
    )
    return case / "out"


@pytest.mark.parametrize(
    # Of float32 the order of the sums is left: half of the last bit of values about 1.
    ("dtype", "step", "order"), [("float32", 0.0, 2**-23), ("bfloat16", 2**-8, 0.0)],
)  # fmt: skip
def test_each_expert_is_what_peft_makes_of_it(
    samples: Path, dtype: str, step: float, order: float
) -> None:
    case = samples / dtype
    made, truth = all_of(str(merged(case))), all_of(str(case / "merged"))
    base = all_of(str(case / "base"))
    assert made.keys() == truth.keys() == base.keys()
    changed = {name for name in truth if not np.array_equal(truth[name], base[name])}
    assert changed == {name for name in made if not np.array_equal(made[name], base[name])}
    assert len(changed) == 2 * (EXPERTS * 3 + 1)
    for name in truth:
        # PEFT rounds the change to the base's type, and then the sum; ours rounds once.
        bound = step * (2 * np.abs(truth[name]) + np.abs(truth[name] - base[name])) * 1.02 + order
        assert (np.abs(made[name] - truth[name]) <= bound).all(), name


def test_it_rounds_once(samples: Path) -> None:
    case = samples / "bfloat16"
    made, base = all_of(str(merged(case))), all_of(str(case / "base"))
    adapter = all_of(str(case / "adapter"))
    a = adapter[f"base_model.model.{LAYER}.base_layer.lora_A.weight"].reshape(EXPERTS, RANK, -1)
    b = adapter[f"base_model.model.{LAYER}.base_layer.lora_B.weight"].reshape(-1, RANK, EXPERTS)
    for expert in range(EXPERTS):
        parts = [f"{LAYER}.{expert}.{one}_proj.weight" for one in ("gate", "up")]
        whole = np.concatenate([base[one] for one in parts]) + SCALE * (b[..., expert] @ a[expert])
        assert np.array_equal(np.concatenate([made[p] for p in parts]), rounded(whole, "bfloat16"))


def of_kind(case: Path, kind: str) -> None:
    file = case / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))


def without_an_expert(case: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = case / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.2.up_proj.weight"]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda case: of_kind(case, "mine"), UsageError),  # how it packs is not known
        (without_an_expert, UsageError),
        (lambda case: change_config(case / "adapter", r=1), FtckptError),
        (lambda case: change_config(case / "adapter", target_parameters=[
            "mlp.experts.gate_up_proj"]), FtckptError),
    ],
    ids=["kind", "expert", "rank", "parameters"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    samples: Path, wrong: Callable[[Path], None], error: type[FtckptError]
) -> None:
    case = samples / "float32"
    wrong(case)
    with pytest.raises(error):
        merged(case)
    assert not (case / "out").exists()


def test_modules_that_only_the_files_have_are_no_gap(samples: Path) -> None:
    """The model that was trained has no `down_proj` of an expert, whatever its files have."""
    case = samples / "float32"
    change_config(case / "adapter", target_modules=["q_proj", "down_proj"])
    first = all_of(str(merged(case)))
    shutil.rmtree(case / "out")
    change_config(case / "adapter", target_modules=["q_proj"])
    second = all_of(str(merged(case)))
    assert all(np.array_equal(first[name], second[name]) for name in first)
