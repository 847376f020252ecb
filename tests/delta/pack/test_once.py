"""What is read for the encoding serves the checks of both sources and the proof of the target."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.delta.pack.tensor_bytes import TensorBytes
from ftckpt.errors import CorruptError
from ftckpt.transfer.read.source_bytes import SourceBytes
from tests.delta.packs import opened, pack_places, save_steps, tensors_of


def saved(folder: Path) -> list[Path]:
    """Return two steps whose records have CRC-32s alone."""
    found = []
    for step in save_steps(folder / "plain", 2, rows=400):
        found.append(folder / f"{step.name}.pt")
        ftckpt.convert(str(step), str(found[-1]), to="torchsave")
        folder.joinpath(f"{step.name}.pt.ftckpt.json").unlink()
    shutil.rmtree(folder / "plain")
    return found


def records(place: Path) -> int:
    """Return the bytes of a checkpoint's tensors."""
    return sum(info.nbytes for info in opened(place).tensors.values())


@pytest.mark.parametrize("jobs", [1, 3])
def test_of_a_target_nothing_is_read_again(tmp_path: Path, jobs: int) -> None:
    steps = saved(tmp_path)
    report = pack_places(steps[0], steps[1], tmp_path / "d", jobs=jobs, check=True)
    assert report.proof is not None
    assert report.proof.source_bytes == 0
    beside = sum(step.stat().st_size - records(step) for step in steps)
    assert report.extra_read <= beside
    assert tensors_of(opened(tmp_path / "d")) == tensors_of(opened(steps[1]))


def test_what_an_earlier_run_had_made_is_checked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("ftckpt.delta.pack.run.prove", killed)
        with pytest.raises(KeyboardInterrupt):
            pack_places(steps[0], steps[1], tmp_path / "d", check=True)
    report = pack_places(steps[0], steps[1], tmp_path / "d", check=True)
    assert report.taken_over
    assert report.extra_read >= records(steps[0]) + records(steps[1])
    assert tensors_of(opened(tmp_path / "d")) == tensors_of(opened(steps[1]))


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("side", [0, 1])
def test_damage_in_a_source_is_found_by_what_was_read(tmp_path: Path, side: int) -> None:
    steps = saved(tmp_path)
    info = max(opened(steps[side]).tensors.values(), key=lambda one: one.nbytes)
    offset = opened(steps[side]).payload(info.pieces[0]).extent.offset
    data = bytearray(steps[side].read_bytes())
    data[offset + info.nbytes // 2] ^= 1
    steps[side].write_bytes(data)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptError, match=info.name):
        pack_places(steps[0], steps[1], tmp_path / "d", check=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_came_wrongly_once_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    steps = saved(tmp_path)
    read: Any = SourceBytes.read
    wrong = iter([True])

    def once(self: SourceBytes, file: str, offset: int, out: memoryview) -> None:
        observer, self.observer = self.observer, None
        read(self, file, offset, out)
        self.observer = observer
        mine = self.checkpoint.source.url.endswith(steps[side].name)
        if observer is not None and mine and len(out) > 1000 and next(wrong, False):
            out[500] ^= 1
        if observer is not None:
            observer.saw(file, offset, out)

    monkeypatch.setattr(SourceBytes, "read", once)
    pack_places(steps[0], steps[1], tmp_path / "d", check=True)
    assert next(wrong, None) is None
    assert tensors_of(opened(tmp_path / "d")) == tensors_of(opened(steps[1]))


def test_elements_that_are_put_in_a_wrong_place_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = saved(tmp_path)
    fill: Any = TensorBytes.fill

    def mixed_up(self: TensorBytes, key: str, offset: int, view: memoryview) -> None:
        fill(self, key, offset, view)
        if key.endswith("layers.0.weight") and len(view) > 1000:
            view[:8], view[400:408] = bytes(view[400:408]), bytes(view[:8])

    monkeypatch.setattr(TensorBytes, "fill", mixed_up)
    with pytest.raises(CorruptError, match=r"layers\.0\.weight"):
        pack_places(None, steps[1], tmp_path / "d", check=True)
    assert not (tmp_path / "d").exists()
