"""Resolve storages that a torch pickle names by persistent id, or holds as a stream.

Source: `torch/serialization.py` (`persistent_id`) and `torch/storage.py` (`__reduce__`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ftckpt.formats.pickles.unpickle import Sealed, refuse, sealed

from .values import StorageRef, StorageType, StoredStorage, TensorRef

if TYPE_CHECKING:
    from ftckpt.extents import Read

    from .stream import TorchStream

NESTED = "torch.storage._load_from_bytes"
NESTED_NAME = b"_load_from_bytes"
# A pickle is an index; the largest real ones are a few hundred MB.
MAX_PICKLE = 1 << 30
FIRST_READ = 256 << 10
# The pickled magic number that every legacy stream begins with.
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


class ParseStream(Protocol):
    """`torch_stream.parse_stream`, handed over so that neither module imports the other."""

    def __call__(
        self, read: Read, size: int, *, file: str, table: Mapping[str, Any]
    ) -> TorchStream:
        """Parse one stream."""


def storage_ref(pid: Any) -> StorageRef:
    """Return the storage that a persistent id names; `torch/serialization.py` writes its fields.

    Raises:
        UnsafeError: torch never writes such a one (`unsafe-pickle`).
    """
    if type(pid) is not tuple or len(pid) not in (5, 6) or type(pid[0]) is not str:
        refuse("has a persistent id that torch never writes")
    tag, kind, key, location, numel = pid[:5]
    if tag != "storage" or type(kind) is not StorageType or type(key) is not str:
        refuse("has a persistent id that torch never writes")
    if type(numel) is not int or numel < 0 or (location is not None and type(location) is not str):
        refuse("has a persistent id that torch never writes")
    return StorageRef(key, kind.dtype, numel, kind.untyped, location or "")


class Nested(metaclass=Sealed):
    """Stand-in of `torch.storage._load_from_bytes`: a storage pickled as a stream of its own.

    Plain `pickle.dump` of a tensor writes this; its elements lie inside the pickle. torch nests one
    deep, so a stream inside that stream is refused.
    """

    __slots__ = ("_count", "_file", "_parse", "_storages", "_table", "opaque")

    def __init__(
        self,
        storages: dict[str, StoredStorage],
        file: str,
        table: Mapping[str, Any],
        parse: ParseStream,
    ) -> None:
        self._parse = parse
        self._storages, self._file, self._count = storages, file, 0
        self._table = {**table, NESTED: sealed(_too_deep)}
        self.opaque: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        refuse("changes a function")

    def __call__(self, data: Any) -> Any:
        """Parse the nested stream and return the storage or tensor that it holds."""
        if type(data) not in (bytes, bytearray):
            refuse(f"calls {NESTED} on what is not bytes")
        raw = bytes(data)
        stream = self._parse(
            lambda offset, length: raw[offset : offset + length],
            len(raw),
            file=self._file,
            table=self._table,
        )
        ref = stream.tree
        if type(ref) is not StorageRef and type(ref) is not TensorRef:
            refuse(f"calls {NESTED} on what holds no storage")
        stored = stream.storages[ref.key]
        start, length = stored.extent.offset, stored.extent.length
        self._count += 1
        key = f"inline:{self._count}:{ref.key}"
        self._storages[key] = stored._replace(inline=raw[start : start + length])
        self.opaque += stream.opaque
        return ref._replace(key=key)


def _too_deep(*args: Any) -> NoReturn:
    refuse("nests streams deeper than torch does")
