"""Open an iteration of local checkpoints: parse every rank's file and put the tensors together.

Megatron-Core saves an `MCoreTensorAwareStateDict`: `common` state, and a tree of `ShardedTensor`s
that say their name, global shape and offsets themselves (megatron/core/dist_checkpointing/
{tensor_aware_state_dict,mapping}.py, 0.16). Of a tensor that several ranks have, one may hold the
data and the others None. Any other tensor (`BasicTensorAwareStateDict`: a state_dict of one rank)
is kept as that rank's own: nothing records how it is cut.

An opened iteration of local checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import (
    Box,
    Commit,
    CommitState,
    Extent,
    Kind,
    ObjectInfo,
    Piece,
    Scalar,
    StepRole,
    TensorInfo,
    Topology,
)
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    NewerWriterError,
    NotFoundError,
    UnsupportedError,
)
from ftckpt.findings import Finding, finding, from_error, listed
from ftckpt.formats.megatron.torch_dist.names import CHAINED, spelling
from ftckpt.formats.megatron.torch_dist.optimizer_buckets import is_bucket
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.walk import MOST_NAMES, at, leaves
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.parse_files import read_stream, read_streams
from ftckpt.formats.state.stored_names import StoredName, place
from ftckpt.formats.torch_files.parse_files import opaque_notes
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .by_iteration import LocalFile, local_file


@dataclass(kw_only=True, repr=False)
class NvrxCheckpoint(RanksCheckpoint):
    """An opened iteration: rank files whose tensors say themselves where they lie."""

    format: ClassVar[str] = "nvrx-local"
    groups_number_states: ClassVar[bool] = False

    def load_object(self, name: str) -> Any:
        """Return one object as inert data; see `Checkpoint.load_object`."""
        info = self.objects.get(name)
        if info is None:
            raise NotFoundError(f"no object is called {name!r}", tensor=name)
        file = info.extent.file
        try:
            return at(fields_of(read_stream(self.source, file).tree, file), info.field)
        except (KeyError, IndexError, TypeError):
            raise CorruptError(
                f"{file} no longer holds {name}", kind="changed-file", tensor=name
            ) from None


def fields_of(tree: Any, file: str) -> dict[Any, Any]:
    """Return the fields of the one object that a file holds.

    Raises:
        CorruptError: it is hollow: its tensors were taken out.
        NewerWriterError: it is another object.
    """
    state = tree.state if isinstance(tree, Inert) else tree
    if not isinstance(state, dict) or not state.keys() & {"sharded_state_dict", "state_dict"}:
        raise NewerWriterError.of(
            file, expected="sharded_state_dict or state_dict", found=tree, file=file
        )
    if state.get("_is_hollow"):
        raise CorruptError(
            f"{file} is hollow: its tensors were not saved", kind="empty-weights", file=file
        )
    return state


_SHARDED = "megatron.core.dist_checkpointing.mapping.ShardedTensor"
_OBJECT = "megatron.core.dist_checkpointing.mapping.ShardedObject"
_MOST_RANKS = 1_000_000
_MOST_AXES = 16
_SHOWN = 20
_GRID = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def open_local(source: Source) -> NvrxCheckpoint:
    """Parse the files of one iteration (see `NvrxLocal.open`)."""
    with no_gc():
        return _Reader(source).checkpoint()


class _Part(NamedTuple):
    """What one rank's file says of a sharded tensor.

    Attributes:
        key: its stored name.
        shape: global, with the leading axes that number layers and experts.
        offset: of this part, in the global tensor.
        sizes: of this part, with a 1 for each of the leading axes.
        prepended: number of the leading axes.
        data: its elements; None if another rank holds them.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    prepended: int
    data: TensorRef | None
    dtype: DType


