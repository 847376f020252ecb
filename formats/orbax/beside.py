"""Check the JSON files that Orbax reads beside the arrays: their metadata, and their shardings.

A restore without a template parses both and fails where they are torn, lack an array or contradict
the stored chunks. What a newer Orbax may write, such as a sharding of a new type, is not damage; a
name that is a known one but for one letter is.

Source: orbax `_src/metadata/array_metadata_store.py`, `_src/metadata/sharding.py` and
`_src/serialization/jax_array_handlers.py` (0.12.8).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from math import prod
from typing import Any, NamedTuple, TypeGuard

from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonError, decode, shown

from .names import SHARDING
from .tree import Tree, read_json, slip_of

# Exactly so: what a copy leaves beside it (`process_0.1a2b3c4d.partial`) is none of Orbax's.
_METADATAS = re.compile(r"(?a)array_metadatas/process_\d+")
_TYPES = ("SingleDeviceSharding", "NamedSharding", "PositionalSharding")
_AXIS_TYPES = ("AxisType.Auto", "AxisType.Explicit", "AxisType.Manual")
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu", "TPU", "TFRT_CPU", "METAL")


class TreeFiles(NamedTuple):
    """A tree of arrays, and what its chunks show.

    Attributes:
        folder: "" or ending in a slash.
        tree: its leaves.
        arrays: shape and chunk of each array that is stored, by its name.
    """

    folder: str
    tree: Tree
    arrays: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def check_beside(source: Source, files: TreeFiles) -> Iterator[Finding]:
    """Yield what is damaged, lost or contradicted in the JSON files beside a tree's arrays."""
    own = (n for n in source.entries if n.startswith(files.folder))
    metadatas = sorted(n for n in own if _METADATAS.fullmatch(n.removeprefix(files.folder)))
    listed: set[str] = set()
    for name in metadatas:
        yield from _metadatas(source, name, files, listed)
    on_devices = {".".join(path) for path in files.tree.on_devices}
    if metadatas and (lost := sorted(on_devices - listed)):
        yield _bad(metadatas[0], f"lacks {lost[0]}")
    name = f"{files.folder}{SHARDING}"
    if name in source.entries:
        yield from _shardings(source, name, files, on_devices)
    elif metadatas and on_devices:  # Orbax has written it for longer than the others
        yield finding(
            "missing-file", f"{name} is missing: arrays were saved from devices", file=name
        )


def _bad(file: str, said: str, tensor: str | None = None) -> Finding:
    return finding("bad-metadata", f"{file} {said}", file=file, tensor=tensor)


