"""One verdict of one checkpoint: levels, evidence, options, the report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import CorruptError, ExitCode
from ftckpt.findings import Finding, Severity
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.safetensors import Safetensors
from ftckpt.manifest.seal import seal
from ftckpt.verification import Level, VerifyOptions, VerifyReport, failed, verify
from ftckpt.workers import Work
from tests.conformance.formats import open_path
from tests.formats.dcp.writing import DATA, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "fsdp2" / "step-3", tmp_path / "step-3"))


def opened(path: Path) -> Checkpoint:
    return open_path(Dcp(), path)


def flip(path: Path, name: str, times: int = 1) -> None:
    """Damage the elements of one tensor, or of several files' worth of it."""
    checkpoint = opened(path)
    for piece in list(checkpoint.tensors[name].pieces)[:times]:
        place = checkpoint.payload(piece).extent
        data = bytearray((path / place.file).read_bytes())
        data[place.offset] ^= 4
        (path / place.file).write_bytes(data)


def errors(report: VerifyReport) -> list[Finding]:
    return [f for f in report.findings if f.severity is Severity.ERROR]


def test_auto_takes_the_crcs_where_there_is_nothing_better(path: Path) -> None:
    answer = verify(opened(path))
    assert (answer.code, answer.level, answer.evidence) == (ExitCode.OK, Level.CONTENT, "crc32")
    assert answer.bytes_read > 0
    assert answer.bytes_covered > 0
    assert answer.bytes_covered + answer.bytes_uncovered == opened(path).source.nbytes
    assert answer.seconds > 0
    assert answer.sampled is None
    assert answer.hint == ""
    assert "CRC-32" in answer.message


def test_structure_reads_no_elements(path: Path) -> None:
    flip(path, "up.weight")
    answer = verify(opened(path), VerifyOptions(level=Level.STRUCTURE))
    assert (answer.code, answer.level, answer.evidence) == (ExitCode.OK, Level.STRUCTURE, "none")
    assert answer.bytes_read == 0
    assert "the content was not read" in answer.message


@pytest.mark.parametrize("level", [Level.AUTO, Level.CONTENT, Level.VALUES])
def test_a_flipped_bit_is_located(path: Path, level: Level) -> None:
    flip(path, "up.weight")
    answer = verify(opened(path), VerifyOptions(level=level))
    assert answer.code is ExitCode.CORRUPT
    found = next(f for f in errors(answer) if f.kind == "bad-crc")
    assert found.tensor == "up.weight"
    assert found.rank is not None
    assert found.file == f"__{found.rank}_0.distcp"
    assert answer.hint


def test_findings_are_given_as_they_are_found(path: Path) -> None:
    flip(path, "up.weight")
    heard: list[Finding] = []
    answer = verify(opened(path), emit=heard.append)
    assert tuple(heard) == answer.findings


def test_fail_fast_stops_at_the_first_error(path: Path) -> None:
    flip(path, "up.weight", times=4)
    assert len(errors(verify(opened(path)))) == 4
    answer = verify(opened(path), VerifyOptions(fail_fast=True))
    assert len(errors(answer)) == 1
    assert answer.code is ExitCode.CORRUPT


def test_a_sample_reads_less_and_says_so(path: Path) -> None:
    whole = verify(opened(path))
    part = verify(opened(path), VerifyOptions(sample=0.1))
    assert 0 < part.bytes_read < whole.bytes_read
    assert part.sampled == 0.1
    assert "sample of 0.1" in part.message
    assert part.bytes_covered == whole.bytes_covered


def test_jobs_do_not_change_the_answer(path: Path) -> None:
    flip(path, "down.weight", times=3)
    one, four = (verify(opened(path), work=Work(threads=n)) for n in (1, 4))
    assert sorted(map(str, one.findings)) == sorted(map(str, four.findings))
    assert one.bytes_read == four.bytes_read