class _Reader:
    """Collects what the files hold."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.files = sorted(f for name in source.entries if (f := local_file(name)) is not None)
        self.tensors: dict[str, TensorInfo] = {}
        self.shards: dict[str, list[tuple[TensorInfo, Piece]]] = defaultdict(list)
        self.objects: dict[str, ObjectInfo] = {}
        self.names: list[str] = []
        self.notes: list[Finding] = []
        self.found: list[Finding] = []
        self.counters: list[Scalar] = []
        self.streams: dict[str, TorchStream] = {}
        self.ranks: dict[str, int] = {}
        self.opaque: dict[str, str] = {}
        self.worlds: dict[int, str] = {}
        self.grids: dict[str, dict[int, str]] = {name: {} for name in _GRID}
        self.bare = 0

    def checkpoint(self) -> NvrxCheckpoint:
        """Read all files, the one that a rank saved itself before its replicas."""
        whole = [f for f in self.files if not f.dirty]
        if not whole:
            raise IncompleteError(
                f"{self.source.url} has no finished file: {listed([f.path for f in self.files])}",
                file=self.files[0].path if self.files else None,
            )
        whole.sort(key=lambda f: (f.rank, f.holder not in (None, f.rank), f.holder or 0))
        first: CorruptError | None = None
        main: set[int] = set()
        for file, stream in read_streams(self.source, whole):
            error = stream if isinstance(stream, CorruptError) else None
            if not isinstance(stream, CorruptError):
                try:
                    self._read(file, stream, replica=file.rank in main)
                    main.add(file.rank)
                except CorruptError as wrong:
                    error = wrong
            if error is not None:
                error.file = error.file or file.path
                first = first or error
                self.found.append(from_error(error, rank=file.rank))
        if first is not None and not self.streams:
            raise first
        world = self._world(main)
        self._assemble()
        if self.bare:
            told = (
                f"{self.bare} tensors are plain parts of single ranks: nothing records how they are"
                " cut, and they are kept one a rank, as extra:rank<R>"
            )
            self.notes.append(finding("note", told))
        buckets = [key for key, info in self.tensors.items() if is_bucket(info)]
        if buckets:
            told = (
                f"the optimizer's state is in {len(buckets)} buckets of its ranks, which are kept"
                " as stored and not given to parameters"
            )
            self.notes.append(finding("note", told, tensor=buckets[0]))
        self.notes += opaque_notes(self.opaque)
        return NvrxCheckpoint(
            source=self.source,
            tensors=self.tensors,
            objects=self.objects,
            topology=self._topology(world),
            commit=Commit(CommitState.NO_MARKER),
            dialect="NVIDIA resiliency extension",
            notes=self.notes,
            names=self.names,
            open_findings=self.found,
            counters=self.counters,
            streams=self.streams,
            ranks=self.ranks,
            files=[file.path for file in self.files],
        )

    def _read(self, file: LocalFile, stream: TorchStream, *, replica: bool) -> None:
        tree = fields_of(stream.tree, file.path)
        for name in stream.opaque:
            if not name.startswith(("megatron.core.dist_checkpointing.", "nvidia_resiliency_ext.")):
                self.opaque.setdefault(name, file.path)
        self.streams[file.path] = stream._replace(tree=None)
        self.ranks[file.path] = file.rank
        common = tree.get("common")
        self._common(file, common if isinstance(common, dict) else {}, first=not self.names)
        extent = next((e for name, e, _ in stream.records if name == "data.pkl"), None)
        pickle = extent or Extent(file.path, 0, 0)
        for path, value in leaves({k: v for k, v in tree.items() if k != "_is_hollow"}):
            name = ".".join(map(str, path))
            if isinstance(value, Inert) and value.qualname == _SHARDED:
                self._sharded(file, _part(value, file.path), stream)
            elif isinstance(value, (TensorRef, SubclassRef, Composite)):
                if not replica:
                    self._own(file, name, value, stream)
            elif not replica and not (isinstance(value, Inert) and value.qualname == _OBJECT
                                      and _empty(value)):  # fmt: skip
                inside = path[:2]
                label = f"rank_{file.rank}." + ".".join(map(str, inside))
                self.objects.setdefault(label, ObjectInfo(label, pickle, file.rank, inside))

    def _common(self, file: LocalFile, common: Mapping[Any, Any], *, first: bool) -> None:
        """Read the step, the grid and the world of one rank's common state."""
        if first:
            for path, _ in leaves(dict(common)):
                if len(self.names) < MOST_NAMES:
                    self.names.append(".".join(map(str, path)))
        step = common.get("iteration")
        if type(step) is int and 0 <= step < 10**15:
            self.counters.append(Scalar(file.path, "iteration", step, StepRole.ITERATION))
            if step != file.iteration:
                told = f"{file.path} holds iteration {step}"
                self.found.append(finding("mixed-steps", told, file=file.path, rank=file.rank))
        else:
            step = file.iteration
            self.counters.append(Scalar(file.path, "iteration", step, StepRole.ITERATION))
        arguments = common.get("args")
        said = arguments.state if isinstance(arguments, Inert) else arguments
        if not isinstance(said, dict):
            return
        if _natural(said.get("world_size")):
            self.worlds.setdefault(said["world_size"], file.path)
        for name, field in _GRID.items():
            if _natural(said.get(field)):
                self.grids[name].setdefault(said[field], file.path)
        own = said.get("rank")
        if type(own) is int and own != file.rank:
            told = f"{file.path} was saved by rank {own}"
            self.found.append(finding("wrong-rank", told, file=file.path, rank=file.rank))

    def _sharded(self, file: LocalFile, part: _Part, stream: TorchStream) -> None:
        prefix = CHAINED.match(part.key)
        where = place(part.key[prefix.end() :] if prefix else part.key, (), part.dtype)
        said = spelling(where.name)
        lead = part.prepended
        name, first = where.name, 0
        if said.axes == lead and lead:
            name, first = said.name(part.offset[:lead]), lead
        elif not said.axes:
            name = said.name(())
        info = TensorInfo(
            where.component, name, where.kind, part.shape[first:], part.dtype, (),
            "" if part.key == name else part.key,
        )  # fmt: skip
        if part.data is None:
            self.shards[info.key] += ()  # a tensor that no rank holds must show
            self.tensors.setdefault(info.key, info)
            return
        box = Box(part.offset[first:], part.sizes[first:])
        self.shards[info.key].append((info, _piece(part.data, stream, box, file)))
        self.tensors.setdefault(info.key, info)

    def _own(self, file: LocalFile, name: str, value: Any, stream: TorchStream) -> None:
        """Keep a tensor that is one rank's alone."""
        if not isinstance(value, TensorRef):
            raise UnsupportedError(
                f"{file.path} holds {name}, not a plain tensor", file=file.path, tensor=name
            )
        where = StoredName(f"extra:rank{file.rank}", Kind.OTHER, name)
        piece = _piece(value, stream, Box.whole(value.shape), file)
        info = TensorInfo(*where[:1], name, Kind.OTHER, value.shape, value.dtype, (piece,))
        self.tensors[info.key] = info
        self.bare += not name.startswith("common.")

    def _assemble(self) -> None:
        """Give each tensor its pieces; the first that holds a box is the main one."""
        for key, parts in self.shards.items():
            known = self.tensors[key]
            pieces = []
            seen: dict[Box, int] = {}
            for info, piece in parts:
                if (info.shape, info.dtype) != (known.shape, known.dtype):
                    told = f"{key} has another shape or type in {piece.extent.file}"
                    self.found.append(
                        finding("bad-metadata", told, file=piece.extent.file, tensor=key)
                    )
                    continue
                replica = seen.get(piece.box, 0)
                seen[piece.box] = replica + 1
                pieces.append(piece._replace(replica=replica))
            self.tensors[key] = known._replace(pieces=tuple(pieces))

    def _world(self, there: set[int]) -> int | None:
        """Report the ranks whose file is missing or unfinished; return the recorded world size."""
        if len(self.worlds) > 1:
            told = " and ".join(f"{size} ({path})" for size, path in sorted(self.worlds.items()))
            self.found.append(finding("world-size", f"files record other world sizes: {told}"))
        recorded = max(self.worlds, default=None)
        known = {file.rank: file for file in self.files if not file.dirty}
        dirty = {file.rank: file for file in self.files if file.dirty and file.rank not in known}
        highest = max((*known, *dirty), default=-1)
        if recorded is None:
            told = f"no file records how many ranks there are: at least {highest + 1}"
            self.notes.append(finding("count-unknown", told))
        elif highest >= recorded:
            path = (known.get(highest) or dirty[highest]).path
            told = f"{path} is of rank {highest}, and the world has {recorded} ranks"
            self.found.append(finding("world-size", told, file=path, rank=highest))
        for rank, file in sorted(dirty.items()):
            told = f"{file.path} of rank {rank} is still being written, or its save was killed"
            self.found.append(finding("missing-rank", told, file=file.path, rank=rank))
        size = max(recorded or 0, highest + 1)
        absent = [r for r in range(min(size, _MOST_RANKS)) if r not in known and r not in dirty]
        for rank in absent[:_SHOWN]:
            told = f"no place has the file of rank {rank}"
            if rank == absent[0] and len(absent) > 1:
                told += f", nor those of {len(absent) - 1} more"
            own = self.files[0]._replace(rank=rank, holder=rank).name
            self.found.append(finding("missing-rank", told, file=own, rank=rank))
        return recorded

    def _topology(self, world: int | None) -> Topology:
        grid = {name: next(iter(said)) if len(said) == 1 else None
                for name, said in self.grids.items()}  # fmt: skip
        evidence = "" if world is None else "recorded in the arguments"
        return Topology(world_size=world, evidence=evidence, **grid)


