"""Names, rows of stacks, and orders of registration, without any file."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Kind, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import NoResourceError, UnsupportedError
from ftckpt.formats.dcp.records import Chunk, StoredItem
from ftckpt.formats.dcp.tensors import ListedChunks
from ftckpt.formats.megatron.job.registration import expert_of, registrations
from ftckpt.formats.megatron.torch_dist.names import logical, rows_of, shard_shape, spelling
from ftckpt.formats.megatron.torch_dist.optimizer_buckets import unbucketed

FP32 = DTYPES["float32"]


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], number: int = 0) -> Chunk:
    made = Chunk()
    made.offsets, made.sizes = offsets, sizes
    made.item = StoredItem()
    made.item.path, made.item.offset, made.item.length = "__0_0.distcp", number, 1
    made.item.transforms = ()
    return made


def info(name: str, shape: tuple[int, ...], *chunks: Chunk, kind: Kind = Kind.PARAM) -> TensorInfo:
    pieces = ListedChunks(chunks or (chunk((0,) * len(shape), shape),))
    return TensorInfo("model", name, kind, shape, FP32, pieces, name)


@pytest.mark.parametrize(
    ("stored", "axes", "name"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", 1, "decoder.layers.7.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0, "decoder.layers.3.mlp.linear_fc1.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight", 2,
            "decoder.layers.7.mlp.experts.local_experts.8.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc2.weight", 1,
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.11.linear_fc2.weight", 0,
            "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", 1,
         "decoder.layers.7.mlp.shared_experts.linear_fc1.weight"),
        ("embedding.word_embeddings.weight", 0, "embedding.word_embeddings.weight"),
        ("experts", 0, "experts"),
        ("100%d.layers.%s", 1, "100%d.layers.7.%s"),
        ("decoder.layers", 0, "decoder.layers"),
    ],
)  # fmt: skip
def test_leading_axes_become_numbers_of_the_name(stored: str, axes: int, name: str) -> None:
    said = spelling(stored)
    assert said.axes == axes
    assert said.name((7, 8)[:axes]) == name


@given(st.data())
def test_rows_of_a_stack_hold_the_elements_of_the_stack(data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 2))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes + 2)))
    grids = [data.draw(st.sets(st.integers(1, n), max_size=2)) for n in shape]
    edges = [sorted({0, n, *grid}) for n, grid in zip(shape, grids, strict=True)]
    spans = [list(pairwise(e)) for e in edges]
    chunks = [
        chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box), number)
        for number, box in enumerate(_products(spans))
    ]
    whole = np.arange(math.prod(shape)).reshape(shape)
    rows = rows_of(ListedChunks(chunks), shape[:axes])
    assert rows is not None
    for at in np.ndindex(*shape[:axes]):
        row = np.full(shape[axes:], -1)
        for piece in rows[at]:
            offsets, sizes = chunks[piece.extent.offset].offsets, chunks[piece.extent.offset].sizes
            record = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            volume = piece.box.volume
            values = record.reshape(-1)[piece.first : piece.first + volume]
            inner = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
            row[inner] = values.reshape(piece.box.sizes)
        assert (row == whole[at]).all()


def _products(spans: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[]]
    for axis in spans:
        found = [[*box, span] for box in found for span in axis]
    return found


def test_a_chunk_beyond_the_layers_is_left_to_the_checks() -> None:
    kept = logical([info("decoder.layers.w", (2, 3), chunk((1, 0), (2, 3)))])
    assert [(key, i.shape) for key, i in kept.items()] == [("decoder.layers.w", (2, 3))]


def test_absurd_stacks_cost_nothing() -> None:
    kept = logical([info("decoder.layers.w", (1 << 62, 1), chunk((0, 0), (1, 1)))])
    assert list(kept) == ["decoder.layers.w"]
    many = [info(f"decoder.layers.w{i}", (1 << 20, 1), chunk((0, 0), (1, 1))) for i in range(9)]
    with pytest.raises(NoResourceError):
        logical(many)


def test_shards_of_a_grid_must_fill_their_tensor() -> None:
    assert shard_shape((2, 2, 1, 12), (4, 6, 2)) == (2, 3, 2)
    assert shard_shape((2, 2, 1, 12), (4, 6, 4)) is None
    assert shard_shape((3, 2, 1, 12), (4, 6, 2)) is None
    assert shard_shape((0, 2, 12), (0, 6)) is None
    assert shard_shape((4, 6), (4, 6)) is None


LAYER = (
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
)  # fmt: skip


def test_the_first_norm_is_registered_before_or_inside_the_attention() -> None:
    names = [f"decoder.layers.0.{n}" for n in LAYER]
    orders = registrations([*names, "output_layer.weight", "embedding.word_embeddings.weight"])
    norm, projection, *rest = names
    assert [o.layers[0] for o in orders] == [
        (norm, projection, *rest),
        (projection, norm, *rest),
    ]
    assert all(o.before == ("embedding.word_embeddings.weight",) for o in orders)
    assert all(o.after == ("output_layer.weight",) for o in orders)


def test_experts_are_registered_one_by_one_or_by_matrix() -> None:
    stem = "decoder.layers.0.mlp.experts.local_experts"
    names = [f"{stem}.{e}.linear_fc{m}.weight" for e in (0, 10, 9) for m in (2, 1)]
    assert expert_of(names[2]) == 10
    assert expert_of("decoder.layers.0.mlp.shared_experts.linear_fc1.weight") is None
    short = {
        tuple(n.removeprefix(stem + ".").removesuffix(".weight") for n in o.layers[0])
        for o in registrations(names)
    }
    assert short == {
        ("0.linear_fc1", "0.linear_fc2", "9.linear_fc1", "9.linear_fc2", "10.linear_fc1",
         "10.linear_fc2"),
        ("0.linear_fc1", "9.linear_fc1", "10.linear_fc1", "0.linear_fc2", "9.linear_fc2",
         "10.linear_fc2"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.0.mixer.A_log", "mtp.layers.0.eh_proj.weight", "decoder.layers.1.mlp.w"],
)
def test_an_unknown_parameter_is_never_given_a_place(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        registrations([f"decoder.layers.0.{n}" for n in LAYER] + [name])
    assert caught.value.tensor == name


def bucket(cuts: list[int], *, state: str = "exp_avg", dtype: str = "bfloat16") -> TensorInfo:
    """Return a bucket of one group, cut into chunks at `cuts`."""
    name = (
        f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.{dtype}, torch.float32)"
        f".bucket_idx_0.{state}"
    )
    edges = [0, *cuts]
    chunks = [chunk((a,), (b - a,), number) for number, (a, b) in enumerate(pairwise(edges))]
    return info(name, (cuts[-1],), *chunks, kind=Kind.OTHER)


ONE = Topology(tp=1, pp=1)
MODEL = (
    info("embedding.word_embeddings.weight", (8, 16)),
    info("output_layer.weight", (10, 16)),
)


def test_a_bucket_is_given_to_its_parameters() -> None:
    found = unbucketed([bucket([96, 160, 192, 320])], MODEL, ONE)
    assert {key: i.shape for key, i in found.items()} == {
        "exp_avg:output_layer.weight": (10, 16),
        "exp_avg:embedding.word_embeddings.weight": (8, 16),
    }
    first, second = found["exp_avg:output_layer.weight"].pieces
    assert (first.flat, first.first, first.extent.offset) == ((0, 96), 0, 0)
    assert (second.flat, second.first, second.extent.offset) == ((96, 160), 0, 1)
    (last,) = found["exp_avg:embedding.word_embeddings.weight"].pieces
    assert (last.box, last.flat) == (Box((0, 0), (8, 16)), (0, 128))


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        ([160, 300], "no order"),  # the recorded size is another
        ([150, 192, 320], "no order"),  # no chunk ends where the first parameter does
        ([100, 100, 90, 320], "not tiled"),
    ],
)
def test_a_bucket_that_does_not_fit_is_refused(cuts: list[int], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        unbucketed([bucket(cuts)], MODEL, ONE)


def test_two_orders_that_fit_are_refused() -> None:
    stem = "decoder.layers.0.mlp.experts.local_experts"
    model = [info(f"{stem}.{e}.linear_fc{m}.weight", (8, 8)) for e in (0, 1) for m in (1, 2)]
    with pytest.raises(UnsupportedError, match="two orders"):
        unbucketed([bucket([64, 128, 192, 256])], model, ONE)


def test_ranks_that_are_not_known_are_refused() -> None:
    whole = [bucket([160, 192, 320])]
    with pytest.raises(UnsupportedError, match="not recorded"):
        unbucketed(whole, MODEL, Topology(tp=1))
    with pytest.raises(UnsupportedError, match="do not fit the ranks"):
        unbucketed(whole, MODEL, Topology(tp=1, pp=2))
    halves = (chunk((0, 0), (3, 16)), chunk((3, 0), (5, 16)))
    split = info("embedding.word_embeddings.weight", (8, 16), *halves)
    with pytest.raises(UnsupportedError, match="do not show"):
        unbucketed(whole, [split, MODEL[1]], ONE)


def test_parameters_of_two_types_are_refused() -> None:
    mixed = [bucket([320]), bucket([320], state="param", dtype="float32")]
    with pytest.raises(UnsupportedError, match="stored as bfloat16 and float32"):
        unbucketed(mixed, MODEL, ONE)


def test_a_model_that_was_not_saved_gives_no_layout() -> None:
    with pytest.raises(UnsupportedError, match="not in the checkpoint"):
        unbucketed([bucket([320])], [], ONE)
