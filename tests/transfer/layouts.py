"""Layouts of anything: files made of parts of a drawn source's tensors, and of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.transfer.content import Content, ShardBox
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
from tests.builders.raw_checkpoint import RawCheckpoint, checkpoints, cut


@dataclass
class Crcs(Checksums):
    """The CRC-32 of some ranges, as a zip's directory would have them."""

    ranges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        self.nbytes = 4 * len(self.ranges)

    def build(self, crcs: Sequence[int]) -> bytes:
        return b"".join(crc.to_bytes(4, "little") for crc in crcs)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[RawCheckpoint, Layout]:
    """Draw a source, and files made of parts of its tensors and of everything else."""
    checkpoint, truth = draw(checkpoints())
    content = Content.of(checkpoint)
    files = []
    for number in range(draw(st.integers(1, 2))):
        segments: list[Segment] = []
        ranges: list[tuple[int, int]] = []
        at = 0

        def add(segment: Segment, segments: list[Segment] = segments) -> None:
            nonlocal at
            segments.append(segment)
            at += segment.nbytes

        for _ in range(draw(st.integers(0, 5))):
            key = draw(st.sampled_from(sorted(truth)))
            shape = content.tensors[key].shape
            begin = at
            match draw(st.sampled_from(["whole", "part", "joined", "lead", "other"])):
                case "whole":
                    shard = content.whole(key)
                case "part":
                    shard = content.part(key, draw(st.sampled_from(cut(draw, shape))))
                case "joined" if shape:
                    # All boxes of a cut but one, in the places of another order along axis 0.
                    boxes = cut(draw, shape)[1:]
                    shard = content.shard(
                        shape, content.tensors[key].dtype, [ShardBox(b, key, b) for b in boxes]
                    )
                case "lead":
                    local = Box((1, *(0,) * len(shape)), (1, *shape))
                    shard = content.shard(
                        (2, *shape),
                        content.tensors[key].dtype,
                        [ShardBox(local, key, Box.whole(shape))],
                    )
                case _:
                    add(Literal(draw(st.binary(max_size=90))))
                    add(Zeros(draw(st.integers(0, 70))))
                    add(Stored(checkpoint.tensors[key].pieces[0].extent))
                    continue
            middle = draw(st.integers(0, shard.numel))
            add(Elements(shard, 0, middle))
            add(Elements(shard, middle, shard.numel))
            if draw(st.booleans()):
                ranges.append((begin, at))
                add(Crcs([(begin, at)]))
        add(Crcs(ranges))
        files.append(OutputFile(f"file{number}", segments))
    return checkpoint, Layout(files=files)
