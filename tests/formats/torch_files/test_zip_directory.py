"""The zip reader against files that torch, zipfile and hand-made bytes give."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, FtckptError, UnsafeError
from ftckpt.formats.torch_files.local_headers import check_local_headers
from ftckpt.formats.torch_files.zip_directory import Archive, read_archive, serialization_id
from tests.campaign import examples

Read = Callable[[int, int], bytes]


def saved(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def reader(data: bytes) -> Read:
    return lambda offset, length: data[offset : offset + length]


def parsed(data: bytes, **options: int) -> Archive:
    return read_archive(reader(data), len(data), file="x.pt", **options)


def contents(archive: Archive, data: bytes) -> dict[str, bytes]:
    return {m.name: data[m.offset : m.offset + m.size] for m in archive.members.values()}


def outcome(data: bytes) -> tuple[Archive | None, set[str]]:
    """Return the archive, None where it is refused, and the kinds of what was found."""
    try:
        archive = parsed(data)
        return archive, {f.kind for f in check_local_headers(archive, reader(data), file="x.pt")}
    except FtckptError as error:
        return None, {error.kind}


STATE = {"w": torch.arange(12.0), "e": torch.zeros(0), "u": torch.ones(3, dtype=torch.uint16)}


def test_members_equal_what_zipfile_reads() -> None:
    data = saved(STATE)
    archive = parsed(data)
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        expected = {n.split("/", 1)[1]: judge.read(n) for n in judge.namelist()}
        crcs = {i.filename.split("/", 1)[1]: i.CRC for i in judge.infolist()}
    assert archive.prefix == "archive"
    assert contents(archive, data) == expected
    assert {m.name: m.crc32 for m in archive.members.values()} == crcs
    assert list(check_local_headers(archive, reader(data), file="x.pt")) == []


def test_reads_only_the_end() -> None:
    data = saved({"w": torch.zeros(100_000)})
    reads: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return data[offset : offset + length]

    read_archive(read, len(data), file="x.pt")
    assert reads == [(len(data) - 65536, 65536)]


def test_a_directory_longer_than_the_tail_takes_one_more_read() -> None:
    data = saved([torch.zeros(1) for _ in range(40)])
    archive = parsed(data, tail=200)
    assert contents(archive, data) == contents(parsed(data), data)


def test_base_is_added_to_offsets_only() -> None:
    data = saved(STATE)
    moved = parsed(data, base=1000)
    for name, member in parsed(data).members.items():
        assert moved.members[name] == member._replace(offset=member.offset + 1000)
    assert list(check_local_headers(moved, reader(data), file="x.pt")) == []


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_every_alignment(alignment: int) -> None:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        data = saved(STATE)
    finally:
        config.save.storage_alignment = before
    archive = parsed(data)
    assert all(m.offset % alignment == 0 for m in archive.members.values() if m.size)
    assert contents(archive, data)["data/0"] == STATE["w"].numpy().tobytes()


def test_crc_zero_is_not_recorded() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(STATE)
    finally:
        torch.serialization.set_crc32_options(True)
    members = parsed(data).members
    assert members["data/0"].crc32 is None
    empty = next(m for m in members.values() if m.size == 0)
    assert empty.crc32 == 0
    assert list(check_local_headers(parsed(data), reader(data), file="x.pt")) == []


def test_zip64_sizes_of_a_sparse_file(tmp_path: object) -> None:
    path = f"{tmp_path}/big.pt"
    big = torch.empty((1 << 32) + 1000, dtype=torch.uint8)  # address space only: never touched
    with torch.serialization.skip_data():
        torch.save({"a": torch.ones(5), "b": big, "c": torch.ones(7)}, path)
    del big
    with open(path, "rb") as file:
        size = file.seek(0, 2)

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        archive = read_archive(read, size, file="big.pt")
        assert list(check_local_headers(archive, read, file="big.pt")) == []
        with zipfile.ZipFile(path) as judge:
            for info in judge.infolist():
                member = archive.members[info.filename.split("/", 1)[1]]
                assert (member.size, member.header_offset) == (info.file_size, info.header_offset)
                name, extra = struct.unpack("<HH", read(info.header_offset + 26, 4))
                assert member.offset == info.header_offset + 30 + name + extra
    assert size > 1 << 32


def test_an_archive_rewritten_by_zipfile_is_read() -> None:
    data = saved(STATE)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), old.read(name))
    again = out.getvalue()
    assert contents(parsed(again), again) == contents(parsed(data), data)


def test_serialization_id_is_what_torch_wrote() -> None:
    for obj in (STATE, [1, 2], torch.zeros(1000)):
        data = saved(obj)
        archive = parsed(data)
        written = contents(archive, data)[".data/serialization_id"].decode()
        assert serialization_id(archive) == written[20:]
    edited = archive.members["data/0"]._replace(crc32=1)
    forged = archive._replace(members={**archive.members, "data/0": edited})
    assert serialization_id(forged) != serialization_id(archive)


# --- damage ------------------------------------------------------------------------------------


def test_every_truncation_is_damage() -> None:
    data = saved(STATE)
    for length in range(len(data)):
        with pytest.raises(CorruptError) as caught:
            parsed(data[:length])
        assert caught.value.kind == "bad-zip"
        assert caught.value.file == "x.pt"


def test_a_cut_file_says_so() -> None:
    with pytest.raises(CorruptError, match=r"ends early.*cut while being written or copied"):
        parsed(saved(STATE)[:-1])


def test_a_truncated_file_with_a_zip_among_its_tensors_is_cut_not_hostile() -> None:
    inner = torch.frombuffer(bytearray(saved(STATE)), dtype=torch.uint8)
    data = saved({"inner": inner, "rest": torch.zeros(10)})
    cut = data[: data.index(b"PK\5\6") + 60]
    with pytest.raises(CorruptError, match="cut"):
        parsed(cut)


@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_byte_of_the_directory_goes_wrong_silently(seed: int) -> None:
    data = saved(STATE)
    archive = parsed(data)
    for at in range(archive.directory, len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (2 * seed)
        other, found = outcome(bytes(flipped))
        if other is None:
            assert found <= {"bad-zip", "unsafe-zip", "odd-zip"}
            continue
        assert found or contents(other, bytes(flipped)) == contents(archive, data)


@given(data=st.binary(max_size=400))
@settings(max_examples=examples(75, 1200), deadline=None)
def test_any_bytes_end_in_a_named_error(data: bytes) -> None:
    for raw in (data, b"PK\3\4" + data, data + saved([1])[-98:]):
        with pytest.raises((CorruptError, UnsafeError)):
            parsed(raw)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(75, 1200), deadline=None)
def test_mutated_archives_end_in_a_named_error_or_parse(edits: list[tuple[int, int]]) -> None:
    data = bytearray(saved([1, "two", torch.zeros(2)]))
    for back, value in edits:
        data[-1 - back % len(data)] = value
    raw = bytes(data)
    archive, found = outcome(raw)
    assert found <= {"bad-zip", "unsafe-zip", "odd-zip"}
    if archive is not None:
        assert all(0 <= m.offset <= m.offset + m.size <= len(raw) for m in archive.members.values())


# --- local headers against the directory --------------------------------------------------------


def _patched(data: bytes, old: bytes, new: bytes, count: int = 1) -> bytes:
    assert old in data
    return data.replace(old, new, count)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"archive/data/0", b"archive/data/9", "name"),
        (b"PK\3\4\0\0\x08\x08", b"PK\3\4\0\0\x09\x08", "flags"),
        (b"PK\3\4\0\0\x08\x08\0\0", b"PK\3\4\0\0\x08\x08\x08\0", "compression"),
        (b"PK\7\x08", b"PK\7\x09", "descriptor"),
        (b"ZZZZ", b"EVIL", "extra field"),
    ],
)
def test_a_local_header_that_differs_is_found(old: bytes, new: bytes, what: str) -> None:
    data = saved(STATE)
    changed = _patched(data, old, new)
    found = list(check_local_headers(parsed(changed), reader(changed), file="x.pt"))
    assert [f.kind for f in found] == ["unsafe-zip"]
    assert what in found[0].message
    assert found[0].file == "x.pt"


def test_a_wrong_descriptor_crc_is_found() -> None:
    data = saved(STATE)
    at = data.index(b"PK\7\x08") + 4
    wrong = struct.pack("<I", zlib.crc32(b"other"))
    changed = data[:at] + wrong + data[at + 4 :]
    found = list(check_local_headers(parsed(changed), reader(changed), file="x.pt"))
    assert len(found) == 1
    assert "data descriptor" in found[0].message
