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
from ftckpt.errors import (
    CorruptError,
    NoResourceError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)

from .archive import TAIL, Archive, Member, Read, read_archive
from .torch_table import TABLE
from .torch_values import (
    Composite,
    StorageRef,
    StorageType,
    StoredStorage,
    SubclassRef,
    TensorRef,
)
from .unpickle import Sealed, load, refuse, sealed

__all__ = [
    "TABLE",
    "Composite",
    "StoredStorage",
    "SubclassRef",
    "TensorRef",
    "TorchStream",
    "parse_stream",
]

# A pickle is an index; the largest real ones are a few hundred MB.
MAX_PICKLE = 1 << 30
_ZIP = b"PK\3\4"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LITTLE = crc32_of(b"little")
_FIRST_READ = 256 << 10


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
    """

    tree: Any
    storages: Mapping[str, StoredStorage]
    opaque: tuple[str, ...]
    archive: Archive | None
    file: str
    legacy: bool = False
    byteorder: str = "little"

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
) -> TorchStream:
    """Parse one stream without reading a storage.

    A zip costs two reads: its last `tail` bytes, and its pickle. Callers that parse many streams
    should do so inside one `ftckpt.memory.bounded` block and one `no_gc` block.

    Args:
        read: returns `length` bytes at `offset`, both relative to the start of the stream.
        size: of the stream, in bytes.
        file: its file, as it shall stand in extents and messages.
        base: where the stream starts in that file.
        table: what pickled names stand for; `TABLE` where None.
        tail: length of the read at the end.

    Raises:
        CorruptError: cut short, damaged, a missing record (`bad-zip`, `bad-pickle`, `bad-crc`), a
            record or view of the wrong size (`size-mismatch`).
        UnsafeError: an ambiguous zip (`unsafe-zip`), a hostile pickle (`unsafe-pickle`).
        UnsupportedError: big-endian, TorchScript, or the tar format before 0.1.10.
    """
    table = TABLE if table is None else table
    try:
        archive = read_archive(read, size, file=file, base=base, tail=tail)
    except CorruptError:
        head = read(0, min(size, 512))
        if head.startswith(_LEGACY):
            return _parse_legacy(read, size, file, base, table)
        _refuse_others(head, file, base)
        raise
    return _parse_zip(read, archive, file, table)


def _may_be_pickle(head: bytes) -> bool:
    """Whether torch, which reads everything but a zip as a pickle or a tar, could read it."""
    import pickletools

    codes = {op.code.encode("latin-1") for op in pickletools.opcodes}
    return head[:1] in codes or head[257:262] == b"ustar"


def _refuse_others(head: bytes, file: str, base: int) -> None:
    """Say what a file is that is no torch.save stream; return where it may be a damaged one."""
    if head[257:262] == b"ustar":
        raise UnsupportedError(
            f"{file} is a tar from before torch 0.1.10",
            hint="load and save it again with a torch of that time, in a sandbox",
            file=file,
        )
    if head and not head.startswith(_ZIP):
        raise CorruptError(
            f"{file} does not begin as a torch.save stream: neither a zip nor the legacy magic",
            kind="bad-zip",
            file=file,
            offset=base,
        )


# --- zip ----------------------------------------------------------------------------------------


def _parse_zip(read: Read, archive: Archive, file: str, table: Mapping[str, Any]) -> TorchStream:
    members = archive.members
    pickle = members.get("data.pkl")
    if pickle is None or "constants.pkl" in members:
        _refuse_kind(archive, file)
    if pickle.size > MAX_PICKLE:
        raise NoResourceError(f"the pickle in {file} has {pickle.size} bytes", file=file)
    # The first bytes decide what torch reads: one read shows them and, as a rule, the pickle.
    skip = pickle.offset - archive.base
    if skip <= _FIRST_READ:
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
        ref = _storage_ref(pid)
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
    if _NESTED_NAME in data and _NESTED not in table:
        nested = Nested(storages, file, table)
        table = {**table, _NESTED: nested}
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


def _storage_ref(pid: Any) -> StorageRef:
    """Return the storage that a persistent id names; see the module's sources for its fields."""
    if type(pid) is not tuple or len(pid) not in (5, 6) or type(pid[0]) is not str:
        refuse("has a persistent id that torch never writes")
    tag, kind, key, location, numel = pid[:5]
    if tag != "storage" or type(kind) is not StorageType or type(key) is not str:
        refuse("has a persistent id that torch never writes")
    if type(numel) is not int or numel < 0 or (location is not None and type(location) is not str):
        refuse("has a persistent id that torch never writes")
    return StorageRef(key, kind.dtype, numel, kind.untyped, location or "")


# --- a stream inside a pickle -------------------------------------------------------------------

_NESTED = "torch.storage._load_from_bytes"
_NESTED_NAME = b"_load_from_bytes"


class Nested(metaclass=Sealed):
    """Stand-in of `torch.storage._load_from_bytes`: a storage pickled as a stream of its own.

    Plain `pickle.dump` of a tensor writes this; its elements lie inside the pickle. torch nests one
    deep, so a stream inside that stream is refused.
    """

    __slots__ = ("_count", "_file", "_storages", "_table", "opaque")

    def __init__(
        self, storages: dict[str, StoredStorage], file: str, table: Mapping[str, Any]
    ) -> None:
        self._storages, self._file, self._count = storages, file, 0
        self._table = {**table, _NESTED: sealed(_too_deep)}
        self.opaque: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        refuse("changes a function")

    def __call__(self, data: Any) -> Any:
        if type(data) not in (bytes, bytearray):
            refuse(f"calls {_NESTED} on what is not bytes")
        raw = bytes(data)
        stream = parse_stream(
            lambda offset, length: raw[offset : offset + length],
            len(raw),
            file=self._file,
            table=self._table,
        )
        ref = stream.tree
        if type(ref) is not StorageRef and type(ref) is not TensorRef:
            refuse(f"calls {_NESTED} on what holds no storage")
        stored = stream.storages[ref.key]
        start, length = stored.extent.offset, stored.extent.length
        self._count += 1
        key = f"inline:{self._count}:{ref.key}"
        self._storages[key] = stored._replace(inline=raw[start : start + length])
        self.opaque += stream.opaque
        return ref._replace(key=key)


