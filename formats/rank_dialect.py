"""How one file a rank is to be named and filled: as the source does, or as verl does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.source import Source

from .dtensor_tree import MeshForm
from .inert_tree import leaves
from .rank_checkpoint import RanksCheckpoint
from .rank_files import CONFIG, RankFile, Role, folder_order, rank_files
from .rank_reading import read_recorded, read_stream
from .rank_tensors import Split
from .torch_values import SubclassRef
from .unpickle import Inert


class Dialect(NamedTuple):
    """The files of one folder.

    Attributes:
        folder: "" or a folder's name and a slash.
        whole: whether a rank has one file (`shard_00000.pt`) and not verl's three.
        counted: whether the name of such a file says the world size.
        mesh: what the job calls its mesh.
        splits: how plain tensors are cut, where a record beside the files says it; then they are no
            DTensors.
        record: name and content of the configuration beside them, "" where there is none.
    """

    folder: str = ""
    whole: bool = False
    counted: bool = True
    mesh: MeshForm = MeshForm()
    splits: Mapping[str, Split] = {}
    record: tuple[str, Mapping[str, Any]] = (CONFIG, {"FSDP_version": 2})

    def file(self, role: Role, rank: int, world: int) -> str:
        """Return the path of a rank's file."""
        first = f"{self.folder}shard_00000.pt" if self.whole else f"{self.folder}{role}"
        size = world if self.counted else None
        return RankFile(first, Role.WHOLE if self.whole else role, 0, size).of_rank(rank)

    def record_bytes(self, world: int) -> bytes:
        """Return the configuration for a world size."""
        return json.dumps({**self.record[1], "world_size": world}, indent=4).encode()


def dialects_of(checkpoint: Checkpoint) -> Mapping[str, Dialect]:
    """Return component -> dialect of its folder: `model` first, then `extra:<folder>`."""
    if type(checkpoint) is not RanksCheckpoint:
        return {"model": Dialect()}
    source = checkpoint.source
    files = [f for f in rank_files(source.entries) if f.path in checkpoint.streams]
    folders = {f.path.rpartition("/")[0]: f for f in reversed(files)}
    chosen = sorted(folders, key=folder_order)
    return {
        "model" if number == 0 else f"extra:{folder}": _dialect(source, folder, folders[folder])
        for number, folder in enumerate(chosen)
    }


def _dialect(source: Source, folder: str, file: RankFile) -> Dialect:
    recorded = read_recorded(source, folder)
    record: tuple[str, Mapping[str, Any]] = ("", {})
    if recorded.path:
        record = (recorded.path.rpartition("/")[2], json.loads(source.read(recorded.path)))
    return Dialect(
        folder=f"{folder}/" if folder else "",
        whole=file.role is Role.WHOLE,
        counted=file.world_size is not None,
        mesh=next(_meshes(source, file.path), MeshForm()),
        splits=recorded.splits,
        record=record,
    )


def _meshes(source: Source, path: str) -> Iterator[MeshForm]:
    """Yield what the meshes of a file's DTensors are called."""
    for _, value in leaves(read_stream(source, path).tree):
        state = value.state if type(value) is SubclassRef else None
        parts = state if type(state) is tuple else (state,)
        for part in parts:
            spec = part.get("_spec") if type(part) is dict else None
            mesh = spec.get("mesh") if isinstance(spec, Inert) else None
            if isinstance(mesh, Inert):
                device = mesh.get("_device_type", mesh.get("device_type"))
                names = mesh.get("_mesh_dim_names", mesh.get("mesh_dim_names"))
                one = type(names) is tuple and len(names) == 1 and type(names[0]) is str
                form = MeshForm()
                yield MeshForm(
                    device if type(device) is str else form.device, names[0] if one else form.name
                )