def test_a_manifest_is_the_stronger_evidence(path: Path) -> None:
    seal(opened(path))
    answer = verify(opened(path))
    assert (answer.code, answer.evidence) == (ExitCode.OK, "manifest")
    assert "every block matches the manifest" in answer.message
    # A byte that no CRC covers.
    body = bytearray((path / "__0_0.distcp").read_bytes())
    body[body.index(b"ZZZZZZZZ")] ^= 1
    (path / "__0_0.distcp").write_bytes(body)
    changed = verify(opened(path))
    assert changed.code in (ExitCode.CORRUPT, ExitCode.UNSAFE)
    assert "bad-digest" in {f.kind for f in errors(changed)}


def test_a_manifest_can_be_left_aside(path: Path) -> None:
    seal(opened(path))
    answer = verify(opened(path), VerifyOptions(use_manifest=False))
    assert (answer.code, answer.evidence) == (ExitCode.OK, "crc32")


def test_a_damaged_manifest_is_a_finding_and_the_crcs_are_used(path: Path) -> None:
    seal(opened(path))
    (path / "ftckpt.manifest.json").write_text("{")
    answer = verify(opened(path))
    assert "bad-manifest" in {f.kind for f in errors(answer)}
    assert answer.evidence == "crc32"


def test_content_without_evidence_is_unverified(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = open_path(Safetensors(), tmp_path)
    auto = verify(checkpoint)
    assert (auto.code, auto.level, auto.evidence) == (ExitCode.OK, Level.STRUCTURE, "none")
    assert "no evidence" in auto.message
    for options in (VerifyOptions(level=Level.CONTENT), VerifyOptions(require_content=True)):
        asked = verify(checkpoint, options)
        assert asked.code is ExitCode.UNVERIFIED
        assert "seal" in asked.hint


def test_damage_wins_over_the_lack_of_evidence(path: Path) -> None:
    (path / "__2_0.distcp").unlink()
    answer = verify(opened(path), VerifyOptions(level=Level.CONTENT, require_content=True))
    assert answer.code is ExitCode.CORRUPT


def test_a_replica_file_by_file(path: Path, tmp_path: Path) -> None:
    replica = opened(DATA / "fsdp2" / "step-3")
    answer = verify(opened(path), VerifyOptions(against=replica))
    assert (answer.code, answer.evidence) == (ExitCode.OK, "replica")
    flip(path, "up.weight")
    answer = verify(opened(path), VerifyOptions(against=replica))
    assert answer.code is ExitCode.CORRUPT
    assert "up.weight" in {f.tensor for f in errors(answer)}


def test_a_replica_of_another_format_tensor_by_tensor(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    ours = opened(save({"model": weights}, tmp_path / "dcp"))
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    same = verify(ours, VerifyOptions(against=open_path(Safetensors(), tmp_path / "hf")))
    assert (same.code, same.evidence) == (ExitCode.OK, "replica")
    weights["b"][2] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    other = verify(ours, VerifyOptions(against=open_path(Safetensors(), tmp_path / "hf")))
    assert other.code is ExitCode.CORRUPT
    assert {f.tensor for f in errors(other)} == {"b"}


def test_the_report_of_what_cannot_be_opened() -> None:
    error = CorruptError("x is bad", kind="bad-metadata", file="x", hint="do this")
    answer = failed(error, seconds=2.0)
    assert (answer.code, answer.message, answer.hint) == (ExitCode.CORRUPT, "x is bad", "do this")
    assert [(f.kind, f.file) for f in answer.findings] == [("bad-metadata", "x")]


def test_each_finding_is_given_once(path: Path) -> None:
    (path / "__1_0.distcp").unlink()
    answer = verify(opened(path))
    keys = [(f.kind, f.file, f.tensor, f.offset) for f in answer.findings]
    assert len(keys) == len(set(keys))
    assert [f.kind for f in errors(answer)].count("missing-file") == 1


def test_every_warning_has_a_class_and_words() -> None:
    from ftckpt.findings import KINDS
    from ftckpt.verification import _WARNINGS

    for kind, info in KINDS.items():
        if info.severity is Severity.WARNING:
            assert info.of is not None, kind
            assert kind in _WARNINGS, kind
        if info.of is not None:
            assert info.severity is not Severity.ERROR
            assert info.strict is not ExitCode.OK
