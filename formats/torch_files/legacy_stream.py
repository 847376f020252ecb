"""The stream that torch.save wrote before 1.6: five pickles back to back, then the storages.

Source: `torch/serialization.py` (`_legacy_save`, `_legacy_load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Extent
from ftckpt.errors import (
    CorruptError,
    NewerWriterError,
    NoResourceError,
    TruncatedError,
    UnsupportedError,
)
from ftckpt.extents import Read
from ftckpt.formats.pickles.unpickle import load, refuse

from .storages import FIRST_READ, MAX_PICKLE, NESTED, Nested, ParseStream, storage_ref
from .values import StorageRef, StoredStorage

_PROTOCOL = 1001  # torch.serialization.PROTOCOL_VERSION


class Legacy(NamedTuple):
    """What a legacy stream holds: the fields of `torch_stream.TorchStream` of these names."""

    tree: Any
    storages: Mapping[str, StoredStorage]
    opaque: tuple[str, ...]


def parse_legacy(
    read: Read, size: int, *, file: str, base: int, table: Mapping[str, Any], parse: ParseStream,
    first: int = FIRST_READ,
) -> Legacy:  # fmt: skip
    """Parse five pickles back to back and place the storages that follow them.

    Where the pickles end is written nowhere: the first read is enlarged until they all fit.

    Args:
        read: returns `length` bytes at `offset`, both relative to the start of the stream.
        size: of the stream, in bytes.
        file: its file, as it shall stand in extents and messages.
        base: where the stream starts in that file.
        table: what pickled names stand for.
        parse: parses a stream inside the pickle.
        first: how many bytes are read at first.

    Raises:
        CorruptError: cut short, or damaged (`bad-pickle`, `bad-zip`, `size-mismatch`,
            `trailing-bytes`).
        UnsafeError: a hostile pickle (`unsafe-pickle`).
        UnsupportedError: big-endian, or of another version.
        NoResourceError: a pickle of more than `MAX_PICKLE` bytes.
    """
    length = min(size, first)
    while True:
        try:
            return _Parser(file, base, table, parse).parse(read(0, length), read, size)
        except CorruptError as error:
            if error.kind != "bad-pickle" or length == size:
                raise
            if length >= MAX_PICKLE:
                raise NoResourceError(
                    f"the pickle in {file} has more than {length} bytes", file=file
                ) from None
            length = min(size, 4 * length)


class _Parser:
    """One attempt to parse a legacy stream from its first bytes."""

    def __init__(self, file: str, base: int, table: Mapping[str, Any], parse: ParseStream) -> None:
        self.file, self.base = file, base
        self.roots: dict[str, StorageRef] = {}
        self.storages: dict[str, StoredStorage] = {}
        self.nested = Nested(self.storages, file, table, parse)
        self.table = table if NESTED in table else {**table, NESTED: self.nested}
        self.at = 0
        self.opaque: tuple[str, ...] = ()

    def parse(self, data: bytes, read: Read, size: int) -> Legacy:
        """Parse the stream from its first bytes, which must hold all its pickles."""
        self._next(data)  # the magic number, known
        version = self._next(data)
        system = self._next(data)
        if version != _PROTOCOL or not isinstance(system, dict):
            if type(version) is int and (version ^ _PROTOCOL).bit_count() == 1:
                self._damaged("its preamble is one bit from that of the legacy format")
            said = f"{version!r}"[:40] if type(version) is int else version
            raise NewerWriterError.of(
                f"the version of the stream in {self.file}", expected=str(_PROTOCOL), found=said,
                file=self.file,
            )  # fmt: skip
        if system.get("little_endian") is not True:
            raise UnsupportedError(
                f"{self.file} was written on a big-endian machine", file=self.file
            )
        tree = self._next(data)
        keys = self._next(data)
        if type(keys) is not list or any(type(key) is not str for key in keys):
            self._damaged("its list of storages is not a list of names")
        if len(set(keys)) != len(keys) or set(keys) != set(self.roots):
            self._damaged("its list of storages is not that of its tensors")
        self._place(keys, read, size)
        opaque = self.opaque + self.nested.opaque
        return Legacy(tree, self.storages, opaque)

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
        ref = storage_ref(pid)
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
