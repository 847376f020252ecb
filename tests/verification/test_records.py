"""The CRC-32s inside DCP files: every record is checked, and damage is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ftckpt.checkpoint import Checkpoint, Extent, Record
from ftckpt.errors import CorruptError, ExitCode, FtckptError
from ftckpt.findings import Finding
from ftckpt.storage import open_store
from ftckpt.storage.decompress import open_stream
from ftckpt.storage.source import Source
from ftckpt.verification import verify
from ftckpt.verification.evidence import ContentResult, Sample, StopChecking
from ftckpt.verification.records import PART, SPAN, check_records
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit
from tests.builders.checkpoints import copy, flip, open_checkpoint, save_dcp

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(tmp_path_factory.mktemp("dcp") / "step-7")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(tmp_path_factory.mktemp("dcp") / "step-7", compressed=True)


def check(checkpoint: Checkpoint, **options: Any) -> tuple[ContentResult, list[Finding]]:
    found: list[Finding] = []
    return check_records(checkpoint, emit=found.append, **options), found


def errors(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.severity == "error"]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "compressed"])
def test_a_whole_checkpoint_passes(kind: str, jobs: int, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(kind))
    result, found = check(checkpoint, work=Work(threads=jobs))
    assert result.ok
    assert result.evidence == "crc32"
    assert [f.kind for f in found] == ["not-covered"]
    assert ".metadata" in found[0].message
    assert found[0].length == result.bytes_uncovered
    assert result.bytes_covered + result.bytes_uncovered == checkpoint.source.nbytes
    assert result.bytes_uncovered >= checkpoint.source.size(".metadata")


def recorded(path: Path) -> list[Record]:
    return [r for r in open_checkpoint(path).records() if r.extent.length]


@pytest.mark.parametrize("kind", ["plain", "compressed"])
def test_a_flipped_bit_in_any_record_is_found_and_located(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    whole = request.getfixturevalue(kind)
    damaged = copy(whole, tmp_path / "step-7")
    draw = random.Random(0)
    for record in dict.fromkeys(r.extent for r in recorded(whole)):
        last = record.length - 1
        places = {0, last // 2, last}
        if kind == "compressed":
            # A stream also holds the archive's headers, which no CRC covers.
            places = {0, last // 4, last // 2} if record.length > 4000 else {0}
        for offset in places:
            bit = draw.randrange(8)
            flip(damaged / record.file, record.offset + offset, bit)
            report = verify(open_checkpoint(damaged))
            flip(damaged / record.file, record.offset + offset, bit)
            # One bit of a compressed stream can scramble the archive in it beyond mere damage.
            allowed = [ExitCode.CORRUPT] + [ExitCode.UNSAFE] * (kind == "compressed")
            assert report.code in allowed, (record, offset)
            at = record.offset + offset
            hit = [f for f in errors(list(report.findings)) if f.file == record.file]
            if kind == "plain":
                ranges = [(f.offset or 0, f.length or 0) for f in hit]
                assert any(first <= at < first + length for first, length in ranges), report
            else:
                assert hit, report


def test_the_finding_names_tensor_rank_file_and_bytes(plain: Path, tmp_path: Path) -> None:
    damaged = copy(plain, tmp_path / "step-7")
    data = next(r for r in recorded(plain) if r.extent.length == 64 * 33 * 4)
    flip(damaged / data.extent.file, data.extent.offset + 1000)
    _, found = check(open_checkpoint(damaged))
    (error,) = errors(found)
    assert (error.kind, error.tensor, error.rank) == ("bad-crc", data.owner, 0)
    assert (error.file, error.offset, error.length) == data.extent
    assert f"{data.crc32:08x}" in error.message


@dataclass(kw_only=True)
class Fake(Checkpoint):
    """A checkpoint of given records over plain files."""

    given: list[Record | FtckptError] = field(default_factory=list)

    def members(self) -> list[str]:
        return list(self.source.entries)

    def load_object(self, name: str) -> Any:
        raise NotImplementedError

    def records(self) -> Iterator[Record]:
        for record in self.given:
            if isinstance(record, FtckptError):
                raise record
            yield record


def fake(root: Path, given: list[Record | FtckptError]) -> Fake:
    source = Source.directory(open_store(str(root)))
    return Fake(source=source, tensors={}, objects={}, given=given)


def crc(data: bytes) -> int:
    import zlib

    return zlib.crc32(data)


def test_records_larger_than_a_part_are_put_together(tmp_path: Path) -> None:
    size = PART + (1 << 20) + 17
    data = bytes(100) + b"\1" + bytes(size - 101)
    (tmp_path / "big").write_bytes(b"head" + data)
    record = Record(Extent("big", 4, size), crc(data), "w", 3)
    result, found = check(fake(tmp_path, [record]), work=Work(threads=2))
    assert (result.ok, result.bytes_read, result.bytes_uncovered) == (True, size, 4)
    flip(tmp_path / "big", PART + 4 + 5)
    result, found = check(fake(tmp_path, [record]), work=Work(threads=2))
    assert [(f.kind, f.tensor, f.rank, f.offset, f.length) for f in errors(found)] == [
        ("bad-crc", "w", 3, 4, size)
    ]


def test_small_records_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(1).randbytes(SPAN + 500_000)
    (tmp_path / "f").write_bytes(data)
    step = 1000
    given: list[Record | FtckptError] = [
        Record(Extent("f", at, step - 64), crc(data[at : at + step - 64]), f"t{at}")
        for at in range(0, len(data), step)
        if at + step <= len(data)
    ]
    from ftckpt.storage.local.store import LocalReader

    reads: list[int] = []
    plain_read = LocalReader.readinto

    def counted(self: LocalReader, offset: int, view: memoryview) -> None:
        reads.append(len(view))
        plain_read(self, offset, view)

    monkeypatch.setattr(LocalReader, "readinto", counted)
    result, _ = check(fake(tmp_path, given))
    assert result.ok
    assert len(reads) == 2
    assert result.bytes_covered == len(given) * (step - 64)


def test_far_and_unordered_records_are_read_apart(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3 << 20)
    (tmp_path / "f").write_bytes(data)
    places = [(2 << 20, 50), (10, 20), (1 << 20, 7), (0, 15), (12, 3)]
    given: list[Record | FtckptError] = [
        Record(Extent("f", at, n), crc(data[at : at + n]), "t") for at, n in places
    ]
    result, _ = check(fake(tmp_path, given))
    assert result.ok
    assert result.bytes_read == 95
    assert result.bytes_covered == 87  # [0, 15) and [10, 30) overlap, [12, 15) lies inside
    assert result.bytes_uncovered == len(data) - 87


def test_absent_crcs_are_no_evidence_and_no_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 300)
    given: list[Record | FtckptError] = [
        Record(Extent("f", 0, 100), None, "a"),
        Record(Extent("f", 100, 100), None, "b"),
        Record(Extent("f", 200, 0), None, "empty"),
        Record(Extent("f", 200, 0), 0, "empty too"),
    ]
    result, found = check(fake(tmp_path, given))
    assert result.ok
    assert [f.kind for f in found] == ["no-crc", "not-covered"]
    assert "2 records of f (200 bytes)" in found[0].message
    given[3] = Record(Extent("f", 200, 0), 5, "empty and wrong")
    assert [f.tensor for f in errors(check(fake(tmp_path, given))[1])] == ["empty and wrong"]


def test_files_without_a_crc_are_named_beside_those_with_one() -> None:
    """A Trainer's weights are safetensors: only the state beside them carries CRC-32s."""
    report = verify(open_checkpoint(DATA / "trainer_dirs" / "trainer"))
    assert (report.code, report.evidence) == (ExitCode.OK, "crc32")
    how = "every record matches its CRC-32, and none covers model.safetensors and 1 more file"
    assert report.message.endswith(how)


