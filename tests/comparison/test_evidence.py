"""What is recorded as equal: only where the recorded evidence says all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, Record, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.comparison.evidence import Basis, RecordedEqual
from ftckpt.errors import CorruptError
from ftckpt.manifest.seal import seal
from ftckpt.own_files import MANIFEST
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.verification.record_sums import RecordIndex
from tests.builders.checkpoints import copy, flip, open_checkpoint, save_dcp
from tests.builders.raw_checkpoint import RawCheckpoint

BOX = Box((0,), (4,))
PIECE = Piece(BOX, Extent("f", 100, 16))
WHOLE = Record(Extent("f", 100, 16), 7, "w")


@dataclass(kw_only=True)
class Recorded(RawCheckpoint):
    """A checkpoint whose writer recorded CRC-32s."""

    recorded: Sequence[Record] = field(default_factory=tuple)
    damaged: bool = False

    def records(self) -> Iterator[Record]:
        yield from self.recorded
        if self.damaged:
            raise CorruptError("a record is damaged")


def held(*records: Record, pieces: Sequence[Piece] = (PIECE,), damaged: bool = False) -> Recorded:
    store = MemoryStore("memory://evidence")
    store.put("f", bytes(200))
    info = TensorInfo("model", "w", Kind.PARAM, (4,), DTYPES["float32"], pieces)
    return Recorded(source=Source.directory(store), tensors={"w": info}, objects={},
                    recorded=records, damaged=damaged)  # fmt: skip


def evidence(ours: Checkpoint, theirs: Checkpoint, key: str = "w") -> Basis | None:
    indexes = RecordIndex(ours), RecordIndex(theirs)
    return RecordedEqual(ours, theirs, indexes).evidence(key, key)


def test_the_same_sums_of_the_same_layout_are_evidence() -> None:
    assert evidence(held(WHOLE), held(WHOLE)) is Basis.CRC32


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (held(), held()),  # nothing is recorded
        (held(WHOLE), held()),
        (held(WHOLE), held(WHOLE._replace(crc32=8))),
        (held(WHOLE._replace(crc32=None)), held(WHOLE._replace(crc32=None))),
        # Half of the bytes have a sum.
        (held(WHOLE._replace(extent=Extent("f", 100, 8))),) * 2,
        # A storage that both are a part of, and another part of it.
        (
            held(WHOLE._replace(extent=Extent("f", 90, 40))),
            held(WHOLE._replace(extent=Extent("f", 92, 40))),
        ),
        (held(WHOLE), held(WHOLE._replace(transforms=("zstd",), inner=(0, 16)))),
        (held(WHOLE), held(WHOLE, pieces=[PIECE._replace(strides=(2,))])),
        (held(WHOLE), held(WHOLE, pieces=[PIECE._replace(flat=(0, 4))])),
        (held(WHOLE), held(WHOLE, damaged=True)),
        (held(WHOLE, pieces=()), held(WHOLE, pieces=())),
    ],
    ids=["none", "one side", "other sum", "no sum", "half", "other part", "compressed", "strided",
         "flat", "damaged", "no pieces"],
)  # fmt: skip
def test_anything_less_is_none(ours: Recorded, theirs: Recorded) -> None:
    assert evidence(ours, theirs) is None
    assert evidence(theirs, ours) is None


def test_sums_of_two_formats_are_not_compared() -> None:
    @dataclass(kw_only=True)
    class Other(Recorded):
        format = "other"

    one = held(WHOLE)
    assert evidence(one, Other(**vars(one))) is None


def test_a_record_of_the_same_place_in_another_file_of_the_same_layout_counts() -> None:
    moved = [PIECE._replace(extent=Extent("g", 300, 16))]
    elsewhere = held(WHOLE._replace(extent=Extent("g", 300, 16)), pieces=moved)
    assert evidence(held(WHOLE), elsewhere) is Basis.CRC32


def test_replicas_are_not_asked_about() -> None:
    replica = PIECE._replace(replica=1, extent=Extent("f", 0, 16))
    assert evidence(held(WHOLE, pieces=[PIECE, replica]), held(WHOLE)) is Basis.CRC32


def test_sealed_digests_are_asked_block_by_block(tmp_path: Path) -> None:
    one = save_dcp(tmp_path / "one")
    two = copy(one, tmp_path / "two")

    def known(key: str = "layers.0.weight") -> Basis | None:
        return evidence(open_checkpoint(one), open_checkpoint(two), key)

    seal(open_checkpoint(one))
    assert known() is Basis.CRC32  # one manifest says nothing of two checkpoints
    seal(open_checkpoint(two))
    assert known() is Basis.MANIFEST
    (two / MANIFEST).unlink()
    flip(two / "__0_0.distcp", 5000)
    seal(open_checkpoint(two))
    assert known() is Basis.CRC32  # the block's digest differs, the recorded sum does not
    # A manifest that cannot be read, or that is of other sizes, says nothing.
    (two / MANIFEST).write_text("{")
    assert known() is Basis.CRC32
    shorter = open_checkpoint(two)
    entries = {n: e._replace(size=e.size + 1) for n, e in shorter.source.entries.items()}
    changed = replace(shorter, source=replace(shorter.source, entries=entries))
    (two / MANIFEST).unlink()
    seal(open_checkpoint(two), force=True)
    found = evidence(open_checkpoint(one), changed, "layers.0.weight")
    assert found is not Basis.MANIFEST
