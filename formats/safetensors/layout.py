"""One safetensors file, laid out as the reference serialiser lays it out.

Tensors lie by descending alignment of their types, then by name, and the header is padded with
spaces to a multiple of eight, so that every tensor is naturally aligned.
Source: `prepare` and `enum Dtype` in safetensors' `tensor.rs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.strict_json import shown
from ftckpt.transfer.content import Shard
from ftckpt.transfer.layout import Elements, Literal, OutputFile

from .header import MAX_HEADER, MAX_TENSORS, PREFIX

_ALIGNMENT = 8
# Codes in the order of `enum Dtype`: by width, then as they came to be.
_CODES = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16
    I32 U32 F32 C64 F64 I64 U64
"""
_ORDER = {code: number for number, code in enumerate(_CODES.split())}


def require_storable(name: str, shard: Shard) -> None:
    """Refuse what no safetensors file can hold.

    Raises:
        UnsupportedError: the type has no code, the elements do not fill whole bytes, or the name
            is not text or is the header's own.
    """
    dtype = shard.dtype
    if dtype.safetensors not in _ORDER:
        raise UnsupportedError(
            f"safetensors has no type for {name}, which is {dtype.name}",
            hint="--drop leaves a tensor out, and a format of torch.save holds every type",
            tensor=name,
        )
    if shard.numel * dtype.bits % 8:
        raise UnsupportedError(
            f"{name} has {shard.numel} elements of {dtype.bits} bits, which do not fill whole "
            "bytes, so that safetensors cannot hold it",
            tensor=name,
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"the name {shown(name)} is not text, so that safetensors cannot hold it", tensor=name
        ) from error
    if name == "__metadata__":
        raise UnsupportedError("safetensors cannot hold a tensor named __metadata__", tensor=name)


def lay_out_file(
    path: str, tensors: Mapping[str, Shard], metadata: Mapping[str, str]
) -> OutputFile:
    """Lay out one file.

    Args:
        path: where, relative to the destination.
        tensors: by the name that the header shall give them.
        metadata: of the header; its keys stand there in this order.

    Raises:
        UnsupportedError: a tensor or a name that the format cannot hold, or more of them than a
            header of 100 MB can name, or than readers accept.
    """
    if len(tensors) > MAX_TENSORS:
        raise _too_many(path, f"hold {len(tensors)} tensors, over the {MAX_TENSORS} that are read")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    in_order = sorted(tensors, key=lambda n: (-_ORDER.get(tensors[n].dtype.safetensors, 0), n))
    for name in in_order:
        shard = tensors[name]
        require_storable(name, shard)
        begin, end = end, end + shard.nbytes
        header[name] = {
            "dtype": shard.dtype.safetensors,
            "shape": list(shard.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        limit = f"over the format's {MAX_HEADER}"
        raise _too_many(path, f"need a header of {len(text)} bytes, {limit}")
    prefix = len(text).to_bytes(PREFIX, "little")
    elements = [Elements.all(tensors[name]) for name in in_order]
    return OutputFile(path, [Literal(prefix + text), *elements])


def _too_many(path: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path} would {what}",
        hint="a folder spreads the tensors over more files, by a smaller --max-shard-size",
        file=path,
    )
