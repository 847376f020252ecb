"""What becomes of a delta where its base, or what looks like its base, is damaged or gone."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ftckpt as api
from ftckpt.errors import ExitCode, FtckptError, NotFoundError
from ftckpt.own_files import MANIFEST
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
from tests.commands.golden import ftckpt

CONTENT = VerifyOptions(Level.CONTENT)


def _state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    weights = {f"l{i}.w": torch.randn(40, 50, generator=generator) + step * 1e-5 for i in range(3)}
    return {"model": weights, "step": step}


def _save(path: Path, step: int) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(_state(step), storage_writer=FileSystemWriter(path), no_dist=True)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of a base and a delta based on it."""
    root = tmp_path / "run"
    base = _save(root / "step-1000", 1000)
    target = _save(tmp_path / "saved" / "step-1010", 1010)
    done = ftckpt("delta", "pack", str(base), str(target), str(root / "step-1010"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return root


def _cut(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])


def test_a_damaged_namesake_of_a_base_condemns_nothing(root: Path, tmp_path: Path) -> None:
    _cut(Path(shutil.copytree(root / "step-1000", root / "checkpoint-1000")))
    assert verify(open_checkpoint(root / "step-1010"), CONTENT).code is ExitCode.OK
    assert api.latest(str(root)).path == str(root / "step-1010")
    for line in (
        "delta info run/step-1010",
        "delta unpack run/step-1010 one",
        "delta unpack run/step-1010 two --base run/step-1000",
        "latest run --level content",
    ):
        done = ftckpt(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
    kept = ftckpt("gc", "run", "--keep-last", "1", "--delete-corrupt", "--json", cwd=tmp_path)
    assert kept.returncode == 0, kept.stderr
    ftckpt("gc", "run", "--keep-last", "1", "--delete-corrupt", "--apply", cwd=tmp_path)
    left = {path.name for path in root.iterdir() if not path.name.startswith(".")}
    assert left == {"step-1000", "step-1010"}


def test_a_damaged_manifest_of_a_base_condemns_no_delta(root: Path) -> None:
    """The delta's own digests prove the base."""
    (root / "step-1000" / MANIFEST).write_text("{}")
    for options in (VerifyOptions(Level.STRUCTURE), CONTENT):
        assert verify(open_checkpoint(root / "step-1010"), options).code is ExitCode.OK
    assert verify(open_checkpoint(root / "step-1000"), CONTENT).code is ExitCode.CORRUPT


def test_a_base_that_is_given_and_damaged_does_not_hide_the_recorded_one(
    root: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(root / "step-1000", tmp_path / "damaged"))
    _cut(damaged)
    line = ("delta", "unpack", "run/step-1010", "out", "--base", "damaged")
    done = ftckpt(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_base_is_missing_whatever_lies_beside_it(root: Path) -> None:
    (root / "step-1000").rename(root / "checkpoint-1000")
    _cut(root / "checkpoint-1000")
    with pytest.raises(NotFoundError, match=r"1000, is not at .*checkpoint-1000 cannot be read"):
        open_checkpoint(root / "step-1010").decoding.bases()


def test_a_base_that_was_dropped_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    line = ("delta", "pack", "run/step-1000", "saved/step-1010", "other/step-1010")
    assert ftckpt(*line, cwd=tmp_path).returncode == 0
    shutil.rmtree(root / "step-1010")
    shutil.copytree(tmp_path / "saved" / "step-1010", root / "step-1010")
    done = ftckpt("gc", "run", "--keep-last", "1", "--apply", "--min-survivors", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (root / "step-1000").exists()
    done = ftckpt("delta", "unpack", "other/step-1010", "out", cwd=tmp_path)
    assert done.returncode == ExitCode.NOT_FOUND
    assert f"step 1000, is gone: {root}/step-1000 was dropped" in done.stderr
    assert f"ftckpt gc undelete {root} step-1000" in done.stderr
    back = ftckpt("gc", "undelete", str(root), "step-1000", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert ftckpt("delta", "unpack", "other/step-1010", "out", cwd=tmp_path).returncode == 0


def test_the_remains_of_a_base_are_no_save_in_flight(root: Path) -> None:
    # As a store without renames has it after a drop, when the tombstone is gone.
    (root / "step-1000" / ".metadata").unlink()
    with pytest.raises(
        NotFoundError, match=r"gone: at .*step-1000 is not a whole checkpoint any more"
    ):
        open_checkpoint(root / "step-1010").decoding.bases()
    report = verify(open_checkpoint(root / "step-1010"), CONTENT)
    assert report.code is ExitCode.NOT_FOUND


def test_a_flipped_bit_in_a_full_base_is_damage(tmp_path: Path) -> None:
    base, target = tmp_path / "step-1000.pt", tmp_path / "step-1010.pt"
    torch.save(_state(1000), base)
    torch.save(_state(1010), target)
    line = ("delta", "pack", "step-1000.pt", "step-1010.pt", "packed")
    assert ftckpt(*line, cwd=tmp_path).returncode == 0
    good = base.read_bytes()
    directory = good.rindex(b"PK\x05\x06") - 600
    codes = set()
    for place in (*range(30, 120, 3), *range(directory, len(good), 17)):
        data = bytearray(good)
        data[place] ^= 4
        base.write_bytes(data)
        try:
            codes.add(verify(open_checkpoint(tmp_path / "packed"), CONTENT).code)
        except FtckptError as error:
            codes.add(error.exit_code)
    # Some bits are of no consequence to any reader; none of them makes the base hostile.
    assert codes <= {ExitCode.OK, ExitCode.CORRUPT}
    assert ExitCode.CORRUPT in codes


def test_a_flipped_bit_in_the_name_of_a_class_of_a_base_is_damage(root: Path) -> None:
    marker = root / "step-1000" / ".metadata"
    good = marker.read_bytes()
    begin = good.index(b"TensorStorageMetadata")
    codes = set()
    for at, bit in ((begin, 0), (begin + 7, 3), (begin - 30, 1), (good.index(b"_StorageInfo"), 6)):
        data = bytearray(good)
        data[at] ^= 1 << bit
        marker.write_bytes(data)
        try:
            codes.add(verify(open_checkpoint(root / "step-1010"), CONTENT).code)
        except FtckptError as error:
            codes.add(error.exit_code)
    assert codes == {ExitCode.CORRUPT}
