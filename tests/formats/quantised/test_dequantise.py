"""Quantised folders become floating ones, bit for bit as their frameworks compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

import ftckpt
from ftckpt.checkpoint.read_tensor import read_tensor

DATA = Path(__file__).parents[2] / "data" / "quantised"
TRUTH: dict[str, dict[str, dict[str, str]]] = json.loads((DATA / "truth.json").read_text())
CASES = [
    (folder, dtype)
    for folder, weights in TRUTH.items()
    for dtype in sorted({d for by in weights.values() for d in by})
]


@pytest.mark.parametrize(("folder", "dtype"), CASES)
def test_every_weight_is_what_the_framework_computes(
    folder: str, dtype: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ftckpt.convert(str(DATA / folder), str(out), "safetensors", dtype=dtype, jobs=1)
    made = ftckpt.open_checkpoint(str(out))
    held = {name: xxhash.xxh3_128_hexdigest(read_tensor(made, name)) for name in made}
    want = {key: by[dtype] for key, by in TRUTH[folder].items() if dtype in by}
    assert {key: held[key] for key in want} == want
    assert set(held) == {*TRUTH[folder], "model.norm.weight"}
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (out / "hf_quant_config.json").exists()
