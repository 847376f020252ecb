"""Read how a plain tensor of a rank's file is cut from the record beside it.

Trainers that save by hand put a shard and its place together:

    {"data": tensor, "sharding_spec": {"type": "shard", "dim": 0}, "global_shape": [16, 8]}
    {"tensor": tensor, "global_shape": (16, 8), "shard_offsets": (4, 0)}
    {"local_tensor": tensor, "global_shape": [16, 8], "placements": ["Shard(dim=0)"]}

or keep the same in one mapping for all tensors, at the top of the file or in `metadata.json`.
What is only probable is left alone: a shape that differs along one axis says that the tensor is
cut, and not in which order or in how many blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.torch_files.dtensor import How, Placement
from ftckpt.formats.torch_files.values import TensorRef

DATA = frozenset(("data", "tensor", "local_tensor", "local", "shard", "local_shard", "value"))
SHAPES = ("global_shape", "full_shape", "global_size", "orig_shape", "unsharded_shape", "shape")
DIMS = ("shard_dim", "dim", "split_dim", "partition_dim", "axis", "split_axis")
OFFSETS = ("shard_offsets", "shard_offset", "offsets", "global_offset", "global_offsets")
SIZES = ("shard_sizes", "shard_shape", "local_shape", "local_size", "sizes")
PLACEMENTS = ("placements", "placement")
MESHES = ("mesh_shape", "mesh_sizes", "mesh", "device_mesh")
COORDINATES = ("mesh_coordinate", "mesh_coordinates", "coordinate", "coordinates", "coords")
SPECS = ("sharding_spec", "sharding", "shard_spec", "spec")
_WORDS = frozenset((*SHAPES[:-1], *DIMS, *OFFSETS, *PLACEMENTS, *SPECS))
# Mappings of one of these for all tensors: `global_shapes: {name: shape}`.
FOR_ALL: Mapping[str, str] = {
    **{f"{word}s": word for word in (*SPECS, "shard_dim", "dim", "split_dim", "partition_dim")},
    "global_shapes": "global_shape",
    "full_shapes": "full_shape",
    "shapes": "shape",
    "axes": "axis",
    "sharding_spec": "sharding_spec",
    "sharding": "sharding_spec",
    "shard_metadata": "sharding_spec",
    "shard_offsets": "shard_offsets",
    "offsets": "offsets",
    "placements": "placements",
    "sharding_info": "sharding_spec",
}
_WHOLE = frozenset(("replicate", "replicated", "replicate()", "r", "none", "whole", "full"))
_SHARD = re.compile(r"s(?:hard)?\(\s*(?:dim\s*=\s*)?(\d{1,2})\s*\)", re.IGNORECASE)


class Spec(NamedTuple):
    """What is written down of one tensor.

    Attributes:
        shape: global shape; None where not said.
        placements: one a mesh dimension; () for a tensor that every rank has whole; None where
            nothing is said.
        offsets: where the shard begins; None where not said.
        mesh: sizes of the mesh; () where not said.
        coordinate: the rank's place in the mesh; None where not said.
    """

    shape: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] | None = None
    offsets: tuple[int, ...] | None = None
    mesh: tuple[int, ...] = ()
    coordinate: tuple[int, ...] | None = None

    @property
    def tells(self) -> bool:
        """Whether it says where the shard lies."""
        return self.shape is not None and (self.placements is not None or self.offsets is not None)

    @property
    def dim(self) -> int | None:
        """The one axis that is cut; None for a replica."""
        dims = [p.dim for p in self.placements or () if p.how is How.SHARD]
        return dims[0] if dims else None


def data_key(value: Any) -> str:
    """Return under which key an entry keeps its tensor; "" for other values."""
    if not isinstance(value, dict) or not 2 <= len(value) <= 64:
        return ""
    held = [key for key, member in value.items() if type(member) is TensorRef]
    if len(held) != 1 or type(held[0]) is not str or held[0] not in DATA:
        return ""
    words = {key for key in value if type(key) is str}
    return held[0] if words & (_WORDS | {"shape"}) else ""


def spec_of(record: Any, local: tuple[int, ...] | None, whose: str) -> Spec:
    """Return what a mapping says of a tensor.

    Args:
        record: an entry, or what `metadata.json` has for a name.
        local: shape of the shard; None where it is not known.
        whose: name of the tensor, for messages.

    Raises:
        CorruptError: it contradicts itself or cannot be (`bad-metadata`).
    """
    parts = _flattened(record)
    shape = _naturals(_first(parts, SHAPES))
    offsets = _naturals(_first(parts, OFFSETS))
    mesh = mesh_of(parts)
    coordinate = _naturals(_first(parts, COORDINATES))
    placements = _placements_of(parts)
    if placements is None and offsets is None and shape is not None and shape == local:
        placements = ()
    found = Spec(shape, placements, offsets, mesh, coordinate)
    _require_possible(found, local, whose)
    return found


def mesh_of(record: Any) -> tuple[int, ...]:
    """Return the sizes of the mesh that a mapping records; () where it records none.

    They are a list, a dict by axis (`{"dp": 2, "tp": 4}`), or the ranks themselves in nested lists,
    where those count up.
    """
    said = _first(record, MESHES) if isinstance(record, dict) else None
    if isinstance(said, dict):
        said = said.get("shape", said.get("mesh_shape", list(said.values())))
    if type(said) is list and said and all(type(row) is list for row in said):
        width = len(said[0])
        flat = [n for row in said for n in row] if len(said) * width <= 1 << 16 else []
        same = all(len(row) == width for row in said)
        counts = bool(flat) and same and all(type(n) is int and n == i for i, n in enumerate(flat))
        return (len(said), width) if counts else ()
    return _naturals(said) or ()


def mappings_for_all(tree: Any) -> frozenset[str]:
    """Return the keys at the top of a file that hold such mappings for all tensors."""
    if not isinstance(tree, dict):
        return frozenset()
    return frozenset(
        key
        for key, value in tree.items()
        if type(key) is str
        and key in FOR_ALL
        and isinstance(value, dict)
        and value
        and all(type(name) is str for name in value)
        and any(_names(tree, key, name) for name in value)
    )


def _names(tree: Mapping[Any, Any], own: str, name: str) -> bool:
    """Whether a name of a mapping is that of a tensor, here or in another member."""
    if type(tree.get(name)) is TensorRef:
        return True
    others = (value for key, value in tree.items() if key != own and isinstance(value, dict))
    return any(type(value.get(name)) is TensorRef for value in others)


def specs_for_all(tree: Any, keys: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Return name -> what the mappings of `mappings_for_all` say of it."""
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        for name, said in tree[key].items():
            found.setdefault(name, {})[FOR_ALL[key]] = said
    return found


