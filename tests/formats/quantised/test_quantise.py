"""Weights become codes and scales as the references make them, and nothing else does."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import ftckpt
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, NoResourceError, UnsupportedError, UsageError
from ftckpt.formats.quantised import encoding
from tests.parts.answers import answer, in_parts

from .weights import (
    FP8_CASES,
    MX_CASES,
    folder,
    fp8_weight,
    half,
    mx_weight,
    single,
    values,
)

DATA = Path(__file__).parents[2] / "data" / "quantised"
GOLDEN: dict[str, list[str]] = json.loads((DATA / "encoded.json").read_text())
LAYER = "model.layers.0"
LINEAR = {
    f"{LAYER}.self_attn.q_proj.weight": (256, 200),
    f"{LAYER}.self_attn.k_proj.weight": (130, 200),
    f"{LAYER}.self_attn.o_proj.weight": (200, 256),
    f"{LAYER}.mlp.experts.0.up_proj.weight": (384, 200),
    f"{LAYER}.mlp.experts.0.down_proj.weight": (200, 384),
}
OTHERS = {
    "model.embed_tokens.weight": (300, 200),
    "model.norm.weight": (200,),
    f"{LAYER}.mlp.gate.weight": (8, 200),
    f"{LAYER}.mlp.gate.e_score_correction_bias": (8,),
    f"{LAYER}.linear_attn.conv1d.weight": (64, 1, 4),
    "model.visual.blocks.0.attn.q_proj.weight": (16, 16),
}
CONFIG: dict[str, Any] = {"model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 200}


def digests(path: str, *names: str) -> list[str]:
    opened = ftckpt.open_checkpoint(path)
    return [xxhash.xxh3_128_hexdigest(read_tensor(opened, name)) for name in names]


def bytes_of(path: Path) -> dict[str, bytes]:
    opened = ftckpt.open_checkpoint(str(path))
    return {key: read_tensor(opened, key) for key in opened.tensors}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = LINEAR | OTHERS
    made = {name: half(values(shape, n)) for n, (name, shape) in enumerate(shapes.items())}
    bias = f"{LAYER}.mlp.gate.e_score_correction_bias"
    made[bias] = single(values((8,), 1))
    return folder(tmp_path_factory.mktemp("model") / "base", made, **CONFIG)


@pytest.fixture(scope="module")
def quantised(model: Path) -> Path:
    made = model.parent / "fp8"
    ftckpt.convert(str(model), str(made), "safetensors", dtype="fp8-block", jobs=2)
    return made


def test_every_code_is_torchs_cast() -> None:
    """All values of 16 bits, those half way between two codes, and their neighbours."""
    words = np.arange(1 << 16, dtype=np.uint16)
    some = (words.astype(np.uint32) << 16).view(np.float32)
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(middle, np.float32(to)) for to in (-1e9, 1e9)]
    found = np.concatenate([some[np.isfinite(some)], middle, *near])
    found = np.concatenate([found, -found])
    want = torch.from_numpy(found).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(encoding.e4m3_codes(found), want.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_is_what_transformers_makes(name: str, tmp_path: Path) -> None:
    key = "m.layers.0.experts.gate_up_proj" if name == "experts" else "m.layers.0.up_proj.weight"
    base = folder(tmp_path / "base", {key: single(fp8_weight(name))}, hidden_size=128)
    out = tmp_path / "out"
    ftckpt.convert(str(base), str(out), "safetensors", dtype="fp8-block")
    assert digests(str(out), key, f"{key}_scale_inv") == GOLDEN[f"fp8 {name}"]


@pytest.mark.parametrize("name", FP8_CASES)
def test_the_digests_are_those_of_transformers_here(name: str) -> None:
    from types import SimpleNamespace

    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    said = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    operation = fp8.Fp8Quantize(SimpleNamespace(quantization_config=said))
    made = operation._quantize_one("a.weight", torch.from_numpy(fp8_weight(name)))
    raw = [one.view(torch.uint8).numpy().tobytes() for one in made.values()]
    assert [xxhash.xxh3_128_hexdigest(one) for one in raw] == GOLDEN[f"fp8 {name}"]


def gpt_oss(path: Path) -> Path:
    stem = f"{LAYER}.mlp.experts"
    made = {f"{stem}.{name}": single(mx_weight(name)) for name in MX_CASES}
    made[f"{LAYER}.mlp.router.weight"] = single(values((4, 64), 1))
    return folder(path, made, model_type="gpt_oss", hidden_size=64, dtype="float32")


def test_mxfp4_is_what_triton_makes(tmp_path: Path) -> None:
    base, out = gpt_oss(tmp_path / "base"), tmp_path / "out"
    ftckpt.convert(str(base), str(out), "safetensors", dtype="mxfp4", jobs=2)
    for name in MX_CASES:
        key = f"{LAYER}.mlp.experts.{name}"
        assert digests(str(out), f"{key}_blocks", f"{key}_scales") == GOLDEN[f"mxfp4 {name}"]
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["dtype"] == "bfloat16"
    opened = ftckpt.open_checkpoint(str(out))
    assert opened.tensors[f"{LAYER}.mlp.router.weight"].dtype.name == "bfloat16"
    assert ftckpt.verify(str(out), level="values").code is ExitCode.OK
    back = {name: one.shape for name, one in opened.dequantised(DTYPES["bfloat16"]).tensors.items()}
    assert back == {
        name: info.shape for name, info in ftckpt.open_checkpoint(str(base)).tensors.items()
    }


def test_linear_weights_become_codes_and_nothing_else(model: Path, quantised: Path) -> None:
    before, after = bytes_of(model), bytes_of(quantised)
    assert set(after) == {*before, *(f"{name}_scale_inv" for name in LINEAR)}
    opened = ftckpt.open_checkpoint(str(quantised))
    for name, shape in LINEAR.items():
        assert opened.tensors[name].dtype.name == "float8_e4m3fn"
        scale = opened.tensors[f"{name}_scale_inv"].shape
        assert scale == tuple(-(-size // 128) for size in shape)
    assert {name: after[name] for name in OTHERS} == {name: before[name] for name in OTHERS}
    config = json.loads((quantised / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head", "model.embed_tokens", f"{LAYER}.linear_attn.conv1d", f"{LAYER}.mlp.gate",
            "model.visual.blocks.0.attn.q_proj",
        ],
    }  # fmt: skip
    assert config == CONFIG
    found = ftckpt.verify(str(quantised), level="values")
    assert found.code is ExitCode.OK
    assert "5 weights in block FP8" in ftckpt.inspect(str(quantised)).dialect


def test_torch_reads_what_was_written(quantised: Path, model: Path) -> None:
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    pytest.importorskip("safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(bytes_of(quantised), "model.safetensors")}
    (quantised / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        state = {name: torch.empty(shape) for name, shape in LINEAR.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            reader = QuantizedHuggingFaceStorageReader(
                str(quantised), target_dtype=torch.float32, block_size=128
            )
            load(state, storage_reader=reader)
    finally:
        (quantised / "model.safetensors.index.json").unlink()
    opened = ftckpt.open_checkpoint(str(model))
    for name, found in state.items():
        raw = np.frombuffer(read_tensor(opened, name), np.uint16).astype(np.uint32) << 16
        was = raw.view(np.float32).reshape(LINEAR[name])
        off, block = np.abs(found.numpy() - was), np.empty_like(was)
        for row in range(0, was.shape[0], 128):
            for column in range(0, was.shape[1], 128):
                at = np.s_[row : row + 128, column : column + 128]
                block[at] = np.abs(was[at]).max()
        assert (off <= block * (16 / 448 + 1e-6)).all()


def test_there_and_back_and_there_is_the_same(quantised: Path, tmp_path: Path) -> None:
    for number, (source, dtype) in enumerate((("", "bf16"), ("0", "fp8-block"), ("1", "bf16"))):
        at = quantised if not source else tmp_path / source
        ftckpt.convert(str(at), str(tmp_path / str(number)), "safetensors", dtype=dtype, jobs=1)
    once, again = bytes_of(quantised), bytes_of(tmp_path / "1")
    bias = f"{LAYER}.mlp.gate.e_score_correction_bias"  # --dtype bf16 rounds it
    assert {**again, bias: b""} == {**once, bias: b""}
    assert bytes_of(tmp_path / "2") == bytes_of(tmp_path / "0")


def test_the_answer_says_what_it_did(model: Path, tmp_path: Path) -> None:
    words = ("convert", model, tmp_path / "out", "--to", "safetensors", "--dtype", "fp8-block")
    result, document = answer(*words)
    assert result.code is ExitCode.OK
    assert sorted(document["quantised"]) == sorted(LINEAR)
    assert 0.03 < document["deviation"]["largest"] <= 16 / 448 + 1e-6
    assert document["deviation"]["tensor"] in LINEAR


def test_patterns_say_what_names_do_not(model: Path, tmp_path: Path) -> None:
    words = ("convert", model, tmp_path / "out", "--to", "safetensors", "--dtype", "fp8-block")
    chosen = ("--unquantised", f"{LAYER}.self_attn.*", "--quantised", "*.mlp.gate")
    _, document = answer(*words, *chosen)
    gate = f"{LAYER}.mlp.gate.weight"
    assert sorted(document["quantised"]) == sorted([gate, *(n for n in LINEAR if "attn" not in n)])
    assert f"{LAYER}.self_attn.q_proj" in document["unquantised"]


def test_a_state_of_float32_is_rounded_once(tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.up_proj.weight"
    made = {
        name: single(fp8_weight("one")), "lm_head.weight": single(values((8, 256), 1)),
        "model.norm.weight": single(values((256,), 2)),
    }  # fmt: skip
    base = folder(tmp_path / "base", made, torch_dtype="float32")
    ftckpt.convert(str(base), str(tmp_path / "out"), "safetensors", dtype="fp8-block")
    opened = ftckpt.open_checkpoint(str(tmp_path / "out"))
    assert digests(str(tmp_path / "out"), name) == GOLDEN["fp8 one"][:1]
    assert opened.tensors["lm_head.weight"].dtype.name == "bfloat16"
    assert opened.tensors["model.norm.weight"].dtype.name == "float32"
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_block_too_small_for_a_scale_becomes_zero(tmp_path: Path) -> None:
    name, tiny = f"{LAYER}.mlp.up_proj.weight", np.full((128, 128), 2.0**-125, np.float32)
    base = folder(tmp_path / "base", {name: single(tiny)}, torch_dtype="float32")
    ftckpt.convert(str(base), str(tmp_path / "out"), "safetensors", dtype="fp8-block")
    held = bytes_of(tmp_path / "out")
    assert not any(held[name])
    assert held[f"{name}_scale_inv"] == np.float32(1).tobytes()


def test_parts_make_the_same(model: Path, quantised: Path, tmp_path: Path) -> None:
    words = ("convert", model, tmp_path / "out", "--to", "safetensors", "--dtype", "fp8-block")
    result, document = in_parts(2, tmp_path / "parts", *words, "--max-shard-size", "100000")
    assert result.code is ExitCode.OK
    _, whole = answer(*words[:2], tmp_path / "alone", *words[3:], "--max-shard-size", "100000")
    assert document["deviation"] == whole["deviation"]
    assert bytes_of(tmp_path / "out") == bytes_of(quantised)


def changed(model: Path, to: Path, change: Any, **config: Any) -> str:
    held = {}
    for name, shape in (LINEAR | OTHERS).items():
        size = 4 if name.endswith("_bias") else 2
        raw = np.frombuffer(bytes_of(model)[name], f"<u{size}").reshape(shape).copy()
        held[name] = ("F32" if size == 4 else "BF16", raw)
    change(held)
    return str(folder(to, held, **(CONFIG | config)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.update({"a.magic.weight": half(values((8, 8), 1))}), UsageError, "magic"),
        (lambda t: [t.pop(name) for name in LINEAR], UsageError, "nothing to quantise"),
        (
            lambda t: t[f"{LAYER}.self_attn.k_proj.weight"][1].__setitem__((129, 3), 0x7FC0),
            CorruptError,
            "k_proj.weight has values that are NaN",
        ),
        (
            lambda t: t[f"{LAYER}.self_attn.q_proj.weight"][1].__setitem__((0, 3), 0xFF80),
            CorruptError,
            "q_proj.weight has values that are NaN",
        ),
    ],
    ids=["an unknown name", "no linear weight", "a NaN", "an infinity"],
)
def test_what_cannot_be_quantised_is_refused(
    model: Path, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    base = changed(model, tmp_path / "base", change)
    with pytest.raises(error, match=message):
        ftckpt.convert(base, str(tmp_path / "out"), "safetensors", dtype="fp8-block", jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "dcp"}, "folder of safetensors"),
        ({"to": "safetensors", "unquantised": ["nothing*"]}, "matches no matrix"),
        ({"to": "safetensors", "dtype": "bf16", "quantised": ["x"]}, "say which weights"),
        ({"to": "safetensors", "quantised": ["*k_proj"], "unquantised": ["*k_proj"]}, "both match"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ftckpt.convert(str(model), str(tmp_path / "out"), **({"dtype": "fp8-block"} | options))


def test_a_folder_that_cannot_say_it_is_refused(model: Path, tmp_path: Path) -> None:
    bare = folder(tmp_path / "bare", {f"{LAYER}.mlp.up_proj.weight": single(fp8_weight("one"))})
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        ftckpt.convert(str(bare), str(tmp_path / "out"), "safetensors", dtype="fp8-block")
    assert "--beside" in caught.value.hint
    ftckpt.convert(
        str(bare), str(tmp_path / "out"), "safetensors", dtype="fp8-block", beside=str(model)
    )
    assert "quantised by fp8" in ftckpt.inspect(str(tmp_path / "out")).dialect


def test_a_training_state_is_refused(tmp_path: Path) -> None:
    run = Path(__file__).parents[2] / "data" / "run" / "step-2"
    with pytest.raises(UsageError, match="weights alone") as caught:
        ftckpt.convert(str(run), str(tmp_path / "out"), "safetensors", dtype="fp8-block")
    assert caught.value.hint == "--only model"


def test_other_models_have_no_mxfp4(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="qwen3_moe"):
        ftckpt.convert(str(model), str(tmp_path / "out"), "safetensors", dtype="mxfp4")


def test_memory_that_is_too_small_is_said_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(NoResourceError, match="quantising"):
        ftckpt.convert(str(model), out, "safetensors", dtype="fp8-block", max_memory="1MiB")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_goes_on_and_never_with_other_weights(model: Path, tmp_path: Path) -> None:
    from tests.killing import KILLED, run_until

    out = tmp_path / "out"

    def run(**more: Any) -> None:
        ftckpt.convert(
            str(model), str(out), "safetensors", dtype="fp8-block", jobs=1,
            max_shard_size=100_000, **more,
        )  # fmt: skip

    for point in range(12, 60, 4):
        assert run_until(run, point) == KILLED
        if len(list(tmp_path.rglob("*.safetensors"))) > 1:
            break
    from ftckpt.errors import RefusedError

    with pytest.raises(RefusedError, match="another"):
        run(unquantised=["*q_proj"])
    run()
    fresh = tmp_path / "fresh"
    ftckpt.convert(str(model), str(fresh), "safetensors", dtype="fp8-block", max_shard_size=100_000)
    assert bytes_of(out) == bytes_of(fresh)


SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 64,
        "num_experts_per_tok": 2, "num_key_value_heads": 2,
    },
    "gpt_oss": {
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_as_the_weights_that_it_stands_for(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "base")
    scheme = "mxfp4" if name == "gpt_oss" else "fp8-block"
    for source, out, dtype in (("base", "codes", scheme), ("codes", "back", "bf16")):
        ftckpt.convert(str(tmp_path / source), str(tmp_path / out), "safetensors", dtype=dtype)
    tokens, logits = torch.arange(12)[None], []
    for one in ("codes", "back"):
        model, lost = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / one, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(lost.values())
        with torch.no_grad():
            logits.append(model.eval()(tokens).logits)
    assert torch.equal(*logits)


def test_damage_of_the_source_is_found_although_its_values_are_only_computed_with(
    model: Path, tmp_path: Path
) -> None:
    """The new file's checksums would hide it."""
    stored = tmp_path / "one.pt"
    ftckpt.convert(str(model), str(stored), "torchsave", jobs=1)
    for beside in tmp_path.glob("*.json"):
        beside.unlink()
    data = bytearray(stored.read_bytes())
    data[data.index(bytes_of(model)[f"{LAYER}.self_attn.o_proj.weight"])] ^= 1
    stored.write_bytes(data)
    with pytest.raises(CorruptError, match="o_proj"):
        ftckpt.convert(
            str(stored), str(tmp_path / "out"), "safetensors", dtype="fp8-block",
            beside=str(model), jobs=1,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
