"""Element types: torch's names, sizes in bits, and how to see their bits through numpy.

Names are torch's without `torch.`. Sources: safetensors' `tensor.rs` for its codes and bit widths,
`torch/storage.py` for the storage classes, `c10/util` headers for the float8 encodings.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: torch's name (`bfloat16`); safetensors-only types carry a name of the same shape.
        bits: size of one element in bits (4 and 6 exist).
        family: `float`, `int`, `uint`, `bool`, `complex` or `opaque` (quantised and raw bits).
        safetensors: code in a safetensors header, "" where it has none.
        storages: names of the torch storage classes that hold it (without `torch.`).
        numpy: numpy dtype string of the same values, "" where numpy has none.
    """

    name: str
    bits: int
    family: str
    safetensors: str = ""
    storages: tuple[str, ...] = ()
    numpy: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 0 for types smaller than a byte."""
        return self.bits // 8

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` densely packed elements (the last byte may be partly used)."""
        return (elements * self.bits + 7) // 8


_ALL = (
    DType("float64", 64, "float", "F64", ("DoubleStorage",), "<f8"),
    DType("float32", 32, "float", "F32", ("FloatStorage",), "<f4"),
    DType("float16", 16, "float", "F16", ("HalfStorage",), "<f2"),
    DType("bfloat16", 16, "float", "BF16", ("BFloat16Storage",)),
    DType("float8_e4m3fn", 8, "float", "F8_E4M3"),
    DType("float8_e5m2", 8, "float", "F8_E5M2"),
    DType("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 8, "float", "F8_E8M0"),
    DType("float6_e2m3", 6, "float", "F6_E2M3"),
    DType("float6_e3m2", 6, "float", "F6_E3M2"),
    DType("float4_e2m1", 4, "float", "F4"),
    DType("float4_e2m1fn_x2", 8, "opaque"),
    DType("int64", 64, "int", "I64", ("LongStorage",), "<i8"),
    DType("int32", 32, "int", "I32", ("IntStorage",), "<i4"),
    DType("int16", 16, "int", "I16", ("ShortStorage",), "<i2"),
    DType("int8", 8, "int", "I8", ("CharStorage",), "i1"),
    DType("uint64", 64, "uint", "U64", (), "<u8"),
    DType("uint32", 32, "uint", "U32", (), "<u4"),
    DType("uint16", 16, "uint", "U16", (), "<u2"),
    DType("uint8", 8, "uint", "U8", ("ByteStorage", "storage.UntypedStorage"), "u1"),
    DType("bool", 8, "bool", "BOOL", ("BoolStorage",), "?"),
    DType("complex32", 32, "complex"),
    DType("complex64", 64, "complex", "C64", ("ComplexFloatStorage",), "<c8"),
    DType("complex128", 128, "complex", "", ("ComplexDoubleStorage",), "<c16"),
    DType("qint8", 8, "opaque", "", ("QInt8Storage",)),
    DType("quint8", 8, "opaque", "", ("QUInt8Storage",)),
    DType("qint32", 32, "opaque", "", ("QInt32Storage",)),
    DType("quint4x2", 8, "opaque", "", ("QUInt4x2Storage",)),
    DType("quint2x4", 8, "opaque", "", ("QUInt2x4Storage",)),
    DType("bits1x8", 8, "opaque"),
    DType("bits2x4", 8, "opaque"),
    DType("bits4x2", 8, "opaque"),
    DType("bits8", 8, "opaque"),
    DType("bits16", 16, "opaque"),
)

DTYPES: dict[str, DType] = {t.name: t for t in _ALL}
# Old spellings that torch still pickles.
DTYPES |= {
    "float": DTYPES["float32"],
    "double": DTYPES["float64"],
    "half": DTYPES["float16"],
    "long": DTYPES["int64"],
    "int": DTYPES["int32"],
    "short": DTYPES["int16"],
    "cfloat": DTYPES["complex64"],
    "cdouble": DTYPES["complex128"],
    "chalf": DTYPES["complex32"],
}
BY_SAFETENSORS: dict[str, DType] = {t.safetensors: t for t in _ALL if t.safetensors}
BY_STORAGE: dict[str, DType] = {s: t for t in _ALL for s in t.storages}


def decode_scalar(dtype: DType, data: bytes) -> float | None:
    """Return the one real number in `data`, or None for a type that has no such reading."""
    if dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data[:2])[0])
    code = _STRUCT.get(dtype.name)
    return None if code is None else float(struct.unpack_from("<" + code, data)[0])


_STRUCT = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h",
    "int8": "b", "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B",
}  # fmt: skip
