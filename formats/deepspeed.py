"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, tensor parallelism.

The unit is one tag (`global_step1000`). Weights in the compute type are the model's; the flat fp32
partitions are its masters, the moments lie beside them. Stage 3 stores no weights of their own: the
masters are what there is. Nothing marks the end of a save, so a missing file is a defect of the set
and no proof of a crash.

Names are those of the module's `state_dict`, to which DeepSpeed adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ftckpt.checkpoint import CommitState, Kind, TensorInfo, tensor_key
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.findings import Finding, counted, finding, from_error
from ftckpt.registry import Listing, Recognition
from ftckpt.rules import Rules
from ftckpt.source import Source

from .deepspeed_checkpoint import DeepSpeedCheckpoint
from .deepspeed_contents import Rest, read_rest
from .deepspeed_files import (
    ZERO,
    DeepSpeedFile,
    Role,
    check_grid,
    deepspeed_files,
    refuse_unread,
)
from .deepspeed_geometry import grid_of
from .deepspeed_plain import PlainOptimizer
from .deepspeed_slices import cuts_of
from .deepspeed_states import ModelState, read_model, read_optimizer, read_weights
from .deepspeed_tensors import Flat, Partitions, rank_tensor
from .deepspeed_weights import Weights
from .rank_reading import read_streams
from .tied import aliases_of
from .torch_stream import TorchStream
from .unpickle import no_gc

# Opaque names that are told one by one.
SHOWN = 20
# What one parameter can be: its weight, its master, its moments.
_TRAINED = (("model", Kind.PARAM), *(("optimizer", k) for k in
            (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)))  # fmt: skip


