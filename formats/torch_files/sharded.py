"""Read DTensor and ShardedTensor out of their inert records: what one rank holds of a tensor.

Sources: torch 2.0-2.13 `distributed/tensor/_dtensor_spec.py` and `device_mesh.py` (before 2.5
`distributed/_tensor/`), `distributed/_shard/sharded_tensor`. Group names, hashes, devices and
thread ids in these records are of the process that is gone and are ignored.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.pickles.unpickle import Inert

from .dtensor import How, Patch, Placement
from .inner import outer_view
from .values import Composite, SubclassRef, TensorRef


class Mesh(NamedTuple):
    """A device mesh as one rank's file shows it.

    Attributes:
        sizes: of its dimensions.
        coordinate: of the rank that wrote the file; None where that rank is outside the mesh.
        rank: the global rank that wrote the file; None where not recorded.
        names: of its dimensions; "" for each where it has none.
    """

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    rank: int | None
    names: tuple[str, ...]


class Distributed(NamedTuple):
    """One rank's part of a DTensor: a local tensor, and the placements that say where it lies.

    Attributes:
        record: the local tensor, if it is of a subclass; `local` then has its shape and no bytes.
    """

    shape: tuple[int, ...]
    dtype: DType
    local: TensorRef
    mesh: Mesh
    placements: tuple[Placement, ...]
    record: SubclassRef | None = None


class Listed(NamedTuple):
    """One rank's part of a ShardedTensor: local tensors, each with its box.

    Attributes:
        shape: global shape.
        dtype: element type.
        shards: this rank's boxes and tensors.
        boxes: the boxes of all ranks.
        rank: the global rank that wrote the file; None where not recorded.
        world_size: of the job; None where not recorded.
    """

    shape: tuple[int, ...]
    dtype: DType
    shards: tuple[tuple[Patch, TensorRef], ...]
    boxes: tuple[Box, ...]
    rank: int | None
    world_size: int | None


Held = TensorRef | Distributed | Listed

_DTENSOR = frozenset(
    f"torch.distributed.{m}.DTensor" for m in ("tensor", "tensor._api", "_tensor", "_tensor.api")
)
_SHARDED = frozenset(
    f"torch.distributed._shard.sharded_tensor{m}.ShardedTensor" for m in (".api", "")
)
_PLACEMENTS = {
    "Shard": How.SHARD,
    "_StridedShard": How.STRIDED,
    "Replicate": How.REPLICATE,
    "Partial": How.PARTIAL,
    "_Partial": How.PARTIAL,
    "_MaskPartial": How.PARTIAL,
}


class HeldReader:
    """Reads the tensors of one stream; meshes are shared between them and parsed once.

    Args:
        rank: whose stream it is.
        records: whether a DTensor's local tensor may be of another subclass.
    """

    def __init__(self, rank: int, *, records: bool = False) -> None:
        self._rank, self._records = rank, records
        self._meshes: dict[int, Mesh] = {}

    def read(self, value: Any) -> Held | None:
        """Return what a value of the tree holds of a tensor; None where it is not a tensor.

        Raises:
            UnsupportedError: a tensor that no strided view describes (sparse, quantized, a
                subclass of another kind).
            NewerWriterError: a record of another form than is known.
            CorruptError: a record that contradicts itself (`bad-metadata`).
        """
        if type(value) is TensorRef:
            return value
        if type(value) is Composite:
            raise UnsupportedError(f"a {value.how} tensor has no place in a sharded checkpoint")
        if type(value) is not SubclassRef:
            return None
        if value.type_name in _DTENSOR:
            return self._distributed(value)
        if value.type_name in _SHARDED:
            return self._listed(value)
        raise UnsupportedError(f"a tensor is of the subclass {value.type_name}, which hides it")

    def _distributed(self, value: SubclassRef) -> Distributed:
        attributes = _attributes(value.state)
        local, spec = attributes.get("_local_tensor"), attributes.get("_spec")
        shape, dtype = _described(value.base)
        record = None
        if type(local) is SubclassRef:
            view = outer_view(local)
            if view is None or not self._records:
                raise hidden(local)
            record, local = local, TensorRef("", 0, view[0], dense_strides(view[0]), view[1])
        if type(local) is not TensorRef or not isinstance(spec, Inert):
            _unknown("a DTensor", "_local_tensor and _spec", listed(sorted(map(str, attributes))))
        mesh = spec.get("mesh")
        placements = spec.get("placements")
        if not isinstance(mesh, Inert) or type(placements) not in (tuple, list):
            _unknown("the spec of a DTensor", "mesh and placements", mesh)
        found = self._meshes.get(id(mesh))
        if found is None:
            found = self._meshes[id(mesh)] = _mesh(mesh, self._rank)
        cuts = tuple(_placement(p) for p in placements)
        return Distributed(shape, dtype, local, found, cuts, record)

    def _listed(self, value: SubclassRef) -> Listed:
        state = value.state
        if type(state) is not tuple or len(state) != 5:
            _unknown("the state of a ShardedTensor", "5 values", state)
        shards, metadata, group = state[:3]
        shape, dtype = _described(value.base)
        everyone = metadata.get("shards_metadata") if isinstance(metadata, Inert) else None
        if type(shards) is not list or type(everyone) is not list:
            _unknown("the shards of a ShardedTensor", "a list", shards)
        mine = []
        for shard in shards:
            local = shard.get("tensor") if isinstance(shard, Inert) else None
            if type(local) is not TensorRef:
                _unknown("a shard of a ShardedTensor", "a tensor", local)
            box = _box(shard.get("metadata"), len(shape))
            if box.sizes != local.shape:
                _malformed(f"a shard of shape {list(box.sizes)} holds a tensor of"
                           f" {list(local.shape)}")  # fmt: skip
            mine.append((Patch(box, (0,) * len(shape)), local))
        boxes = tuple(_box(other, len(shape)) for other in everyone)
        rank = group.get("global_rank") if isinstance(group, Inert) else None
        world = group.get("global_world_size") if isinstance(group, Inert) else None
        return Listed(shape, dtype, tuple(mine), boxes, _whole(rank), _whole(world))


def hidden(value: SubclassRef) -> UnsupportedError:
    """Return the error for a DTensor's local tensor of a class that is not known."""
    return UnsupportedError(
        f"the local part of a DTensor is of the subclass {value.type_name}, which hides it"
    )