def _too_deep(*args: Any) -> NoReturn:
    refuse("nests streams deeper than torch does")


# --- legacy -------------------------------------------------------------------------------------


def _parse_legacy(
    read: Read, size: int, file: str, base: int, table: Mapping[str, Any]
) -> TorchStream:
    """Parse five pickles back to back and place the storages that follow them.

    Where the pickles end is written nowhere: the first read is doubled until they all fit.
    """
    length = min(size, _FIRST_READ)
    while True:
        try:
            return _LegacyParser(file, base, table).parse(read(0, length), read, size)
        except CorruptError as error:
            if error.kind != "bad-pickle" or length == size:
                raise
            if length >= MAX_PICKLE:
                raise NoResourceError(
                    f"the pickle in {file} has more than {length} bytes", file=file
                ) from None
            length = min(size, 4 * length)


class _LegacyParser:
    """One attempt to parse a legacy stream from its first bytes."""

    def __init__(self, file: str, base: int, table: Mapping[str, Any]) -> None:
        self.file, self.base = file, base
        self.roots: dict[str, StorageRef] = {}
        self.storages: dict[str, StoredStorage] = {}
        self.nested = Nested(self.storages, file, table)
        self.table = table if _NESTED in table else {**table, _NESTED: self.nested}
        self.at = 0
        self.opaque: tuple[str, ...] = ()

    def parse(self, data: bytes, read: Read, size: int) -> TorchStream:
        """Parse the stream from its first bytes, which must hold all its pickles."""
        self._next(data)  # the magic number, known
        version = self._next(data)
        system = self._next(data)
        if version != 1001 or not isinstance(system, dict):
            self._damaged("its preamble is not that of the legacy format")
        if system.get("little_endian") is not True:
            raise UnsupportedError(
                f"{self.file} was written on a big-endian machine", file=self.file
            )
        tree = self._next(data)
        keys = self._next(data)
        if type(keys) is not list or any(type(key) is not str for key in keys):
            self._damaged("its list of storages is no list of names")
        if len(set(keys)) != len(keys) or set(keys) != set(self.roots):
            self._damaged("its list of storages is not that of its tensors")
        self._place(keys, read, size)
        opaque = self.opaque + self.nested.opaque
        return TorchStream(tree, self.storages, opaque, None, self.file, legacy=True)

    def _next(self, data: bytes) -> Any:
        loaded = load(
            data[self.at :],
            file=self.file,
            table=self.table,
            persistent=self._persistent,
            exact=False,
            offset=self.base + self.at,
        )
        self.at += loaded.consumed
        self.opaque += loaded.opaque
        return loaded.value

    def _persistent(self, pid: Any) -> Any:
        if type(pid) is tuple and pid and type(pid[0]) is str and pid[0] == "module":
            # A whole nn.Module: its class, its source file, its source text. Only the class counts.
            return (
                pid[1] if len(pid) == 4 else refuse("has a persistent id that torch never writes")
            )
        ref = _storage_ref(pid)
        known = self.roots.setdefault(ref.key, ref)
        if known.numel != ref.numel or known.dtype.itemsize != ref.dtype.itemsize:
            refuse("gives one storage two sizes")
        view = pid[5] if len(pid) == 6 else None
        if view is None:
            return ref
        if type(view) is not tuple or len(view) != 3 or any(type(v) is not int for v in view[1:]):
            refuse("has a persistent id that torch never writes")
        first, numel = view[1:]
        if first < 0 or numel < 0 or first + numel > ref.numel:
            refuse("has a storage view outside its storage")
        # The view's own elements are numbered from `first`; a tensor's reach is checked against
        # the end of the view.
        return ref._replace(first=first, numel=numel)

    def _place(self, keys: list[str], read: Read, size: int) -> None:
        at = self.at
        for key in keys:
            root = self.roots[key]
            length = root.dtype.nbytes(root.numel)
            if at + 8 + length > size:
                raise TruncatedError(
                    f"{self.file} ends before the bytes of its storages: it was cut while being"
                    " written or copied",
                    file=self.file,
                    offset=self.base + at,
                )
            numel = int.from_bytes(read(at, 8), "little", signed=True)
            if numel != root.numel:
                raise CorruptError(
                    f"a storage in {self.file} says {numel} elements where its tensors say"
                    f" {root.numel}",
                    kind="size-mismatch",
                    file=self.file,
                    offset=self.base + at,
                    length=8,
                )
            extent = Extent(self.file, self.base + at + 8, length)
            self.storages[key] = StoredStorage(extent, root.dtype, root.numel)
            at += 8 + length
        if at != size:
            raise CorruptError(
                f"{size - at} bytes follow the last storage in {self.file}",
                kind="trailing-bytes",
                file=self.file,
                offset=self.base + at,
                length=size - at,
            )

    def _damaged(self, what: str) -> NoReturn:
        raise CorruptError(
            f"{self.file} is damaged: {what}", kind="bad-zip", file=self.file, offset=self.base
        )
