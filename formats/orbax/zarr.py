"""What the metadata of a zarr array says: its shape and type, and where each chunk's bytes lie.

Read are version 2 and version 3 with the regular grid, little-endian bytes in C order, plain or
compressed with zstd, gzip, zlib or Blosc, and version 3's shards of such chunks, with `crc32c`.
Everything else is refused by name.

Source: zarr-specs `docs/v2/v2.0.rst`, `docs/v3/core`, `docs/v3/codecs/sharding-indexed`;
tensorstore `driver/{zarr,zarr3}`, which adds the types of ml_dtypes by their names.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.storage.decompress import BLOSC, GZIP, ZLIB, ZSTD
from ftckpt.strict_json import JsonLimits, parse, shown

_LIMITS = JsonLimits(depth=16, objects=1000, keys=10_000, items=100_000, naturals=False)
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_NUMPY = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16",
    "<i4": "int32", "<u4": "uint32", "<i8": "int64", "<u8": "uint64", "<f2": "float16",
    "<f4": "float32", "<f8": "float64", "<c8": "complex64", "<c16": "complex128",
}  # fmt: skip
# Of ml_dtypes' types those whose bytes are torch's (`jax.numpy.float8_e4m3fn` and its kin).
_NAMED = {
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
}  # fmt: skip
# What an array of zarr 2 calls each type.
WRITTEN_TYPES = {name: name for name in sorted(_NAMED)} | {v: k for k, v in _NUMPY.items()}
_STRUCT = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "q", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
_COMPRESSORS = {"zstd": ZSTD, "gzip": GZIP, "zlib": ZLIB, "blosc": BLOSC}
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62


class ZarrCodec(NamedTuple):
    """How the bytes of a chunk are stored.

    Attributes:
        transforms: of the compressor; none where they are not compressed.
        crc: whether a CRC-32C of four bytes follows what is stored.
    """

    transforms: tuple[str, ...]
    crc: bool


class Array(NamedTuple):
    """One array.

    Attributes:
        grid: shape of a stored object: of a chunk, or of a shard of chunks.
        chunk: shape of what is stored as one run; it divides `grid`.
        codec: of a chunk.
        indexed: how a shard's index is stored, None without shards.
        index_first: whether it stands before the chunks.
        version: of zarr.
        separator: between the numbers in a chunk's key.
        prefixed: whether a chunk's key begins with `c`.
        fill: the bytes of an element of a chunk that is not stored; None where nothing says them.
    """

    shape: tuple[int, ...]
    dtype: DType
    grid: tuple[int, ...]
    chunk: tuple[int, ...]
    codec: ZarrCodec
    indexed: ZarrCodec | None
    index_first: bool
    version: int
    separator: str
    prefixed: bool
    fill: bytes | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of stored objects along each axis."""
        return tuple(-(-n // g) for n, g in zip(self.shape, self.grid, strict=True))

    @property
    def inner(self) -> tuple[int, ...]:
        """Number of chunks in a stored object along each axis."""
        return tuple(g // c for g, c in zip(self.grid, self.chunk, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk, decoded; chunks at an edge are as large as the others."""
        return self.dtype.nbytes(prod(self.chunk))

    def key(self, at: tuple[int, ...]) -> str:
        """Return the key of a stored object, below the array's."""
        numbers = [str(one) for one in at]
        if self.prefixed:
            return self.separator.join(["c", *numbers])
        return self.separator.join(numbers) or "0"


def parse_array(raw: bytes, file: str, version: int) -> Array:
    """Return what the metadata of an array of zarr 2 or 3 says.

    Raises:
        CorruptError: it is not JSON, or contradicts itself (`bad-metadata`).
        NewerWriterError: it has other members, or values of other types, than are known.
        UnsafeError: it is ambiguous or abusive.
        UnsupportedError: a type, codec or grid that is not read.
    """
    value = parse(
        raw, _LIMITS, file=file, what="metadata", bad="bad-metadata", unsafe="unsafe-index"
    )
    found = _Metadata(value, file)
    return _version2(found) if version == 2 else _version3(found)


class _Metadata:
    """A JSON object, asked for members that must be there or be of one value."""

    def __init__(self, value: object, file: str) -> None:
        self.file = file
        self.left: dict[str, Any] = (
            dict(value) if isinstance(value, dict) else self.other("an object", value)
        )

    def other(self, expected: str, value: object) -> NoReturn:
        raise NewerWriterError.of(
            f"the metadata of {self.file}", expected=expected, found=shown(value), file=self.file
        )

    def damaged(self, value: object) -> Any:
        raise CorruptError(
            f"the metadata of {self.file} holds {shown(value)} where it must not",
            kind="bad-metadata", file=self.file,
        )  # fmt: skip

    def unknown(self, what: str, value: object) -> Any:
        raise UnsupportedError(
            f"{self.file} is an array with {what} {shown(value)}, which is not read",
            file=self.file,
        )

    def take(self, name: str) -> Any:
        if name not in self.left:
            near = next((one for one in self.left if one_bit_from(one, (name,))), "")
            if near:
                raise CorruptError(
                    f"the metadata of {self.file} has {shown(near)}, one bit from {name}",
                    kind="bad-metadata", file=self.file,
                )  # fmt: skip
            raise NewerWriterError.of(
                f"the metadata of {self.file}", expected=name,
                found=listed(sorted(self.left)) or "nothing", file=self.file,
            )  # fmt: skip
        return self.left.pop(name)

    def below(self, value: object) -> _Metadata:
        return _Metadata(value, self.file)

    def must(self, name: str, *allowed: Any) -> None:
        self.left[name] = self.take(name)
        self.only(name, *allowed)

    def only(self, name: str, *allowed: Any) -> None:
        value = self.left.pop(name, allowed[0])
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.unknown(name, value)

    def done(self) -> None:
        for name, value in self.left.items():
            self.unknown(name, value)

    def sizes(self, value: object, least: int) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.other("a list of sizes", value)
        if len(value) > _MOST_DIMENSIONS:
            self.damaged(value)
        if any(type(one) is not int or not least <= one < _MOST_ELEMENTS for one in value):
            self.damaged(value)
        if prod(value) > _MOST_ELEMENTS:
            self.damaged(value)
        return tuple(value)


def _version2(found: _Metadata) -> Array:
    found.must("zarr_format", 2)
    shape = found.sizes(found.take("shape"), 0)
    chunks = found.sizes(found.take("chunks"), 1)
    if len(chunks) != len(shape):
        found.damaged(list(chunks))
    name = found.take("dtype")
    if not isinstance(name, str) or name not in {*_NUMPY, *_NAMED}:
        found.unknown("the type", name)
    found.must("order", "C")
    found.must("filters", None, [])
    separator = found.left.pop("dimension_separator", ".")
    if separator not in (".", "/"):
        found.unknown("dimension_separator", separator)
    fill = found.take("fill_value")
    if fill not in (None, [0, 0], *_NOT_FINITE) and not isinstance(fill, int | float):
        found.other("a fill value", fill)
    compressor = found.take("compressor")
    transforms: tuple[str, ...] = ()
    if compressor is not None:
        inner = found.below(compressor)
        transforms = (_compressor(inner, inner.take("id")),)
    found.done()
    dtype = DTYPES[_NUMPY.get(name, name)]
    codec = ZarrCodec(transforms, crc=False)
    return Array(
        shape, dtype, chunks, chunks, codec, None, False, 2, separator, prefixed=False,
        fill=_fill(dtype, fill),
    )  # fmt: skip


def _version3(found: _Metadata) -> Array:
    found.must("zarr_format", 3)
    found.must("node_type", "array")
    shape = found.sizes(found.take("shape"), 0)
    name = found.take("data_type")
    if not isinstance(name, str) or name not in {*_NUMPY.values(), *_NAMED}:
        found.unknown("the type", name)
    grid = found.below(found.take("chunk_grid"))
    grid.only("name", "regular")
    configuration = grid.below(grid.take("configuration"))
    chunk = stored = found.sizes(configuration.take("chunk_shape"), 1)
    configuration.done()
    grid.done()
    encoding = found.below(found.take("chunk_key_encoding"))
    prefixed, separator = _key_encoding(encoding)
    codecs = found.take("codecs")
    index, first = None, False
    if isinstance(codecs, list) and len(codecs) == 1 and _is_sharding(codecs[0]):
        inner = found.below(codecs[0])
        inner.only("name", "sharding_indexed")
        sharding = inner.below(inner.take("configuration"))
        inner.done()
        chunk = found.sizes(sharding.take("chunk_shape"), 1)
        index = _codec(found, sharding.take("index_codecs"))
        place = sharding.left.pop("index_location", "end")
        if place not in ("start", "end"):
            found.unknown("index_location", place)
        first = place == "start"
        codecs = sharding.take("codecs")
        sharding.done()
        if index.transforms:
            found.unknown("an index", "compressed")
    codec = _codec(found, codecs)
    if not len(shape) == len(stored) == len(chunk):
        found.damaged(list(chunk))
    if any(whole % part for whole, part in zip(stored, chunk, strict=True)):
        found.damaged(list(chunk))
    fill = _fill(DTYPES[name], found.take("fill_value"))
    for harmless in ("attributes", "dimension_names"):
        found.left.pop(harmless, None)
    found.only("storage_transformers", [])
    found.done()
    return Array(
        shape, DTYPES[name], stored, chunk, codec, index, first, 3, separator, prefixed, fill
    )


def _fill(dtype: DType, value: object) -> bytes | None:
    """Return the bytes of a fill value: zero of any type, or a number of an ordinary one."""
    if value == [0, 0] or (type(value) in (bool, int, float) and value == 0 and _plus(value)):
        return bytes(dtype.itemsize)
    code = _STRUCT.get(dtype.name)
    if code is None or not isinstance(value, int | float):
        return None
    try:
        return struct.pack("<" + code, value)
    except (struct.error, OverflowError, ValueError):
        return None


def _plus(value: object) -> bool:
    return not str(value).startswith("-")


def _is_sharding(value: object) -> bool:
    return isinstance(value, dict) and value.get("name") == "sharding_indexed"


def _key_encoding(encoding: _Metadata) -> tuple[bool, str]:
    name = encoding.take("name")
    if name not in ("default", "v2"):
        encoding.unknown("chunk_key_encoding", name)
    inner = encoding.below(encoding.left.pop("configuration", {}))
    separator = inner.left.pop("separator", "/" if name == "default" else ".")
    if separator not in (".", "/"):
        encoding.unknown("a separator", separator)
    inner.done()
    encoding.done()
    return name == "default", separator


def _codec(found: _Metadata, codecs: object) -> ZarrCodec:
    """Return bytes, perhaps a compressor, perhaps crc32c, in this order."""
    if not isinstance(codecs, list) or not codecs:
        found.other("a list of codecs", codecs)
    names, transforms = [], []
    for one in codecs:
        codec = found.below(one)
        name = codec.take("name")
        inner = codec.below(codec.left.pop("configuration", {}))
        codec.done()
        names.append(name)
        if name == "bytes":
            inner.only("endian", "little")
        elif name != "crc32c":
            transforms.append(_compressor(inner, name))
        inner.done()
    order = ["bytes", *names[1 : 1 + len(transforms)], *(["crc32c"] if "crc32c" in names else [])]
    if names != order or len(transforms) > 1:
        found.unknown("the codecs", names)
    return ZarrCodec(tuple(transforms), "crc32c" in names)


def _compressor(found: _Metadata, name: object) -> str:
    """Return the transform of a compressor; what its settings are does not matter to a reader."""
    transform = _COMPRESSORS.get(name) if isinstance(name, str) else None
    if transform is None:
        found.unknown("the codec", name)
    assert transform is not None
    for setting in ("level", "clevel", "blocksize", "typesize"):
        if type(value := found.left.pop(setting, 0)) is not int:
            found.other(f"a number as {setting}", value)
    for setting in ("checksum", "shuffle"):
        found.left.pop(setting, None)
    if transform == BLOSC:
        packer = found.left.pop("cname", "lz4")
        if packer not in ("lz4", "lz4hc", "zlib", "zstd"):
            found.unknown("Blosc's", packer)
    found.done()
    return transform