def _unknown(what: str, expected: str, found: object) -> NoReturn:
    raise NewerWriterError.of(f"{what} in a pickle", expected=expected, found=found)


def _malformed(what: str) -> NoReturn:
    raise CorruptError(f"the pickle holds {what}", kind="bad-metadata")


def _attributes(state: Any) -> dict[Any, Any]:
    # A subclass that has slots sends a pair, of which the second is the slots' values.
    if type(state) is tuple and len(state) == 2:
        merged: dict[Any, Any] = {}
        for part in state:
            if type(part) is dict:
                merged |= part
        return merged
    return state if type(state) is dict else {}


def _described(base: Any) -> tuple[tuple[int, ...], DType]:
    if type(base) is not Composite or base.how != "wrapper":
        _unknown("a sharded tensor", "a wrapper", base)
    shape, dtype = base.parts.get("shape"), base.parts.get("dtype")
    assert isinstance(shape, tuple)
    assert isinstance(dtype, DType)
    return shape, dtype


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _naturals(value: Any) -> tuple[int, ...] | None:
    if type(value) is int:
        value = (value,)
    if type(value) not in (tuple, list) or any(_whole(v) is None for v in value):
        return None
    return tuple(value)


def _placement(value: Any) -> Placement:
    name = value.qualname.rpartition(".")[2] if isinstance(value, Inert) else ""
    how = _PLACEMENTS.get(name)
    if how is None:
        raise UnsupportedError(f"a DTensor has the placement {name or type(value).__name__}")
    if how in (How.REPLICATE, How.PARTIAL):
        return Placement(how)
    dim = value.get("dim", value.args[0] if value.args else None)
    factor = value.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int:
        _unknown(f"a placement {name}", "a dimension", dim)
    return Placement(how, dim, factor if how is How.STRIDED else 1)


