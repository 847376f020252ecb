"""A training state that `pickle.dump` wrote by itself: `latest.pkl`, without torch.save.

A tensor is pickled as a call that loads a stream of torch's from the bytes beside it, an array of
numpy as its bytes with a type and a shape. All of them lie inside the pickle, and a pickle of tens
of gigabytes is not read into memory to be unpickled. So it is walked first, opcode by opcode, and
every bytes object is left out: a reference takes its place, and what stays is short. The one
unpickler reads that. A tensor is then a place in the file, as in every other format.

What was left out and is not a tensor (a random state, a scalar) is put back, and the pickle is read
once more.

Sources: CPython's `Modules/_pickle.c`, `torch/storage.py` (`__reduce__`), numpy's
`core/src/multiarray/methods.c` (`array_reduce`) and `descriptor.c` (`arraydescr_reduce`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError, FtckptError, UnsafeError, UnsupportedError
from ftckpt.extents import Read
from ftckpt.formats.pickles.inert import Inert, Sealed, inert, refuse, sealed
from ftckpt.formats.pickles.outline import Outline
from ftckpt.formats.pickles.sniff import refuse_hostile
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.pickles.walk import step_of

from .legacy_stream import Legacy, parse_legacy
from .storages import MAGIC, NESTED
from .table import TABLE
from .values import StorageRef, StoredStorage, TensorRef

if TYPE_CHECKING:
    from .stream import TorchStream

_MARK = re.compile(rb"\x80[\x02-\x05]")


def begins_plain(head: bytes) -> bool:
    """Say whether bytes begin as a pickle by itself, of protocol 2 to 5."""
    return _MARK.match(head) is not None and not head.startswith(MAGIC)


def parse_plain(read: Read, size: int, *, file: str, base: int = 0) -> TorchStream:
    """Parse one pickle whose tensors lie inside it; their elements are found, not read.

    Args:
        read: returns `length` bytes at `offset`, relative to the start of the pickle.
        size: of the pickle, in bytes.
        file: its file, as it shall stand in extents and messages.
        base: where the pickle starts in that file.

    Returns:
        The stream: numpy arrays in dicts and lists are tensors too, others stay what they are.

    Raises:
        CorruptError: cut short, or damaged (`bad-pickle`, `size-mismatch`).
        UnsafeError: a hostile pickle (`unsafe-pickle`).
        UnsupportedError: tensors that are spelled as text, as protocol 2 does it.
        NoResourceError: more than memory holds of what is not a tensor.
    """
    from .stream import TorchStream

    try:
        outline = Outline(read, size, file, base)
    except CorruptError:
        refuse_hostile(read, size, file=file, base=base)  # it acts before it breaks
        raise
    except UnsafeError as error:
        error.file = error.file or file
        raise
    reading = _Reading(read, file, base, outline)
    loaded = reading.load(frozenset(range(len(outline.payloads))))
    kept = frozenset(reading.used)
    if len(kept) < len(outline.payloads):
        loaded = reading.load(kept)
    opaque = dict.fromkeys((*loaded.opaque, *reading.opaque))
    return TorchStream(loaded.tree, reading.storages, tuple(opaque), None, file, plain=True)


# Stands in the tree for a bytes object that was left out, and holds its number.
_SPAN = inert("builtins.bytes")


class _Loads(metaclass=Sealed):
    """Stand-in of `_load_from_bytes`, for one reading."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[Any], StorageRef | TensorRef]) -> None:
        self._find = find

    def __setstate__(self, state: Any) -> None:
        refuse("changes a function")

    def __call__(self, data: Any) -> StorageRef | TensorRef:
        return self._find(data)


class _Loaded(NamedTuple):
    tree: Any
    opaque: tuple[str, ...]