def _flattened(record: Any) -> dict[str, Any]:
    """Return a record with what its inner mappings say at one level; the outermost decides."""
    found: dict[str, Any] = {}
    todo: list[Any] = [record]
    for value in todo[:8]:
        members = value.state if isinstance(value, Inert) else value
        if not isinstance(members, dict) or len(members) > 64:
            continue
        for key, member in members.items():
            if type(key) is not str:
                continue
            inner = key in SPECS and isinstance(member, (dict, Inert)) and not _named(member)
            if inner:
                below = member.state if isinstance(member, Inert) else member
                if isinstance(below, dict):
                    for word, said in below.items():
                        if type(word) is str:
                            found.setdefault(word, said)
            else:
                found.setdefault(key, member)
    return found


def _named(value: Any) -> bool:
    """Whether a value is a placement of torch's own."""
    return isinstance(value, Inert) and value.qualname.rpartition(".")[2] in _TORCH


_TORCH = {"Shard": How.SHARD, "Replicate": How.REPLICATE}


def _first(parts: Mapping[str, Any], words: tuple[str, ...]) -> Any:
    return next((parts[word] for word in words if word in parts), None)


def _naturals(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Inert) and len(value.args) == 1:  # torch.Size
        value = value.args[0]
    if type(value) not in (tuple, list) or len(value) > 32:
        return None
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        return None
    return tuple(value)


def _placements_of(parts: Mapping[str, Any]) -> tuple[Placement, ...] | None:
    """Return the placements, from whichever word says them; None where none does."""
    for word in (*PLACEMENTS, *SPECS):
        if word in parts:
            found = _placements(parts[word])
            if found is not None:
                return found
    how = _first(parts, ("type", "kind", "mode", "strategy"))
    if type(how) is str and how.lower() in _WHOLE:
        return ()
    for word in DIMS:
        if word in parts:
            dim = parts[word]
            if dim is None or (type(dim) is int and dim == -1):
                return ()
            if type(dim) is int and 0 <= dim < 32:
                return (Placement(How.SHARD, dim),)
    return None


def _placements(value: Any) -> tuple[Placement, ...] | None:
    if type(value) in (list, tuple):
        found = [_placement(one) for one in value[:8]]
        if not value or None in found:
            return None
        return tuple(p for p in found if p is not None)
    one = _placement(value)
    if one is None:
        return None
    return () if one.how is How.REPLICATE else (one,)


def _placement(value: Any) -> Placement | None:
    if isinstance(value, Inert) and _named(value):
        how = _TORCH[value.qualname.rpartition(".")[2]]
        dim = value.get("dim", value.args[0] if value.args else 0)
        return Placement(how, dim) if type(dim) is int else None
    if isinstance(value, dict):
        found = _placements_of({k: v for k, v in value.items() if type(k) is str})
        return None if found is None or len(found) > 1 else (*found, Placement(How.REPLICATE))[0]
    if type(value) in (tuple, list) and 1 <= len(value) <= 2 and type(value[0]) is str:
        # ("shard", 0), ("replicate",)
        value = f"{value[0]}({value[1]})" if len(value) == 2 and value[1] is not None else value[0]
    if type(value) is not str:
        return None
    if value.lower() in _WHOLE:
        return Placement(How.REPLICATE)
    match = _SHARD.fullmatch(value)
    return Placement(How.SHARD, int(match[1])) if match else None


def _require_possible(spec: Spec, local: tuple[int, ...] | None, whose: str) -> None:
    if spec.shape is None:
        return
    width = len(spec.shape)
    odd = local is not None and (
        len(local) != width or any(n > size for n, size in zip(local, spec.shape, strict=True))
    )
    if any(p.how is not How.REPLICATE and p.dim >= width for p in spec.placements or ()):
        odd = True
    if spec.offsets is not None:
        odd |= len(spec.offsets) != width
        odd |= not odd and any(
            begin + size > end
            for begin, size, end in zip(
                spec.offsets, local or (0,) * width, spec.shape, strict=True
            )
        )
    if odd:
        held = f"a shard of {list(local)}" if local is not None else "its shards"
        raise CorruptError(
            f"what is recorded of {whose} cannot be: {held} in a tensor of {list(spec.shape)}",
            kind="bad-metadata",
            tensor=whose,
        )
