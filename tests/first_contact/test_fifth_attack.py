"""A fifth attack: flipped bits that a framework fails on, and files that take all memory."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ftckpt import verify
from ftckpt.commands.cli.render import printable
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    NewerWriterError,
    NoResourceError,
    UnsafeError,
)
from ftckpt.formats.dcp.records import TABLE
from ftckpt.formats.huggingface.index import parse_index
from ftckpt.formats.orbax.zarr import parse_array
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.safetensors.header import parse_header
from ftckpt.verification.places import PlaceReport
from ftckpt.workers import budget
from tests.first_contact.lines import printed
from tests.formats.megatron.torch_dist.test_reader import torch_dist

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"


def checked(place: Path) -> PlaceReport:
    found = verify(str(place), level="content")
    assert isinstance(found, PlaceReport)
    return found


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"common_backend"', '"common_bacKend"', ExitCode.CORRUPT),
        ('"sharded_backend_version"', '"sharded_backend_versi/n"', ExitCode.CORRUPT),
        ('"torch"', '"tosch"', ExitCode.CORRUPT),
        ('"common_backend_version": 1', '"common_backend_version": 2', ExitCode.UNSUPPORTED),
        ('"common_backend_version": 1', '"common_backend_version": "1"', ExitCode.UNSUPPORTED),
        ('"common_backend_version": 1', '"later": 1', ExitCode.UNSUPPORTED),
    ],
)
def test_what_megatron_does_not_load_by_metadata_json(
    old: str, new: str, code: ExitCode, tmp_path: Path
) -> None:
    step = torch_dist(tmp_path / "iter_0000003", {"decoder.weight": torch.zeros(4, 2)})
    file = step / "metadata.json"
    usual = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1,
        "common_backend": "torch", "common_backend_version": 1,
    }  # fmt: skip
    text = json.dumps(usual)
    assert old in text
    torch.save({"iteration": 3}, step / "common.pt")
    file.write_text(text)
    assert checked(step).code is ExitCode.OK
    file.write_text(text.replace(old, new))
    assert checked(step).code is code


def other_stage(tree: dict[str, Any]) -> None:
    tree["optimizer_state_dict"]["zero_stage"] = 2


def nothing(tree: dict[str, Any]) -> None:
    pass


def no_stage(tree: dict[str, Any]) -> None:
    del tree["optimizer_state_dict"]["zero_stage"]


def no_groups(tree: dict[str, Any]) -> None:
    tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"] = 5


def odd_buffers(tree: dict[str, Any]) -> None:
    tree["buffer_names"] = 5


def odd_frozen(tree: dict[str, Any]) -> None:
    tree["frozen_param_shapes"] = []


@pytest.mark.parametrize(
    ("file", "change", "code"),
    [
        ("*zero_pp_rank_1_mp_rank_00_optim_states.pt", nothing, ExitCode.OK),
        ("mp_rank_00_model_states.pt", nothing, ExitCode.OK),
        ("*zero_pp_rank_1_mp_rank_00_optim_states.pt", other_stage, ExitCode.CORRUPT),
        ("*zero_pp_rank_1_mp_rank_00_optim_states.pt", no_stage, ExitCode.CORRUPT),
        ("*zero_pp_rank_1_mp_rank_00_optim_states.pt", no_groups, ExitCode.UNSUPPORTED),
        ("mp_rank_00_model_states.pt", odd_buffers, ExitCode.UNSUPPORTED),
        ("mp_rank_00_model_states.pt", odd_frozen, ExitCode.UNSUPPORTED),
    ],
)
def test_what_zero_to_fp32_does_not_load(
    file: str, change: Callable[[dict[str, Any]], None], code: ExitCode, tmp_path: Path
) -> None:
    step = Path(shutil.copytree(DEEPSPEED / "z1" / "global_step2", tmp_path / "global_step2"))
    (one,) = step.glob(file)
    tree = torch.load(one, weights_only=False, pickle_module=Lenient)
    change(tree)
    torch.save(tree, one)
    assert checked(step).code is code


class Stood:
    """Stands for a class of DeepSpeed's."""

    def __new__(cls, *_: object) -> Stood:
        """Take any arguments."""
        return super().__new__(cls)


class Lenient(pickle.Pickler):
    """Loads what names DeepSpeed, which is in no environment of the tests."""

    class Unpickler(pickle.Unpickler):
        """Gives numbers and records for DeepSpeed's own."""

        def find_class(self, module: str, name: str) -> Any:
            """Return a class, or what stands for DeepSpeed's."""
            if module.startswith("deepspeed"):
                return int if name == "ZeroStageEnum" else Stood
            return super().find_class(module, name)

    @staticmethod
    def load(file: Any, **given: Any) -> Any:
        """Load a pickle."""
        return Lenient.Unpickler(file, **given).load()


def test_a_record_of_torch_is_no_key() -> None:
    chunk = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81"
    data = b"\x80\x02}(" + chunk + b"K\x01u."
    with pytest.raises(TypeError):
        pickle.loads(data)
    with pytest.raises(CorruptError, match="unhashable"):
        load(data, file=".metadata", table=TABLE)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def hugging_face(place: Path, config: dict[str, Any]) -> Path:
    """Save the weights of a small Llama beside a configuration."""
    place.mkdir()
    layer = {
        "input_layernorm": (8,), "self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8),
        "self_attn.v_proj": (8, 8), "self_attn.o_proj": (8, 8), "post_attention_layernorm": (8,),
        "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16),
    }  # fmt: skip
    shapes = {f"model.layers.{n}.{name}": shape for n in (0, 1) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (32, 8), "model.norm": (8,), "lm_head": (32, 8)}
    tensors = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


