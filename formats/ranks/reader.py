"""Open a checkpoint of one file a rank (see `ranks`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ftckpt.checkpoint import (
    Commit,
    CommitState,
    Extent,
    ImpliedCount,
    Kind,
    ObjectInfo,
    Scalar,
    StepRole,
    TensorInfo,
    Topology,
)
from ftckpt.checkpoint.names import unwrapped
from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import CorruptError, ExitCode, NotFoundError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.huggingface.config import parsed_json
from ftckpt.formats.state.coded_shards import CodedParts
from ftckpt.formats.state.stored_names import StoredName, aliases_of
from ftckpt.formats.torch_files.parse_files import opaque_notes
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .checkpoint import RanksCheckpoint
from .contents import Contents, is_flat
from .files import check_set, size_of
from .meta_llama.checklist import is_of_release, listed_release
from .names import (
    CONFIG,
    METADATA,
    RankFile,
    Role,
    component_of,
    folder_order,
    rank_file,
    rank_files,
)
from .parse_files import RecordedConfig, read_recorded, read_streams
from .splits import PARAMETERS, Splits, check_release, meta_rules
from .tensors import (
    RankEntry,
    RankSplit,
    TensorIdentity,
    assemble,
    assemble_coded,
    is_coded,
    wrong_rank,
)

# The component of FSDP's flattened parameters: other tensors are views of them.
FLAT = "extra:flat"
# verl's dataloader state beside them.
DATA = "data.pt"


def open_ranks(source: Source, rules: Rules | None) -> RanksCheckpoint:
    """Parse the pickles of all ranks and put their tensors together (see `Ranks.open`)."""
    with no_gc():  # a million small records live until the end: collecting them costs triple
        return RanksReader(source, rules).checkpoint()


class RanksReader:
    """Collects what the files of all folders hold."""

    def __init__(self, source: Source, rules: Rules | None) -> None:
        self.source, self._rules = source, rules
        self.splits: dict[str, RankSplit] = {}
        self.coded: dict[str, CodedParts] = {}
        self.coded_places: set[tuple[str, str]] = set()
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
        self.commit = Commit(CommitState.NO_MARKER)
        self.implied: list[ImpliedCount] = []

    def checkpoint(self) -> RanksCheckpoint:
        """Read all folders of the place."""
        folders: dict[str, list[RankFile]] = defaultdict(list)
        for found in rank_files(self.source.entries):
            file = found._replace(path=self.source.shown(found.path))
            folder = file.path.rpartition("/")[0]
            if "/" not in folder:
                folders[folder].append(file)
        # Rank files at the top are the checkpoint; folders beside them belong to something else.
        chosen = [""] if "" in folders else sorted(folders, key=folder_order)
        if not chosen:
            raise NotFoundError(f"{self.source.url} holds no rank's file")
        for folder in chosen:
            self._folder(folder, folders[folder], component_of(folder))
        if not self.streams and self.broken:
            raise self.broken[0]
        self._beside(chosen)
        self.notes += opaque_notes(self.opaque)
        return RanksCheckpoint(
            **self.parts(),
            dialect="verl" if chosen != [""] or self._verl("") else "",
            files=sorted(map(self.source.stored, self.members)),
        )

    def parts(self) -> dict[str, Any]:
        """Return what was collected, as a `RanksCheckpoint` is made of it."""
        return {
            "source": self.source,
            "tensors": self.tensors,
            "objects": self.objects,
            "aliases": aliases_of(self.tensors.values()),
            "topology": self._topology(),
            "commit": self.commit,
            "splits": self.splits,
            "coded": self.coded,
            "elsewhere": self.coded_places,
            "notes": self.notes,
            "names": self.names,
            "open_findings": self.found,
            "counters": self.counters,
            "streams": self.streams,
            "ranks": self.ranks,
            "implied": self.implied,
        }

    def _verl(self, folder: str) -> bool:
        return f"{folder}/{CONFIG}".lstrip("/") in self.source.entries

    def _folder(self, folder: str, files: Sequence[RankFile], component: str) -> None:
        recorded = read_recorded(self.source, folder)
        if not folder and not recorded.path and all(file.of_meta for file in files):
            recorded = listed_release(self.source)
        self.members |= {file.path for file in files}
        if recorded.path:
            self.members.add(recorded.path)
        if recorded.step is not None:
            self.counters.append(Scalar(recorded.path, "step", recorded.step, StepRole.ITERATION))
        # Files that name another world than most are not read: they are of another save.
        named = size_of(files, recorded, ()).files
        owner = f"{folder}." if component != "model" else ""
        mine = [f for f in files if f.world_size in (None, named)]
        contents = self._read(mine, owner)
        evidence = [one.evidence for one, _ in contents]
        size = size_of(files, recorded, evidence)
        if size.files > self.world_size:
            self.world_size = size.files
            self.evidence = size.known_by or "the highest rank"
        for found in check_set(files, size, recorded, evidence):
            (self.found if found.code is not ExitCode.OK else self.notes).append(found)
        if not size.known_by:
            self.implied += [one for file in files if (one := file.implied) is not None]
        if recorded.path.rpartition("/")[2] == METADATA:
            self.commit = Commit(CommitState.COMMITTED, recorded.path)
        fitting = [(one, storages) for one, storages in contents if one.file.rank < size.files]
        own = _by_component([one.file for one, _ in fitting], component)
        for name in dict.fromkeys(own.values()):
            part = [(one, held) for one, held in fitting if own[one.file.path] == name]
            self._merge(part, name, recorded, size.files)

    def _read(self, files: Sequence[RankFile], owner: str) -> list[tuple[Contents, Any]]:
        """Parse all files, a rank's model before its optimizer, which borrows its names."""
        files = sorted(files, key=lambda f: f.role not in (Role.MODEL, Role.WHOLE))
        weights: dict[int, list[tuple[str, Held]]] = {}
        read: list[tuple[Contents, Any]] = []
        for file, stream in self.parsed(files):
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
            if file.role in (Role.MODEL, Role.WHOLE):
                held = [(f.where.name, f.held) for f in contents.tensors
                        if f.where.component == "model"]  # fmt: skip
                weights.setdefault(file.rank, held)
            self.objects |= contents.objects
            self.names += contents.names
            self.counters += (Scalar(file.path, n.name, n.value, n.role) for n in contents.numbers)
            step, roles = contents.evidence.step, {n.role for n in contents.numbers}
            if step is not None and StepRole.ITERATION not in roles:
                spelled = contents.evidence.spelled["step"]
                self.counters.append(Scalar(file.path, spelled, step, StepRole.ITERATION))
            read.append((contents, stream.storages))
        return read

    def parsed(
        self, files: Sequence[RankFile]
    ) -> Iterator[tuple[RankFile, TorchStream | CorruptError]]:
        """Yield what each file holds, or the damage that keeps it from being parsed."""
        return read_streams(self.source, files)

    def _merge(
        self,
        read: Sequence[tuple[Contents, Any]],
        component: str,
        recorded: RecordedConfig,
        world: int,
    ) -> None:
        groups: dict[str, tuple[TensorIdentity, list[RankEntry]]] = {}
        accused: set[str] = set()
        found = [where for contents, _ in read for where, *_ in contents.tensors]
        bare = unwrapped(where.name for where in found if where.component == "model")
        sharded = any(contents.sharded for contents, _ in read)
        flat = any(contents.flat for contents, _ in read)
        parts = _parts([contents for contents, _ in read], world)
        for contents, storages in read:
            file = contents.file
            part = parts[file.path]
            for where, stored, held, spec in contents.tensors:
                if isinstance(held, Distributed):
                    self.meshes.setdefault((held.mesh.names, held.mesh.sizes))
                odd = wrong_rank(file.path, file.rank, world, held)
                if odd is not None and file.path not in accused:
                    accused.add(file.path)
                    self.found.append(odd)
                own = where.component
                if own in ("model", "optimizer") and component != "model":
                    own = component
                name, kind = _bare(where, bare), where.kind
                if is_flat(where):
                    own, kind = FLAT, Kind.OTHER
                identity = TensorIdentity(own, kind, name, "" if stored == name else stored)
                # Kinds may differ by rank where a file is wrong; the key says what is one tensor.
                _, held_by = groups.setdefault(identity.key, (identity, []))
                if held_by and held_by[-1].file == file.path:
                    what = f"{file.path} holds {identity.key} twice"
                    self.found.append(
                        finding("duplicate-tensor", what, file=file.path, tensor=identity.key)
                    )
                    continue
                held_by.append(RankEntry(file.rank, file.path, held, storages, spec, part))
        plain = 0
        whole_here = _of_stages(groups) if _staged(read) else frozenset[str]()
        rules = self._rules
        of_meta = bool(read) and all(one.file.of_meta for one, _ in read)
        if rules is None and of_meta:
            rules = meta_rules(groups)
        splits = Splits(recorded, rules, component, groups, self.found.append)
        for identity, held_by in groups.values():
            if is_coded(held_by):
                self._coded(identity, held_by)
                continue
            whole = not any(isinstance(e.held, (Distributed, Listed)) for e in held_by)
            # Where others are sharded, what is whole is the same on all ranks, if it can be. Beside
            # flattened parameters lie their slices.
            presumed = not flat and (sharded or identity.key in whole_here)
            presumed = presumed and len({e.held.shape for e in held_by}) == 1
            if sharded and whole and presumed and identity.kind is Kind.PARAM:
                # Parameters are sharded here, so what stays whole is a buffer.
                identity = replace(identity, kind=Kind.BUFFER)
            split, placed = splits.of(identity, held_by)
            made = assemble(
                identity,
                placed,
                split=split,
                replicated=world == 1 or presumed,
                report=self.found.append,
            )
            plain += made[0].component.startswith("extra:rank") and len(made) > 1
            for tensor in made:
                self.tensors[tensor.key] = tensor
            if split is not None and len(made) == 1:
                self.splits[made[0].key] = split
        if of_meta and component == "model":
            self._check_release(read[0][0].file.path.rpartition("/")[0])
        if plain:
            what = (
                f"nothing records how {plain} tensors are split over the ranks: they are kept one a"
                " rank, as extra:rank<R>, and not merged"
            )
            if flat:
                what += ": slices of flattened parameters (FSDP's LOCAL_STATE_DICT)"
            self.notes.append(finding("note", what, file=recorded.path or None))

    def _coded(self, identity: TensorIdentity, held_by: Sequence[RankEntry]) -> None:
        """Put a tensor subclass together; the record of one shard is an object."""
        tensor, parts = assemble_coded(
            identity, held_by, report=self.found.append, read=self.source.read_many
        )
        self.tensors |= {info.key: info for info in parts.values()}
        stored = identity.stored_name or identity.name
        self.coded_places |= {(entry.file, stored) for entry in held_by}
        if tensor is None:
            return
        suffix, first = next(iter(parts.items()))
        own = first.name.removesuffix(suffix)
        name = f"optimizer.state.{own}" if first.component == "optimizer" else own
        if first.component not in ("model", "optimizer"):
            name = f"{first.component}.{own}"
        self.coded[name] = CodedParts(tensor, {s: info.key for s, info in parts.items()})
        file = first.pieces[0].extent.file
        pickle = next((e for n, e, _ in self.streams[file].records if n == "data.pkl"), None)
        where = pickle or Extent(file, 0, self.source.size(file))
        self.objects[name] = ObjectInfo(name, where, None, (*stored.split("."), "_local_tensor"))

    def _check_release(self, folder: str) -> None:
        file = f"{folder}/{PARAMETERS}".lstrip("/")
        said: dict[str, Any] = {}
        try:
            said = parsed_json(self.source, file)
        except CorruptError as error:
            self.found.append(from_error(error))
        self.found += check_release(self.tensors, said, file)

    def _beside(self, folders: Sequence[str]) -> None:
        """Add what verl keeps beside the ranks: the dataloader's state, the tokenizer."""
        of_meta = folders == [""] and all(
            (file := rank_file(name)) is not None and file.of_meta for name in self.streams
        )
        for name in self.source.entries:
            if of_meta and is_of_release(name):
                self.members.add(self.source.shown(name))
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


