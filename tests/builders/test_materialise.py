from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.extents import Extent
from ftckpt.transfer.content import Content, Copy, ShardBox, TargetTensor
from ftckpt.transfer.layout import (
    Checksums,
    Elements,
    Layout,
    Literal,
    OutputFile,
    Segment,
    Stored,
    Zeros,
)
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise


class _Sum(Checksums):
    nbytes = 8
    ranges = ((0, 4), (2, 6))

    def build(self, crcs: Sequence[int]) -> bytes:
        return b"".join(crc.to_bytes(4, "little") for crc in crcs)


def test_every_segment_becomes_its_bytes(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    torch.save({"w": values}, tmp_path / "source.pt")
    checkpoint = open_checkpoint(tmp_path / "source.pt")
    half = TargetTensor("model", "w", checkpoint.tensors["w"].kind, (2, 3), DTYPES["bfloat16"],
                  (Copy(Box((0, 0), (2, 3)), "w", Box((1, 1), (2, 3))),))  # fmt: skip
    content = Content.of(checkpoint).with_tensors([half])
    shard = content.shard(
        (1, 2, 4), half.dtype, [ShardBox(Box((0, 0, 1), (1, 2, 3)), "w", Box((0, 0), (2, 3)))]
    )
    segments: list[Segment] = [
        Literal(b"head"), Zeros(2), _Sum(), Elements.all(shard), Elements(shard, 1, 3),
        Stored(Extent("source.pt", 0, 4)),
    ]  # fmt: skip
    file = OutputFile("deep/er.bin", segments)
    last = OutputFile("commit", [Literal(b"")])
    materialise(Layout(files=[file], commit=[last]), checkpoint, tmp_path / "out")

    expected = torch.zeros(2, 4, dtype=torch.bfloat16)
    expected[:, 1:] = values[1:, 1:].to(torch.bfloat16)
    raw = bytes(expected.view(torch.uint8).flatten().tolist())
    got = (tmp_path / "out/deep/er.bin").read_bytes()
    assert got[:6] == b"head\0\0"

    assert got[6:14] == b"".join(_crc(part).to_bytes(4, "little") for part in (b"head", b"ad\0\0"))
    assert got[14:] == raw + raw[2:6] + b"PK\3\4"
    assert (tmp_path / "out/commit").read_bytes() == b""


def _crc(data: bytes) -> int:
    """Bit by bit, as the definition says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