@dataclass(frozen=True)
class DeepSpeed:
    """The format `deepspeed` (see the module's docstring).

    Attributes:
        rules: how parameters are cut over tensor-parallel ranks; asked before what the checkpoint
            records and before the names of Megatron-DeepSpeed.
    """

    rules: Rules | None = None
    name = "deepspeed"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by the names of its files; a universal checkpoint has some of them too."""
        if listing.single or ZERO in listing.directories:
            return None
        files = deepspeed_files(listing.files)
        if not files:
            return None
        return Recognition(self.name, f"has {files[0].path}", CommitState.NO_MARKER)

    def open(self, source: Source) -> DeepSpeedCheckpoint:
        """Parse the pickles of all files and put their tensors together.

        Raises:
            NotFoundError: none of DeepSpeed's files is there.
            CorruptError: no file says which parameters there are; other damage is a finding.
            UnsafeError: a file is hostile.
            UnsupportedError: experts, offloaded tensors, or a cut that no rule explains.
        """
        refuse_unread(source.entries)
        with no_gc():  # many small records live until the end: collecting them costs triple
            return _Opening(source, self.rules).checkpoint()


class _Opening:
    """Collects what the files hold."""

    def __init__(self, source: Source, rules: Rules | None) -> None:
        self.source, self.rules = source, rules
        self.files = deepspeed_files(source.entries)
        if not self.files:
            raise NotFoundError(f"{source.url} holds none of DeepSpeed's files")
        self.head = self._head()
        self.grid = grid_of(self.files, self.head)
        self.stage = self._stage()
        self.found: list[Finding] = []
        self.streams: dict[str, TorchStream] = {}
        self.opaque: dict[str, str] = {}
        self.rest: list[Rest] = []
        self.models: dict[int, ModelState] = {}
        self.gaps: dict[int, tuple[tuple[int, ...], ...]] = {}

    def _head(self) -> ModelState:
        """Read the first model's file that can be read: it says how large the job was."""
        broken: CorruptError | None = None
        files = [f for f in self.files if f.role is Role.MODEL]
        for file, stream in read_streams(self.source, files):
            try:
                if isinstance(stream, CorruptError):
                    raise stream
                return read_model(file, stream.tree, stream.storages)
            except CorruptError as error:
                broken = broken or error
        raise broken or CorruptError(
            f"the model's files (mp_rank_*_model_states.pt) are not there: none of the"
            f" {counted(len(self.files), 'file')} says which parameters there are",
            kind="missing-rank",
            file="mp_rank_00_model_states.pt",
        )

    def _stage(self) -> int:
        """Return the stage that names and shapes show; an optimizer's file tells 1 from 2."""
        if any(f.role is Role.MODEL and f.dp is not None for f in self.files):
            return 3
        zero = any(f.role is Role.OPTIMIZER for f in self.files)
        return 1 if zero or self.head.groups else 0

    def checkpoint(self) -> DeepSpeedCheckpoint:
        weights = self._weights()
        partitions = self._partitions(weights)
        plain = PlainOptimizer(weights.placed, self.grid, self.found.append)
        for state in self.models.values():
            plain.add(state)
        made = [*weights.tensors(), *partitions.tensors(), *plain.tensors()]
        made += self._extra([*partitions.extra, *plain.extra])
        tensors = {tensor.key: tensor for tensor in made}
        aliases = aliases_of(t for t in made if t.component == "model")
        aliases |= _share(self.models.values(), tensors)
        averaged = [name for name, placed in weights.placed.items() if placed.cut.averaged]
        keys = (tensor_key(c, k, n) for n in averaged for c, k in _TRAINED)
        return DeepSpeedCheckpoint(
            source=self.source,
            tensors=tensors,
            objects={name: info for rest in self.rest for name, info in rest.objects.items()},
            aliases=aliases,
            topology=self.grid.topology(),
            dialect=f"ZeRO stage {self.stage}" if self.stage else "ZeRO off",
            notes=[*self._opaque_names(), *(f for f in self.found if f.kind == "note")],
            files=sorted(f.path for f in self.files),
            names=[name for rest in self.rest for name in rest.names],
            found=[*self._check_names(), *(f for f in self.found if f.kind != "note")],
            counters=[scalar for rest in self.rest for scalar in rest.counters],
            streams=self.streams,
            ranks={f.path: self._rank(f) for f in self.files if f.role is not Role.LAYER},
            stage=self.stage,
            grid=self.grid,
            groups={mp: state.groups for mp, state in sorted(self.models.items())},
            gaps=self.gaps,
            averaged=frozenset(key for key in keys if key in tensors),
            info=self.head.info,
            steps=[*partitions.steps(), *plain.steps],
        )

    def _rank(self, file: DeepSpeedFile) -> int:
        return self.grid.rank(file.mp, file.dp)

    def _inside(self, file: DeepSpeedFile) -> bool:
        slices = self.grid.tp if file.role is Role.LAYER else self.grid.mp
        return file.mp < slices and (file.dp or 0) < self.grid.dp

    def _read(self, role: Role, use: Callable[[DeepSpeedFile, TorchStream], None]) -> None:
        """Parse the files of one role that lie inside the grid; damage becomes a finding."""
        files = [f for f in self.files if f.role is role and self._inside(f)]
        for file, stream in read_streams(self.source, files):
            try:
                if isinstance(stream, CorruptError):
                    raise stream
                for name in stream.opaque:
                    self.opaque.setdefault(name, file.path)
                # The tree is sorted into tensors and objects now and would double the memory.
                self.streams[file.path] = stream._replace(tree=None)
                use(file, stream)
            except CorruptError as error:
                error.file = error.file or file.path
                rank = None if role is Role.LAYER else self._rank(file)
                self.found.append(from_error(error, rank=rank))

    def _rest(self, file: DeepSpeedFile, stream: TorchStream) -> None:
        first = all(rest.file.role is not file.role for rest in self.rest)
        self.rest.append(read_rest(file, stream, self._rank(file), first=first))

    def _weights(self) -> Weights:
        weights = Weights(self.grid, self.found.append)

        def model(file: DeepSpeedFile, stream: TorchStream) -> None:
            state = read_model(file, stream.tree, stream.storages)
            known = self.models.setdefault(file.mp, state)
            if not state.lists_as(known):
                raise CorruptError(
                    f"{file.path} lists other parameters than {known.file.path}",
                    kind="bad-metadata",
                    file=file.path,
                )
            weights.add_model(state)
            self._rest(file, stream)

        def layer(file: DeepSpeedFile, stream: TorchStream) -> None:
            weights.add_layer(file, read_weights(file.path, stream.tree), stream.storages)

        self._read(Role.MODEL, model)
        self._read(Role.LAYER, layer)
        weights.place(cuts_of(self.head, self.rules))
        return weights

    def _partitions(self, weights: Weights) -> Partitions:
        partitions = Partitions(weights.placed, self.grid, self.found.append)

        def optimizer(file: DeepSpeedFile, stream: TorchStream) -> None:
            state = read_optimizer(file, stream.tree, stream.storages)
            self._rest(file, stream)
            odd = [n for n in state.partitions if n != self.grid.dp]
            if odd:
                raise CorruptError(
                    f"{file.path} is one of {odd[0]} partitions, {self.head.file.path} says"
                    f" {self.grid.dp}",
                    kind="world-size",
                    file=file.path,
                )
            self.stage = state.stage
            self.gaps.setdefault(file.mp, state.gaps)
            model = self.models.get(file.mp)
            if model is not None:  # else its file is missing or damaged, which is reported
                partitions.add(state, model)

        self._read(Role.OPTIMIZER, optimizer)
        return partitions

    def _extra(self, flats: Iterable[tuple[str, Flat]]) -> Iterator[TensorInfo]:
        """Yield tensors that are no part of a parameter, one a rank."""
        for name, flat in flats:
            yield rank_tensor(name, flat)
        for rest in self.rest:
            storages = self.streams[rest.file.path].storages
            for name, ref in rest.tensors.items():
                yield rank_tensor(name, Flat(rest.file, rest.rank, ref, storages))

    def _opaque_names(self) -> Iterator[Finding]:
        for name, path in list(self.opaque.items())[:SHOWN]:
            what = f"{path} names {name}, a class outside the allow-list; kept inert"
            yield finding("opaque-object", what, file=path)

    def _check_names(self) -> Iterator[Finding]:
        grid = self.grid
        for file in self.files:
            if not self._inside(file):
                what = (
                    f"{file.path} lies outside the job of {grid.mp} model-parallel ranks and"
                    f" {grid.dp} partitions: another job's save was written over"
                )
                yield finding("world-size", what, file=file.path)
        yield from check_grid(self.files, mp=grid.mp, dp=grid.dp, tp=grid.tp, stage=self.stage)


def _share(models: Iterable[ModelState], tensors: dict[str, TensorInfo]) -> dict[str, str]:
    """Add the weights and masters that share another's, under their own names; return the ties."""
    aliases = {}
    for state in models:
        for absent, stored in state.shared.items():
            for component, kind in _TRAINED[:2]:
                owner = tensors.get(tensor_key(component, kind, stored))
                key = tensor_key(component, kind, absent)
                if owner is not None:
                    tensors.setdefault(key, owner._replace(name=absent))
                    aliases[key] = owner.key
    return aliases
