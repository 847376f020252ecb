"""MaxText's models, saved by Orbax over 8 devices, as Hugging Face folders.

`tests/data/orbax/make_maxtext.py` ran MaxText's own forward pass in JAX. Where transformers is
installed its logits must agree to the last bit of bfloat16; elsewhere the digest of the weights
that it has judged must.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import FtckptError, UnsupportedError, UsageError
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "orbax"
MODELS = ("llama31", "llama", "mixtral", "qwen3", "qwen2", "gemma2", "gemma3")
JUDGED = json.loads((DATA / "maxtext_judged.json").read_text())
FAMILY = {"llama31": "llama3.1"}


def said(name: str) -> Any:
    return json.loads((DATA / f"maxtext_{name}.json").read_text())


def place_of(name: str) -> Path:
    return DATA / f"maxtext_{name}" / "100"


def convert(source: Path, to: Path, config: Any, **options: Any) -> Path:
    file = to.with_suffix(".config")
    file.write_text(json.dumps(config))
    options = {"names": "hf", "only": "model"} | options
    api.convert(str(source), str(to), "safetensors", config=str(file), **options)
    return to


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    to = tmp_path_factory.mktemp("hf") / name
    return convert(place_of(name), to, said(name)["config"], family=FAMILY.get(name, ""))


def test_the_weights_are_those_that_transformers_has_judged(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == JUDGED[folder.name]
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("torch_dtype") in ("float32", "bfloat16")
    assert config == said(folder.name)["config"]


def test_transformers_gives_the_logits_of_jax(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        found = model(torch.tensor([said(folder.name)["tokens"]])).logits[0]
    wanted = torch.tensor(said(folder.name)["logits"])
    # Two orders of float32 sums: each is within the last bit of bfloat16 of the other.
    bits = [values.bfloat16().view(torch.int16).int() for values in (found, wanted)]
    assert int((bits[0] - bits[1]).abs().max()) <= 1
    assert float((found - wanted).abs().max()) < 2e-5


def arrays_of(place: Path) -> dict[str, Any]:
    """Read whole arrays as float32, which shares nothing with views."""
    import numpy as np

    found = {}
    checkpoint = open_checkpoint(place)
    for key, info in checkpoint.tensors.items():
        raw = read_tensor(checkpoint, key)
        if info.dtype.name == "bfloat16":
            raw = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).tobytes()
        if info.dtype.name in ("bfloat16", "float32"):
            found[key.removeprefix("params.")] = np.frombuffer(raw, np.float32).reshape(info.shape)
    return found


def layer_of(name: str, arrays: dict[str, Any], key: str, number: int) -> Any:
    """Return an array of one layer, wherever MaxText keeps it."""
    if name == "gemma2":
        top, dot, rest = key.partition(".")
        side = ("local", "global")[number % 2]
        return arrays[f"decoder.layers.{top}_{side}{dot}{rest}"][:, number // 2]
    if name == "gemma3" and number >= 6:
        return arrays[f"decoder.layers_remainder.layers_{number - 6}.{key}"]
    if name == "gemma3":
        return arrays[f"decoder.layers.layers_{number}.{key}"][:, 0]
    stacked = f"decoder.layers.{key}"
    return (
        arrays[stacked][:, number]
        if stacked in arrays
        else arrays[f"decoder.layers_{number}.{key}"]
    )


def test_every_element_is_where_maxtext_says(folder: Path) -> None:
    import numpy as np

    name = folder.name
    config = said(name)["config"]
    arrays, held = arrays_of(place_of(name)), arrays_of(folder)
    hidden = config["hidden_size"]
    for number in range(config["num_hidden_layers"]):
        for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel = layer_of(name, arrays, f"self_attention.{theirs}.kernel", number)
            if name == "llama31" and ours in "qk":
                kernel = np.concatenate([kernel[..., ::2], kernel[..., 1::2]], -1)
            if ours == "q" and not name.startswith(("qwen", "gemma3")):
                width = config.get("query_pre_attn_scalar", kernel.shape[-1])
                kernel = kernel * np.sqrt(np.float32(width))
            found = held[f"model.layers.{number}.self_attn.{ours}_proj.weight"]
            assert np.array_equal(found, kernel.reshape(hidden, -1).T)
        kernel = layer_of(name, arrays, "self_attention.out.kernel", number)
        found = held[f"model.layers.{number}.self_attn.o_proj.weight"]
        assert np.array_equal(found, kernel.reshape(-1, hidden).T)
        if name.startswith("gemma"):
            scale = layer_of(name, arrays, "post_ffw_norm.scale", number)
            found = held[f"model.layers.{number}.post_feedforward_layernorm.weight"]
            assert np.array_equal(found, scale - 1)
    if name.startswith("gemma"):
        table = arrays["token_embedder.embedding"][: config["vocab_size"]]
        assert np.array_equal(held["model.embed_tokens.weight"], table / np.float32(4))


def test_gemmas_layers_by_their_numbers(tmp_path: Path) -> None:
    """`scan_layers=false`: two layers of Gemma 2 are still one of MaxText's."""
    from safetensors.numpy import save_file

    arrays = {}
    for key, array in arrays_of(place_of("gemma2")).items():
        if not key.startswith("decoder.layers."):
            arrays[f"params.{key}"] = array
            continue
        for number in range(array.shape[1]):
            name = key.replace("layers.", f"layers_{number}.", 1)
            arrays[f"params.{name}"] = array[:, number].copy()
    save_file(arrays, tmp_path / "model.safetensors")
    to = convert(tmp_path / "model.safetensors", tmp_path / "hf", said("gemma2")["config"])
    judged = hashlib.sha256((to / "model.safetensors").read_bytes()).hexdigest()
    assert judged == JUDGED["gemma2"]


