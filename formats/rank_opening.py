"""How a checkpoint of one file a rank is opened (see `ranks`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ftckpt.checkpoint import (
    Extent,
    Kind,
    ObjectInfo,
    Scalar,
    StepRole,
    TensorInfo,
    Topology,
    tensor_key,
)
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.memory import no_gc
from ftckpt.names import unwrapped
from ftckpt.source import Source

from .dcp_names import Place
from .rank_checkpoint import RanksCheckpoint
from .rank_contents import Contents
from .rank_files import (
    CONFIG,
    RankFile,
    Role,
    check_set,
    folder_order,
    rank_files,
    world_size_of,
)
from .rank_reading import Recorded, read_recorded, read_streams
from .rank_tensors import Entry, Identity, Split, assemble, wrong_rank
from .sharded import Distributed, Held, Listed
from .tied import aliases_of
from .torch_stream import TorchStream

# verl's dataloader state beside them.
DATA = "data.pt"
# Opaque names that are told one by one.
SHOWN = 20


def open_ranks(source: Source) -> RanksCheckpoint:
    """Parse the pickles of all ranks and put their tensors together (see `Ranks.open`)."""
    with no_gc():  # a million small records live until the end: collecting them costs triple
        return _Opening(source).checkpoint()


class _Opening:
    """Collects what the files of all folders hold."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: dict[str, ObjectInfo] = {}
        self.names: list[str] = []
        self.found: list[Finding] = []
        self.notes: list[Finding] = []
        self.counters: list[Scalar] = []
        self.streams: dict[str, TorchStream] = {}
        self.ranks: dict[str, int] = {}
        self.opaque: dict[str, str] = {}
        self.meshes: dict[tuple[tuple[str, ...], tuple[int, ...]], None] = {}
        self.world_size = 0
        self.evidence = ""
        self.broken: list[CorruptError] = []
        self.members: set[str] = set()

    def checkpoint(self) -> RanksCheckpoint:
        folders: dict[str, list[RankFile]] = defaultdict(list)
        for file in rank_files(self.source.entries):
            folder = file.path.rpartition("/")[0]
            if "/" not in folder:
                folders[folder].append(file)
        # Rank files at the top are the checkpoint; folders beside them belong to something else.
        chosen = [""] if "" in folders else sorted(folders, key=folder_order)
        if not chosen:
            raise NotFoundError(f"{self.source.url} holds no rank's file")
        for number, folder in enumerate(chosen):
            self._folder(folder, folders[folder], "model" if number == 0 else f"extra:{folder}")
        if not self.streams and self.broken:
            raise self.broken[0]
        self._beside(chosen)
        for name, path in list(self.opaque.items())[:SHOWN]:
            what = f"{path} names {name}, a class outside the allow-list; kept inert"
            self.notes.append(finding("opaque-object", what, file=path))
        return RanksCheckpoint(
            source=self.source,
            tensors=self.tensors,
            objects=self.objects,
            aliases=aliases_of(self.tensors.values()),
            topology=self._topology(),
            dialect="verl" if chosen != [""] or self._verl("") else "",
            notes=self.notes,
            files=sorted(self.members),
            names=self.names,
            found=self.found,
            counters=self.counters,
            streams=self.streams,
            ranks=self.ranks,
        )

    def _verl(self, folder: str) -> bool:
        return f"{folder}/{CONFIG}".lstrip("/") in self.source.entries

    def _folder(self, folder: str, files: Sequence[RankFile], component: str) -> None:
        recorded = read_recorded(self.source, folder)
        world = world_size_of(files, recorded.world_size)
        if world > self.world_size:
            self.world_size = world
            named = all(f.world_size is not None for f in files)
            self.evidence = "the files' names" if named else recorded.path or "the highest rank"
        self.found += check_set(files, world, recorded.world_size, recorded.path)
        self.members |= {file.path for file in files}
        if recorded.path:
            self.members.add(recorded.path)
        if recorded.step is not None:
            self.counters.append(Scalar(recorded.path, "step", recorded.step, StepRole.ITERATION))
        if recorded.world_size is None and any(f.world_size is None for f in files):
            what = f"nothing records the world size: {world} is what the highest rank implies"
            self.notes.append(finding("note", what))
        mine = [f for f in files if f.world_size in (None, world) and f.rank < world]
        owner = f"{folder}." if component != "model" else ""
        contents = self._read(mine, owner)
        self._merge(contents, component, recorded, world)

    def _read(self, files: Sequence[RankFile], owner: str) -> list[tuple[Contents, Any]]:
        """Parse all files, a rank's model before its optimizer, which borrows its names."""
        weights: dict[int, list[tuple[str, Held]]] = {}
        read: list[tuple[Contents, Any]] = []
        for file, stream in read_streams(self.source, files):
            if isinstance(stream, CorruptError):
                self.broken.append(stream)
                self.found.append(from_error(stream, rank=file.rank))
                continue
            for name in stream.opaque:
                self.opaque.setdefault(name, file.path)
            # The tree is sorted into tensors and objects now and would double the memory.
            self.streams[file.path] = stream._replace(tree=None)
            self.ranks[file.path] = file.rank
            try:
                contents = Contents(file, stream, weights.get(file.rank, []), owner)
            except CorruptError as error:
                error.file = error.file or file.path
                self.broken.append(error)
                self.found.append(from_error(error, rank=file.rank))
                continue
            if file.role is Role.MODEL:
                weights[file.rank] = [(f.where.name, f.held) for f in contents.tensors]
            self.objects |= contents.objects
            self.names += contents.names
            self.counters += (Scalar(file.path, n.name, n.value, n.role) for n in contents.numbers)
            read.append((contents, stream.storages))
        return read

    def _merge(
        self, read: Sequence[tuple[Contents, Any]], component: str, recorded: Recorded, world: int
    ) -> None:
        groups: dict[str, tuple[Identity, list[Entry]]] = {}
        accused: set[str] = set()
        found = [where for contents, _ in read for where, _, _ in contents.tensors]
        bare = unwrapped(where.name for where in found if where.component == "model")
        sharded = any(contents.sharded for contents, _ in read)
        for contents, storages in read:
            file = contents.file
            for where, stored, held in contents.tensors:
                if isinstance(held, Distributed):
                    self.meshes.setdefault((held.mesh.names, held.mesh.sizes))
                odd = wrong_rank(file.path, file.rank, world, held)
                if odd is not None and file.path not in accused:
                    accused.add(file.path)
                    self.found.append(odd)
                own = where.component
                if own in ("model", "optimizer") and component != "model":
                    own = component
                name = _bare(where, bare)
                identity = Identity(own, where.kind, name, "" if stored == name else stored)
                # Kinds may differ by rank where a file is wrong; the key says what is one tensor.
                _, held_by = groups.setdefault(identity.key, (identity, []))
                if held_by and held_by[-1].file == file.path:
                    what = f"{file.path} holds {identity.key} twice"
                    self.found.append(
                        finding("duplicate-tensor", what, file=file.path, tensor=identity.key)
                    )
                    continue
                held_by.append(Entry(file.rank, file.path, held, storages))
        plain = 0
        for identity, held_by in groups.values():
            whole = not any(isinstance(e.held, (Distributed, Listed)) for e in held_by)
            if sharded and whole and identity.kind is Kind.PARAM:
                # Parameters are sharded here, so what stays whole is a buffer.
                identity = replace(identity, kind=Kind.BUFFER)
            split = recorded.splits.get(identity.stored_name)
            if split is None and identity.kind is not Kind.OTHER:
                split = _split_of_weight(identity, held_by, groups, recorded, component)
            made = assemble(
                identity,
                held_by,
                split=split,
                replicated=sharded or world == 1,
                report=self.found.append,
            )
            plain += made[0].component.startswith("extra:rank") and len(made) > 1
            for tensor in made:
                self.tensors[tensor.key] = tensor
        if plain:
            what = (
                f"nothing records how {plain} tensors are split over the ranks: they are kept one a"
                " rank, as extra:rank<R>, and not merged"
            )
            self.notes.append(finding("note", what, file=recorded.path or None))

    def _beside(self, folders: Sequence[str]) -> None:
        """Add what verl keeps beside the ranks: the dataloader's state, the tokenizer."""
        for name in self.source.entries:
            inside = any(name.startswith(f"{f}/huggingface/".lstrip("/")) for f in folders)
            if inside or (name == DATA and folders != [""]):
                self.members.add(name)
        if DATA in self.members:
            file = RankFile(DATA, Role.EXTRA, 0, None)
            for contents, _ in self._read([file], ""):
                whole = ObjectInfo(DATA, Extent(DATA, 0, self.source.size(DATA)), None, ())
                for name in contents.objects:
                    del self.objects[name]
                self.objects[DATA] = whole
                self.names = [n for n in self.names if n not in set(contents.names)]
                self.names += [DATA, *(f"{DATA}.{n.partition('.')[2]}" for n in contents.names)]
            self.ranks.pop(DATA, None)

    def _topology(self) -> Topology:
        """Read tensor and data parallelism off the named mesh of most dimensions."""
        names, sizes = max(self.meshes, key=lambda m: len(m[0]), default=((), ()))
        known = dict(zip(names, sizes, strict=True))
        dp = [known[n] for n in names if n in _DP]
        return Topology(
            world_size=self.world_size,
            tp=known.get("tp"),
            pp=known.get("pp"),
            ep=known.get("ep"),
            dp=prod(dp) if dp else None,
            evidence=self.evidence,
        )


_DP = frozenset({"dp", "ddp", "fsdp", "replicate", "shard", "dp_replicate", "dp_shard", "hsdp"})


def _bare(where: Place, bare: Mapping[str, str]) -> str:
    """Return a tensor's name without what wrappers added to its parameter's name."""
    if where.component != "optimizer" or where.kind is not Kind.OTHER:
        return bare.get(where.name, where.name)
    parameter, dot, leaf = where.name.rpartition(".")
    return bare.get(parameter, parameter) + dot + leaf


def _split_of_weight(
    identity: Identity,
    held_by: Sequence[Entry],
    groups: Mapping[str, tuple[Identity, Sequence[Entry]]],
    recorded: Recorded,
    component: str,
) -> Split | None:
    """Return the split of a weight; for its moment too, if shapes are equal on every rank."""
    split = recorded.splits.get(identity.name)
    if split is None or identity.kind in (Kind.PARAM, Kind.BUFFER):
        return split
    weight = groups.get(tensor_key(component, Kind.PARAM, identity.name))
    if weight is None:
        return None
    shapes = [(e.rank, e.held.shape) for e in held_by]
    return split if shapes == [(e.rank, e.held.shape) for e in weight[1]] else None