def _mesh(mesh: Inert, rank: int) -> Mesh:
    """Read a mesh of any version: up to 2.9 an int tensor, later a layout over a rank map."""
    sizes = mesh_sizes(mesh)
    ranks = _naturals(mesh.get("_flatten_mesh_list")) if mesh.get("_layout") is None else None
    names = mesh.get("_mesh_dim_names", mesh.get("mesh_dim_names"))
    if type(names) not in (tuple, list) or len(names) != len(sizes):
        names = ("",) * len(sizes)
    coordinate = mesh.get("_coordinate_on_dim", ...)
    if coordinate is ...:
        if ranks is None or len(ranks) != prod(sizes):
            raise UnsupportedError(
                "a device mesh does not say where its rank stands",
                hint="torch 2.0 and 2.1 pickle no coordinates: load and save it with a later one",
            )
        coordinate = _unravel(ranks.index(rank), sizes) if rank in ranks else None
    elif coordinate is not None:
        coordinate = _naturals(coordinate)
        if coordinate is None or len(coordinate) != len(sizes):
            _malformed("a device mesh whose coordinate is of another mesh")
    wrote = _whole(mesh.get("_rank"))
    if wrote is None and ranks is not None and coordinate is not None:
        at = _ravel(coordinate, sizes)
        wrote = ranks[at] if at < len(ranks) else None
    return Mesh(sizes, coordinate, wrote, tuple(str(n) for n in names))


def mesh_sizes(mesh: Inert) -> tuple[int, ...]:
    """Return the number of ranks along each axis of a pickled `DeviceMesh`.

    Raises:
        NewerWriterError: it is none that is known.
    """
    layout = mesh.get("_layout")
    if layout is not None:
        return _layout_sizes(layout)
    tensor = mesh.get("mesh")
    if type(tensor) is not TensorRef:
        _unknown("a device mesh", "a tensor of its ranks", tensor)
    return tensor.shape


def _layout_sizes(layout: Any) -> tuple[int, ...]:
    if not isinstance(layout, Inert):
        _unknown("the layout of a device mesh", "a record", layout)
    axes = layout.get("axes")
    if type(axes) in (tuple, list):  # since 2.13: one flat layout an axis
        shapes = [a.get("shape") if isinstance(a, Inert) else None for a in axes]
    else:
        shapes = layout.get("shape")
        shapes = [shapes] if type(shapes) is int else shapes
    if type(shapes) not in (tuple, list):
        _unknown("the layout of a device mesh", "shapes", shapes)
    return tuple(_extent(shape) for shape in shapes)


def _extent(shape: Any) -> int:
    """Return the number of ranks along one axis, which may itself be a nest of axes."""
    total, todo = 1, [shape]
    # A pickle can nest a list in itself; no real axis is a nest of more than a few.
    for _ in range(64):
        if not todo:
            return total
        value = todo.pop()
        if type(value) in (tuple, list):
            todo.extend(value)
        elif type(value) is int and value < 0:
            _malformed("a mesh layout with a negative shape")
        elif _whole(value) is None:
            _unknown("a shape in the layout of a device mesh", "a number", value)
        else:
            total *= value
    _malformed("a mesh layout that is nested without end")


def _ravel(coordinate: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    at = 0
    for place, size in zip(coordinate, sizes, strict=True):
        at = at * size + place
    return at


def _unravel(at: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(sizes):
        out.append(at % size)
        at //= size
    return tuple(reversed(out))


def _box(metadata: Any, dimensions: int) -> Box:
    if not isinstance(metadata, Inert):
        _unknown("the metadata of a shard", "a record", metadata)
    offsets, sizes = metadata.get("shard_offsets"), metadata.get("shard_sizes")
    for value in (offsets, sizes):
        if type(value) not in (tuple, list) or any(type(one) is not int for one in value):
            _unknown("the box of a shard", "offsets and sizes in numbers", value)
    offsets, sizes = _naturals(offsets), _naturals(sizes)
    if offsets is None or sizes is None or not len(offsets) == len(sizes) == dimensions:
        _malformed("a shard whose box does not fit its tensor")
    return Box(offsets, sizes)
