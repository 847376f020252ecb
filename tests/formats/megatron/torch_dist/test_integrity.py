"""Megatron's `integrity.json`: its digests are evidence, and what it says is not trusted blindly.

The record is written as `save_integrity_manifest` of Megatron-LM does it: the files at the top,
sorted, hashed whole.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ftckpt as api
from ftckpt.errors import ExitCode, FtckptError, RefusedError
from ftckpt.formats.dcp.integrity import write_integrity
from ftckpt.formats.megatron.torch_dist import MegatronDist
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.commands.golden import ftckpt
from tests.conformance.formats import open_path
from tests.formats.megatron.torch_dist.test_reader import of_data

NAME = "integrity.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = of_data("singleton", tmp_path).path
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "words").write_bytes(b"words")
    record(path)
    return path


def record(path: Path, **more: Any) -> None:
    files = {
        entry.name: hashlib.sha256(entry.read_bytes()).hexdigest()
        for entry in sorted(path.iterdir())
        if entry.is_file() and entry.name != NAME
    }
    said = {"algorithm": "sha256", "files": files | more.pop("files", {}), **more}
    (path / NAME).write_text(json.dumps(said, indent=2))


def verified(path: Path, level: Level = Level.CONTENT) -> VerifyReport:
    return verify(open_path(MegatronDist(), path), VerifyOptions(level=level))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_every_file_is_held_to_its_digest(saved: Path) -> None:
    report = verified(saved)
    assert (report.code, report.evidence) == (ExitCode.OK, "sha256")
    assert "every file matches its SHA-256" in report.message
    at_top = [f for f in saved.iterdir() if f.is_file() and f.name != NAME]
    assert report.bytes_covered == sum(f.stat().st_size for f in at_top)
    assert report.bytes_uncovered == 5 + (saved / NAME).stat().st_size


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
def test_a_flipped_bit_anywhere_is_found_and_named(saved: Path, name: str) -> None:
    file = saved / name
    wrong = hashlib.sha256(file.read_bytes()).hexdigest()
    # The record says that the file was another one: what it holds is right in itself.
    record(saved, files={name: f"{int(wrong[0], 16) ^ 1:x}{wrong[1:]}"})
    report = verified(saved)
    assert report.code is ExitCode.CORRUPT
    assert [f.file for f in report.findings if f.kind == "bad-digest"] == [name]


def test_damage_in_a_tensor_names_file_and_tensor(saved: Path) -> None:
    file = max(saved.glob("*.distcp"), key=lambda f: f.stat().st_size)
    checkpoint = open_path(MegatronDist(), saved)
    piece = next(
        p for i in checkpoint.tensors.values() for p in i.pieces if p.extent.file == file.name
    )
    flip(file, checkpoint.payload(piece).extent.offset)
    report = verified(saved)
    assert report.code is ExitCode.CORRUPT
    kinds = {f.kind: f for f in report.findings}
    assert kinds["bad-digest"].file == kinds["bad-crc"].file == file.name
    assert kinds["bad-crc"].tensor


def test_a_recorded_file_that_is_missing_is_damage(saved: Path) -> None:
    record(saved, files={"modelopt.pt": "0" * 64})
    report = verified(saved, Level.STRUCTURE)
    assert report.code is ExitCode.CORRUPT
    assert ("missing-file", "modelopt.pt") in {(f.kind, f.file) for f in report.findings}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{}", ExitCode.UNSUPPORTED),
        ("[]", ExitCode.UNSUPPORTED),
        ('{"files": {"common.pt"', ExitCode.CORRUPT),
        ('{"files": {"common.pt": "0"}}', ExitCode.CORRUPT),
        ('{"files": {"common.pt": 7}}', ExitCode.CORRUPT),
        ('{"files": {"common.pt": "%s"}}' % ("G" * 64), ExitCode.CORRUPT),
        ('{"files": {"/etc/passwd": "%s"}}' % ("0" * 64), ExitCode.UNSAFE),
        ('{"files": {"../other/.metadata": "%s"}}' % ("0" * 64), ExitCode.UNSAFE),
        ('{"files": {}, "files": {}}', ExitCode.UNSAFE),
        ('{"algorithm": "md5", "files": {}}', ExitCode.UNSUPPORTED),
    ],
)
@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.CONTENT])
def test_a_record_that_cannot_be_trusted(
    saved: Path, text: str, code: ExitCode, level: Level
) -> None:
    (saved / NAME).write_text(text)
    report = verified(saved, level)
    assert report.code is code
    assert report.evidence != "sha256"
    assert next(f for f in report.findings if f.code is code).file == NAME


def test_a_record_of_too_many_bytes_is_not_read(saved: Path) -> None:
    with (saved / NAME).open("wb") as file:
        file.truncate((128 << 20) + 1)
    assert verified(saved, Level.STRUCTURE).code is ExitCode.UNSUPPORTED


def test_a_sample_takes_some_files_whole(saved: Path) -> None:
    report = verify(
        open_path(MegatronDist(), saved), VerifyOptions(level=Level.CONTENT, sample=0.4)
    )
    assert (report.code, report.evidence) == (ExitCode.OK, "sha256")
    assert 0 < report.bytes_read < report.bytes_covered


def test_what_is_written_is_what_megatron_writes(saved: Path) -> None:
    theirs = json.loads((saved / NAME).read_text())
    (saved / NAME).unlink()
    (saved / "ftckpt.manifest.json").write_text("{}")  # ours is not Megatron's to check
    assert write_integrity(Source.directory(open_store(str(saved)))) is True
    assert json.loads((saved / NAME).read_text()) == theirs
    (saved / "ftckpt.manifest.json").unlink()
    assert verified(saved).evidence == "sha256"
    before = (saved / NAME).stat().st_mtime_ns
    assert write_integrity(Source.directory(open_store(str(saved)))) is False
    assert (saved / NAME).stat().st_mtime_ns == before


def test_a_record_that_lists_less_is_not_replaced(saved: Path) -> None:
    (saved / "modelopt.pt").write_bytes(b"later")
    before = (saved / NAME).read_bytes()
    with pytest.raises(RefusedError, match=r"modelopt\.pt"):
        write_integrity(Source.directory(open_store(str(saved))))
    assert (saved / NAME).read_bytes() == before


def test_no_record_of_a_file_that_changes_meanwhile(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / NAME).unlink()
    source = Source.directory(open_store(str(saved)))
    (saved / "common.pt").write_bytes((saved / "common.pt").read_bytes() + b"x")
    with pytest.raises(FtckptError):
        write_integrity(source)
    assert not (saved / NAME).exists()


def test_the_manifest_covers_the_record(saved: Path) -> None:
    (saved / NAME).unlink()
    done = ftckpt("seal", str(saved), "--integrity", cwd=saved)
    assert done.returncode == 0, done.stderr
    report = verified(saved)
    assert (report.code, report.evidence) == (ExitCode.OK, "manifest")
    listed = json.loads((saved / "ftckpt.manifest.json").read_text())["files"]
    assert NAME in {entry["path"] for entry in listed}
    api.seal(str(saved), integrity=True)
    (saved / NAME).unlink()
    (saved / "ftckpt.manifest.json").unlink()
    assert api.seal(str(saved), integrity=True).written
    assert verified(saved).evidence == "manifest"


def test_a_sealed_checkpoint_gets_the_record_and_a_manifest_that_lists_it(saved: Path) -> None:
    (saved / NAME).unlink()
    assert ftckpt("seal", str(saved), cwd=saved).returncode == 0
    done = ftckpt("seal", str(saved), "--integrity", cwd=saved)
    assert done.returncode == 0, done.stderr
    listed = json.loads((saved / "ftckpt.manifest.json").read_text())["files"]
    assert NAME in {entry["path"] for entry in listed}
    assert verified(saved).code is ExitCode.OK
    assert not api.seal(str(saved), integrity=True).written


def test_nothing_is_added_where_the_manifest_says_something_else(saved: Path) -> None:
    (saved / NAME).unlink()
    assert ftckpt("seal", str(saved), cwd=saved).returncode == 0
    file = saved / "metadata.json"
    file.write_text(file.read_text() + " ")
    done = ftckpt("seal", str(saved), "--integrity", cwd=saved)
    assert done.returncode == ExitCode.REFUSED, done.stderr
    with pytest.raises(RefusedError):
        api.seal(str(saved), integrity=True)
    assert not (saved / NAME).exists()


def test_other_formats_have_no_such_record(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    done = ftckpt("seal", str(tmp_path / "model.safetensors"), "--integrity", cwd=tmp_path)
    assert done.returncode == 2
    assert "safetensors" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
