"""Check local headers and data descriptors of a zip against its directory.

Scanners read local headers and torch reads the directory, so a difference hides content from one
of them. It is looked for when a checkpoint is verified, because it costs small reads all over the
file.

A header that no reader can take for one hides nothing: a page of zeros or of noise is damage.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftckpt.extents import Read
from ftckpt.findings import Finding, finding

from .zip_directory import LOCAL_HEADER, Archive, Member, descriptor_length


def check_local_headers(archive: Archive, read: Read, *, file: str) -> Iterator[Finding]:
    """Yield where local headers or data descriptors contradict the directory, or hold odd values.

    Scanners read local headers, torch reads the directory: a difference hides content from one of
    them. Costs two small reads a record.

    Args:
        archive: as `read_archive` returned it.
        read: as for `read_archive`.
        file: for the findings.
    """
    odd = list(archive.odd)
    for member in archive.members.values():
        header, descriptor = _repeats(member, archive.base)
        found = read(*header)
        if found[:4] == b"PK\3\4":
            fields = LOCAL_HEADER.unpack_from(found)
            if fields[1] or fields[4] or fields[5]:
                odd.append(f"version {fields[1]}, time {fields[4]} and {fields[5]} of the header of"
                           f" {member.name!r}")  # fmt: skip
        wrong = _local_fault(found, member, f"{archive.prefix}/{member.name}".encode())
        lost = _is_no_header(found)
        if not wrong and descriptor[1]:
            found = read(*descriptor)
            wrong = _descriptor_fault(found, member)
            lost = _is_no_descriptor(found, member)
        if wrong:
            does = "is overwritten" if lost else "contradicts the directory"
            yield finding(
                "bad-zip" if lost else "unsafe-zip",
                f"in {file}, {wrong} of the record {member.name!r} {does}",
                file=file,
                offset=archive.base + header[0],
                length=header[1],
            )

    if odd:
        more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
        yield finding(
            "odd-zip",
            f"{file} has header fields that torch never writes: {odd[0]}{more}",
            file=file,
            offset=archive.base,
        )


def local_extents(archive: Archive) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of all that `check_local_headers` reads, for reading it at once."""
    for member in archive.members.values():
        header, descriptor = _repeats(member, archive.base)
        yield header
        if descriptor[1]:
            yield descriptor


def _repeats(member: Member, base: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (offset, length) of a member's local header and of its data descriptor."""
    begin, data = member.header_offset, member.offset - base
    return (begin, data - begin), (
        data + member.size,
        descriptor_length(member.size, begin, member.flags),
    )


def _local_fault(header: bytes, member: Member, name: bytes) -> str:
    """Return which part of a local header contradicts the directory, or ''."""
    sig, _, flags, method, _, _, crc, packed, size, name_length, extra = LOCAL_HEADER.unpack_from(
        header
    )
    if sig != b"PK\3\4":
        return "the header's signature"
    if header[30 : 30 + name_length] != name:
        return "the header's name"
    if flags != member.flags:
        return "the header's flags"
    if method:
        return "the header's compression"
    if 30 + name_length + extra != len(header):
        return "the header's length"
    allowed = {0, member.size, 0xFFFFFFFF}
    if packed not in allowed or size not in allowed or crc not in {0, member.crc32 or 0}:
        return "the header's size or CRC"
    at = 30 + name_length
    while at < len(header):
        tag, length = header[at : at + 2], int.from_bytes(header[at + 2 : at + 4], "little")
        body = header[at + 4 : at + 4 + length]
        padding = tag == b"FB" and not body.strip(b"Z\0")
        if not (padding or (tag == b"\1\0" and length <= 24)) or len(body) != length:
            return "the header's extra field"
        at += 4 + length
    return ""


def _is_no_header(header: bytes) -> bool:
    """Say whether a local header's begin is lost, or all from some byte of its fields or name."""
    if not header.startswith(b"PK\3\4"):
        return True
    name_length: int = LOCAL_HEADER.unpack_from(header)[9]
    return len(header.rstrip(b"\0")) < 30 + name_length


def _is_no_descriptor(data: bytes, member: Member) -> bool:
    """Say whether a descriptor's begin is noise, or bytes of it were set to zero."""
    width = (len(data) - 8) // 2
    size = member.size.to_bytes(width, "little")
    expected = b"PK\7\x08" + (member.crc32 or 0).to_bytes(4, "little") + size + size
    zeroed = all(found in (0, right) for found, right in zip(data, expected, strict=True))
    return zeroed or (data[:4] != expected[:4] and data[4:8] != expected[4:8])


def _descriptor_fault(data: bytes, member: Member) -> str:
    width = (len(data) - 8) // 2
    sizes = (data[8 : 8 + width], data[8 + width :])
    if data[:4] != b"PK\7\x08" or int.from_bytes(data[4:8], "little") != (member.crc32 or 0):
        return "the data descriptor"
    if any(int.from_bytes(size, "little") != member.size for size in sizes):
        return "the data descriptor"
    return ""
