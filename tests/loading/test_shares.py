"""Who reads and who checks what, and the reading itself, without torch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ftckpt
from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import CorruptError
from ftckpt.extents import BLOCK, Extent
from ftckpt.loading import evidence
from ftckpt.loading.evidence import LoadEvidence
from ftckpt.loading.fill import Filler, fill
from ftckpt.loading.shares import divide
from ftckpt.loading.targets import ArrayTarget, Wanted
from ftckpt.manifest.locate import find
from ftckpt.transfer.content import Content, Shard
from ftckpt.transfer.read.elements import SPAN
from ftckpt.workers import Work

DATA = Path(__file__).parents[1] / "data"
ROWS, COLUMNS = 64, 48


def target(shard: Shard, kind: str = "") -> tuple[Any, Wanted]:
    dtype = DTYPES[kind] if kind else shard.dtype
    memory = bytearray(b"\x4d" * dtype.nbytes(shard.numel))
    return memory, Wanted("t", shard, ArrayTarget(memoryview(memory), dtype))


def rows_of(content: Content, key: str, rank: int, ranks: int) -> Shard:
    rows, *rest = content.tensors[key].shape
    begin, end = rows * rank // ranks, rows * (rank + 1) // ranks
    return content.part(key, Box((begin, *(0,) * len(rest)), (end - begin, *rest)))


@pytest.mark.parametrize(
    "sample", ["dcp/fsdp2/step-3", "ranks/tp_fsdp2/actor", "deepspeed/z3/global_step2",
               "deepspeed/z1/global_step2", "trainer_dirs/accelerate_two"],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_record_is_checked_by_one_rank(sample: str, ranks: int) -> None:
    checkpoint = ftckpt.open_checkpoint(str(DATA / sample))
    content = Content.of(checkpoint)
    keys = [key for key, one in content.tensors.items() if one.shape and one.shape[0] >= ranks]
    asked = [[rows_of(content, key, rank, ranks) for key in keys] for rank in range(ranks)]
    shares = divide(checkpoint, asked, None, check=True)
    charges = [one.evidence.charge or frozenset() for one in shares]
    assert sum(map(len, charges)) == len(frozenset().union(*charges))
    checked = nbytes = 0
    for share in shares:
        sent = pickle.loads(pickle.dumps(share))
        assert sent.checkpoint is not None
        made = [target(shard) for shard in sent.shards]
        found = fill(sent.checkpoint, [one for _, one in made], sent.evidence, work=Work())
        checked += found.crc32
        for (memory, _), shard, key in zip(made, share.shards, keys, strict=True):
            nbytes += len(memory)
            rank = shares.index(share)
            rows = content.tensors[key].shape[0]
            begin, end = rows * rank // ranks, rows * (rank + 1) // ranks
            want = checkpoint[key][begin:end].torch().contiguous()
            assert bytes(memory) == want.view(-1).view(torch.uint8).numpy().tobytes(), key
            assert shard.numel
    if sample != "trainer_dirs/accelerate_two":  # its weights have no sums
        held = {piece.extent for key in keys for piece in checkpoint.tensors[key].pieces
                if not piece.packed and not piece.replica}  # fmt: skip
        assert checked >= (sum(one.length for one in held) if held else nbytes)


def test_a_block_is_checked_by_one_rank(tmp_path: Path) -> None:
    arrays = {f"w{n}": np.random.default_rng(n).standard_normal((ROWS, COLUMNS)) for n in range(6)}
    save_file(arrays, tmp_path / "model.safetensors")
    ftckpt.seal(str(tmp_path))
    checkpoint = ftckpt.open_checkpoint(str(tmp_path))
    content = Content.of(checkpoint)
    manifest = find(checkpoint.source)
    asked = [[rows_of(content, key, rank, 3) for key in arrays] for rank in range(3)]
    shares = divide(checkpoint, asked, manifest, check=True)
    held = [one for one in shares if one.evidence.charge]
    assert len(held) == 1  # one block
    size = (tmp_path / "model.safetensors").stat().st_size
    assert held[0].evidence.charge == frozenset((Extent("model.safetensors", 0, size),))
    for share in shares:
        made = [target(shard) for shard in share.shards]
        assert share.checkpoint is not None
        found = fill(share.checkpoint, [one for _, one in made], share.evidence, work=Work())
        assert found.manifest == (size if share is held[0] else 0)
        least = 0 if share is held[0] else sum(len(memory) for memory, _ in made)
        assert found.elsewhere >= least
    assert BLOCK == 64 << 20


def test_small_blocks_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings that lie over the border of two blocks, gaps before, between and behind them."""
    import xxhash

    small = 4096
    arrays = {f"w{n:02}": np.arange(700, dtype=np.float32) + n for n in range(20)}
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    data = path.read_bytes()
    digests = b"".join(
        xxhash.xxh3_128_digest(data[at : at + small]) for at in range(0, len(data), small)
    )
    from ftckpt.checkpoint import Topology
    from ftckpt.manifest import FileDigest, Manifest

    manifest = Manifest(
        "safetensors", None, Topology(), [FileDigest("model.safetensors", len(data), digests)]
    )
    monkeypatch.setattr(evidence, "BLOCK", small)
    monkeypatch.setattr(
        evidence, "block_length", lambda size, number: min(small, size - number * small)
    )
    checkpoint = ftckpt.open_checkpoint(str(path))
    content = Content.of(checkpoint)
    for keys in (list(arrays), list(arrays)[3:17:4]):
        made = [target(content.whole(key)) for key in keys]
        found = fill(checkpoint, [one for _, one in made], LoadEvidence(manifest=manifest),
                     work=Work(threads=2))  # fmt: skip
        for (memory, _), key in zip(made, keys, strict=True):
            assert bytes(memory) == arrays[key].tobytes()
        assert found.manifest <= len(data)
        assert found.manifest >= 2800 * len(keys)
    damaged = bytearray(data)
    damaged[-5000] ^= 1
    path.write_bytes(damaged)
    made = [target(content.whole(key)) for key in arrays]
    with pytest.raises(CorruptError) as caught:
        fill(checkpoint, [one for _, one in made], LoadEvidence(manifest=manifest), work=Work())
    assert caught.value.offset == (len(data) - 5000) // small * small
    made = [target(content.whole("w00"))]
    fill(checkpoint, [made[0][1]], LoadEvidence(manifest=manifest), work=Work())  # another block


