"""A checkpoint that keeps copies of its files is mended from them, without another replica."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ftckpt as api
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.errors import CorruptError, ExitCode, UnverifiedError, UsageError
from ftckpt.extents import Extent
from ftckpt.own_files import MANIFEST
from ftckpt.replication import own_copies
from ftckpt.verification import file_digests
from tests.builders.archives import extract
from tests.builders.checkpoints import flip, open_checkpoint

DATA = Path(__file__).parents[1] / "data"
A, B = "copy-0/__0_0.distcp", "copy-1/__0_0.distcp"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """What S3StorageWriter leaves with `num_copies=2`."""
    extract(DATA / "dialects/copies.tar.xz", tmp_path)
    return tmp_path / "copies/step-3"


def content(path: Path) -> dict[str, bytes]:
    files = [p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def in_tensor(path: Path, file: str) -> int:
    """Return a byte of a tensor in a data file."""
    return next(in_tensors(path, file))


def in_tensors(path: Path, file: str) -> Iterator[int]:
    """Yield a byte of each tensor in a data file."""
    checkpoint = open_checkpoint(path)
    for info in checkpoint.tensors.values():
        for piece in info.pieces:
            extent = checkpoint.payload(piece).extent
            if extent.file == file and extent.length:
                yield extent.offset


def passes(step: Path, at: int) -> bool:
    """Whether a flipped bit of A is in no checksum."""
    flip(step / A, at)
    found = api.verify(str(step)).findings
    flip(step / A, at)
    return {f.kind for f in found if f.severity == "error"} <= {"copies-differ"}


@pytest.mark.parametrize(
    ("harm", "sealed"), [("flip", True), ("missing", True), ("cut", True), ("flip", False)]
)
def test_what_is_damaged_in_one_copy_comes_from_the_other(
    harm: str, sealed: bool, step: Path
) -> None:
    whole = content(step)
    if sealed:
        api.seal(str(step))
    for file in (A, "copy-1/__1_0.distcp"):
        at = in_tensor(step, file)
        if harm == "flip":
            flip(step / file, at)
        elif harm == "missing":
            (step / file).unlink()
        else:
            (step / file).write_bytes((step / file).read_bytes()[:at])
    assert api.verify(str(step)).code is ExitCode.CORRUPT
    report = api.repair(str(step))
    assert report.done
    assert report.evidence == ("manifest" if sealed else "crc32")
    assert content(step) == whole
    assert api.verify(str(step), level="values").code is ExitCode.OK


def test_a_byte_that_no_crc_covers_needs_the_seal(step: Path) -> None:
    whole = content(step)
    padding = next(at for at in range(len(whole[A])) if passes(step, at))
    flip(step / A, padding)
    with pytest.raises(UnverifiedError, match="no evidence says which"):
        api.repair(str(step))
    flip(step / A, padding)
    api.seal(str(step))
    flip(step / A, padding)
    api.repair(str(step))
    assert content(step) == whole


def test_what_is_damaged_in_every_copy_stays(step: Path) -> None:
    api.seal(str(step))
    at = in_tensor(step, A)
    flip(step / A, at)
    flip(step / B, at, 1)
    before = content(step)
    with pytest.raises(CorruptError, match="cannot be had"):
        api.repair(str(step))
    assert content(step) == before
    assert api.repair(str(step), dry_run=True).blocks


def test_the_third_copy_is_asked_too(step: Path) -> None:
    data = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(data.replace(b"num_copies=2", b"num_copies=3"))
    shutil.copytree(step / "copy-0", step / "copy-2")
    api.seal(str(step))
    whole = content(step)
    at = in_tensor(step, A)
    flip(step / A, at)
    flip(step / B, at, 1)
    api.repair(str(step))
    assert content(step) == whole


def test_a_copy_of_another_step_is_not_taken_for_a_replica(step: Path) -> None:
    shutil.copy(step.with_name("step-2") / B, step / B)
    before = content(step)
    assert api.verify(str(step), level="values").code is ExitCode.CORRUPT
    with pytest.raises(UnverifiedError, match="no evidence says which"):
        api.repair(str(step))
    assert content(step) == before


def refuses(step: Path) -> None:
    before = content(step)
    with pytest.raises(UnverifiedError, match="no evidence says"):
        api.repair(str(step))
    assert content(step) == before
    assert not (step / MANIFEST).exists()


@pytest.mark.parametrize("harm", ["missing", "cut", "empty", "list of records"])
def test_without_a_seal_a_damaged_file_must_show_that_the_copy_is_of_its_save(
    harm: str, step: Path
) -> None:
    data = (step / A).read_bytes()
    if harm == "missing":
        (step / A).unlink()
    elif harm == "cut":
        (step / A).write_bytes(data[: in_tensor(step, A)])
    elif harm == "empty":
        (step / A).write_bytes(b"")
    else:
        flip(step / A, len(data) - 30)
    refuses(step)


def in_moment(step: Path, file: str) -> int:
    """Return where the first moment in a data file ends."""
    info = open_checkpoint(step).tensors["exp_avg:up.weight"]
    return next(piece.extent.end for piece in info.pieces if piece.extent.file == file)


def test_without_a_seal_a_short_file_with_a_moment_shows_it(step: Path) -> None:
    whole = content(step)
    at = in_moment(step, A)
    (step / A).write_bytes(whole[A][:at])
    report = api.repair(str(step))
    assert (report.done, report.evidence) == (True, "crc32")
    assert content(step) == whole
    assert api.verify(str(step), level="values").code is ExitCode.OK


def test_parameters_of_a_short_file_show_nothing(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a save without an optimizer: a frozen base is the same in every one.
    monkeypatch.setattr(own_copies, "_CHANGING", frozenset())
    (step / A).write_bytes((step / A).read_bytes()[:-1])
    refuses(step)


@pytest.mark.parametrize("left", ["less", "of another step", "of one value"])
def test_too_little_of_a_short_file_shows_nothing(left: str, step: Path) -> None:
    at = in_moment(step, A)
    if left == "of another step":
        shutil.copy(step.with_name("step-2") / B, step / B)
    elif left == "of one value":
        info = open_checkpoint(step).tensors["exp_avg:up.weight"]
        for file in (A, B):  # as it is before the first gradient
            piece = next(p for p in info.pieces if p.extent.file == file)
            extent = open_checkpoint(step).payload(piece).extent
            data = bytearray((step / file).read_bytes())
            crc = zlib.crc32(data[extent.offset : extent.end]).to_bytes(4, "little")
            data[extent.offset : extent.end] = bytes(extent.length)
            now = zlib.crc32(bytes(extent.length)).to_bytes(4, "little")
            item = data[piece.extent.offset : piece.extent.end].replace(crc, now)
            data[piece.extent.offset : piece.extent.end] = item
            (step / file).write_bytes(bytes(data))
    (step / A).write_bytes((step / A).read_bytes()[: at - (left == "less")])
    refuses(step)


@pytest.mark.parametrize("tensors", ["one", "all"])
def test_damage_beside_a_copy_of_another_step_is_not_mended_from_it(
    tensors: str, step: Path
) -> None:
    places = list(in_tensors(step, A))
    shutil.copy(step.with_name("step-2") / B, step / B)
    for at in places[:1] if tensors == "one" else places:
        flip(step / A, at)
    refuses(step)


def test_every_tensor_of_a_copy_may_be_damaged(step: Path) -> None:
    whole = content(step)
    for at in list(in_tensors(step, A)):
        flip(step / A, at)
    assert api.repair(str(step)).done
    assert content(step) == whole


def test_what_keeps_no_copies_needs_another_place(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp/fsdp2/step-3", tmp_path / "step-3")
    with pytest.raises(UsageError, match="keeps no copies"):
        api.repair(str(tmp_path / "step-3"))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_copy_of_another_step_is_found_without_looking_at_values(
    sealed: bool, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(step.with_name("step-2") / B, step / B)
    if sealed:  # by a release that did not compare copies
        with monkeypatch.context() as old:
            old.setattr(file_digests, "check_file_copies", lambda *_, **__: (0, True))
            api.seal(str(step))
    report = api.verify(str(step), level="content")
    assert report.code is ExitCode.CORRUPT
    found = [f for f in report.findings if f.kind == "copies-differ"]
    assert {f.file for f in found} == {B}
    assert f"{A} and {B}, copies of one file, differ" in found[0].message
    if not sealed:
        mine, other = (step / A).read_bytes(), (step / B).read_bytes()
        at = found[0].offset
        assert at is not None
        assert mine[at] != other[at]


def test_a_copy_that_is_damaged_is_named_once(step: Path) -> None:
    flip(step / B, in_tensor(step, B))
    report = api.verify(str(step), level="content")
    errors = [f.kind for f in report.findings if f.file == B and f.severity == "error"]
    assert errors == ["bad-crc"]


# --- replicas of shards ---------------------------------------------------------------------------


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A step of Megatron-core in which each rank wrote what it reads."""
    extract(DATA / "megatron_dist/shadows.tar.xz", tmp_path)
    return tmp_path / "shadows/iter_0000002"


