"""Write a DTensor as torch.save does: a local tensor, and the mesh and placement around it.

The mesh has one dimension, as FSDP2's has. The records are torch 2.13's; what belonged to the
process that wrote them (hashes, thread, process groups) is left as a fresh object has it.

Sources: torch 2.13 `distributed/device_mesh.py`, `_mesh_layout.py`, `tensor/_dtensor_spec.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.formats.pickles.write import Call, Global
from ftckpt.transfer.layout import Literal

from .write_tree import Storage, Tensor


class MeshForm(NamedTuple):
    """What a job calls its mesh.

    Attributes:
        device: type of its devices.
        name: of its only dimension.
    """

    device: str = "cuda"
    name: str = "fsdp"


class RankMesh:
    """The mesh of all ranks as one of them sees it: one a file, shared by all its DTensors."""

    def __init__(self, rank: int, world: int, form: MeshForm) -> None:
        self._mesh = _mesh(rank, world, form)
        self._specs: dict[tuple[tuple[int, ...], str, int | None], Call] = {}

    def dtensor(
        self, local: Tensor | Call, shape: tuple[int, ...], dtype: DType, axis: int | None
    ) -> Call:
        """Return a DTensor.

        Args:
            local: what this rank holds, or the call that makes it.
            shape: global shape.
            dtype: of its elements.
            axis: the axis that is divided over the ranks; None where each has all of it.
        """
        form = (shape, dtype.name, axis)
        spec = self._specs.get(form)
        if spec is None:  # tensors of one form have equal ones, which nothing changes
            spec = self._specs[form] = _spec(self._mesh, shape, dtype, axis)
        layout = Call(_LAYOUT, ("torch.strided",))
        device = Call(Global("torch", "device"), ("cpu",))
        built = (_CLASS, dtype, (*shape,), dense_strides(shape), 0, layout, device, False)
        state = {"_local_tensor": local, "_spec": spec}
        return Call(_FROM_TYPE, (_WRAPPER, _CLASS, built, (None, state)), once=True)


def _spec(mesh: Call, shape: tuple[int, ...], dtype: DType, axis: int | None) -> Call:
    placement = _made("tensor.placement_types", "Replicate", {})
    order: tuple[Call, ...] = ()
    if axis is not None:
        placement = _made("tensor.placement_types", "Shard", {"dim": axis})
        order = (_new("tensor._dtensor_spec", "ShardOrderEntry", (axis, (0,))),)
    size = Call(Global("torch", "Size"), ((*shape,),))
    meta = (size, dense_strides(shape), dtype)
    spec = {
        "mesh": mesh,
        "placements": (placement,),
        "tensor_meta": _new("tensor._dtensor_spec", "TensorMeta", meta),
        "shard_order": order,
        "use_strided_shard_as_shard_order": False,
        "_hash": None,
    }
    return _made("tensor._dtensor_spec", "DTensorSpec", spec)


def _mesh(rank: int, world: int, form: MeshForm) -> Call:
    # torch drops an axis of one rank, and compares meshes by what is left.
    flat = {"shape": (world,), "stride": (1,)} if world > 1 else {"shape": (), "stride": ()}
    axis = _made("_mesh_layout", "_FlatLayout", flat)
    ranks = b"".join(r.to_bytes(4, "little") for r in range(world))
    rank_map = Tensor(Storage((Literal(ranks),)), DTYPES["int32"], (world,), (1,))
    state = {
        "_device_type": form.device,
        "_layout": _made("_mesh_layout", "_MeshLayout", {"axes": (axis,)}),
        "_rank_map": rank_map,
        "_mesh_dim_names": (form.name,),
        "_root_mesh": None,
        "_flatten_rank_map": tuple(range(world)),
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": [],
        "_rank": rank,
        "_coordinate_on_dim": (rank,),
        "_hash": None,
    }
    return _made("device_mesh", "DeviceMesh", state)


_CLASS = Global("torch.distributed.tensor", "DTensor")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_LAYOUT = Global("torch.serialization", "_get_layout")


def _made(module: str, name: str, state: Any) -> Call:
    return Call(Global(f"torch.distributed.{module}", name), state=state, new=True)


def _new(module: str, name: str, args: tuple[Any, ...]) -> Call:
    return Call(Global(f"torch.distributed.{module}", name), args, new=True)
