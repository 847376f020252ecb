"""Write the hostile torch.save archives that lie beside this script, and their table.

    python -m tests.data.hostile.make_zips

Each case is a small archive as torch writes it (`Zip`), wrong in one way. Scanners and loaders read
zips differently, so whatever two readers could see differently is refused. The table in
zip/README.md comes from here too, and a test holds files, table and this script together.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.data.hostile.make_pickles import EVIL, arguments, named, text, whole

HERE = Path(__file__).parent


class Case(NamedTuple):
    """One hostile archive: its bytes, what it tries, the finding and the exit code."""

    content: bytes
    tries: str
    kind: str = "unsafe-zip"
    code: int = 7


@dataclass
class Entry:
    """One record, with everything that can be said wrongly about it.

    Attributes ending in `_local` stand in the local header, `_after` in the data descriptor; None
    means the truth. `extra` stands in the directory, `gap` before the local header.
    """

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0x0808
    crc: int | None = None
    size: int | None = None
    packed: int | None = None
    header: int | None = None
    disk: int = 0
    extra: bytes = b""
    comment: bytes = b""
    gap: bytes = b""
    name_local: bytes | None = None
    flags_local: int | None = None
    method_local: int | None = None
    size_local: int = 0
    crc_local: int = 0
    padding: bytes = b"Z"
    crc_after: int | None = None
    size_after: int | None = None
    at: int = field(default=0, init=False)

    def local(self, position: int) -> bytes:
        """Return the local header, the bytes and the descriptor for a place in the file."""
        name = self.name if self.name_local is None else self.name_local
        start = position + 30 + len(name) + 4
        pad = -start % 64
        header = struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0,
            self.flags if self.flags_local is None else self.flags_local,
            self.method if self.method_local is None else self.method_local,
            0, 0, self.crc_local, self.size_local, self.size_local, len(name), 4 + pad,
        )  # fmt: skip
        padding = b"FB" + struct.pack("<H", pad) + self.padding * pad
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        after = b""
        if self.flags & 8:
            size = len(self.data) if self.size_after is None else self.size_after
            crc_after = crc if self.crc_after is None else self.crc_after
            after = struct.pack("<4s3I", b"PK\7\x08", crc_after, size, size)
        return header + name + padding + self.data + after

    def central(self) -> bytes:
        """Return the entry of the directory."""
        size = len(self.data) if self.size is None else self.size
        return (
            struct.pack(
                "<4s6H3I5H2I", b"PK\1\2", 0, 0, self.flags, self.method, 0, 0,
                zlib.crc32(self.data) if self.crc is None else self.crc,
                size if self.packed is None else self.packed, size, len(self.name),
                len(self.extra), len(self.comment), self.disk, 0, 0,
                self.at if self.header is None else self.header,
            )
            + self.name + self.extra + self.comment
        )  # fmt: skip


# {"w": a tensor of three float32}
TENSOR = whole(
    b"}" + text("w") + named("torch._utils", "_rebuild_tensor_v2")
    + b"(" + arguments("storage", named("torch", "FloatStorage"), "0", "cpu", 3) + b"Q"
    + b"K\0" + arguments(3) + arguments(1) + b"\x89}tRs"
)  # fmt: skip
BYTES = struct.pack("<3f", 1, 2, 3)


@dataclass
class Zip:
    """An archive as torch writes it; each attribute can be set to something else."""

    entries: list[Entry] = field(default_factory=list)
    prefix: bytes = b""
    suffix: bytes = b""
    before_directory: bytes = b""
    comment: bytes = b""
    zip64: bool = True
    end: dict[str, int] = field(default_factory=dict)
    end64: dict[str, int] = field(default_factory=dict)
    locator: dict[str, int] = field(default_factory=dict)

    def built(self) -> bytes:
        """Return the file."""
        out = self.prefix
        for entry in self.entries:
            out += entry.gap
            entry.at = len(out)
            out += entry.local(len(out))
        out += self.before_directory
        start = len(out)
        directory = b"".join(entry.central() for entry in self.entries)
        out += directory
        count, length = len(self.entries), len(directory)
        truth = {"disk": 0, "first": 0, "here": count, "count": count, "length": length,
                 "start": start}  # fmt: skip
        if self.zip64:
            end64 = {**truth, **self.end64}
            at = len(out)
            out += struct.pack(
                "<4sQHHIIQQQQ", b"PK\6\6", end64.get("size", 44), 0x031E, 45, end64["disk"],
                end64["first"], end64["here"], end64["count"], end64["length"], end64["start"],
            )  # fmt: skip
            where = {"disk": 0, "at": at, "disks": 1, **self.locator}
            out += struct.pack("<4sIQI", b"PK\6\7", where["disk"], where["at"], where["disks"])
        end = {**truth, **self.end}
        out += struct.pack(
            "<4s4HIIH", b"PK\5\6", end["disk"], end["first"], end["here"], end["count"],
            end["length"], end["start"], end.get("comment", len(self.comment)),
        )  # fmt: skip
        return out + self.comment + self.suffix


def archive(pickled: bytes = TENSOR, data: bytes = BYTES) -> Zip:
    """Return a good archive of one tensor, or of another pickle."""
    names = {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}
    return Zip([Entry(b"x/" + name.encode(), content) for name, content in names.items()])


def wrapped(pickled: bytes) -> bytes:
    """Return an archive with this pickle."""
    return archive(pickled).built()


def _with(change: Callable[[Zip], object]) -> bytes:
    made = archive()
    change(made)
    return made.built()


def _without_zip64(made: Zip) -> None:
    made.zip64 = False
    made.end.update(count=0xFFFF, here=0xFFFF)


def _entry(index: int, **values: object) -> bytes:
    made = archive()
    for name, value in values.items():
        setattr(made.entries[index], name, value)
    return made.built()


def _renamed(name: bytes) -> bytes:
    return _entry(2, name=name)


GOOD = archive().built()
_BAD, _SIZE = ("bad-zip", 4), ("size-mismatch", 4)
_WIDE = struct.pack("<HHQ", 1, 8, 12)
_UNICODE_PATH = struct.pack("<HHBI", 0x7075, 15, 1, 0) + b"x/data.pkl"
_PKL = Entry(b"x/data.pkl", EVIL)

ZIPS: dict[str, Case] = {
    # Names.
    "two-pickles": Case(_with(lambda z: z.entries.append(_PKL)), "data.pkl twice, the last evil"),
    "two-pickles-first": Case(
        _with(lambda z: z.entries.insert(0, _PKL)), "data.pkl twice, the first evil"
    ),
    "two-storages": Case(
        _with(lambda z: z.entries.append(Entry(b"x/data/0", bytes(12)))), "a storage twice"
    ),
    "dot-dot": Case(_renamed(b"x/../data/0"), "a name that climbs"),
    "dot": Case(_renamed(b"x/./data/0"), "a name with a dot"),
    "absolute": Case(_renamed(b"/data/0"), "an absolute name"),
    "backslash": Case(_renamed(b"x/data\\0"), "a backslash in a name"),
    "no-folder": Case(_renamed(b"data.pkl"), "a name without a folder"),
    "two-folders": Case(_renamed(b"y/data/0"), "names in two folders"),
    "empty-part": Case(_renamed(b"x//data/0"), "two slashes in a name"),
    "folder-entry": Case(_renamed(b"x/data/"), "a folder as a record"),
    "nul": Case(_renamed(b"x/data/0\0.txt"), "NUL in a name"),
    "newline": Case(_renamed(b"x/data/0\n"), "a newline in a name"),
    "not-utf-8": Case(_renamed(b"x/data/\xff"), "a name that is no text"),
    "no-name": Case(_renamed(b""), "an empty name"),
    "right-to-left": Case(_renamed("x/data/\u202e0".encode()), "a name that prints as another"),
    # Local header against directory.
    "local-name": Case(_entry(0, name_local=b"x/note.txt"), "another name in the local header"),
    "local-flags": Case(_entry(0, flags_local=0x0809), "other flags in the local header"),
    "local-method": Case(_entry(0, method_local=8), "another method in the local header"),
    "local-size": Case(_entry(0, size_local=5), "another size in the local header"),
    "local-crc": Case(_entry(0, crc_local=5), "another CRC in the local header"),
    "local-extra": Case(_entry(0, padding=b"E"), "bytes hidden in the padding"),
    "descriptor-crc": Case(_entry(0, crc_after=5), "another CRC in the data descriptor"),
    "descriptor-size": Case(_entry(0, size_after=5), "another size in the data descriptor"),
    # What torch never writes.
    "deflated": Case(_entry(0, method=8, method_local=8), "a compressed record"),
    "method-99": Case(_entry(0, method=99, method_local=99), "a record encrypted by AES"),
    "encrypted": Case(_entry(0, flags=0x0809), "an encrypted record (flag 0x1)"),
    "flag-patched": Case(_entry(0, flags=0x0828), "flag 0x20"),
    "flag-strong": Case(_entry(0, flags=0x0848), "flag 0x40"),
    "flag-masked": Case(_entry(0, flags=0x2808), "flag 0x2000, a masked directory"),
    "entry-comment": Case(_entry(0, comment=b"hello"), "a comment on a record"),
    "entry-disk": Case(_entry(0, disk=1), "a record on another disk"),
    "unicode-path": Case(_entry(2, extra=_UNICODE_PATH), "a second name in an extra field"),
    "zip64-unasked": Case(_entry(2, extra=_WIDE), "a zip64 field that nothing asks for"),
    "zip64-missing": Case(_entry(2, size=0xFFFFFFFF), "a size that needs a zip64 field", *_BAD),
    "two-sizes": Case(_entry(2, packed=11), "a packed size of its own"),
    # Space that no record owns.
    "prefix": Case(_with(lambda z: setattr(z, "prefix", b"#!/bin/sh\n")), "a script before it"),
    "prefix-unadjusted": Case(b"#!/bin/sh\n" + GOOD, "a script before it, offsets as they were"),
    "suffix": Case(GOOD + b"\0", "a byte after the end"),
    "suffix-zip": Case(GOOD + wrapped(EVIL), "a second archive after the end"),
    "comment": Case(_with(lambda z: setattr(z, "comment", b"hello")), "a comment at the end"),
    "comment-zip": Case(
        _with(lambda z: setattr(z, "comment", wrapped(EVIL))), "an archive as a comment"
    ),
    "gap": Case(_entry(2, gap=b"\0" * 200), "a gap between two records"),
    "gap-pickle": Case(_entry(2, gap=EVIL), "a pickle between two records"),
    "gap-at-end": Case(
        _with(lambda z: setattr(z, "before_directory", bytes(64))), "a gap before the directory"
    ),
    "overlap": Case(_entry(2, header=0), "a record over another"),
    "into-directory": Case(_entry(3, header=1 << 20), "a record behind the directory"),
    "backwards": Case(_with(lambda z: z.entries[1].__setattr__("header", 1)), "inside a header"),
    "size-over": Case(_entry(2, size=1 << 20), "a record longer than the archive"),
    # Two ends.
    "end-count": Case(
        _with(lambda z: z.end.update(count=3, here=3)), "fewer records by one of the two ends"
    ),
    "end-start": Case(_with(lambda z: z.end.update(start=1)), "two places of the directory"),
    "end-length": Case(_with(lambda z: z.end.update(length=1)), "two lengths of the directory"),
    "end64-count": Case(
        _with(lambda z: z.end64.update(count=3, here=3)), "fewer records by the zip64 end"
    ),
    "both-counts": Case(
        _with(lambda z: (z.end.update(count=3, here=3), z.end64.update(count=3, here=3))),
        "a record that neither end counts",
    ),
    "both-starts": Case(
        _with(lambda z: (z.end.update(start=64), z.end64.update(start=64))),
        "a directory that does not end where it must",
    ),
    "locator": Case(_with(lambda z: z.locator.update(at=64)), "a locator that points elsewhere"),
    "locator-disks": Case(_with(lambda z: z.locator.update(disks=2)), "two disks by the locator"),
    "end64-size": Case(_with(lambda z: z.end64.update(size=60)), "a longer zip64 end"),
    "end64-disk": Case(_with(lambda z: z.end64.update(disk=1)), "another disk by the zip64 end"),
    "end-disk": Case(_with(lambda z: z.end.update(disk=1)), "another disk"),
    "end-here": Case(_with(lambda z: z.end.update(here=3)), "fewer records on this disk"),
    "count-too-large": Case(
        _with(lambda z: (z.end.update(count=5, here=5), z.end64.update(count=5, here=5))),
        "more records than the directory has", *_BAD,
    ),
    "count-huge": Case(
        _with(lambda z: (z.end.update(count=0xFFFF, here=0xFFFF),
                         z.end64.update(count=1 << 40, here=1 << 40))),
        "a trillion records", *_BAD,
    ),
    "no-zip64-end": Case(_with(_without_zip64), "a count that needs the zip64 end", *_BAD),
    # Content against pickle.
    "short-storage": Case(archive(data=BYTES[:8]).built(), "a storage too short", *_SIZE),
    "long-storage": Case(archive(data=BYTES + BYTES).built(), "a storage too long", *_SIZE),
    "no-storage": Case(_with(lambda z: z.entries.pop(2)), "a storage that is not there", *_BAD),
    "no-pickle": Case(_with(lambda z: z.entries.pop(0)), "no data.pkl", *_BAD),
    "no-records": Case(Zip().built(), "an empty archive", *_BAD),
    "pickle-crc": Case(_entry(0, crc=1), "a data.pkl of another CRC", "bad-crc", 4),
    "byteorder-middle": Case(
        _with(lambda z: setattr(z.entries[1], "data", b"middle")), "an unknown byte order"
    ),
    "byteorder-big": Case(
        _with(lambda z: setattr(z.entries[1], "data", b"big")), "big-endian", "unsupported", 13
    ),
    "torchscript": Case(
        _with(lambda z: z.entries.append(Entry(b"x/constants.pkl", whole(b")")))),
        "a TorchScript program", "unsupported", 13,
    ),
    "evil-pickle": Case(wrapped(EVIL), "a pickle that calls os.system", "unsafe-pickle", 7),
    # A head that says something else.
    "legacy-head": Case(
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + GOOD[15:], "the magic of the legacy format"
    ),
    "pickle-head": Case(EVIL[:30] + GOOD[30:], "a pickle at the head"),
    # Damage.
    "empty": Case(b"", "no bytes", *_BAD),
    "zeros": Case(bytes(len(GOOD)), "zeros, as a lost block leaves them", *_BAD),
    "cut-1": Case(GOOD[:-1], "one byte short", *_BAD),
    "cut-end": Case(GOOD[:-22], "without its end record", *_BAD),
    "cut-half": Case(GOOD[: len(GOOD) // 2], "half of it", *_BAD),
    "cut-head": Case(GOOD[64:], "without its first block"),
    "end-zeroed": Case(GOOD[:-98] + bytes(98), "end records of zeros", *_BAD),
    "end64-zeroed": Case(GOOD[:-98] + bytes(56) + GOOD[-42:], "a zip64 end of zeros", *_BAD),
    "directory-zeroed": Case(
        GOOD.replace(b"PK\1\2", bytes(4), 1), "an entry without a signature", *_BAD
    ),
}  # fmt: skip

README = """# Hostile torch.save archives

Each is opened and checked as one checkpoint, and must lead to the finding and the exit code in its
row. Written by `../make_zips.py`.

| file | tries | finding | exit code |
|---|---|---|---|
"""


def files() -> dict[str, bytes]:
    """Return path -> content of all that this script writes."""
    rows = "".join(f"| {n}.pt | {c.tries} | `{c.kind}` | {c.code} |\n" for n, c in ZIPS.items())
    made = {f"zip/{name}.pt": case.content for name, case in ZIPS.items()}
    return {**made, "zip/README.md": (README + rows).encode()}


if __name__ == "__main__":
    for path, content in files().items():
        (HERE / path).parent.mkdir(exist_ok=True)
        (HERE / path).write_bytes(content)
