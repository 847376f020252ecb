"""Lay out a save of torch_checkpointing: a file of each item and rank, and the metadata.

Parameters and what an optimizer keeps of them are DTensors, cut along their first axis as FSDP2
cuts; the rest is whole on every rank and recorded as replicated over the world, as the package
records it (`default_resharder.py`, `_replicated_tensor_metadata`). Other state becomes an item of
its own for each key at its top.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.formats.pickles.write import dumps
from ftckpt.formats.ranks.division import require_divisible
from ftckpt.formats.ranks.names import Role
from ftckpt.formats.ranks.writer import Dialect, Placed, RankFolder
from ftckpt.formats.state.paths import coded_in, with_aliases, without_records
from ftckpt.formats.state.world_size import world_notes, world_of
from ftckpt.formats.torch_files.write_tree import MeshForm, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile

from .names import METADATA, REST, default_name

_ITEMS = {Role.MODEL: "model", Role.OPTIMIZER: "optimizer"}
_ITEM = re.compile(r"[A-Za-z0-9_-]+")
_MESH = MeshForm()


class TorchCheckpointingWriter:
    """The writer of `torch-checkpointing` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "torch-checkpointing"
    single = False
    supported_options = ("dp",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` ranks; for the source's world size without it.

        Raises:
            UsageError: a wish for another division than over one world.
            UnsupportedError: a tensor of a type that torch.save cannot write.
        """
        world = world_of(content, request)
        content = with_aliases(content)
        require_divisible(content, world)
        coded = coded_in(content)
        folder = RankFolder(content, Dialect(mesh=_MESH), world, coded, {})
        files = [
            OutputFile(default_name(item, rank), save(tree, folder=f"{item}_{rank}"))
            for rank, role, whole in folder.trees()
            for item, tree in _items(role, whole)
        ]
        commit = [OutputFile(METADATA, [Literal(dumps(_metadata(folder.placed, world)))])]
        notes = [*world_notes(content, world), *folder.notes]
        held = {name: one for name, one in content.objects.items() if name not in folder.changed}
        if folder.changed or coded:
            content = without_records(replace(content, objects=held), coded)
            return Layout(
                files=files, commit=commit, unplaced=folder.unplaced, notes=notes, content=content
            )
        return Layout(files=files, commit=commit, unplaced=folder.unplaced, notes=notes)


def _items(role: Role, tree: dict[str | int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items that one of a rank's files becomes."""
    if role in _ITEMS:
        yield _ITEMS[role], tree
        return
    taken = {*_ITEMS.values(), REST}
    rest = {}
    for key, value in tree.items():
        if isinstance(key, str) and _ITEM.fullmatch(key) and key not in taken:
            yield key, value
        else:
            rest[key] = value
    if rest:
        yield REST, rest


def _metadata(placed: Sequence[Placed], world: int) -> dict[str, Any]:
    everyone = tuple(range(world))
    mesh = {
        "device_type": _MESH.device,
        "mesh_shape": (world,),
        "mesh_data": everyone,
        "mesh_dim_names": (_MESH.name,),
    }
    whole = mesh | {"mesh_dim_names": None}
    items: dict[str, Any] = {}
    for role, path, shape, dtype, axis in placed:
        if role not in _ITEMS:
            continue
        cut = {"type": "Replicate"} if axis is None else {"type": "Shard", "dim": axis}
        data = {
            "global_shape": list(shape),
            "dtype": f"torch.{dtype.name}",
            "stride": list(dense_strides(shape)),
            "mesh_spec": whole if axis is None else mesh,
            "placements": [cut],
        }
        sharding = {"type": "DTensorShardingMetadata", "data": data}
        item = items.setdefault(
            _ITEMS[role],
            {"nested_path_to_metadata": {}, "rank_to_layout_info": dict.fromkeys(everyone)},
        )
        name = json.dumps(list(path), separators=(",", ":"))
        item["nested_path_to_metadata"][name] = [
            # Each has a list of its own, as the package writes it.
            {"sharding_metadata": sharding, "ranks": (*everyone,)}
        ]
    return {"metadata": items, "world_size": world, "version": "2.0"}