def _by_component(files: Sequence[RankFile], component: str) -> dict[str, str]:
    """Return path -> component: of several series of whole states, the model's is the first.

    `model_rank_0.pt` may have an `ema_rank_0.pt` beside it, whose tensors have the same names.
    """
    series = dict.fromkeys(f.series for f in files if f.role is Role.WHOLE)
    words = {f.series: f.word for f in files}
    main = min(series, key=lambda s: (words[s] not in _MAIN, s), default="")
    found = {}
    for file in files:
        own = component
        if file.role is Role.WHOLE and file.series != main:
            own = "ema" if file.word.startswith("ema") else f"extra:{file.word or 'shard'}"
        found[file.path] = own
    return found


_MAIN = frozenset({"", "model", "checkpoint", "ckpt", "model_state", "model_states", "weights"})


def _bare(where: StoredName, bare: Mapping[str, str]) -> str:
    """Return a tensor's name without what wrappers added to its parameter's name."""
    if where.component != "optimizer" or where.kind is not Kind.OTHER:
        return bare.get(where.name, where.name)
    parameter, dot, leaf = where.name.rpartition(".")
    return bare.get(parameter, parameter) + dot + leaf


def _staged(read: Sequence[tuple[Contents, Any]]) -> bool:
    return any(contents.file.staged for contents, _ in read)


def _of_stages(groups: Mapping[str, tuple[TensorIdentity, Sequence[RankEntry]]]) -> frozenset[str]:
    """Return the keys of tensors that pipeline stages hold whole.

    A stage holds whole layers. Where two stages have a layer of one number, each counts its own
    from 0, and no number says which layer of the model it is. What has no number is one tensor,
    tied: the embedding in the first stage and the last.
    """
    numbered = {key for key, (one, _) in groups.items() if _NUMBER.search(one.name)}
    twice = any(len(groups[key][1]) > 1 for key in numbered)
    return frozenset(key for key in groups if not twice or key not in numbered)


_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def _parts(read: Sequence[Contents], world: int) -> dict[str, int]:
    """Return path -> place of a file among the shards of a plain tensor.

    That is its rank, unless all files record a tensor-parallel rank of fewer than there are: then
    ranks of the same place hold replicas.
    """
    places = {}
    for contents in read:
        told = contents.evidence
        size, mine = told.groups.get("tp"), told.coordinates.get("tp")
        if size is None or mine is None or not mine < size < world:
            return {contents.file.path: contents.file.rank for contents in read}
        places[contents.file.path] = mine
    return places
