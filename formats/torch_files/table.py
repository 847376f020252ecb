"""The names in a `torch.save` pickle and what each stands for: the reader's whole vocabulary.

Exact names only; what is not here is kept opaque, and refused where it is called and Python's,
torch's or numpy's own. Sources: torch 1.0 to 2.13 `_utils.py`, `storage.py`, `distributed/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.checkpoint.dtypes import BY_STORAGE, DTYPES
from ftckpt.formats.pickles.inert import inert, refuse, sealed
from ftckpt.formats.pickles.names import BUILTINS

from .inner import ENGINE_CLASSES, ENGINE_FUNCTIONS, ENGINE_METHOD, ENGINE_METHODS
from .rebuild import BUILDERS, CLASSES, wrong_arguments
from .values import StorageType

# --- the getattr of real files ------------------------------------------------------------------

_SHARDED_TENSOR = inert("torch.distributed._shard.sharded_tensor.api.ShardedTensor")
_PROCESS_GROUP_STATE = inert(
    f"{_SHARDED_TENSOR.qualname}.ProcessGroupState", module=_SHARDED_TENSOR.module
)


# Methods that a class keeps in its state, by reference: mmengine's `HistoryBuffer` holds how each
# curve is summed up (mmengine/logging/history_buffer.py, `_set_default_statistics`). Protocol 2
# spells `Class.method` as `getattr(Class, "method")`; here the name alone is kept.
_HISTORIES = [
    inert(f"{module}.HistoryBuffer")
    for module in ("mmengine.logging.history_buffer", "mmengine.logging")
]
_METHODS: Mapping[tuple[type, str], Any] = {
    (one, name): inert(f"{one.qualname}.{name}", module=one.module, refused=True)
    for one in _HISTORIES
    for name in ("mean", "min", "max", "current")
}


def _getattr(owner: Any, name: Any = None, *default: Any) -> Any:
    if isinstance(owner, type) and isinstance(name, str) and not default:
        method = _METHODS.get((owner, name))
        if method is not None:
            return method
    if name == ENGINE_METHOD and isinstance(owner, type) and not default:
        method = ENGINE_METHODS.get(owner)
        if method is not None:
            return method
    if owner is not _SHARDED_TENSOR or name != "ProcessGroupState" or default:
        refuse("calls getattr, which no checkpoint needs; nothing was executed")
    return _PROCESS_GROUP_STATE


# --- the table ----------------------------------------------------------------------------------

_T = "torch.distributed"
# Classes that torch's own distributed tensors and training state pickle. Exact names only.
_QUIET = (
    *(f"{_T}.{m}.DTensor" for m in ("tensor", "tensor._api", "_tensor", "_tensor.api")),
    *(
        f"{_T}.{m}.{n}"
        for m in ("_tensor.placement_types", "tensor._dtensor_spec")
        for n in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    ),
    *(
        f"{_T}.{m}.placement_types.{n}"
        for m in ("_tensor", "tensor")
        for n in (
            "Placement", "Shard", "Replicate", "Partial", "_Partial", "_StridedShard",
            "_MaskPartial", "InterleavedShard",
        )
    ),
    f"{_T}.device_mesh.DeviceMesh", f"{_T}._tensor.device_mesh.DeviceMesh",
    f"{_T}._mesh_layout._MeshLayout", f"{_T}._mesh_layout._FlatLayout",
    "torch.fx.passes.shape_prop.TensorMetadata",
    f"{_T}._shard.sharded_tensor.shard.Shard",
    f"{_T}._shard.metadata.ShardMetadata",
    f"{_T}._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_T}._shard.sharded_tensor.metadata.TensorProperties",
    f"{_T}._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_T}._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_T}._shard.sharding_spec.api.EnumerableShardingSpec",
    f"{_T}.remote_device._remote_device",
    f"{_T}.distributed_c10d.ReduceOp", f"{_T}.distributed_c10d.ReduceOp.RedOpType",
    "torch._C._distributed_c10d.ReduceOp", "torch._C._distributed_c10d.ReduceOp.RedOpType",
    *(
        f"torch.{n}"
        for n in (
            "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine",
            "per_channel_symmetric", "per_channel_affine_float_qparams", "contiguous_format",
            "channels_last", "channels_last_3d", "preserve_format", "memory_format", "layout",
            "Generator", "dtype", "qscheme",
        )
    ),
)  # fmt: skip

# Functions that pickled modules refer to, as a layer's activation. To call one is still refused.
_ACTIVATIONS = (
    "torch.nn.functional.relu", "torch.nn.functional.gelu", "torch.nn.functional.silu",
    "torch._C._nn.gelu",
)  # fmt: skip

_STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage", "torch.xpu", "torch.hpu")


def _storage_types() -> dict[str, StorageType]:
    types: dict[str, StorageType] = {}
    for name, dtype in BY_STORAGE.items():
        kind = StorageType(dtype, "Untyped" in name)
        names = (f"{m}.{name.rpartition('.')[2]}" for m in _STORAGE_MODULES)
        types.update(dict.fromkeys(names, kind))
    untyped = StorageType(DTYPES["uint8"], True)
    return types | dict.fromkeys(
        ("torch.storage._UntypedStorage", "torch._UntypedStorage"), untyped
    )


def _size(values: Any = ()) -> tuple[int, ...]:
    if type(values) is not tuple and type(values) is not list:
        wrong_arguments("torch.Size")
    return tuple(values)


TABLE: Mapping[str, Any] = {
    **BUILTINS,
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **_storage_types(),
    **{name: sealed(build) for name, build in BUILDERS.items()},
    "torch.Size": sealed(_size),
    "builtins.getattr": sealed(_getattr),
    "__builtin__.getattr": sealed(_getattr),
    **ENGINE_CLASSES,
    **ENGINE_FUNCTIONS,
    **{name: inert(name) for name in (*_QUIET, *CLASSES)},
    **{name: inert(name, refused=True) for name in _ACTIVATIONS},
    **{one.qualname: one for one in _HISTORIES},
    _SHARDED_TENSOR.qualname: _SHARDED_TENSOR,
    f"{_T}._shard.sharded_tensor.ShardedTensor": _SHARDED_TENSOR,
    _PROCESS_GROUP_STATE.qualname: _PROCESS_GROUP_STATE,
}
