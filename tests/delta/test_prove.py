"""The proof of a delta decodes each block once, though most are asked for by several tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ftckpt.delta.codec.decode import DeltaDecoder
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.prove.against_source import prove
from ftckpt.workers.budget import budget, set_budget
from tests.delta.packs import opened, pack_places, save_steps


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
