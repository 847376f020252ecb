"""The JSON files of a checkpoint: a tree's leaves, items, times, meshes, strings."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonError, JsonLimits, decode, parse, shown
from ftckpt.workers.budget import demand

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
