"""One `torch.save` stream, zip or legacy: its object as inert data, its storages as extents.

A stream may be a whole file or a part of one: an item of a distributed checkpoint is a stream of
its own. Reading one costs the end of the zip and its pickle; storages are found, not read.

Source: `torch/serialization.py` of torch 0.4 to 2.13 (`_save`, `_legacy_save`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn
from zlib import crc32 as crc32_of

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, NoResourceError, UnsafeError, UnsupportedError
from ftckpt.extents import Read
from ftckpt.formats.pickles.unpickle import load, refuse

from .storages import FIRST_READ, MAGIC, MAX_PICKLE, NESTED, NESTED_NAME, Nested, storage_ref
from .table import TABLE
from .values import Composite, StorageRef, StoredStorage, SubclassRef, TensorRef
from .zip_directory import TAIL, Archive, Member, read_archive

__all__ = [
    "TABLE",
    "Composite",
    "StoredStorage",
    "SubclassRef",
    "TensorRef",
    "TorchStream",
    "parse_stream",
]

_ZIP = b"PK\3\4"
_LITTLE = crc32_of(b"little")
# How files of other programs begin: long enough that no damage looks so.
_OTHERS = {
    b"\x1f\x8b\x08": "a gzip stream",
    b"\xfd7zXZ\0": "an xz stream",
    b"\x28\xb5\x2f\xfd": "a zstd stream",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"\x04\x22\x4d\x18": "an lz4 stream",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"SQLite format 3\0": "an SQLite database",
    b"ARROW1\0\0": "an Arrow file",
    b"PAR1": "a Parquet file",
    # One for each size of its blocks; then the digits of pi, or of its root where it is empty.
    **{b"BZh%d" % n + m: "a bzip2 stream" for n in range(1, 10) for m in (b"1AY&SY", b"\x17rE8P")},
}
_LOOK = 64 << 10  # bytes at the beginning and at the end that show whether a file is text


class TorchStream(NamedTuple):
    """What one stream holds.

    Attributes:
        tree: the saved object: plain data, `TensorRef`, `SubclassRef`, `Composite`, `Inert`.
        storages: by key, in the order in which the pickle names them.
        opaque: names outside the table, in order of appearance.
        archive: the zip's directory; None for a legacy stream.
        file: path of the file, as in all extents.
        legacy: whether it is the format before torch 1.6.
        byteorder: `little`.
        plain: whether it is not a stream of torch's but a pickle by itself (`plain_pickle`).
    """

    tree: Any
    storages: Mapping[str, StoredStorage]
    opaque: tuple[str, ...]
    archive: Archive | None
    file: str
    legacy: bool = False
    byteorder: str = "little"
    plain: bool = False

    @property
    def records(self) -> list[tuple[str, Extent, int | None]]:
        """Every record with its CRC-32 (None where not recorded), in the order of its bytes.

        A legacy stream carries no CRC and has no records.
        """
        if self.archive is None:
            return []
        return [
            (m.name, Extent(self.file, m.offset, m.size), m.crc32)
            for m in self.archive.members.values()
        ]

    @property
    def unreferenced(self) -> tuple[str, ...]:
        """Names of storage records that no tensor uses: dead weight, or something hidden."""
        if self.archive is None:
            return ()
        data = (name[5:] for name in self.archive.members if name.startswith("data/"))
        return tuple(f"data/{key}" for key in data if key not in self.storages)


def parse_stream(
    read: Read,
    size: int,
    *,
    file: str,
    base: int = 0,
    table: Mapping[str, Any] | None = None,
    tail: int = TAIL,
    plain: bool = False,
) -> TorchStream:
    """Parse one stream without reading a storage.

    A zip costs two reads: its last `tail` bytes, and its pickle. Callers that parse many streams
    should do so inside one `ftckpt.workers.memory.bounded` block and one `no_gc` block.

    Args:
        read: returns `length` bytes at `offset`, both relative to the start of the stream.
        size: of the stream, in bytes.
        file: its file, as it shall stand in extents and messages.
        base: where the stream starts in that file.
        table: what pickled names stand for; `TABLE` where None.
        tail: length of the read at the end.
        plain: whether it may be a pickle by itself, as `pickle.dump` writes it.

    Raises:
        CorruptError: cut short, damaged, a missing record (`bad-zip`, `bad-pickle`, `bad-crc`), a
            record or view of the wrong size (`size-mismatch`).
        UnsafeError: an ambiguous zip (`unsafe-zip`), a hostile pickle (`unsafe-pickle`).
        UnsupportedError: big-endian, TorchScript, the tar format before 0.1.10, or text.
    """
    table = TABLE if table is None else table
    try:
        archive = read_archive(read, size, file=file, base=base, tail=tail)
    except CorruptError:
        head = read(0, min(size, 512))
        if head.startswith(MAGIC):
            from .legacy_stream import parse_legacy

            found = parse_legacy(read, size, file=file, base=base, table=table, parse=parse_stream)
            return TorchStream(*found, None, file, legacy=True)
        if plain:
            from .plain_pickle import begins_plain, parse_plain

            if begins_plain(head):
                return parse_plain(read, size, file=file, base=base)
        _refuse_others(read, size, head, file, base)
        raise
    return _parse_zip(read, archive, file, table)


def _may_be_pickle(head: bytes) -> bool:
    """Whether torch, which reads everything but a zip as a pickle or a tar, could read it."""
    import pickletools

    codes = {op.code.encode("latin-1") for op in pickletools.opcodes}
    return head[:1] in codes or head[257:262] == b"ustar"


def _refuse_others(read: Read, size: int, head: bytes, file: str, base: int) -> None:
    """Say what a file is that is not a torch.save stream; return where it may be a damaged one."""
    if head[257:262] == b"ustar":
        raise UnsupportedError(
            f"{file} is a tar from before torch 0.1.10",
            hint="load and save it again with a torch of that time, in a sandbox",
            file=file,
        )
    if head and not head.startswith(_ZIP):
        from ftckpt.formats.pickles.sniff import refuse_hostile

        refuse_hostile(read, size, file=file, base=base)
        if _is_text(read, size):
            raise UnsupportedError(
                f"{file} holds text, and no torch.save stream: what it means is its trainer's",
                file=file,
            )
        other = other_kind(head)
        if other:
            raise UnsupportedError(f"{file} is {other}, and no torch.save stream", file=file)
        raise CorruptError(
            f"{file} does not begin as a torch.save stream: neither a zip nor the legacy magic",
            kind="bad-zip",
            file=file,
            offset=base,
        )


def other_kind(head: bytes) -> str:
    """Return what a file of another program is by its first bytes; "" for none that is known."""
    return next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), "")


def _is_text(read: Read, size: int) -> bool:
    """Whether a file is text from its first bytes to its last; damage leaves zeros or noise."""
    head = read(0, min(size, _LOOK))
    if b"\n" not in head and not head.lstrip().startswith((b"{", b"[", b"<")):
        return False  # a few letters say nothing
    return _are_letters(head) and (size <= _LOOK or _are_letters(read(size - _LOOK, _LOOK)))


def _are_letters(data: bytes) -> bool:
    """Whether bytes are UTF-8 that prints; a letter may be cut at both ends."""
    begin = next((n for n in range(4) if data[n : n + 1] and data[n] & 0xC0 != 0x80), 4)
    for end in range(len(data), max(len(data) - 4, begin), -1):
        try:
            said = data[begin:end].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return all(letter.isprintable() or letter in "\t\n\r\f" for letter in said)
    return False


def _parse_zip(read: Read, archive: Archive, file: str, table: Mapping[str, Any]) -> TorchStream:
    members = archive.members
    pickle = members.get("data.pkl")
    if pickle is None or "constants.pkl" in members:
        _refuse_kind(archive, file)
    if pickle.size > MAX_PICKLE:
        raise NoResourceError(f"the pickle in {file} has {pickle.size} bytes", file=file)
    # The first bytes decide what torch reads: one read shows them and, as a rule, the pickle.
    skip = pickle.offset - archive.base
    if skip <= FIRST_READ:
        head = read(0, skip + pickle.size)
        data = head[skip:]
    else:
        head, data = read(0, 4), read(skip, pickle.size)
    if not head.startswith(_ZIP):
        if not _may_be_pickle(head):
            raise CorruptError(
                f"{file} has lost its first bytes: they begin neither a zip nor a pickle",
                kind="bad-zip",
                file=file,
                offset=archive.base,
            )
        raise UnsafeError(
            f"{file} begins as something else than the zip that its end describes",
            kind="unsafe-zip",
            file=file,
            offset=archive.base,
        )
    if pickle.crc32 is not None and crc32_of(data) != pickle.crc32:
        raise CorruptError(
            f"the CRC-32 of data.pkl in {file} does not match its bytes",
            kind="bad-crc",
            file=file,
            offset=pickle.offset,
            length=pickle.size,
        )
    if "byteorder" in members:
        _check_byteorder(read, members["byteorder"], archive, file)
    storages: dict[str, StoredStorage] = {}

    def persistent(pid: Any) -> StorageRef:
        ref = storage_ref(pid)
        key, dtype, numel, *_ = ref
        known = storages.get(key)
        if known is None:
            member = members.get(f"data/{key}")
            if member is None:
                raise CorruptError(
                    f"{file} has no record data/{key[:40]!r}, which its pickle names",
                    kind="bad-zip",
                    file=file,
                )
            if member.size != dtype.nbytes(numel):
                raise CorruptError(
                    f"the record {member.name} in {file} has {member.size} bytes where {numel}"
                    f" elements of {dtype.name} need {dtype.nbytes(numel)}",
                    kind="size-mismatch",
                    file=file,
                    offset=member.offset,
                    length=member.size,
                )
            extent = Extent(file, member.offset, member.size)
            storages[key] = StoredStorage(extent, dtype, numel, member.crc32)
        elif known.numel * known.dtype.itemsize != numel * dtype.itemsize:
            refuse("gives one storage two sizes")
        return ref

    opaque: tuple[str, ...] = ()
    if NESTED_NAME in data and NESTED not in table:
        nested = Nested(storages, file, table, parse_stream)
        table = {**table, NESTED: nested}
        loaded = load(data, file=file, table=table, persistent=persistent, offset=pickle.offset)
        opaque = nested.opaque
    else:
        loaded = load(data, file=file, table=table, persistent=persistent, offset=pickle.offset)
    return TorchStream(loaded.value, storages, loaded.opaque + opaque, archive, file)


def _refuse_kind(archive: Archive, file: str) -> NoReturn:
    members = archive.members
    if "constants.pkl" in members or any(name.startswith("code/") for name in members):
        raise UnsupportedError(
            f"{file} is a TorchScript program, not a checkpoint",
            hint="save the module's state_dict with torch.save",
            file=file,
        )
    if ".data/extern_modules" in members:
        raise UnsupportedError(f"{file} is a torch.package archive, not a checkpoint", file=file)
    if "archive_format" in members or any(name.startswith("models/") for name in members):
        raise UnsupportedError(f"{file} is an exported program (pt2), not a checkpoint", file=file)
    raise CorruptError(f"{file} has no record data.pkl", kind="bad-zip", file=file)


def _check_byteorder(read: Read, member: Member, archive: Archive, file: str) -> None:
    # The recorded CRC says which text it is without a read; content checks hold it to the bytes.
    if member.size == 6 and member.crc32 == _LITTLE:
        return
    order = read(member.offset - archive.base, min(member.size, 16))
    if order == b"big":
        raise UnsupportedError(
            f"{file} was written on a big-endian machine", file=file, offset=member.offset
        )
    if order != b"little":
        raise UnsafeError(
            f"{file} gives its byte order as {order!r}",
            kind="unsafe-zip",
            file=file,
            offset=member.offset,
            length=member.size,
        )
