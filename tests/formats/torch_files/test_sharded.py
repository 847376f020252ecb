"""DTensor and ShardedTensor records of every torch that wrote them, and records that lie."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.formats.pickles.unpickle import Inert, inert
from ftckpt.formats.torch_files.dtensor import How, Placement
from ftckpt.formats.torch_files.sharded import Distributed, HeldReader, Listed
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef

FLOAT = DTYPES["float32"]


def record(name: str, state: Any = None) -> Inert:
    found = inert(name)()
    if state is not None:
        found.__setstate__(state)
    return found


def local(*shape: int) -> TensorRef:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return TensorRef("0", 0, shape, tuple(strides), FLOAT)


def subclass(type_name: str, shape: tuple[int, ...], state: Any) -> SubclassRef:
    found = SubclassRef()
    found.type_name = type_name
    found.base = Composite("wrapper", {"dtype": FLOAT, "shape": shape})
    found.state = state
    return found


OLD_MESH = {
    "device_type": "cuda",
    "mesh": TensorRef("9", 0, (2, 2), (2, 1), DTYPES["int32"]),
    "mesh_dim_names": ("dp", "tp"),
    "_flatten_mesh_list": (4, 5, 6, 7),
    "_coordinate_on_dim": [1, 0],
}
LAYOUT = "torch.distributed._mesh_layout._MeshLayout"
FLAT = "torch.distributed._mesh_layout._FlatLayout"
NEW_MESH = {
    "_device_type": "cuda",
    "_layout": record(LAYOUT, {"shape": (2, 2), "stride": (2, 1)}),
    "_rank_map": TensorRef("9", 0, (8,), (1,), DTYPES["int32"]),
    "_mesh_dim_names": ("dp", "tp"),
    "_coordinate_on_dim": (1, 0),
}
NEWEST_MESH = {
    **NEW_MESH,
    "_layout": record(
        LAYOUT,
        {"axes": (record(FLAT, {"shape": (2,), "stride": (2,)}),
                  record(FLAT, {"shape": (1, 2), "stride": (0, 1)}))},
    ),
    "_rank": 6,
}  # fmt: skip


def dtensor(
    mesh: dict[str, Any],
    *,
    modern: bool = True,
    placements: Any = None,
    part: Any = None,
) -> SubclassRef:
    base = "torch.distributed.tensor" if modern else "torch.distributed._tensor"
    kinds = f"{base}.placement_types"
    if placements is None:
        placements = (
            record(f"{kinds}._StridedShard", {"dim": 0, "split_factor": 2}),
            record(f"{kinds}.Shard", {"dim": 0}),
        )
    spec = record(
        f"{base}._dtensor_spec.DTensorSpec" if modern else f"{kinds}.DTensorSpec",
        {
            "mesh": record("torch.distributed.device_mesh.DeviceMesh", mesh),
            "placements": placements,
        },
    )
    state = (None, {"_local_tensor": local(2, 3) if part is None else part, "_spec": spec})
    return subclass(f"{base}.DTensor" if modern else f"{base}.api.DTensor", (8, 3), state)


@pytest.mark.parametrize(
    ("mesh", "modern", "rank"),
    [(OLD_MESH, False, 6), (OLD_MESH, True, 6), (NEW_MESH, True, None), (NEWEST_MESH, True, 6)],
    ids=["torch 2.2", "torch 2.5", "torch 2.10", "torch 2.13"],
)
def test_meshes_of_every_version(mesh: dict[str, Any], modern: bool, rank: int | None) -> None:
    held = HeldReader(6).read(dtensor(mesh, modern=modern))
    assert isinstance(held, Distributed)
    assert held.shape == (8, 3)
    assert held.mesh == ((2, 2), (1, 0), rank, ("dp", "tp"))
    assert held.placements == (Placement(How.STRIDED, 0, 2), Placement(How.SHARD, 0))


def test_a_mesh_without_coordinates_is_asked_for_the_rank() -> None:
    mesh = {k: v for k, v in OLD_MESH.items() if k != "_coordinate_on_dim"}
    for rank, coordinate in ((5, (0, 1)), (7, (1, 1)), (3, None)):
        held = HeldReader(rank).read(dtensor(mesh))
        assert isinstance(held, Distributed)
        assert held.mesh.coordinate == coordinate
    del mesh["_flatten_mesh_list"]
    with pytest.raises(UnsupportedError):
        HeldReader(5).read(dtensor(mesh))


def test_a_rank_outside_its_mesh_has_no_coordinate() -> None:
    held = HeldReader(0).read(dtensor({**NEW_MESH, "_coordinate_on_dim": None}))
    assert isinstance(held, Distributed)
    assert held.mesh.coordinate is None


def test_a_mesh_shared_by_many_tensors_is_parsed_once() -> None:
    reader, first = HeldReader(6), dtensor(NEWEST_MESH)
    one, two = reader.read(first), reader.read(first)
    assert isinstance(one, Distributed)
    assert isinstance(two, Distributed)
    assert one.mesh is two.mesh


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {**NEW_MESH, "_layout": 3},
        {**NEW_MESH, "_layout": record(LAYOUT, {})},
        {**NEW_MESH, "_layout": record(LAYOUT, {"shape": (2, "x")})},
    ],
)
def test_meshes_of_another_form(mesh: dict[str, Any]) -> None:
    with pytest.raises(NewerWriterError, match=r"expected .*, found"):
        HeldReader(0).read(dtensor(mesh))


@pytest.mark.parametrize(
    "mesh",
    [
        {**NEW_MESH, "_layout": record(LAYOUT, {"shape": (2, -1)})},
        {**NEW_MESH, "_layout": record(LAYOUT, {"shape": (ENDLESS,)})},
        {**NEW_MESH, "_coordinate_on_dim": (1,)},
        {**NEW_MESH, "_coordinate_on_dim": (-1, 0)},
        {**NEW_MESH, "_coordinate_on_dim": "ab"},
    ],
)
def test_meshes_that_torch_never_writes(mesh: dict[str, Any]) -> None:
    with pytest.raises(CorruptError) as caught:
        HeldReader(0).read(dtensor(mesh))
    assert caught.value.kind == "bad-metadata"


def test_placements_that_are_not_known() -> None:
    kinds = "torch.distributed.tensor.placement_types"
    held = HeldReader(6).read(dtensor(NEW_MESH, placements=(record(f"{kinds}.Partial"),) * 2))
    assert isinstance(held, Distributed)
    assert held.placements == (Placement(How.PARTIAL), Placement(How.PARTIAL))
    with pytest.raises(UnsupportedError):
        HeldReader(6).read(dtensor(NEW_MESH, placements=(record("mine.Ragged"),)))
    with pytest.raises(NewerWriterError):
        HeldReader(6).read(dtensor(NEW_MESH, placements=(record(f"{kinds}.Shard"),)))
    with pytest.raises(NewerWriterError):
        HeldReader(6).read(dtensor(NEW_MESH, placements=3))


def test_a_local_tensor_of_another_subclass_is_named() -> None:
    part = subclass("torchao.Float8Tensor", (2, 3), None)
    with pytest.raises(UnsupportedError, match=r"torchao\.Float8Tensor"):
        HeldReader(6).read(dtensor(NEW_MESH, part=part))
    with pytest.raises(UnsupportedError, match=r"torchao\.Float8Tensor"):
        HeldReader(6).read(part)
    with pytest.raises(NewerWriterError):
        HeldReader(6).read(dtensor(NEW_MESH, part=7))


S = "torch.distributed._shard"
API = f"{S}.sharded_tensor.api.ShardedTensor"


def shard_metadata(offsets: Any, sizes: Any) -> Inert:
    state = (None, {"shard_offsets": offsets, "shard_sizes": sizes, "placement": None})
    return record(f"{S}.metadata.ShardMetadata", state)


def sharded(
    part: Any = None, offsets: Any = (4, 0), sizes: Any = (2, 3), group: Any = None
) -> SubclassRef:
    mine = shard_metadata(list(offsets), list(sizes))
    shard = record(
        f"{S}.sharded_tensor.shard.Shard",
        (None, {"tensor": local(2, 3) if part is None else part, "metadata": mine}),
    )
    everyone = record(
        f"{S}.sharded_tensor.metadata.ShardedTensorMetadata",
        {"shards_metadata": [shard_metadata([0, 0], [4, 3]), mine]},
    )
    group = {"global_rank": 1, "global_world_size": 2} if group is None else group
    state = ([shard], everyone, record(f"{API}.ProcessGroupState", group), None, False)
    return subclass(API, (6, 3), state)


def test_a_sharded_tensor_lists_its_boxes() -> None:
    held = HeldReader(1).read(sharded())
    assert isinstance(held, Listed)
    assert (held.shape, held.rank, held.world_size) == ((6, 3), 1, 2)
    ((patch, ref),) = held.shards
    assert (patch.box, ref.shape) == (Box((4, 0), (2, 3)), (2, 3))
    assert held.boxes == (Box((0, 0), (4, 3)), Box((4, 0), (2, 3)))


def test_a_process_group_that_says_nothing() -> None:
    held = HeldReader(1).read(sharded(group={"global_rank": "one"}))
    assert isinstance(held, Listed)
    assert (held.rank, held.world_size) == (None, None)


@pytest.mark.parametrize(
    "value",
    [
        sharded(part=local(3, 3)),
        sharded(offsets=(4,)),
        sharded(offsets=(4, -1)),
        sharded(sizes=(2, 3, 1)),
    ],
)
def test_sharded_tensors_that_torch_never_writes(value: SubclassRef) -> None:
    with pytest.raises(CorruptError) as caught:
        HeldReader(1).read(value)
    assert caught.value.kind == "bad-metadata"


@pytest.mark.parametrize(
    "value",
    [
        sharded(part=3),
        sharded(offsets=("a", 0)),
        subclass(API, (6, 3), None),
        subclass(API, (6, 3), (1, 2, 3, 4, 5)),
        subclass(API, (6, 3), (1, 2, 3, 4, 5, 6)),
    ],
)
def test_sharded_tensors_of_another_form(value: SubclassRef) -> None:
    with pytest.raises(NewerWriterError, match=r"expected .*, found"):
        HeldReader(1).read(value)


def test_what_is_no_tensor_and_what_is_no_view() -> None:
    assert HeldReader(0).read({"a": 1}) is None
    assert HeldReader(0).read(local(2)) == local(2)
    with pytest.raises(UnsupportedError, match="sparse"):
        HeldReader(0).read(Composite("sparse", {}))