def test_the_type_is_what_config_says(tmp_path: Path) -> None:
    convert(
        place_of("llama31"), tmp_path / "hf", said("llama31")["config"],
        family="llama3.1", dtype="bf16",
    )  # fmt: skip
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    types = {info.dtype.name for info in open_checkpoint(tmp_path / "hf").tensors.values()}
    assert types == {"bfloat16"}


def test_it_goes_over_safetensors_too(tmp_path: Path) -> None:
    """Plain files are read by strides; of compressed chunks each layer undoes all."""
    api.convert(str(place_of("mixtral")), str(tmp_path / "raw"), "safetensors", only="model")
    to = convert(tmp_path / "raw", tmp_path / "hf", said("mixtral")["config"])
    raw = (to / "model.safetensors").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == JUDGED["mixtral"]


def _with(**fields: Any) -> Callable[[Any], Any]:
    return lambda config: {**config, **fields}


REFUSED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any], type[FtckptError], str]] = {
    "the rotation": ("llama31", _with(), {"family": ""}, UsageError, "rotates"),
    "another family": ("qwen3", _with(), {"family": "llama"}, UsageError, "not a llama"),
    "moments": ("llama31", _with(), {"only": ""}, UnsupportedError, "only weights"),
    "heads": ("qwen3", _with(num_attention_heads=8), {}, UsageError, "has the shape"),
    "layers": ("qwen3", _with(num_hidden_layers=3), {}, UsageError, "has the shape"),
    "a layer too many": ("llama", _with(num_hidden_layers=1), {}, UsageError, "is of layer 1"),
    "a layer too few": ("llama", _with(num_hidden_layers=3), {}, UsageError, "becomes"),
    "an odd number of layers that are paired": (
        "gemma2", _with(num_hidden_layers=5), {}, UsageError, r"becomes model\.layers\.4\.",
    ),
    "layers that are left over, too many": (
        "gemma3", _with(num_hidden_layers=7), {}, UsageError, "is of layer 7",
    ),
    "another pattern of layers": (
        "gemma3", _with(num_hidden_layers=14), {}, UsageError, "has the shape",
    ),
    "an output that is not tied": (
        "qwen3", _with(tie_word_embeddings=False), {}, UsageError, "lm_head",
    ),
    "a table without MaxText": (
        "qwen3", _with(model_type="gpt2", num_attention_heads=4), {}, UnsupportedError, "no table",
    ),
    "an array too many": (
        "qwen3", _with(model_type="llama"), {}, UnsupportedError, "no array that MaxText calls",
    ),
    "an array that was dropped": (
        "qwen3", _with(), {"drop": ["params.decoder.layers.mlp.wo.kernel"]}, UsageError, "becomes",
    ),
    "nothing of the model": ("qwen3", lambda config: {}, {}, UsageError, "do not say"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    name, change, options, error, says = REFUSED[case]
    options = {"family": FAMILY.get(name, "")} | options
    with pytest.raises(error, match=says):
        convert(place_of(name), tmp_path / "hf", change(said(name)["config"]), **options)
    assert not (tmp_path / "hf").exists()


def test_a_config_is_for_maxtext_alone(tmp_path: Path) -> None:
    shutil.copytree(DATA / "adamw", tmp_path / "3")
    with pytest.raises(UnsupportedError, match="no parameter that Megatron calls"):
        convert(tmp_path / "3", tmp_path / "hf", said("llama")["config"])


def test_rows_of_padding_are_listed(tmp_path: Path) -> None:
    """MaxText pads its vocabulary; what is left out is said, and the flag goes before the file."""
    config = said("qwen3")["config"]
    rows = config["vocab_size"]
    (tmp_path / "c.json").write_text(json.dumps({**config, "vocab_size": rows - 3}))
    for flags in ([], ["--true-vocab-size", str(rows - 5)]):
        report = ftckpt_json(
            "convert", str(place_of("qwen3")), str(tmp_path / f"hf{len(flags)}"), "--to",
            "safetensors", "--names", "hf", "--only", "model", "--config",
            str(tmp_path / "c.json"), *flags,
        )  # fmt: skip
        left = 5 if flags else 3
        words = f"{left} rows of padding of the vocabulary in params.token_embedder.embedding"
        assert words in report["dropped"]
        held = open_checkpoint(tmp_path / f"hf{len(flags)}").tensors
        assert held["model.embed_tokens.weight"].shape[0] == rows - left
        found = json.loads((tmp_path / f"hf{len(flags)}/config.json").read_text())
        assert found["vocab_size"] == rows - left
