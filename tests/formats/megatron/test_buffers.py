"""The layout of Megatron's flat buffers: the rules, and buffers that Megatron itself wrote."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.dcp.reader import DcpCheckpoint, open_dcp
from ftckpt.formats.megatron.optimizer.read_distrib_optim import (
    Buffer,
    Parameter,
    Slot,
    by_dtype,
    default_limit,
    lay_out,
    padded,
)
from ftckpt.formats.torchsave import TorchSave
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.archives import extract
from tests.conformance.formats import open_path

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
BF16, FP32 = DTYPES["bfloat16"], DTYPES["float32"]


def parameters(*sizes: int, shared: tuple[int, ...] = ()) -> list[Parameter]:
    return [Parameter(f"p{i}", (n,), BF16, i in shared) for i, n in enumerate(sizes)]


def test_the_last_registered_comes_first_and_each_starts_aligned() -> None:
    laid = lay_out([Parameter("a", (5, 20), BF16), *parameters(3, 64)])
    assert laid == Buffer(
        {"p1": Slot(0, 0, 64), "p0": Slot(0, 64, 3), "a": Slot(0, 128, 100)}, (228,)
    )
    assert laid.unpadded == 228


def test_a_bucket_closes_when_it_is_full_and_the_next_starts_at_its_padded_end() -> None:
    laid = lay_out(parameters(10, 100, 50, 70), limit=120)
    # 70 and then 50 from 128: 178 elements, which is enough; 100 and then 10 from 128.
    assert laid.buckets == (178, 138)
    assert laid.slots["p1"] == Slot(1, 0, 100)
    assert laid.starts() == {"p3": 0, "p2": 128, "p1": 178, "p0": 178 + 128}


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    laid = lay_out(parameters(30, 100, 50, shared=(1,)))
    # The bucket before it is counted to where it would have started.
    assert laid.buckets == (64, 100, 30)
    assert [slot.bucket for slot in laid.slots.values()] == [0, 1, 2]
    assert lay_out(parameters(5, shared=(0,))).buckets == (5,)


def test_recorded_sizes_close_buckets_and_one_that_does_not_fit_shows() -> None:
    three = parameters(10, 100, 50)
    assert lay_out(three, limit=(50, 138)).buckets == (50, 138)
    assert lay_out(three, limit=(164, 10)).buckets == (164, 10)
    assert lay_out(three, limit=(51, 138)).buckets == (164, 10)


def test_every_element_type_has_a_buffer() -> None:
    mixed = [Parameter("a", (1,), FP32), *parameters(2, 3), Parameter("b", (4,), FP32)]
    assert [[p.name for p in group] for group in by_dtype(mixed)] == [["a", "b"], ["p0", "p1"]]


def test_padding_lets_ranks_own_equal_parts() -> None:
    assert padded(153_664, 2) == 153_728
    assert padded(1, 3) == 384
    assert padded(1, 2, wide=True) == 65_536
    assert (default_limit(2), default_limit(64)) == (40_000_000, 64_000_000)


@given(
    sizes=st.lists(st.integers(1, 400), max_size=30),
    limit=st.none() | st.integers(1, 900),
    shared=st.sets(st.integers(0, 29)),
)
def test_every_parameter_has_a_place_of_its_own(
    sizes: list[int], limit: int | None, shared: set[int]
) -> None:
    laid = lay_out(parameters(*sizes, shared=tuple(shared)), limit)
    assert list(laid.slots) == [f"p{i}" for i in reversed(range(len(sizes)))]
    end, bucket = 0, 0
    for name, slot in laid.slots.items():
        number = int(name[1:])
        assert slot.length == sizes[number]
        if slot.bucket > bucket:
            assert slot.bucket == bucket + 1
            assert slot.start == 0
            closed = laid.buckets[bucket]
            assert closed - end < 64
            assert closed == end or number in shared
            bucket = slot.bucket
        else:
            assert 0 <= slot.start - end < 64
            assert slot.start % 64 == 0
            assert limit is None or end < limit
        end = slot.start + slot.length
    assert laid.buckets[bucket:] == ((end,) if sizes else ())
    # The sizes of its buckets alone give the layout again.
    assert lay_out(parameters(*sizes, shared=tuple(shared)), laid.buckets) == laid


def unpack(name: str, to: Path) -> Path:
    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"no real checkpoints at {ARCHIVES}")
    extract(archive, to)
    return to / name / "ckpt" / "iter_0000003"


def numbers(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    tensor = checkpoint.tensors[key]
    dtype = getattr(torch, tensor.dtype.name)
    return torch.frombuffer(bytearray(read_tensor(checkpoint, key)), dtype=dtype)


def test_masters_in_a_real_distrib_optim_are_the_weights(tmp_path: Path) -> None:
    folder = unpack("mcore_torch_tp2dp2_distopt_bf16", tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):
        optimizer = open_path(TorchSave(), folder / rank / "distrib_optim.pt")
        weights = open_path(TorchSave(), folder / rank / "model_optim_rng.pt")
        held = [
            Parameter(t.name, t.shape, t.dtype)
            for t in weights.tensors.values()
            if t.component == "model"
        ]
        laid = lay_out(held)
        master = numbers(optimizer, "<tuple>.param")  # 0 is the key of the only buffer
        assert laid.unpadded == len(master)
        for name, start in laid.starts().items():
            weight = numbers(weights, name)
            assert torch.equal(master[start : start + len(weight)].bfloat16(), weight), name


def test_masters_in_real_buckets_are_the_weights(tmp_path: Path) -> None:
    place = unpack("mcore0161_tp2dp2_dpreshard", tmp_path)
    stored = open_dcp(Source.directory(open_store(str(place))), DcpCheckpoint)
    # In the order of registration, on the first of two tensor-parallel ranks.
    local: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (500, 64),
        **{
            f"decoder.layers.{layer}.{name}": shape
            for layer in range(4)
            for name, shape in (
                ("self_attention.linear_qkv.layer_norm_weight", (64,)),
                ("self_attention.linear_proj.weight", (64, 32)),
                ("self_attention.linear_qkv.weight", (64, 64)),
                ("mlp.linear_fc1.layer_norm_weight", (64,)),
                ("mlp.linear_fc1.weight", (168, 64)),
                ("mlp.linear_fc2.weight", (64, 84)),
            )
        },
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (500, 64),
    }
    laid = lay_out([Parameter(name, shape, BF16) for name, shape in local.items()])
    assert laid.buckets == (153_664,)
    assert laid.unpadded == sum(map(prod, local.values()))
    master = numbers(
        stored,
        "optimizer:distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16)"
        ".bucket_idx_0.param",
    )
    starts = laid.starts()
    for name, start in starts.items():
        values = master[start : start + prod(local[name])].bfloat16().reshape(local[name])
        parts = name.split(".")
        if parts[1] == "layers":
            weight = numbers(stored, ".".join(parts[:2] + parts[3:]))
            weight = weight.reshape(4, -1)[int(parts[2])]
        else:
            weight = numbers(stored, name)
        if len(local[name]) == 1:
            rows = weight
        elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            rows = weight.reshape(64, -1)[:, : local[name][1]]
        elif name.endswith("linear_fc1.weight"):
            whole = weight.reshape(336, 64)
            rows = torch.cat([whole[:84], whole[168:252]])
        else:
            rows = weight.reshape(-1, 64)[: local[name][0]]
        assert torch.equal(values, rows), name
