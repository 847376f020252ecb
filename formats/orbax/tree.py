"""The JSON files of a checkpoint: a tree's leaves, items, times, meshes, strings.

Check the JSON files that Orbax reads beside the arrays: their metadata, and their shardings.

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
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ftckpt.errors import CorruptError, FtckptError, NewerWriterError, UnsupportedError
from ftckpt.findings import Finding, finding, from_error, listed
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonError, JsonLimits, decode, parse, shown
from ftckpt.workers.budget import demand

from .names import SHARDING

_LIMITS = JsonLimits(64, objects=20_000_000, keys=60_000_000, items=60_000_000, naturals=False)
_GROWTH = 10  # bytes of memory for a byte of JSON, as a bound
_ARRAYS = frozenset(("jax.Array", "np.ndarray", "scalar"))
_EMPTY = frozenset(("None", "Dict", "List", "Tuple", "NamedTuple"))
_ON_DEVICES = "jax.Array"
_STRING = "string"
_KEYS = (1, 2)  # of a sequence, of a mapping
_MEMBERS = (
    "tree_metadata", "use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value",
    "custom_metadata",
)  # fmt: skip


class Tree(NamedTuple):
    """The leaves of a tree.

    Attributes:
        arrays: paths of arrays and numbers.
        strings: paths of strings.
        stores_all: whether every chunk is stored; else those that equal the fill value are not.
        on_devices: paths of the arrays that were saved from devices.
        zarr: version of zarr that it says; None where it says none.
        parts: of arrays of which it is recorded, the shape that was written at once, by name.
    """

    arrays: tuple[tuple[str, ...], ...]
    strings: tuple[tuple[str, ...], ...]
    stores_all: bool
    on_devices: tuple[tuple[str, ...], ...] = ()
    zarr: int | None = None
    parts: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def slip_of(value: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a member that is one of some names but for one letter, where that is absent; or ""."""
    for name in names:
        for own in value if name not in value else ():
            if len(own) == len(name) and sum(a != b for a, b in zip(own, name, strict=True)) == 1:
                return str(own)
    return ""


def _slip_in(entry: object) -> bool:
    """Return whether a member of an entry of `tree_metadata` is a known one but for one letter."""
    if not isinstance(entry, dict):
        return False
    keys, about = entry.get("key_metadata"), entry.get("value_metadata")
    inner = [one for one in keys if isinstance(one, dict)] if isinstance(keys, list) else []
    return bool(
        slip_of(entry, ("key_metadata", "value_metadata"))
        or any(slip_of(one, ("key", "key_type")) for one in inner)
        or (isinstance(about, dict) and slip_of(about, ("value_type", "skip_deserialize")))
    )