def renamed(old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in CONFIG.items()}


@pytest.mark.parametrize(
    "config",
    [
        renamed("num_hidden_layers", "num_hidden_layErs"),
        renamed("hidden_size", "hiddun_size"),
        renamed("model_type", "model\x7ftype"),
        CONFIG | {"model_type": "llamA"},
        CONFIG | {"hidden_act": "shlu"},
    ],
)
def test_a_flipped_bit_in_a_configuration(config: dict[str, Any], tmp_path: Path) -> None:
    whole = verify(str(hugging_face(tmp_path / "whole", CONFIG)))
    assert whole.code is ExitCode.OK
    assert not any(one.severity == "warning" for one in whole.findings)
    found = verify(str(hugging_face(tmp_path / "flipped", config)))
    assert found.code is ExitCode.CORRUPT


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"hidden_size": "8"},
        CONFIG | {"intermediate_size": -16},
        CONFIG | {"num_hidden_layers": 2.5},
    ],
)
def test_a_size_that_is_none_is_told(config: dict[str, Any], tmp_path: Path) -> None:
    found = verify(str(hugging_face(tmp_path / "odd", config)))
    assert any("which is not a size" in one.message for one in found.findings)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"model_type": "qwen7"},  # a later version, not a flipped bit
        CONFIG | {"hidden_sizes": [8], "head_dim": None},
    ],
)
def test_other_configurations_are_no_damage(config: dict[str, Any], tmp_path: Path) -> None:
    assert verify(str(hugging_face(tmp_path / "other", config))).code is ExitCode.OK


def test_an_index_whose_metadata_has_another_name() -> None:
    whole = b'{"metadata": {"total_size": 4}, "weight_map": {"w": "model.safetensors"}}'
    assert parse_index(whole, "index.json").total_size == 4
    with pytest.raises(CorruptError, match="one bit from metadata"):
        parse_index(whole.replace(b'"metadata"', b'"mepadata"'), "index.json")
    bare = b'{"weight_map": {"w": "model.safetensors"}}'
    assert parse_index(bare, "index.json").total_size is None


ARRAY = {
    "zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<f4", "order": "C", "filters": None,
    "fill_value": None, "compressor": {"id": "zstd", "level": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"order": "C", ', ""),
        ('"filters": null, ', ""),
        ('"zarr_format": 2, ', ""),
        ('"fill_value": null, ', ""),
        ('"fill_value": null', '"fill_value": []'),
        ('"fill_value": null', '"fill_value": ""'),
        ('"level": 1', '"level": "1"'),
    ],
)
def test_an_array_that_tensorstore_does_not_open(old: str, new: str) -> None:
    text = json.dumps(ARRAY)
    assert parse_array(text.encode(), ".zarray", 2).shape == (4,)
    assert old in text
    with pytest.raises(NewerWriterError):
        parse_array(text.replace(old, new).encode(), ".zarray", 2)


def test_a_header_of_metadata_alone() -> None:
    keys = ",".join(f'"{n:x}":""' for n in range(300_000))
    text = f'{{"__metadata__":{{{keys}}}}}'.encode()
    head = struct.pack("<Q", len(text)) + text
    with pytest.raises(UnsafeError, match="keys"):
        parse_header(head, len(head), "model.safetensors")


def test_a_pickle_of_more_values_than_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_budget", 64 << 20)
    data = b"\x80\x04](" + b"}" * 12_000_000 + b"e."
    with pytest.raises(NoResourceError, match="needs more memory") as told:
        load(data, file="data.pkl", table={})
    assert told.value.hint.startswith("--max-memory")


def test_a_name_of_megabytes_is_cut() -> None:
    told = printable(f"error: {'a' * 50_000_000} is missing\x1b")
    assert len(told) < 400
    assert told.startswith("error: aaa")
    assert told.endswith("[... 49999744 characters more] is missing\\x1b")
    path = "/".join(["d" * 200] * 20)
    assert printable(path) == path
    names = ", ".join(f"step-{n}" for n in range(10_000))
    assert printable(names) == names


def test_findings_of_one_kind_are_counted(tmp_path: Path) -> None:
    weights = {f"w{n}": f"model-{n:05d}.safetensors" for n in range(250)}
    index = {"metadata": {"total_size": 1000}, "weight_map": weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    code, told, _ = printed("verify", str(tmp_path))
    assert code == ExitCode.CORRUPT
    assert told.count("error: missing-file: model-") == 100
    assert "error: missing-file: 150 more of this kind (--json has them all)" in told


def test_reasons_of_one_kind_are_counted(tmp_path: Path) -> None:
    for step in range(70):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"\1\2\3")
    code, _, told = printed("latest", str(tmp_path))
    assert code == ExitCode.CORRUPT
    assert told.count("skipped (CORRUPT): /") == 50
    assert "skipped (CORRUPT): 20 more (--json has them all)" in told
