"""What `delta info` says of a chain is what a restore does: bytes read, blocks decoded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.delta import DeltaDecoder
from ftckpt.delta.pack.report import Method
from ftckpt.errors import ExitCode
from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
from ftckpt.formats.delta.rates import measure
from ftckpt.formats.delta.survey import BaseIdentity, survey
from tests.builders.checkpoints import open_checkpoint
from tests.commands.golden import RUN
from tests.delta.on_disk import pack_delta, run_of, save_full, state_at, training
from tests.delta.packing import trained
from tests.delta.packs import pack_places


def delta_at(path: Path) -> DeltaCheckpoint:
    opened = open_checkpoint(path)
    assert isinstance(opened, DeltaCheckpoint)
    return opened


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Every block that is decoded: of which decoder, which tensor, which number."""
    seen: set[tuple[int, int, int]] = set()
    decode = DeltaDecoder._decode

    def noted(self: DeltaDecoder, number: int, block: int, *out: object) -> None:
        seen.add((id(self), number, block))
        decode(self, number, block, *out)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaDecoder, "_decode", noted)
    return seen


def test_the_blocks_of_a_restore(tmp_path: Path, counted: set[tuple[int, int, int]]) -> None:
    run_of(tmp_path, 4)
    counted.clear()
    delta = delta_at(tmp_path / "step-3")
    found = survey(delta)
    assert not counted  # indexes alone are read
    for key in delta.tensors:
        read_tensor(delta, key)
    assert found.blocks == len(counted)
    assert [link.blocks > 0 for link in found.links] == [True, True, True, False]
    assert found.read == sum(link.read for link in found.links)


def test_predicted_tensors_need_what_predicts_them(
    tmp_path: Path, counted: set[tuple[int, int, int]]
) -> None:
    before, after = trained(size=(1100, 1000))
    pack_delta(tmp_path / "step-1", before, step=1)
    pack_delta(tmp_path / "step-2", after, tmp_path / "step-1", step=2)
    counted.clear()
    delta = delta_at(tmp_path / "step-2")
    found = survey(delta)
    assert Method.PREDICTED in found.methods
    for key in delta.tensors:
        read_tensor(delta, key)
    assert found.blocks == len(counted)
    # Weights that are their rounded masters are not asked of the base.
    assert found.links[1].blocks < sum(tensor.blocks for tensor in delta.index.tensors)


def test_bytes_of_a_full_base(tmp_path: Path) -> None:
    saves = training(2)
    base = save_full(tmp_path / "step-0", saves[0])
    whole = save_full(tmp_path / "whole", saves[1])
    pack_delta(tmp_path / "step-1", state_at(open_checkpoint(whole)), base, step=1)
    delta = delta_at(tmp_path / "step-1")
    upon = [t for t in delta.index.tensors if any(b.reference for b in delta.index.blocks_of(t))]
    assert survey(delta).links[1].read == sum(tensor.nbytes for tensor in upon)


def test_it_says_what_packing_said(tmp_path: Path) -> None:
    for upon, out in ((None, "whole"), (RUN / "step-1", "upon")):
        report = pack_places(upon, RUN / "step-2", tmp_path / out)
        found = survey(delta_at(tmp_path / out))
        assert found.links[0].ratio == report.ratio
        assert found.links[0].stored == report.bytes_out
        assert found.components == report.components
        assert found.methods == report.methods


def test_what_lay_beside_is_missing(tmp_path: Path) -> None:
    pack_places(None, RUN / "step-1", tmp_path / "one")
    pack_places(tmp_path / "one", RUN / "step-2", tmp_path / "two")
    (tmp_path / "two" / "objects.records").unlink()
    found = survey(delta_at(tmp_path / "two"))
    assert [link.ratio is None for link in found.links] == [True, False]
    assert found.broken is not None
    assert (found.broken.file, found.broken.code) == ("objects.records", ExitCode.CORRUPT)
    assert "objects" not in found.components


def test_where_a_chain_breaks(tmp_path: Path) -> None:
    run_of(tmp_path, 3)
    shutil.rmtree(tmp_path / "step-0")
    found = survey(delta_at(tmp_path / "step-2"))
    assert [link.identity for link in found.links] == [BaseIdentity.ITSELF, BaseIdentity.CONTENT]
    assert found.broken is not None
    assert (found.broken.kind, found.broken.code) == ("missing-base", ExitCode.NOT_FOUND)


def test_rates_are_of_something(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    rates = measure(delta_at(tmp_path / "step-1"), 2)
    assert min(rates) > 0