def test_elements_are_cast_and_padding_is_zero(tmp_path: Path) -> None:
    from ftckpt.transfer.content import SourceBox

    array = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    save_file({"w": array}, tmp_path / "model.safetensors")
    checkpoint = ftckpt.open_checkpoint(str(tmp_path / "model.safetensors"))
    content = Content.of(checkpoint)
    memory, want = target(content.whole("w"), "float16")
    fill(checkpoint, [want], LoadEvidence(off=True), work=Work())
    assert bytes(memory) == array.astype(np.float16).tobytes()
    box = Box((0, 0), (3, 4))
    padded = Shard((4, 4), DTYPES["float32"], (SourceBox(box, "w", box),))
    memory, want = target(padded)
    fill(checkpoint, [want], LoadEvidence(off=True), work=Work())
    assert bytes(memory) == np.vstack([array, np.zeros((1, 4), np.float32)]).tobytes()


def test_a_reading_is_never_longer_than_a_span(tmp_path: Path) -> None:
    """Whole, in columns, and many small ones side by side: memory does not grow with a tensor."""
    arrays: dict[str, Any] = {"big": np.zeros((3000, 2000), np.float32)}
    arrays |= {f"s{n:03}": np.zeros(100, np.float32) for n in range(300)}
    save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = ftckpt.open_checkpoint(str(tmp_path / "model.safetensors"))
    content = Content.of(checkpoint)
    filler = Filler(checkpoint)
    columns = [target(content.part("big", Box((0, 0), (3000, 900))))[1]]
    small = [target(content.whole(key))[1] for key in arrays if key != "big"]
    for wanted, most in (([target(content.whole("big"))[1]], 6), (columns, 7), (small, 1)):
        readings = filler.plan(wanted, Work())
        assert len(readings) <= most
        assert all(reading.nbytes <= SPAN for reading in readings)
    filler.close()
