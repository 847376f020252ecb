"""Choose how rank files are named and filled: as the source does, or as verl does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.formats.torch_files.write_dtensor import MeshForm
from ftckpt.storage.source import Source

from .checkpoint import RanksCheckpoint
from .names import CONFIG, RankFile, Role, component_of, folder_order, rank_files
from .parse_files import read_recorded, read_stream
from .recorded_job import Evidence
from .renumbering import Renumbering, renumbered_record


class Dialect(NamedTuple):
    """The files of one folder.

    Attributes:
        folder: "" or a folder's name and a slash.
        files: a file of each role, whose names the others are spelled as; verl's where empty.
        mesh: what the job calls its mesh.
        record: name and content of the configuration beside them, "" where there is none.
    """

    folder: str = ""
    files: Mapping[Role, RankFile] = {}
    mesh: MeshForm = MeshForm()
    record: tuple[str, Mapping[str, Any]] = (CONFIG, {"FSDP_version": 2})

    @property
    def whole(self) -> bool:
        """Whether a rank has one file (`shard_00000.pt`) and not one for each role."""
        return set(self.files) == {Role.WHOLE}

    def file(self, role: Role, rank: int, world: int) -> str:
        """Return the path of a rank's file."""
        own = self.files.get(role) or (self.files.get(Role.WHOLE) if role is Role.MODEL else None)
        own = own or RankFile(f"{self.folder}{role}", role, 0, world)
        return own.of_rank(rank, None if own.world_size is None else world)

    def record_bytes(self, before: int, world: int) -> bytes:
        """Return the configuration for a world size, where it was one for another."""
        names = {}
        for role, file in self.files.items():
            of = [None if file.world_size is None else size for size in (before, world)]
            new = [self.file(role, rank, world) for rank in range(world)]
            old = [file.of_rank(rank, of[0]) for rank in range(before)]
            # Equal lengths: a list of all old names becomes one of all new names.
            names[role] = ([_last(n) for n in old], [_last(n) for n in new])
        record = renumbered_record(self.record[1], Renumbering(before, world), names.values())
        told = Evidence("", 0)
        told.read(record)
        if told.shards is None and told.world is None and not told.groups:
            record["world_size"] = world
        return json.dumps(record, indent=4).encode()


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def dialects_of(checkpoint: Checkpoint) -> Mapping[str, Dialect]:
    """Return component -> dialect of its folder: `model` first, then `extra:<folder>`."""
    if type(checkpoint) is not RanksCheckpoint:
        return {"model": Dialect()}
    source = checkpoint.source
    files = [f for f in rank_files(map(source.shown, source.entries))
             if f.path in checkpoint.streams]  # fmt: skip
    folders: dict[str, dict[Role, RankFile]] = {}
    for file in files:
        folders.setdefault(file.path.rpartition("/")[0], {}).setdefault(file.role, file)
    chosen = sorted(folders, key=folder_order)
    return {component_of(folder): _dialect(source, folder, folders[folder]) for folder in chosen}


def _dialect(source: Source, folder: str, files: Mapping[Role, RankFile]) -> Dialect:
    recorded = read_recorded(source, folder)
    record: tuple[str, Mapping[str, Any]] = ("", {})
    if recorded.path:
        record = (recorded.path.rpartition("/")[2], json.loads(source.read(recorded.path)))
    return Dialect(
        folder=f"{folder}/" if folder else "",
        files={role: file for role, file in files.items() if file.spelling is not None},
        mesh=next(_meshes(source, next(iter(files.values())).path), MeshForm()),
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
