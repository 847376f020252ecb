"""Each block of a delta is decoded once, though most are asked for by several tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.delta.codec.decode import DeltaDecoder
from ftckpt.errors import CorruptError
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.run import TransferReport
from ftckpt.workers.budget import budget, set_budget
from tests.delta.packs import opened, pack_places, save_steps, tensors_of


def test_the_tensors_of_a_parameter_are_compared_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = save_steps(tmp_path, 2, rows=400)
    pack_places(steps[0], steps[1], tmp_path / "d")
    delta = opened(tmp_path / "d")
    before, decoded = budget(), Counter[tuple[int, int]]()
    decode: Any = DeltaDecoder._decode

    def counted(self: DeltaDecoder, number: int, block: int, out: Any) -> None:
        decoded[number, block] += 1
        decode(self, number, block, out)

    monkeypatch.setattr(DeltaDecoder, "_decode", counted)
    set_budget(2 << 20)  # a parameter's blocks are kept, and no others
    try:
        proof = prove(Content.of(opened(steps[1])), delta, SameObject)
    finally:
        set_budget(before)
    assert proof.tensors == len(delta.tensors) == len(decoded) == 11
    assert set(decoded.values()) == {1}


@pytest.mark.parametrize("to", ["", "safetensors"])
def test_unpack_decodes_once_and_reads_nothing_for_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    steps = save_steps(tmp_path, 2)
    pack_places(steps[0], steps[1], tmp_path / "d")
    decoded = Counter[tuple[int, int]]()
    decode: Any = DeltaDecoder._decode

    def counted(self: DeltaDecoder, number: int, block: int, out: Any) -> None:
        decoded[number, block] += 1
        decode(self, number, block, out)

    monkeypatch.setattr(DeltaDecoder, "_decode", counted)
    report = ftckpt.delta_unpack(str(tmp_path / "d"), str(tmp_path / "back"), to=to, jobs=1)
    assert isinstance(report, TransferReport)
    assert report.proof is not None
    assert set(decoded.values()) == {1}
    assert report.extra_read < (tmp_path / "d" / "00000.blocks").stat().st_size


def test_a_block_that_was_read_wrongly_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = save_steps(tmp_path, 2)
    pack_places(steps[0], steps[1], tmp_path / "d")
    decode: Any = DeltaDecoder._decode
    failures = iter([CorruptError("a bit flipped on the way", kind="bad-digest")])

    def once(self: DeltaDecoder, number: int, block: int, out: Any) -> None:
        for error in failures:
            raise error
        decode(self, number, block, out)

    monkeypatch.setattr(DeltaDecoder, "_decode", once)
    ftckpt.delta_unpack(str(tmp_path / "d"), str(tmp_path / "back"), to="safetensors", jobs=1)
    assert tensors_of(opened(tmp_path / "back")) == tensors_of(opened(steps[1]))


def test_damage_is_named_as_verify_names_it_and_nothing_is_visible(tmp_path: Path) -> None:
    steps = save_steps(tmp_path, 2)
    pack_places(steps[0], steps[1], tmp_path / "d")
    data = bytearray((tmp_path / "d" / "00000.blocks").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "d" / "00000.blocks").write_bytes(data)
    with pytest.raises(CorruptError, match=r"00000\.blocks differs from the manifest"):
        ftckpt.delta_unpack(str(tmp_path / "d"), str(tmp_path / "back"), to="safetensors")
    assert not (tmp_path / "back").exists()