def test_nothing_recorded_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 300)
    result, _ = check(fake(tmp_path, [Record(Extent("f", 0, 300), None, "a")]))
    assert (result.evidence, result.bytes_covered, result.bytes_uncovered) == ("none", 0, 300)


def test_missing_and_short_files_are_reported_once_and_others_checked(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 50)
    (tmp_path / "whole").write_bytes(b"y" * 50)
    given: list[Record | FtckptError] = [
        Record(Extent(name, at, 50), crc(b"y" * 50) if name == "whole" else 1, name)
        for name in ("gone", "short", "whole")
        for at in ((0,) if name == "whole" else (50, 100))
    ]
    result, found = check(fake(tmp_path, given))
    assert [(f.kind, f.file) for f in errors(found)] == [
        ("missing-file", "gone"),
        ("truncated-file", "short"),
    ]
    assert result.bytes_read == 50


def test_a_list_of_records_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 50)
    good = Record(Extent("f", 0, 10), crc(b"x" * 10), "a")
    broken = CorruptError("a damaged directory", kind="bad-zip", file="f")
    result, found = check(fake(tmp_path, [good, broken]))
    assert not result.ok
    assert [f.kind for f in errors(found)] == ["bad-zip"]
    assert result.bytes_read == 10


def stream(root: Path, data: bytes, *, wanted: int, transform: str = "stream.zstd/1") -> Fake:
    packed = zstandard.ZstdCompressor().compress(data)
    (root / "f").write_bytes(packed)
    place = Extent("f", 0, len(packed))
    return fake(root, [Record(place, crc(data[5:wanted]), "t", 0, (transform,), (5, wanted - 5))])