def record_and_replica(path: Path) -> tuple[Extent, Extent]:
    """Return where a shard's elements lie, and where they lie again."""
    checkpoint = open_checkpoint(path)
    for info in checkpoint.tensors.values():
        for held in copies_of(info):
            if len(held.pieces) > 1 and held.box.volume > 8:
                first, other = (checkpoint.payload(piece).extent for piece in held.pieces[:2])
                return first, other
    raise AssertionError


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_shard_comes_from_its_local_replica_and_back(
    which: int, sealed: bool, shadows: Path
) -> None:
    whole = content(shadows)
    if sealed:
        api.seal(str(shadows))
    bad = record_and_replica(shadows)[which]
    flip(shadows / bad.file, bad.offset)
    assert api.verify(str(shadows), level="content").code is ExitCode.CORRUPT
    report = api.repair(str(shadows))
    assert report.done
    assert report.evidence == ("manifest" if sealed else "crc32")
    assert content(shadows) == whole
    assert api.verify(str(shadows), level="values").code is ExitCode.OK


def test_a_replica_of_another_step_mends_nothing(shadows: Path) -> None:
    first, other = record_and_replica(shadows)
    data = bytearray((shadows / other.file).read_bytes())
    old = zlib.crc32(data[other.offset : other.end])
    data[other.offset] ^= 4
    new = zlib.crc32(data[other.offset : other.end])
    # As the other step's file would have it: right in itself.
    data = data.replace(old.to_bytes(4, "little"), new.to_bytes(4, "little"))
    (shadows / other.file).write_bytes(data)
    assert api.verify(str(shadows), level="content").code is ExitCode.OK
    flip(shadows / first.file, first.offset)
    before = content(shadows)
    with pytest.raises((CorruptError, UnverifiedError)):
        api.repair(str(shadows))
    assert content(shadows) == before


def test_a_shard_that_is_damaged_everywhere_stays(shadows: Path) -> None:
    api.seal(str(shadows))
    for extent in record_and_replica(shadows):
        flip(shadows / extent.file, extent.offset)
    before = content(shadows)
    with pytest.raises(CorruptError, match="cannot be had"):
        api.repair(str(shadows))
    assert content(shadows) == before


def test_a_lost_file_is_not_made_of_its_replicas(shadows: Path) -> None:
    api.seal(str(shadows))
    (shadows / record_and_replica(shadows)[1].file).unlink()
    before = content(shadows)
    with pytest.raises(CorruptError):
        api.repair(str(shadows))
    assert content(shadows) == before


def test_the_metadata_is_there_once(step: Path) -> None:
    api.seal(str(step))
    data = (step / ".metadata").read_bytes()
    flip(step / ".metadata", data.index(b"up.weight"))
    with pytest.raises(CorruptError):
        api.repair(str(step))
