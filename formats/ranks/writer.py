"""Lay out one file a rank, with DTensors inside: verl's three files, or one for everything.

A source of this format keeps its own form: folders, names, the mesh's name and device. Plain
tensors of which it is known how they are cut (`rank_splits`) stay plain, with what is written down
beside them and in `metadata.json` for the new ranks. Any other source becomes verl's:
`model_world_size_W_rank_R.pt`, `optim_…`, `extra_state_…` and `fsdp_config.json`; a model under
Meta's names becomes a release of Meta's (`meta`).

Parameters and what an optimizer keeps of them are cut along their first axis as FSDP2 cuts; the
rest is whole on every rank. Non-tensor state is dealt out by `rank_objects`.

Choose how rank files are named and filled: as the source does, or as verl does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Extent, Kind
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.sharding import Split as Cut
from ftckpt.checkpoint.sharding import part_shape, slabs
from ftckpt.findings import Finding, finding
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import Path, dotted, leaves
from ftckpt.formats.state.paths import (
    LEAVES,
    NestedState,
    coded_in,
    is_divided,
    owner_of,
    with_aliases,
    without_records,
)
from ftckpt.formats.state.world_size import world_notes, world_of
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, MeshForm, RankMesh, Tensor, save
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content, Shard, ShardBox, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile, Stored

from .checkpoint import RankPlace, RankPlaces, RanksCheckpoint
from .division import (
    BesideTensors,
    require_divisible,
    shard_box,
    split_of,
    splits_of,
    wish_for_ranks,
)
from .meta_llama.checklist import CHECKLIST
from .meta_llama.writer import release_layout
from .names import CONFIG, RankFile, Role, component_of, folder_order, rank_file, rank_files
from .objects import RankObjects, Renumbering, renumbered_record
from .parse_files import read_recorded, read_stream
from .recorded_job import Evidence
from .splits import PARAMETERS, cut_of
from .tensors import RankSplit

if TYPE_CHECKING:
    from ftckpt.formats.state.write_coded import CodedContent


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


class RanksWriter:
    """The writer of the format `ranks` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "ranks"
    single = False
    supported_options = ("tp", "dp")

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` ranks, or `request.tp` where tensors are plain.

        The source's world size where neither is asked for.

        Raises:
            UsageError: a wish for another division than over one world.
            UnsupportedError: a tensor of a type that torch.save cannot write; a tensor of which
                nothing says how it is divided (`unknown-rule`); a grid of ranks.
        """
        if PARAMETERS in content.beside:
            return release_layout(content, request)
        world = world_of(content, wish_for_ranks(content, request))
        content = with_aliases(content)
        require_divisible(content, world)
        files: list[OutputFile] = []
        commit: list[OutputFile] = []
        unplaced: list[str] = []
        notes: list[Finding] = world_notes(content, world)
        changed: set[str] = set()
        coded = coded_in(content)
        for dialect, part, keys in _folders(content, {one.name for one in coded}):
            own = {source: key for key, source in keys.items()}
            inside = [one.moved(part, own) for one in coded if own.keys() >= {*one.keys.values()}]
            state = RankFolder(part, dialect, world, inside, splits_of(part))
            files += state.outputs()
            unplaced += (keys.get(name, name) for name in state.unplaced)
            notes += state.notes
            changed |= state.changed
            name = dialect.record[0]
            if name:
                before = content.topology.world_size or world
                record = Literal(dialect.record_bytes(before, world))
                commit.append(OutputFile(dialect.folder + name, [record]))
        files += _beside(content)
        if not changed and not coded:
            return Layout(files=files, commit=commit, unplaced=unplaced, notes=notes)
        held = {name: info for name, info in content.objects.items() if name not in changed}
        content = without_records(replace(content, objects=held), coded)
        if not changed:
            return Layout(
                files=files, commit=commit, unplaced=unplaced, notes=notes, content=content
            )
        what = f"world size and ranks inside the files are those of the new ranks: {min(changed)}"
        more = len(changed) - 1
        notes.append(finding("note", what + (f" and {more} more" if more else "")))
        return Layout(files=files, commit=commit, unplaced=unplaced, notes=notes, content=content)


def _folders(
    content: Content, records: Collection[str]
) -> Iterator[tuple[Dialect, Content, Mapping[str, str]]]:
    """Yield each folder's dialect, its content, and what its keys are called in the whole.

    The objects `records` are in none: they are of tensors.
    """
    dialects = dialects_of(content.checkpoint)
    others = [component for component in dialects if component != "model"]
    for component, dialect in dialects.items():
        mine: dict[str, str] = {}
        tensors: list[TargetTensor] = []
        for key, wanted in content.tensors.items():
            if wanted.component == component and component != "model":
                moment = wanted.kind in LEAVES or wanted.kind is Kind.OTHER
                own = wanted._replace(component="optimizer" if moment else "model")
            elif component == "model" and wanted.component not in others:
                own = wanted
            else:
                continue
            tensors.append(own)
            mine[own.key] = key
        owner = "" if component == "model" else component.removeprefix("extra:") + "."
        apart = tuple(f"{other.removeprefix('extra:')}.rank_" for other in others)
        objects = {
            name: info
            for name, info in content.objects.items()
            if name not in records
            and (name.startswith(f"{owner}rank_") if owner else not name.startswith(apart or "\0"))
            and name not in _carried(content.checkpoint)
        }
        yield dialect, replace(content.with_tensors(tensors), objects=objects), mine


class Placed(NamedTuple):
    """Where a tensor of all ranks stands, and the axis that is divided over them; None for none."""

    role: Role
    path: Path
    shape: tuple[int, ...]
    dtype: DType
    axis: int | None


class RankFolder:
    """The files of one folder, as they grow: a nested state for each file of each rank.

    Attributes:
        unplaced: keys of tensors and names of objects that have no place.
        notes: what a user should know.
        changed: names of objects in which a number of the old world became one of the new.
        placed: the tensors that all ranks hold, or a part each.
    """

    def __init__(
        self,
        content: Content,
        dialect: Dialect,
        world: int,
        coded: Sequence[CodedContent],
        splits: Mapping[str, RankSplit],
    ) -> None:
        self._content, self._dialect, self._world = content, dialect, world
        self._states: list[dict[Role, NestedState]] = [{} for _ in range(world)]
        self._meshes = [RankMesh(rank, world, dialect.mesh) for rank in range(world)]
        self._tied = set(content.aliases.values())
        self._locals: dict[tuple[str, int, Cut | None], Tensor] = {}  # of tied weights
        self._splits = splits
        self.placed: list[Placed] = []
        self._coded = coded
        suffixes = {key: suffix for one in coded for suffix, key in one.keys.items()}
        self._places = RankPlaces(content, whole=dialect.whole, inside=suffixes)
        objects = RankObjects(content, world)
        self.notes, self.changed = objects.notes, objects.changed
        self.unplaced = [*self._places.unplaced, *objects.unplaced]
        self._tensors()
        if self._splits:
            self._beside_tensors()
        for rank, role, leaf in objects.leaves:
            if not self._put(rank, role, leaf.path, leaf.value):
                self.unplaced.append(f"rank_{rank}.{dotted(leaf.path)}")
        self._complete_optimizers()

    def _put(self, rank: int, role: Role, path: Path, value: Any) -> bool:
        """Put a value into one of a rank's files; False where something stands there."""
        if self._dialect.whole:
            role, path = Role.WHOLE, (*_TOPS.get(role, ()), *path)
        state = self._states[rank].setdefault(role, NestedState())
        return state.put(path, value)

    def _complete_optimizers(self) -> None:
        """Give groups to optimizers that have none: readers know an optimizer by having both."""
        whole = self._dialect.whole
        for states in self._states:
            state = states.get(Role.WHOLE if whole else Role.OPTIMIZER)
            at = _TOPS[Role.OPTIMIZER] if whole else ()
            if state is not None and "param_groups" not in (has := state.below(at)) and has:
                state.put((*at, "param_groups"), [])

    def _tensors(self) -> None:
        places = dict(self._places.found)
        own = [{key: places.pop(key) for key in one.keys.values()} for one in self._coded]
        axes = {key: self._cut(key) for key in places}
        # Where nothing is divided, only a placement can say that all ranks hold the same.
        alone = all(axis is None for axis in axes.values()) and self._world > 1
        for key, (role, path, owner) in places.items():
            if owner is not None and owner >= self._world:
                self.unplaced.append(key)
                continue
            for rank in range(self._world) if owner is None else [owner]:
                value = self._value(key, rank, axes[key], placed=alone and owner is None)
                if not self._put(rank, role, path, value):
                    self.unplaced.append(key)
                    break
            else:
                cut, wanted = axes[key], self._content.tensors[key]
                if owner is None:
                    axis = None if cut is None else cut.axis
                    self.placed.append(Placed(role, path, wanted.shape, wanted.dtype, axis))

        for one, found in zip(self._coded, own, strict=True):  # after the model, as in its file
            self._subclass(one, found)

    def _subclass(self, one: CodedContent, found: Mapping[str, RankPlace]) -> None:
        """Put each rank's shard of a tensor subclass where a tensor inside would stand."""
        role = next(iter(found.values())).role
        path = one.path({key: place.path for key, place in found.items()})
        shape = one.tensor.shape
        for rank in range(self._world):
            local = one.shard(shard_box(shape, Cut(0), self._world, rank))
            dtype = local.dtype if isinstance(local, Tensor) else one.tensor.dtype
            value = self._meshes[rank].dtensor(local, shape, dtype, 0)
            if not self._put(rank, role, path, value):
                self.unplaced.append(one.name)
                break
        else:
            self.placed.append(Placed(role, path, shape, one.tensor.dtype, 0))

    def _cut(self, key: str) -> Cut | None:
        """Return how a tensor is divided over the ranks; None where all of them hold all of it."""
        wanted = self._content.tensors[key]
        if self._splits:
            split = split_of(self._content, wanted)
            return None if split is None or split.dim is None else cut_of(split)
        alone = self._world == 1 and not self._coded  # a subclass is always a DTensor's
        return Cut(0) if not alone and is_divided(wanted) else None

    def _value(self, key: str, rank: int, cut: Cut | None, *, placed: bool) -> Any:
        """Return what a rank holds of a tensor; `placed` says to give a whole one a placement."""
        wanted, owner = self._content.tensors[key], owner_of(self._content, key)
        local = self._locals.get((owner, rank, cut))
        if local is None:
            local = Tensor.of(self._shard(owner, rank, cut))
        if owner in self._tied:
            self._locals[owner, rank, cut] = local
        if self._splits or (cut is None and not placed):
            return local
        axis = None if cut is None else cut.axis
        return self._meshes[rank].dtensor(local, wanted.shape, wanted.dtype, axis)

    def _shard(self, key: str, rank: int, cut: Cut | None) -> Shard:
        wanted = self._content.tensors[key]
        if cut is not None and cut.blocks:
            parts = [
                ShardBox(slab.local, key, slab.box)
                for slab in slabs(wanted.shape, cut, self._world, rank)
            ]
            return self._content.shard(
                part_shape(wanted.shape, cut, self._world), wanted.dtype, parts
            )
        return self._content.part(key, shard_box(wanted.shape, cut, self._world, rank))

    def _beside_tensors(self) -> None:
        """Put what was written down of each shard beside it: for the new ranks, their places."""
        specs = BesideTensors(self._content, self._places, self._world)
        for key, (role, path, owner) in self._places.found.items():
            if owner is not None:
                continue
            for rank in range(self._world):
                for at, value in specs.of(key, path, rank):
                    self._put(rank, role, at, CopiedTree(value, {}))
        for rank in range(self._world):
            for role, at, value in specs.for_all(rank):
                self._put(rank, role, at, CopiedTree(value, {}))

    def trees(self) -> Iterator[tuple[int, Role, dict[str | int, Any]]]:
        """Yield what each file of each rank holds, rank by rank."""
        for rank, states in enumerate(self._states):
            for role in Role:
                if role in states:
                    yield rank, role, states[role].settled(self._places.is_list(role))

    def outputs(self) -> Iterator[OutputFile]:
        """Yield the files, rank by rank."""
        for rank, role, tree in self.trees():
            path = self._dialect.file(role, rank, self._world)
            stem = path.rpartition("/")[2].removesuffix(".pt")
            yield OutputFile(path, save(tree, folder=stem))


_TOPS: Mapping[Role, Path] = {Role.MODEL: ("model",), Role.OPTIMIZER: ("optimizer",)}


def _beside(content: Content) -> list[OutputFile]:
    """Return what verl keeps beside the ranks' files, as it is."""
    entries = content.checkpoint.source.entries
    return [
        OutputFile(name, [Stored(Extent(name, 0, entries[name].size))])
        for name in sorted(_carried(content.checkpoint))
        if name not in content.checkpoint.objects or name in content.objects
    ]


def _carried(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the files of a source that are of no rank."""
    if type(checkpoint) is not RanksCheckpoint:
        return frozenset()
    records = {f"{d.folder}{d.record[0]}" for d in dialects_of(checkpoint).values()}
    own = (name for name in checkpoint.members() if rank_file(name) is None)
    # The new files have other digests.
    return frozenset(name for name in own if name not in records and name != CHECKLIST)
