"""A merge that is killed goes on where it was, and never with another adapter's values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import ftckpt
from ftckpt.errors import CorruptError, IncompleteError, RefusedError
from ftckpt.formats.lora.arithmetic import MergedWeights
from tests.formats.lora.samples import adapters_of, all_of, base_of, unpacked
from tests.killing import KILLED, kill_points, run_until


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return unpacked(tmp_path) / "dora"


def merge(case: Path, out: Path, *, restart: bool = False) -> None:
    ftckpt.convert(
        base_of(case), str(out), "safetensors", adapter=adapters_of(case), jobs=1,
        restart=restart, max_shard_size=2000,
    )  # fmt: skip


def kill_midway(case: Path, out: Path) -> None:
    """Kill a merge when some of its files are made and not all."""
    staging = out.with_name(f".{out.name}.ftckpt-staging")
    for point in range(10, 60, 5):
        assert run_until(lambda: merge(case, out), point) == KILLED
        if len(list(staging.rglob("*.safetensors"))) > 1:
            return
    raise AssertionError("nothing was begun")


def test_killed_anywhere_it_goes_on(case: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    merge(case, whole)
    wanted = {p.name: p.read_bytes() for p in whole.glob("*.safetensors*")}
    assert len(wanted) > 3
    points = 0
    for point in kill_points(lambda: merge(case, out)):
        points = point
        if out.exists():
            assert {p.name: p.read_bytes() for p in out.glob("*.safetensors*")} == wanted
    assert points > 10
    assert {p.name: p.read_bytes() for p in out.glob("*.safetensors*")} == wanted


@pytest.mark.parametrize("changed", ["values", "config"])
def test_another_adapter_is_not_mixed_in(case: Path, tmp_path: Path, changed: str) -> None:
    out, apart = tmp_path / "out", tmp_path / "apart"
    kill_midway(case, out)
    file = case / "adapter" / "adapter_model.safetensors"
    before = file.stat().st_size
    if changed == "values":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1  # of one magnitude or matrix; the size stays
        file.write_bytes(data)
        assert file.stat().st_size == before
    else:
        config = case / "adapter" / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))
    with pytest.raises(RefusedError, match="another"):
        merge(case, out)
    assert not out.exists()
    merge(case, out, restart=True)
    merge(case, apart)
    assert all_of(str(out)).keys() == all_of(str(apart)).keys()
    for key, one in all_of(str(apart)).items():
        assert np.array_equal(one, all_of(str(out))[key]), key


def test_an_adapter_that_changes_meanwhile_is_no_result(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = MergedWeights.fill
    left = [3]

    def late(self: MergedWeights, key: str, offset: int, view: memoryview) -> None:
        left[0] -= 1
        if not left[0]:
            with (case / "adapter" / "adapter_model.safetensors").open("ab") as stream:
                stream.write(b"\0")
        fill(self, key, offset, view)

    monkeypatch.setattr(MergedWeights, "fill", late)
    with pytest.raises(IncompleteError, match="changed while"):
        merge(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_into_an_adapter(case: Path) -> None:
    with pytest.raises(RefusedError, match="inside the adapter"):
        merge(case, case / "adapter" / "out")


def test_a_damaged_adapter_is_refused_by_its_manifest(case: Path, tmp_path: Path) -> None:
    ftckpt.seal(str(case / "adapter"))
    merge(case, tmp_path / "sound")
    file = case / "adapter" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        merge(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shared_disk_of_an_untouched_copy_goes_on(case: Path, tmp_path: Path) -> None:
    """Only the adapter's content counts: not its times."""
    out = tmp_path / "out"
    kill_midway(case, out)
    shutil.copytree(case / "adapter", case / "copy")
    shutil.rmtree(case / "adapter")
    shutil.copytree(case / "copy", case / "adapter", copy_function=shutil.copyfile)
    merge(case, out)
    assert out.exists()