class _Reading:
    """Unpickles what stays, and finds which of the rest are tensors.

    Attributes:
        storages: of all tensors.
        used: numbers of the bytes objects that they lie in.
        opaque: names outside the table in torch's own streams.
    """

    def __init__(self, read: Read, file: str, base: int, outline: Outline) -> None:
        self.storages: dict[str, StoredStorage] = {}
        self.used: set[int] = set()
        self.opaque: tuple[str, ...] = ()
        self._read, self._file, self._base, self._outline = read, file, base, outline
        self._streams: dict[int, StorageRef | TensorRef] = {}

    def load(self, left_out: frozenset[int]) -> _Loaded:
        """Unpickle; bytes objects that are not `left_out` are what they are."""
        spans = {number: _SPAN(number) for number in left_out}

        def span(pid: Any) -> Inert:
            if type(pid) is not int or pid not in spans:
                refuse("refers to outside storage where there is none")
            return spans[pid]

        table = {**TABLE, **_TOLERANT, NESTED: _Loads(self._nested)}
        rest = self._outline.rest(left_out)
        try:
            loaded = load(rest, file=self._file, table=table, persistent=span, offset=self._base)
        except FtckptError as error:
            if error.length == len(rest):
                error.length = None  # what was read has other places than the file
            raise
        return _Loaded(self._with_arrays(loaded.value), loaded.opaque)

    def _nested(self, data: Any) -> StorageRef | TensorRef:
        """Stand in for `_load_from_bytes`: find the storage in a stream inside the pickle."""
        if isinstance(data, (bytes, str)):
            raise self._as_text()
        if type(data) is not _SPAN:
            refuse(f"calls {NESTED} on what is not bytes")
        number = data.args[0]
        known = self._streams.get(number)
        if known is None:
            known = self._streams[number] = self._stream(number)
        return known

    def _as_text(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._file} spells the bytes of its tensors as text, as pickle's protocol 2 does",
            hint="load it with the trainer's own code and write it with protocol 4",
            file=self._file,
        )

    def _stream(self, number: int) -> StorageRef | TensorRef:
        from .stream import parse_stream

        payload = self._outline.payloads[number]
        table = {**TABLE, NESTED: sealed(_too_deep)}
        base = self._base + payload.offset

        head = self._read(payload.offset, min(_HEAD, payload.length))

        def read(offset: int, length: int) -> bytes:
            if offset + length <= len(head):
                return head[offset : offset + length]
            return self._read(payload.offset + offset, min(length, payload.length - offset))

        if head.startswith(MAGIC):
            found: Legacy | TorchStream = parse_legacy(
                read, payload.length, file=self._file, base=base, table=table,
                parse=parse_stream, first=_HEAD,
            )  # fmt: skip
        else:
            found = parse_stream(read, payload.length, file=self._file, base=base, table=table)
        ref = found.tree
        if type(ref) is not StorageRef and type(ref) is not TensorRef:
            refuse(f"calls {NESTED} on what holds no storage")
        key = f"{number}:{ref.key}"
        self.storages[key] = found.storages[ref.key]
        self.used.add(number)
        self.opaque += found.opaque
        return ref._replace(key=key)

    # --- numpy ----------------------------------------------------------------------------------

    def _with_arrays(self, tree: Any) -> Any:
        """Put tensors in place of the arrays in dicts and lists, states of generators excepted."""
        made: dict[int, TensorRef | None] = {}
        seen: set[int] = set()
        todo: list[Any] = [[tree]]
        top = todo[0]
        while todo:
            holder = todo.pop()
            members = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in list(members):
                if isinstance(value, Inert) and not _is_generator(key):
                    if id(value) not in made:
                        made[id(value)] = self._array(value)
                    ref = made[id(value)]
                    if ref is not None:
                        holder[key] = ref
                elif (type(value) is list or isinstance(value, dict)) and id(value) not in seen:
                    seen.add(id(value))
                    if not _of_generators(key, value):
                        todo.append(value)
        return top[0]

    def _array(self, value: Inert) -> TensorRef | None:
        """Return an array as a tensor; None for what is none, or of no plain type."""
        if value.qualname in _RECONSTRUCT:
            if type(value.state) is not tuple or len(value.state) != 5 or not value.args:
                return None
            _, shape, kind, fortran, data = value.state
            if getattr(value.args[0], "qualname", "") != "numpy.ndarray":
                return None
        elif value.qualname in _FROM_BUFFER and len(value.args) == 4:
            data, kind, shape, order = value.args
            fortran = order == "F"
        else:
            return None
        dtype = _dtype(kind)
        if dtype is None or type(shape) is not tuple:
            return None
        if len(shape) > _DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            return None
        if isinstance(data, (bytes, str)):
            raise self._as_text()
        if type(data) is not _SPAN:
            return None
        number = data.args[0]
        payload = self._outline.payloads[number]
        numel = prod(shape)
        if dtype.nbytes(numel) != payload.length:
            raise CorruptError(
                f"an array of shape {list(shape)[:8]} in {self._file} has {payload.length} bytes"
                f" where its elements need {dtype.nbytes(numel)}",
                kind="size-mismatch", file=self._file,
                offset=self._base + payload.offset, length=payload.length,
            )  # fmt: skip
        key = f"{number}:array"
        extent = Extent(self._file, self._base + payload.offset, payload.length)
        self.storages[key] = StoredStorage(extent, dtype, numel)
        self.used.add(number)
        strides = tuple(reversed(dense_strides(shape[::-1]))) if fortran else dense_strides(shape)
        return TensorRef(key, 0, shape, strides, dtype)


# Storages are pickled with a few hundred bytes before their elements.
_HEAD = 4 << 10
_DIMENSIONS = 64  # numpy's limit
_RECONSTRUCT = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core"))
_FROM_BUFFER = frozenset(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core"))
_TYPES: Mapping[str, DType] = {
    code: DTYPES[name]
    for code, name in {
        "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8",
        "u2": "uint16", "u4": "uint32", "u8": "uint64", "f2": "float16", "f4": "float32",
        "f8": "float64", "c8": "complex64", "c16": "complex128",
    }.items()
}  # fmt: skip
_GENERATORS = re.compile(r"(?:^|_)(?:rng|random|generator)(?:s|_|$)")


def _dtype(kind: Any) -> DType | None:
    """Return a plain little-endian type as numpy pickles it; None for another."""
    if not isinstance(kind, Inert) or kind.qualname != "numpy.dtype" or not kind.args:
        return None
    code, state = kind.args[0], kind.state
    if type(code) is not str or type(state) is not tuple or len(state) < 5:
        return None
    plain = state[1] in ("<", "|") and state[2] is None and state[4] is None
    return _TYPES.get(code) if plain else None


def _of_generators(key: Any, value: Any) -> bool:
    """Say whether arrays in it are the state of a generator, which is put back as an array."""
    return _is_generator(key) or (isinstance(value, dict) and "bit_generator" in value)


def _is_generator(key: Any) -> bool:
    return _GENERATORS.search(str(step_of(key)).lower()) is not None


def _tolerant(build: Callable[..., Any]) -> Callable[..., Any]:
    def built(*args: Any) -> Any:
        # No tensor uses these bytes, so all is read once more with them in their place.
        return None if args and type(args[0]) is _SPAN else build(*args)

    return built


_TOLERANT = {
    f"{module}.{name}": _tolerant(TABLE[f"{module}.{name}"])
    for module in ("builtins", "__builtin__")
    for name in ("bytearray", "bytes")
}


def _too_deep(*args: Any) -> NoReturn:
    refuse("nests streams deeper than torch does")
