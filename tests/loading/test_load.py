"""`ftckpt.load` and `state_dict`: a checkpoint in memory, whole or one rank's of another job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

import ftckpt
from ftckpt.errors import CorruptError, UnsupportedError, UsageError
from ftckpt.formats.torch_files.stream import parse_stream
from tests.formats.dcp.fsdp2_loading import require_equal, trained

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("load")
    weights, settings = get_state_dict(*trained())
    dcp.save({"model": weights, "optimizer": settings, "step": 3}, checkpoint_id=str(root / "dcp"))
    return root


def test_the_weights_are_a_dict(saved: Path) -> None:
    truth = trained()[0].state_dict()
    weights = ftckpt.load(str(saved / "dcp"))
    require_equal(weights, dict(truth))
    arrays = ftckpt.load(saved / "dcp", device=None)
    assert {name: array.dtype for name, array in arrays.items()} == {
        name: tensor.numpy().dtype for name, tensor in truth.items()
    }
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, truth[name].numpy())
    half = ftckpt.load(saved / "dcp", dtype="bf16")
    assert torch.equal(half["embed.weight"], truth["embed.weight"].bfloat16())
    with pytest.raises(UnsupportedError) as caught:
        ftckpt.load(saved / "dcp", dtype="bf16", device=None)
    assert "bfloat16" in caught.value.message


def test_the_whole_state_is_nested_as_torch_nests_it(saved: Path) -> None:
    state = ftckpt.open(str(saved / "dcp")).state_dict(only="")
    weights, settings = get_state_dict(*trained())
    require_equal(state["model"], dict(weights))
    require_equal(state["optimizer"]["state"], settings["state"])
    require_equal(state["optimizer"]["param_groups"], settings["param_groups"])
    assert state["step"] == 3


def test_rows_are_those_of_fsdp2(saved: Path) -> None:
    truth = trained()[0].state_dict()
    parts = [ftckpt.load(saved / "dcp", dp=(rank, 4)) for rank in range(4)]
    for name, tensor in truth.items():
        if name == "seen":
            assert all(int(part[name]) == 5 for part in parts)
            continue
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name
    assert [len(part["embed.weight"]) for part in parts] == [4, 4, 4, 1]


def test_numpy_needs_no_torch(saved: Path) -> None:
    script = (
        "import sys, ftckpt\n"
        f"print(len(ftckpt.load({str(saved / 'dcp')!r}, device=None)), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=True, timeout=120, cwd=ROOT)  # fmt: skip
    assert done.stdout == "7 False\n"


def test_a_rank_of_megatron_is_what_reshard_writes(tmp_path: Path) -> None:
    """From a folder of Hugging Face's, by Megatron's names, for tensor rank 1 of 2."""
    torch.manual_seed(3)
    width, inner, rows = 16, 24, 32
    shapes = {
        "model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,),
        "lm_head.weight": (rows, width),
        "model.layers.0.input_layernorm.weight": (width,),
        "model.layers.0.post_attention_layernorm.weight": (width,),
        **{f"model.layers.0.self_attn.{one}_proj.weight": (width, width) for one in "qkvo"},
        "model.layers.0.mlp.gate_proj.weight": (inner, width),
        "model.layers.0.mlp.up_proj.weight": (inner, width),
        "model.layers.0.mlp.down_proj.weight": (width, inner),
    }  # fmt: skip
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({n: torch.randn(s) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16,'
        ' "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 4,'
        ' "num_key_value_heads": 4, "intermediate_size": 24, "rms_norm_eps": 1e-05,'
        ' "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu",'
        ' "tie_word_embeddings": false, "torch_dtype": "float32"}'
    )
    mine = ftckpt.load(folder, names="megatron", tp=(1, 2))
    ftckpt.convert(str(folder), str(tmp_path / "out"), "megatron", names="megatron", tp=2)
    (file,) = (tmp_path / "out").rglob("mp_rank_01/model_optim_rng.pt")
    data = file.read_bytes()
    stream = parse_stream(lambda at, n: data[at : at + n], len(data), file=file.name)
    wrote = stream.tree["model"]
    assert mine.keys() == wrote.keys()
    compared = 0
    for name, ref in wrote.items():
        if not torch.is_tensor(mine[name]):
            continue
        place = ref.span(stream.storages)
        raw = bytearray(data[place.offset : place.offset + place.length])
        want = torch.frombuffer(raw, dtype=mine[name].dtype).view(ref.shape)
        assert torch.equal(mine[name], want), name
        compared += 1
    assert compared >= 8
    assert ftckpt.load(folder)["lm_head.weight"].shape == (32, 16)


def test_a_table_of_rules_cuts_any_model(tmp_path: Path) -> None:
    tensors = {"up.weight": torch.randn(8, 4), "down.weight": torch.randn(4, 8),
               "norm.weight": torch.randn(4), "gate_up.weight": torch.randn(8, 4)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'family = "own"\n[[rule]]\nnames = ["up.*"]\nsplit = 0\n[[rule]]\nnames = ["down.*"]\n'
        'split = 1\n[[rule]]\nnames = ["norm.*"]\nsplit = "replicated"\n[[rule]]\n'
        'names = ["gate_up.*"]\nsplit = 0\nblocks = [1, 1]\n'
    )
    mine = ftckpt.load(tmp_path / "model.safetensors", rules=str(rules), tp=(1, 2))
    assert torch.equal(mine["up.weight"], tensors["up.weight"][4:])
    assert torch.equal(mine["down.weight"], tensors["down.weight"][:, 4:])
    assert torch.equal(mine["norm.weight"], tensors["norm.weight"])
    fused = tensors["gate_up.weight"]
    assert torch.equal(mine["gate_up.weight"], torch.cat([fused[2:4], fused[6:]]))


def test_what_cannot_be_granted_is_said(saved: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ftckpt.load(saved / "dcp", tp=(0, 2))
    assert "rules=" in caught.value.hint
    with pytest.raises(UsageError):
        ftckpt.load(saved / "dcp", dp=(4, 4))
    with pytest.raises(UsageError):
        ftckpt.load(saved / "dcp", device="tpu")
    with pytest.raises(TypeError):
        ftckpt.load(saved / "dcp", dps=(4, 4))  # type: ignore[call-arg]


def test_damage_is_an_error_here_too(saved: Path, tmp_path: Path) -> None:
    ftckpt.copy(str(saved / "dcp"), str(tmp_path / "bad"))
    (tmp_path / "bad" / "ftckpt.manifest.json").unlink(missing_ok=True)
    opened = ftckpt.open(str(tmp_path / "bad"))
    place = opened.payload(opened.tensors["embed.weight"].pieces[0]).extent
    file = tmp_path / "bad" / place.file
    data = bytearray(file.read_bytes())
    data[place.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        ftckpt.load(tmp_path / "bad")
    assert caught.value.tensor == "embed.weight"
    assert len(ftckpt.load(tmp_path / "bad", level="structure")) == 7


def test_an_adapter_is_merged_on_the_way(tmp_path: Path) -> None:
    from tests.formats.lora.samples import base_of, unpacked

    case = unpacked(tmp_path) / "lora"
    merged = ftckpt.load(str(base_of(case)), adapter=[str(case / "adapter")])
    ftckpt.convert(str(base_of(case)), str(tmp_path / "out"), adapter=[str(case / "adapter")])
    want = ftckpt.load(str(tmp_path / "out"))
    require_equal(merged, want)


@pytest.mark.parametrize(
    ("state", "first"),
    [
        (lambda own: own, "0.weight"),
        (lambda own: {"model": own, "step": 3}, "0.weight"),
        (lambda own: {f"module.{k}": v for k, v in own.items()}, "module.0.weight"),
        (lambda own: {"module": own, "step": 3}, "0.weight"),
        (lambda own: {"net": {f"module.{k}": v for k, v in own.items()}, "step": 3},
         "module.0.weight"),
        (lambda own: {"state_dict": {f"module._orig_mod.{k}": v for k, v in own.items()}, "a": 1},
         "module._orig_mod.0.weight"),
    ],
)  # fmt: skip
def test_names_as_the_trainer_spells_them(tmp_path: Path, state: Any, first: str) -> None:
    own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).state_dict()
    torch.save(state(own), tmp_path / "a.pt")
    with ftckpt.open(tmp_path / "a.pt") as checkpoint:
        bare = checkpoint.state_dict(only="model")
        spelled = checkpoint.state_dict(only="model", names="trainer")
    assert list(bare) == list(own)
    assert next(iter(spelled)) == first
    assert [name.endswith(key) for name, key in zip(spelled, own, strict=True)] == [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(spelled.values(), own.values(), strict=True))


def test_a_compiled_model_takes_the_trainers_names(tmp_path: Path) -> None:
    model = torch.nn.Module()  # as torch.compile wraps one
    model._orig_mod = torch.nn.Linear(3, 4)
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "a.pt")
    checkpoint = ftckpt.open(tmp_path / "a.pt")
    model.load_state_dict(checkpoint.state_dict(names="trainer"))
    with pytest.raises(UsageError, match="whole model"):
        checkpoint.state_dict(only="", names="trainer")
    with pytest.raises(UsageError, match="whole model"):
        checkpoint.state_dict(names="trainer", dp=(0, 2))


def test_a_notebook_shows_a_checkpoint_as_a_table(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a<b.pt")
    shown = ftckpt.open(tmp_path / "a<b.pt")._repr_html_()
    assert shown.startswith("<table>")
    assert "a&lt;b.pt" in shown
    assert shown.count("<tr>") == 5