def _part(value: Inert, file: str) -> _Part:
    """Check what a file says of a sharded tensor.

    Raises:
        CorruptError: it contradicts itself (`bad-metadata`).
        UnsupportedError: a flat range of a tensor, which Megatron wrote before core 0.14.
    """
    state = value.state if isinstance(value.state, dict) else {}
    key, data = state.get("key"), state.get("data")
    if type(key) is str and not 0 < len(key) <= 4096:
        raise _contradicts("a sharded tensor", "has no name that can be", file)
    if type(key) is not str:
        raise NewerWriterError.of(
            f"the key of a sharded tensor of {file}", expected="a name", found=key, file=file
        )
    if state.get("flattened_range") is not None:
        raise UnsupportedError(
            f"{file} holds {key} as a flat range, which is not read",
            hint="load it with the job that wrote it",
            file=file,
            tensor=key,
        )
    local, shape, offset = (
        _sizes(state.get(name)) for name in ("local_shape", "global_shape", "global_offset")
    )
    lead, dtype = state.get("prepend_axis_num"), state.get("dtype")
    if local is None or shape is None or offset is None or type(lead) is not int:
        names = ("local_shape", "global_shape", "global_offset")
        if type(lead) is int and all(_are_numbers(state.get(name)) for name in names):
            raise _contradicts(key, "has a shape or an offset that none can have", file)
        raise NewerWriterError.of(
            f"{key} in {file}", expected="shapes and offsets", found="other values", file=file,
            tensor=key,
        )  # fmt: skip
    if not lead >= 0 or len(shape) != len(offset) or len(shape) != lead + len(local):
        raise _contradicts(key, f"has shapes {local} and {shape} and {lead} leading axes", file)
    if data is not None and not isinstance(data, TensorRef):
        raise UnsupportedError(
            f"{file} holds {key} as something else than a plain tensor", file=file, tensor=key
        )
    if not isinstance(dtype, DType):
        dtype = None if data is None else data.dtype
    if dtype is None or (data is not None and (data.dtype != dtype or data.shape != local)):
        raise _contradicts(key, "is recorded with another shape or type than its data", file)
    sizes = (*(1,) * lead, *local)
    if any(o + s > whole for o, s, whole in zip(offset, sizes, shape, strict=True)):
        raise _contradicts(key, f"has a part at {offset} of {sizes} outside of {shape}", file)
    return _Part(key, shape, offset, sizes, lead, data, dtype)


def _are_numbers(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(type(one) is int for one in value)


def _piece(data: TensorRef, stream: TorchStream, box: Box, file: LocalFile) -> Piece:
    if data.conj or data.neg:
        raise UnsupportedError(f"{file.path} holds a lazily negated tensor", file=file.path)
    try:
        span = data.span(stream.storages)
    except (KeyError, ValueError):
        raise UnsupportedError(
            f"the bytes of a tensor lie inside the pickle of {file.path}", file=file.path
        ) from None
    return Piece(box, span, None, None if data.dense else data.strides, 0, file.rank)


def _contradicts(key: str, what: str, file: str) -> FtckptError:
    return CorruptError(f"{key} {what}, in {file}", kind="bad-metadata", file=file, tensor=key)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a tuple of sizes or offsets as a file holds it; None if it is none."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_AXES:
        return None
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in value):
        return None
    return tuple(value)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MOST_RANKS


def _empty(value: Inert) -> bool:
    """Whether a sharded object holds nothing, as `_extra_state` of most modules."""
    return isinstance(value.state, dict) and value.state.get("data") is None