def read_json(source: Source, name: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        CorruptError: it is missing, or no JSON.
        UnsafeError: it is ambiguous or abusive.
    """
    size = source.entry(name).size  # a link to nothing is told as such, and not as an empty file
    demand(size * _GROWTH, f"the metadata {name} of {size >> 20} MiB")
    if not size:
        raise CorruptError(f"{name} is empty", kind="truncated-file", file=name)
    raw = source.read(name)
    return parse(raw, _LIMITS, file=name, what="content", bad="bad-metadata", unsafe="unsafe-index")


def read_tree(source: Source, name: str) -> Tree:
    """Return the leaves that `_METADATA` names.

    Raises:
        CorruptError, UnsafeError: see `read_json`; or it contradicts itself.
        UnsupportedError: a kind of leaf that is not read.
    """
    value = read_json(source, name)

    def damaged(said: object) -> NoReturn:
        raise CorruptError(f"{name} holds {shown(said)} where it must not",
                           kind="bad-metadata", file=name)  # fmt: skip

    if not isinstance(value, dict) or not isinstance(value.get("tree_metadata"), dict):
        if isinstance(value, dict) and slip_of(value, _MEMBERS):
            damaged(slip_of(value, _MEMBERS))
        found = listed(sorted(value)) if isinstance(value, dict) else value
        raise NewerWriterError.of(name, expected="tree_metadata", found=found, file=name)
    if slip := slip_of(value, _MEMBERS):
        damaged(slip)
    arrays, strings, on_devices = [], [], []
    parts: dict[str, tuple[int, ...]] = {}
    for label, entry in value["tree_metadata"].items():
        try:
            path = tuple(str(one["key"]) for one in entry["key_metadata"])
            types = [one["key_type"] for one in entry["key_metadata"]]
            about = entry["value_metadata"]
            kind = about["value_type"]
            skipped = about["skip_deserialize"]
        except (KeyError, TypeError):
            if _slip_in(entry):  # one letter of a known name is another
                damaged(label)
            found = listed(sorted(map(str, entry))) if isinstance(entry, dict) else entry
            raise NewerWriterError.of(
                f"the entry {shown(label)} of {name}", expected="key_metadata and value_metadata",
                found=found, file=name,
            ) from None  # fmt: skip
        # Orbax finds a leaf by its keys; the label says the same once more.
        if label != str(path) or any(type(one) is not int or one not in _KEYS for one in types):
            damaged(label)
        if type(skipped) is not bool or slip_of(about, ("write_shape",)):
            damaged(label)
        if kind in _EMPTY:
            continue
        if not path or "" in path:
            damaged(label)
        if kind in _ARRAYS:
            arrays.append(path)
            if kind == _ON_DEVICES:
                on_devices.append(path)
            if (part := about.get("write_shape")) is not None:
                if not isinstance(part, list) or any(type(one) is not int for one in part):
                    damaged(label)
                parts[".".join(path)] = tuple(part)
        elif kind == _STRING:
            strings.append(path)
        else:
            raise UnsupportedError(
                f"{'.'.join(path)} is a {shown(kind)}, which is not read",
                file=name, tensor=".".join(path),
            )  # fmt: skip
    labels = {".".join(path) for path in (*arrays, *strings)}
    if len(labels) != len(arrays) + len(strings):
        damaged("two leaves of one name")
    flags = {}
    for flag in _MEMBERS[1:4]:
        flags[flag] = value.get(flag)
        if flag in value and type(value[flag]) is not bool:
            damaged(f"{flag} = {value[flag]}")
    zarr = {None: None, False: 2, True: 3}[flags["use_zarr3"]]
    return Tree(
        tuple(arrays), tuple(strings), flags["store_array_data_equal_to_fill_value"] is True,
        tuple(on_devices), zarr, parts,
    )  # fmt: skip


def items_of(value: object, name: str) -> dict[str, str]:
    """Return the handler of each item of a step; of a single item under the name "".

    Raises:
        CorruptError: `_CHECKPOINT_METADATA` is of another form.
    """
    handlers = value.get("item_handlers") if isinstance(value, dict) else None
    if handlers is None and isinstance(value, dict):
        return {}
    if isinstance(handlers, str):
        return {"": handlers}
    if isinstance(handlers, dict) and all(isinstance(v, str | None) for v in handlers.values()):
        return {one: handler or "" for one, handler in handlers.items()}
    raise NewerWriterError.of(
        f"item_handlers of {name}", expected="names", found=handlers, file=name
    )


class DeviceMesh(NamedTuple):
    """A mesh of devices: the names of its axes and their sizes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(self.sizes)

    def __str__(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.sizes, strict=True))


def meshes(value: object) -> Iterator[DeviceMesh]:
    """Yield the mesh of every array that `_sharding` gives one; damage ends it."""
    for name, text in value.items() if isinstance(value, Mapping) else ():
        try:
            base64.b64decode(name, validate=True)
            sharding = decode(text)
            shape, axes = sharding["shape"], sharding["axis_names"]
        except (JsonError, binascii.Error, KeyError, TypeError, AttributeError):
            continue  # a single device, or a sharding of another kind: it says nothing of a mesh
        sound = (
            isinstance(shape, list) and isinstance(axes, list) and len(shape) == len(axes)
            and all(type(one) is int and 0 < one < 1 << 32 for one in shape)
            and all(isinstance(one, str) for one in axes)
        )  # fmt: skip
        if sound:
            yield DeviceMesh(tuple(axes), tuple(shape))


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