def _metadatas(source: Source, file: str, files: TreeFiles, listed: set[str]) -> Iterator[Finding]:
    try:
        value = read_json(source, file)
    except FtckptError as error:
        yield from_error(error)
        return
    rows = value.get("array_metadatas") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        yield _bad(file, "holds no list of arrays")
        return
    for row in rows:
        said = row.get("array_metadata") if isinstance(row, dict) else None
        name = said.get("param_name") if isinstance(said, dict) else None
        if not isinstance(said, dict) or not isinstance(name, str):
            yield _bad(file, f"holds {shown(row)} where it must not")
            continue
        listed.add(name)
        write, chunk = said.get("write_shape"), said.get("chunk_shape")
        if name not in files.arrays:
            yield _bad(file, f"describes {shown(name)}, which the tree does not have")
        elif not (_is_shape(write) and _is_shape(chunk)):
            yield _bad(file, f"gives {name} no shapes", name)
        elif slip_of(said, ("ext_metadata",)):
            yield _bad(file, f"calls a member of {name} {slip_of(said, ('ext_metadata',))!r}", name)
        else:
            shape, stored = files.arrays[name]
            if tuple(chunk) != stored:
                yield _bad(
                    file, f"says chunks {chunk} of {name}, and stored are {list(stored)}", name
                )
            elif not divides(write, shape) or not divides(chunk, write):
                what = f"says that {write} of {name} was written at once, and it is {list(shape)}"
                yield _bad(file, what, name)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def divides(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Say whether equal parts of a shape make another: JAX shards arrays evenly."""
    return len(part) == len(whole) and all(
        w == p or (p > 0 and w % p == 0) for p, w in zip(part, whole, strict=True)
    )


def _shardings(
    source: Source, file: str, files: TreeFiles, on_devices: Set[str]
) -> Iterator[Finding]:
    try:
        value = read_json(source, file)
    except FtckptError as error:
        yield from_error(error)
        return
    if not isinstance(value, dict):
        yield _bad(file, "is not an object")
        return
    known = {".".join(path) for path in files.tree.arrays}
    told: set[str] = set()
    texts = Counter(text for text in value.values() if isinstance(text, str))
    usual = [text for text, count in texts.most_common(8) if count > 1]
    for key, text in value.items():
        try:
            name = base64.b64decode(key, validate=True).decode()
        except (binascii.Error, ValueError):
            yield _bad(file, f"holds the key {shown(key)}, which is not a name in base64")
            continue
        if name not in known:
            yield _bad(file, f"shards {shown(name)}, which the tree does not have")
            continue
        told.add(name)
        said = _said(text, files.arrays.get(name, ((), ()))[0])
        if not said and isinstance(text, str) and texts[text] == 1:
            other = next((one for one in usual if _is_slip(text, one)), "")
            said = "differs in one letter from those around it" if other else ""
        if said:
            yield _bad(file, f"has a sharding of {name} that {said}", name)
    for name in sorted(on_devices - told)[:1]:
        yield _bad(file, f"has no sharding of {name}", name)


def _is_slip(text: str, other: str) -> bool:
    """Say whether two texts differ in one letter, and not only in a digit: a number may differ."""
    if len(text) != len(other):
        return False
    odd = [(a, b) for a, b in zip(text, other, strict=True) if a != b]
    return len(odd) == 1 and not (odd[0][0].isdigit() and odd[0][1].isdigit())


def _said(text: object, shape: Sequence[int]) -> str:
    """Return what is wrong with the sharding of an array of a shape; "" where nothing is."""
    try:
        said = decode(text) if isinstance(text, str) else None
    except JsonError as error:
        return str(error)
    if not isinstance(said, dict) or not isinstance(said.get("sharding_type"), str):
        return "names no type"
    kind = said["sharding_type"]
    if kind not in _TYPES:
        return f"is of type {shown(kind)}" if any(_is_slip(kind, one) for one in _TYPES) else ""
    if kind == "SingleDeviceSharding":
        return _device(said.get("device_str"))
    return _named(said, shape) if kind == "NamedSharding" else ""


def _device(text: object) -> str:
    if not isinstance(text, str) or not text:
        return "names no device"
    platform = text.rstrip("0123456789").rstrip(":_")
    if platform in _PLATFORMS or not any(_is_slip(platform, one) for one in _PLATFORMS):
        return ""
    return f"names the device {shown(text)}"


def _named(said: Mapping[str, Any], shape: Sequence[int]) -> str:
    sizes, axes, spec = said.get("shape"), said.get("axis_names"), said.get("partition_spec")
    if not _is_shape(sizes) or not isinstance(axes, list) or not isinstance(spec, list):
        return "has no mesh, or no axes"
    if len(sizes) != len(axes) or not all(isinstance(axis, str) for axis in axes):
        return f"has the axes {shown(axes)} of a mesh {shown(sizes)}"
    optional = ("axis_types", "device_mesh", "memory_kind")
    if slip := slip_of(said, optional):
        return f"has a member {slip!r}"
    types = said.get("axis_types")
    if types is not None and not (isinstance(types, list) and len(types) == len(axes)):
        return "has not one type for each axis"
    for one in types or ():
        if one not in _AXIS_TYPES and any(_is_slip(str(one), known) for known in _AXIS_TYPES):
            return f"has an axis of type {shown(one)}"
    size = dict(zip(axes, sizes, strict=True))
    used: list[str] = []
    for place, part in enumerate(spec):
        parts = [] if part is None else part if isinstance(part, list) else [part]
        if not all(isinstance(one, str) and one in size for one in parts):
            return f"divides by {shown(part)}, which is not an axis of its mesh"
        used += parts
        ways = prod(size[one] for one in parts)
        if parts and (place >= len(shape) or (ways and shape[place] % ways)):
            return f"divides axis {place} of {list(shape)} into {ways}"
    if len(set(used)) != len(used):
        return "divides by one axis twice"
    return _mesh(said.get("device_mesh"), sizes)


def _mesh(value: object, sizes: Sequence[int]) -> str:
    """Return what is wrong with the devices of a mesh: each has a number, and none another's."""
    if value is None:
        return ""
    devices = [value.get("mesh") if isinstance(value, dict) else None]
    for size in sizes:
        if not all(isinstance(row, list) and len(row) == size for row in devices):
            return "has a mesh of another shape"
        devices = [one for row in devices for one in row or ()]
    numbers = [one.get("id") if isinstance(one, dict) else None for one in devices]
    if any(type(number) is not int for number in numbers):
        return "has a device without a number"
    if len(set(numbers)) != len(numbers) or len(numbers) != prod(sizes):
        return "has a device twice, or not as many as its mesh"
    return ""
