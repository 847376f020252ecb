"""Gathering on a torch device gives the same bits as gathering in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.errors import NoResourceError, UsageError
from ftckpt.transfer.content import Content, Shard, ShardBox
from ftckpt.transfer.device import DeviceGatherer, gatherer
from ftckpt.transfer.layout import Elements, Layout, OutputFile
from ftckpt.transfer.read import elements as gathering
from ftckpt.transfer.read.elements import Gatherer
from tests.builders.materialise import shard_bytes
from tests.builders.raw_checkpoint import RawCheckpoint, checkpoints, cut
from tests.campaign import examples

_CASTS = {"bfloat16": "float32", "float32": "bfloat16"}


@pytest.fixture(
    params=["memory", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module"
)
def device(request: pytest.FixtureRequest) -> str:
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@st.composite
def shards(draw: st.DrawFn) -> tuple[RawCheckpoint, Shard]:
    """Draw a shard: all of a tensor or some boxes of it, cast or not."""
    checkpoint, truth = draw(checkpoints())
    content = Content.of(checkpoint)
    key = draw(st.sampled_from(sorted(truth)))
    wanted = content.tensors[key]
    boxes = cut(draw, wanted.shape)[draw(st.integers(0, 1)) :]
    shard = content.shard(wanted.shape, wanted.dtype, [ShardBox(b, key, b) for b in boxes])
    if wanted.dtype.name in _CASTS and draw(st.booleans()):
        dtype = DTYPES[_CASTS[wanted.dtype.name]]
        shard = Shard(shard.shape, dtype, shard.fills)
    return checkpoint, shard


def nan_alike(data: bytes, dtype: str) -> bytes:
    """Return bf16 with one spelling of NaN; anything else as it is.

    torch casts a NaN of contiguous memory to 0xffff and one of strided memory to 0x7fc0 (2.13, on a
    processor), so that the bits say how the elements lay.
    """
    if dtype != "bfloat16":
        return data
    words = np.frombuffer(data, "<u2").copy()
    words[(words & 0x7FFF) > 0x7F80] = 0x7FC0
    return words.tobytes()


@pytest.mark.filterwarnings("ignore:invalid value")
@settings(deadline=None, max_examples=examples(50, 600))
@given(drawn=shards(), data=st.data())
def test_every_range_has_the_same_bits(
    device: str, drawn: tuple[RawCheckpoint, Shard], data: st.DataObject
) -> None:
    checkpoint, shard = drawn
    store = checkpoint.source.store
    store.traits = store.traits._replace(gap=data.draw(st.sampled_from([0, 9, 1 << 20])))
    start = data.draw(st.integers(0, shard.numel))
    stop = data.draw(st.integers(start, shard.numel))
    step = data.draw(st.integers(1, max(1, stop - start)))
    size = shard.dtype.itemsize
    out = bytearray((stop - start) * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "SPAN", data.draw(st.sampled_from([16, 70, 4 << 20])))
        patch.setattr(gathering, "_REGION", data.draw(st.sampled_from([16, 90, 64 << 20])))
        one = Gatherer(checkpoint) if device == "memory" else DeviceGatherer(checkpoint, device)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            part = memoryview(out)[(begin - start) * size : (end - start) * size]
            one.fill(shard, begin, end, part)
        one.close()
    expected = shard_bytes(shard, checkpoint)[start * size : stop * size]
    assert nan_alike(bytes(out), shard.dtype.name) == nan_alike(expected, shard.dtype.name)


def test_spans_are_cut_where_elements_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
    from ftckpt.storage.memory import MemoryStore
    from ftckpt.storage.source import Source

    monkeypatch.setattr(gathering, "SPAN", 200)
    whole = np.arange(10 * 12, dtype="<u4").reshape(10, 12)
    store = MemoryStore("memory://far-apart")
    store.put("f", whole.tobytes())
    dtype = DTYPES["int32"]
    piece = Piece(Box.whole((10, 12)), Extent("f", 0, whole.nbytes))
    infos = {"t": TensorInfo("model", "t", Kind.PARAM, (10, 12), dtype, [piece])}
    checkpoint = RawCheckpoint(source=Source.directory(store), tensors=infos, objects={})
    shard = Content.of(checkpoint).part("t", Box((1, 3), (8, 5)))
    for gap in (0, 1 << 20):
        store.traits = store.traits._replace(gap=gap)
        one = Gatherer(checkpoint)
        one.bytes.checkpoint.source.store.traits = store.traits
        out = bytearray(shard.nbytes)
        before = store.usage().bytes_read
        one.fill(shard, 0, shard.numel, memoryview(out))
        assert bytes(out) == np.ascontiguousarray(whole[1:9, 3:8]).tobytes()
        read = checkpoint.source.store.usage().bytes_read - before
        assert read == shard.nbytes if gap == 0 else read > shard.nbytes


def test_a_device_that_is_not_there_is_said_so(tmp_path: Any) -> None:
    from tests.builders.checkpoints import open_checkpoint, save_dcp

    checkpoint = open_checkpoint(save_dcp(tmp_path / "step-1"))
    for name in ("tpu", "cuda:x", ""):
        with pytest.raises(UsageError, match="is not a device"):
            DeviceGatherer(checkpoint, name)
    with pytest.raises(NoResourceError, match="no cuda:77 here"):
        DeviceGatherer(checkpoint, "cuda:77")


def test_auto_measures_only_where_there_is_a_choice() -> None:
    import torch

    from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
    from ftckpt.storage.memory import MemoryStore
    from ftckpt.storage.source import Source

    store = MemoryStore("memory://auto")
    store.put("f", bytes(64))
    piece = Piece(Box.whole((16,)), Extent("f", 0, 64))
    infos = {"t": TensorInfo("model", "t", Kind.PARAM, (16,), DTYPES["float32"], [piece])}
    checkpoint = RawCheckpoint(source=Source.directory(store), tensors=infos, objects={})
    shard = Content.of(checkpoint).whole("t")
    layout = Layout(files=[OutputFile("a", [Elements.all(shard)])])
    found = gatherer(checkpoint, "auto", layout)
    assert type(found) is Gatherer or torch.cuda.is_available()
    assert type(gatherer(checkpoint, "cpu", layout)) is Gatherer
    assert raw_dtype(4).itemsize == 4
