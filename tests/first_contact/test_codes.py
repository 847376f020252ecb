"""Numbers beside scales are codes: computed where the method is known, and never cast.

GPTQ and AWQ are packed here after their sources (`QuantLinear.pack` of AutoGPTQ's
`qlinear_cuda_old.py`, `WQLinear_GEMM.from_linear` of AutoAWQ) and computed as those do, in float16.
What mlx computes of its own files was written by mlx (`tests/data/first_contact/mlx/make.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftckpt
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.quantised import arithmetic
from tests.json_run import ftckpt_json

from .weights import save

MLX = Path(__file__).parents[1] / "data" / "first_contact" / "mlx"
Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
INPUTS, OUTPUTS = 128, 64


def packed_rows(values: Array, bits: int) -> Array:
    """Pack along the first axis, as `QuantLinear.pack` does."""
    values = values.astype(np.uint32)
    out = np.zeros((values.shape[0] // 32 * bits, values.shape[1]), np.uint32)
    i = row = 0
    while row < len(out):
        if bits != 3:
            for j in range(i, i + 32 // bits):
                out[row] |= values[j] << np.uint32(bits * (j - i))
            i += 32 // bits
            row += 1
            continue
        for shift, rest, keep in ((0, 30, 2), (1, 31, 1), (2, None, 0)):
            for j in range(i, i + 10):
                out[row] |= values[j] << np.uint32(3 * (j - i) + shift)
            i += 10
            if rest is not None:
                out[row] |= values[i] << np.uint32(rest)
                out[row + 1] |= values[i] >> np.uint32(keep)
                i += 1
            row += 1
    return out.view(np.int32)


def packed_awq(values: Array) -> Array:
    """Pack along the last axis, eight values in the order of AutoAWQ."""
    out = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return out.view(np.int32)


def made(
    method: str, bits: int, group: int, *, order: str = "plain", seed: int = 3
) -> tuple[Tensors, Array]:
    """Return the tensors of one module, without its name, and its weight in float16."""
    random = np.random.default_rng(seed)
    groups = INPUTS // group if group > 0 else 1
    codes = random.integers(0, 1 << bits, (INPUTS, OUTPUTS))
    zeros = random.integers(1, 1 << bits, (groups, OUTPUTS))
    scales = (random.standard_normal((groups, OUTPUTS)) / 50).astype(np.float16)
    of = np.arange(INPUTS) // (group if group > 0 else INPUTS)
    if order == "acts":
        of = random.permutation(of)
    weight = ((codes - zeros[of]).astype(np.float16) * scales[of]).T
    if method == "awq":
        held = {"qweight": packed_awq(codes), "qzeros": packed_awq(zeros), "scales": scales}
        return held, weight
    stored = zeros if method == "gptq_v2" else zeros - 1
    held = {
        "qweight": packed_rows(codes, bits),
        "qzeros": packed_rows(stored.T, bits).T,
        "scales": scales,
    }
    if order != "none":
        held["g_idx"] = of.astype(np.int32)
    return held, weight


def folder(path: Path, modules: dict[str, Tensors], **files: Any) -> Path:
    """Write a folder: its files are JSON by name without the suffix."""
    tensors = {
        f"{name}.{leaf}": one for name, held in modules.items() for leaf, one in held.items()
    }
    tensors["model.norm.weight"] = np.ones(8, np.float16)
    save(path / "model.safetensors", tensors)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def converted(path: Path, out: Path, dtype: str = "fp16") -> Tensors:
    from safetensors.torch import load_file

    ftckpt.convert(str(path), str(out), "safetensors", dtype=dtype)
    held = load_file(out / "model.safetensors")
    floats = {name: one.float() if one.is_floating_point() else one for name, one in held.items()}
    return {name: one.numpy() for name, one in floats.items()}


def names(number: int) -> str:
    return f"model.layers.{number}.self_attn.q_proj"


GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("group", "order", "kind"),
    [(32, "plain", "gptq"), (32, "acts", "gptq"), (32, "none", "gptq_v2"), (-1, "none", "gptq")],
)
def test_gptq_is_computed(bits: int, group: int, order: str, kind: str, tmp_path: Path) -> None:
    held, weight = made(kind, bits, group, order=order)
    said = {"bits": bits, "group_size": group, "checkpoint_format": kind, "quant_method": "gptq"}
    path = folder(tmp_path / "in", {names(0): held}, config={"quantization_config": said})
    found = converted(path, tmp_path / "out")
    assert found.keys() == {f"{names(0)}.weight", "model.norm.weight"}
    assert np.array_equal(found[f"{names(0)}.weight"], weight)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_modules_may_have_bits_of_their_own(tmp_path: Path) -> None:
    modules, weights = {}, {}
    for number, (bits, group) in enumerate(((4, 32), (8, 32), (4, 64))):
        modules[names(number)], weights[names(number)] = made("gptq", bits, group)
    own = {"+:.*\\.1\\..*": {"bits": 8}, "+:.*\\.2\\..*": {"group_size": 64}}
    said = {**GPTQ, "quant_method": "gptq", "dynamic": own}
    path = folder(tmp_path / "in", modules, config={"quantization_config": said})
    found = converted(path, tmp_path / "out")
    assert all(np.array_equal(found[f"{name}.weight"], one) for name, one in weights.items())


@pytest.mark.parametrize(
    ("method", "files"),
    [
        ("gptq", {"quantize_config": GPTQ}),
        ("awq", {"quant_config": AWQ}),
        ("awq", {"config": {"quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}}),
        ("awq", {"quantize_config": {**GPTQ, "quant_method": "awq"}}),
    ],
)  # fmt: skip
def test_the_files_of_their_own_are_read(
    method: str, files: dict[str, Any], tmp_path: Path
) -> None:
    held, weight = made(method, 4, 32)
    files = {"config": {"model_type": "tiny"}} | files
    path = folder(tmp_path / "in", {names(0): held}, **files)
    found = converted(path, tmp_path / "out")
    assert np.array_equal(found[f"{names(0)}.weight"], weight)
    assert not any((tmp_path / "out").glob("quant*"))
    assert ftckpt.inspect(str(path)).parameters == weight.size + 8


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_wide_matrices_are_computed_in_stripes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_STRIPE", 1000)
    monkeypatch.setattr(arithmetic, "_RUN", 700)
    held, weight = made(method, 4, 32, order="acts" if method == "gptq" else "plain")
    name = {"gptq": "quantize_config", "awq": "quant_config"}[method]
    files = {"config": {}, name: GPTQ if method == "gptq" else AWQ}
    found = converted(folder(tmp_path / "in", {names(0): held}, **files), tmp_path / "out")
    assert np.array_equal(found[f"{names(0)}.weight"], weight)


def test_mlx_is_computed_as_mlx_does(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = converted(MLX / "model", tmp_path / "out", "fp32")
    truth = load_file(MLX / "truth.safetensors")
    assert found.keys() == {*truth, "model.norm.weight"}
    assert all(np.array_equal(found[name], one) for name, one in truth.items())
    assert ftckpt.verify(str(MLX / "model"), level="values").code == 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("leaf", ["scales", "qzeros"])
def test_a_lost_scale_is_damage(method: str, leaf: str, tmp_path: Path) -> None:
    modules = {names(number): made(method, 4, 32)[0] for number in range(4)}
    del modules[names(1)][leaf]
    files: dict[str, Any] = {"gptq": {"quantize_config": GPTQ}, "awq": {"quant_config": AWQ}}
    path = folder(tmp_path / "in", modules, config={}, **files[method])
    answer = ftckpt_json("verify", str(path))
    assert answer["result"]["code"] == 4
    assert [one["kind"] for one in answer["findings"] if one["severity"] == "error"] == [
        "missing-scale"
    ]
    with pytest.raises(CorruptError):
        converted(path, tmp_path / "out")


def test_groups_without_a_scale_are_damage(tmp_path: Path) -> None:
    held, _ = made("gptq", 4, 32)
    held["g_idx"][5] = 9
    path = folder(tmp_path / "in", {names(0): held}, config={}, quantize_config=GPTQ)
    with pytest.raises(CorruptError, match="names groups from 0 to 9"):
        converted(path, tmp_path / "out")


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32},
        {"quant_method": "quark"},
    ],
)
def test_another_packing_is_refused_by_name(said: dict[str, Any], tmp_path: Path) -> None:
    held, _ = made("gptq", 4, 32)
    path = folder(tmp_path / "in", {names(0): held}, config={"quantization_config": said})
    assert ftckpt.verify(str(path)).code == 0
    with pytest.raises(UnsupportedError, match=said["quant_method"]):
        converted(path, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_shapes_of_no_weight_are_another_layout_and_one_is_damage(tmp_path: Path) -> None:
    modules = {names(number): made("gptq", 4, 32)[0] for number in range(4)}
    path = folder(tmp_path / "in", modules, config={}, quant_config=AWQ)
    assert ftckpt.verify(str(path)).code == 0
    with pytest.raises(UnsupportedError, match="another layout of awq"):
        converted(path, tmp_path / "out")
    modules = {names(number): made("awq", 4, 32)[0] for number in range(4)}
    modules[names(2)]["scales"] = modules[names(2)]["scales"][:2]
    path = folder(tmp_path / "one", modules, config={}, quant_config=AWQ)
    assert ftckpt.verify(str(path)).code == 4


_I8, _U8 = np.ones((4, 8), np.int8), np.ones((4, 8), np.uint8)
_I32, _HALF = np.ones((4, 8), np.int32), np.full((4, 1), 0.3, np.float32)
SCHEMES: dict[str, Tensors] = {
    "mlx": {"weight": _I32.view(np.uint32), "scales": _HALF, "biases": _HALF},
    "gptq": {"qweight": _I32, "qzeros": _I32, "scales": _HALF},
    "quanto": {"weight._data": _I8, "weight._scale": _HALF},
    "eetq": {"weight": _I8, "weight_scales": _HALF},
    "aqlm": {"codes": _I8, "codebooks": _HALF, "scales": _HALF},
    "hqq": {"W_q": _U8, "scale": _HALF, "zero": _HALF},
    "vptq": {"indices": _I32, "centroids": _HALF},
    "quark": {"weight": _I8, "weight_scale": _HALF, "weight_zero_point": _I8[:, :1]},
    "compressed-tensors": {"weight_packed": _I32, "weight_scale": _HALF},
    "mxfp4": {"down_proj_blocks": _U8, "down_proj_scales": _U8[:, :1]},
    "squeezellm": {"qweight": _I32, "lookup_table": _HALF, "lut": _HALF},
    "bitsandbytes": {"weight": _I8, "SCB": _HALF},
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("config", [None, {}, {"quantization_config": {"quant_method": "new"}}])
def test_codes_that_nothing_explains_are_not_cast(
    scheme: Tensors, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    files = {} if config is None else {"config": config}
    path = folder(tmp_path / "in", {names(number): scheme for number in range(4)}, **files)
    assert ftckpt.verify(str(path)).code == 0
    with pytest.raises(UnsupportedError, match="not known"):
        converted(path, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()
    ftckpt.convert(str(path), str(tmp_path / "out"), "safetensors")
    with pytest.raises(UnsupportedError, match="not known"):
        converted(path / "model.safetensors", tmp_path / "other", "bf16")


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_scale_that_only_one_of_many_lacks_is_lost(scheme: Tensors, tmp_path: Path) -> None:
    modules = {names(number): dict(scheme) for number in range(5)}
    lost = next(leaf for leaf in scheme if "scale" in leaf or leaf in ("centroids", "SCB", "lut"))
    del modules[names(2)][lost]
    path = folder(tmp_path / "in", modules, config={})
    answer = ftckpt_json("verify", str(path))
    assert answer["result"]["code"] == 4
    assert {one["kind"] for one in answer["findings"] if one["severity"] == "error"} == {
        "missing-scale"
    }


def test_a_pickled_state_of_codes_is_not_cast(tmp_path: Path) -> None:
    import torch

    state = {
        f"{names(number)}.{leaf}": torch.from_numpy(one.copy())
        for number in range(2)
        for leaf, one in SCHEMES["hqq"].items()
    }
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="W_q"):
        ftckpt.convert(
            str(tmp_path / "model.pt"), str(tmp_path / "out"), "safetensors", dtype="bf16"
        )


NO_CODES: dict[str, Tensors] = {
    "swin": {
        "relative_position_index": np.ones((4, 4), np.int64),
        "logit_scale": _HALF,
        "q.weight": _HALF,
    },
    "gpt2": {"bias": np.ones((1, 1, 4, 4), np.uint8), "scale": _HALF, "weight": _HALF},
    "batch norm": {"num_batches_tracked": np.ones((), np.int64), "weight": _HALF},
    "mask": {"attn_mask": np.ones((4, 4), np.uint8), "scale": _HALF},
    "bool": {"keep": np.ones((4, 4), np.bool_), "scale": _HALF},
    "positions": {"position_ids": np.ones((1, 4), np.int32), "scales": _HALF},
    "caches": {"weight": _HALF, "k_scale": _HALF, "kept": np.ones(4, np.int32)},
    "biases": {"biases": _HALF, "table": np.ones((4, 4), np.int32)},
}


@pytest.mark.parametrize("module", NO_CODES.values(), ids=NO_CODES)
def test_other_integers_are_no_codes(module: Tensors, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", {names(number): module for number in range(2)}, config={})
    assert ftckpt.verify(str(path)).code == 0
    converted(path, tmp_path / "out", "bf16")


def test_the_codes_of_mlx_without_their_record_are_not_cast(tmp_path: Path) -> None:
    shutil.copytree(MLX / "model", tmp_path / "in")
    (tmp_path / "in/config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="holds codes of uint32, with biases, scales"):
        converted(tmp_path / "in", tmp_path / "out", "bf16")