def test_no_more_is_unfolded_than_a_record_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = stream(tmp_path, bytes(1 << 30), wanted=1000)
    unfolded = [0]
    plain_stream = open_stream

    def counted(*args: Any, **options: Any) -> Iterator[bytes]:
        for part in plain_stream(*args, **options):
            unfolded[0] += len(part)
            yield part

    monkeypatch.setattr("ftckpt.verification.records.open_stream", counted)
    result, _ = check(bomb)
    assert result.ok
    assert unfolded[0] == 1000


def test_a_stream_that_unfolds_to_less_is_damage(tmp_path: Path) -> None:
    _, found = check(stream(tmp_path, bytes(1000), wanted=1001))
    assert [(f.kind, f.tensor) for f in errors(found)] == [("bad-transform", "t")]


def test_an_unknown_transform_is_no_evidence(tmp_path: Path) -> None:
    result, found = check(stream(tmp_path, bytes(1000), wanted=900, transform="stream.secret"))
    assert (result.ok, result.evidence) == (True, "none")
    assert "transform" in next(f for f in found if f.kind == "no-crc").message


def test_samples_of_two_checkpoints_differ() -> None:
    one, other = (
        [Sample(0.1, name).takes("a", place, first=False) for place in range(1000)]
        for name in ("step-1", "step-2")
    )
    assert one != other
    assert 50 < sum(one) < 150


def test_a_sample_is_the_same_every_time_and_holds_each_files_first(tmp_path: Path) -> None:
    given: list[Record | FtckptError] = []
    for name in ("a", "b"):
        # So far apart that what lies between two records of the sample is not read along.
        with (tmp_path / name).open("wb") as file:
            file.truncate(200 * 100_000)
        places = [Extent(name, at, 1000) for at in range(0, 200 * 100_000, 100_000)]
        given += [Record(place, crc(bytes(1000)), f"{name}{place.offset}") for place in places]
    first, again = (check(fake(tmp_path, given), sample=0.1)[0] for _ in range(2))
    assert first == again
    assert first.sampled == 0.1
    assert first.bytes_covered == 400_000
    assert 10_000 < first.bytes_read < 100_000
    (tmp_path / "a").write_bytes(b"\1" * 20_000_000)
    _, found = check(fake(tmp_path, given), sample=1e-9)
    assert [f.tensor for f in errors(found)] == ["a0"]


def test_a_file_that_changes_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old content")
    checkpoint = fake(tmp_path, [Record(Extent("f", 0, 3), crc(b"old"), "a")])
    (tmp_path / "f").write_bytes(b"new")
    _, found = check(checkpoint)
    assert [f.kind for f in errors(found)] == ["changed-file"]


def test_checking_stops_where_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    given: list[Record | FtckptError] = [
        Record(Extent("f", at, 10), 1, f"t{at}") for at in range(0, 1000, 10)
    ]
    found: list[Finding] = []

    def stop(one: Finding) -> None:
        found.append(one)
        raise StopChecking

    with pytest.raises(StopChecking):
        check_records(fake(tmp_path, given), emit=stop)
    assert len(found) == 1


def test_the_rate_is_asked_for_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(RateLimit, "take", lambda self, n: taken.append(n))
    (tmp_path / "f").write_bytes(bytes(6 << 20))
    given: list[Record | FtckptError] = [
        Record(Extent("f", 0, 100), crc(bytes(100)), "a"),
        Record(Extent("f", 100, 100), crc(bytes(100)), "b"),
        Record(Extent("f", 1 << 20, 5 << 20), crc(bytes(5 << 20)), "c"),
    ]
    result, _ = check(fake(tmp_path, given), work=Work(limiter=RateLimit(1)))
    assert sum(taken) == result.bytes_read == 200 + (5 << 20)
