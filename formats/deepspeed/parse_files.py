"""Open the files that a DeepSpeed checkpoint and a universal one have in common: the model's.

What the optimizer's files hold is added by each format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ftckpt.checkpoint import Kind, TensorInfo, tensor_key
from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import CorruptError, IncompleteError, UnsupportedError
from ftckpt.findings import Finding, counted, finding, from_error
from ftckpt.formats.deepspeed.job.objects import FileObjects, read_layer, read_number, read_objects
from ftckpt.formats.ranks.parse_files import NamedFile, read_streams
from ftckpt.formats.state.stored_names import aliases_of
from ftckpt.formats.torch_files.parse_files import opaque_notes
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source

from .autoep import check_maps, group_ep
from .checkpoint import DeepSpeedCheckpoint, StepCopy
from .experts import ExpertLayers
from .geometry import grid_of
from .names import DeepSpeedFile, FileRole, check_grid, deepspeed_files
from .slices import cuts_of
from .states import BASES, ModelState, read_model, read_weights
from .tensors import FlatTensor, rank_tensor
from .weights import Weights

# Files that are not one rank's own.
_OF_NO_RANK = (FileRole.LAYER, FileRole.EXPERT)
# What one parameter can be: its weight, its master, its moments.
_TRAINED = (
    ("model", Kind.PARAM),
    *(("optimizer", kind) for kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)),
)

F = TypeVar("F", bound=NamedFile)
C = TypeVar("C", bound=DeepSpeedCheckpoint)


class DeepSpeedParser:
    """Collects what the files hold.

    Attributes:
        source: the place.
        files: those whose names are DeepSpeed's.
        head: a model's file: what it records holds for all.
        grid: sizes of the job's parallel groups.
        stage: of ZeRO.
        models: one model's file of each model-parallel rank.
        gaps: see `DeepSpeedCheckpoint`.
        experts: the layers of experts; known when the weights were read.
        found: findings, notes among them.
        streams: of all files that could be parsed.
    """

    def __init__(self, source: Source, rules: Rules | None, roles: Collection[FileRole]) -> None:
        """Read the first model's file.

        Args:
            source: the place.
            rules: see `DeepSpeed`.
            roles: of the files of which it must have one for every rank, or layer.

        Raises:
            CorruptError: no file says which parameters there are.
            IncompleteError: there are layers alone, which a pipeline saves first.
        """
        self.source = source
        self._rules, self._roles = rules, frozenset(roles)
        self.files = deepspeed_files(source.entries)
        self.head = self._head()
        self.grid = grid_of(self.files, self.head)
        self.stage = self._stage()
        self.experts = ExpertLayers(self.grid, self.head)
        self.found: list[Finding] = []
        self.streams: dict[str, TorchStream] = {}
        self.models: dict[int, ModelState] = {}
        self.gaps: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._opaque: dict[str, str] = {}
        self._objects: list[FileObjects] = []

    def _head(self) -> ModelState:
        """Read the first model's file that can be read: it says how large the job was."""
        broken: CorruptError | None = None
        files = [f for f in self.files if f.role is FileRole.MODEL]
        for file, stream in read_streams(self.source, files):
            try:
                if isinstance(stream, CorruptError):
                    raise stream
                state = read_model(file, stream.tree, stream.storages)
                check_maps(file.path, stream.tree, state.stacked)
                return state
            except CorruptError as error:
                broken = broken or error
        what = (
            f"the model's files (mp_rank_*_model_states.pt) are not there: none of the"
            f" {counted(len(self.files), 'file')} says which parameters there are"
        )
        lost = "mp_rank_00_model_states.pt"
        if broken is None and {f.role for f in self.files} == {FileRole.LAYER}:
            raise IncompleteError(what, kind="missing-rank", file=lost)
        raise broken or CorruptError(what, kind="missing-rank", file=lost)

    def _stage(self) -> int:
        """Return the stage that names and shapes show; an optimizer's file tells 1 from 2."""
        if any(f.role is FileRole.MODEL and f.dp is not None for f in self.files):
            return 3
        zero = any(f.role is FileRole.OPTIMIZER for f in self.files)
        return 1 if zero or self.head.groups else 0

    def rank(self, file: DeepSpeedFile) -> int:
        """Return the global rank that wrote a file."""
        dp = file.dp if file.expert is None else self.experts.first(file.expert)
        return self.grid.rank(file.mp, dp)

    def _inside(self, file: DeepSpeedFile) -> bool:
        slices = self.grid.tp if file.role is FileRole.LAYER else self.grid.mp
        return file.mp < slices and (file.dp or 0) < self.grid.dp

    def of_role(self, role: FileRole) -> list[DeepSpeedFile]:
        """Return the files of one role that lie inside the grid."""
        return [f for f in self.files if f.role is role and self._inside(f)]

    def read(self, files: Sequence[F], use: Callable[[F, TorchStream], None]) -> None:
        """Parse files one after the other; damage becomes a finding.

        Raises:
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be mapped.
        """
        for file, stream in read_streams(self.source, files):
            try:
                if isinstance(stream, CorruptError):
                    raise stream
                for name in stream.opaque:
                    self._opaque.setdefault(name, file.path)
                # The tree is sorted into tensors and objects now and would double the memory.
                self.streams[file.path] = stream._replace(tree=None)
                use(file, stream)
            except CorruptError as error:
                error.file = error.file or file.path
                self.found.append(from_error(error))

    def keep_objects(self, file: DeepSpeedFile, stream: TorchStream) -> None:
        """Keep the state in a file that is neither a weight nor partitioned."""
        first = all(one.role is not file.role for one in self._objects)
        self._objects.append(read_objects(file, stream, self.rank(file), first=first))

    def keep_number(self, path: str, label: str, stream: TorchStream) -> None:
        """Keep the state in a file that is one number."""
        self._objects.append(read_number(path, label, stream))

    def weights(self) -> Weights:
        """Read the model's files and find where every parameter lies.

        Raises:
            UnsafeError, UnsupportedError: see `read` and `Weights.place`.
        """
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
            other = state.other_sizes(self.head)
            if other:
                raise CorruptError(
                    f"{file.path} is of another job than {self.head.file.path}: it records {other}",
                    kind="world-size",
                    file=file.path,
                )
            weights.add_model(state)
            self.experts.add_model(state)
            self.keep_objects(file, stream)

        def expert(file: DeepSpeedFile, stream: TorchStream) -> None:
            refs = read_weights(file.path, stream.tree)
            self.experts.add_file(file, refs)
            weights.add_expert(file, self.experts.by_rows(refs), stream.storages)

        beside: list[tuple[DeepSpeedFile, TorchStream]] = []

        def layer(file: DeepSpeedFile, stream: TorchStream) -> None:
            refs = read_weights(file.path, stream.tree)
            weights.add_layer(file, refs, stream.storages)
            others = {key: v for key, v in stream.tree.items() if key not in refs}
            if any(value is not None for value in others.values()):
                beside.append((file, stream._replace(tree=others)))

        self.read(self.of_role(FileRole.MODEL), model)
        self.read(self.of_role(FileRole.EXPERT), expert)
        self.read(self.of_role(FileRole.LAYER), layer)
        self.experts.resolve(self._shared())
        cut_of = cuts_of(self.head, self._rules)
        weights.place(cut_of, self.experts, layers=FileRole.LAYER in self._roles)
        for file, stream in beside:
            mp = weights.stages.get(file.layer or 0, 0) * self.grid.tp + file.mp
            self._objects.append(read_layer(file, stream, self.grid.rank(mp, None)))
        return weights

    def _shared(self) -> int | None:
        """Return how many ranks share a layer of experts where ZeRO is off.

        Raises:
            UnsupportedError: the layers are shared differently, and which are is not recorded.
        """
        plain = self.head.optimizer if isinstance(self.head.optimizer, dict) else {}
        holders = [*(plain.get(key) for key in BASES), plain]
        groups = [g for h in holders if isinstance(h, dict) for g in h.get("param_groups") or ()]
        sizes = {size for size in map(group_ep, groups) if size is not None}
        if len(sizes) > 1:
            raise UnsupportedError(
                "layers of experts are shared by different numbers of ranks, and without ZeRO"
                " nothing says which",
                file=self.head.file.path,
            )
        files = [f for f in self.files if f.role is FileRole.EXPERT_OPTIMIZER and not f.mp]
        return next(iter(sizes), len(files)) or None

    def checkpoint(
        self,
        kind: type[C],
        weights: Weights,
        made: Sequence[TensorInfo],
        *,
        steps: Sequence[StepCopy],
        others: Iterable[str] = (),
    ) -> C:
        """Return the checkpoint.

        Args:
            kind: of which class.
            weights: of `weights`.
            made: what the optimizer's files hold.
            steps: copies of step counters.
            others: files that belong to it beside `files`.
        """
        found = [*weights.tensors(), *made, *self._extra()]
        tensors = {tensor.key: tensor for tensor in found}
        aliases = aliases_of(t for t in found if t.component == "model")
        aliases |= _share(self.models.values(), tensors)
        averaged = [name for name, placed in weights.placed.items() if placed.cut.averaged]
        keys = (tensor_key(c, k, n) for n in averaged for c, k in _TRAINED)
        return kind(
            source=self.source,
            tensors=tensors,
            objects={name: info for one in self._objects for name, info in one.objects.items()},
            aliases=aliases,
            topology=replace(self.grid.topology(), ep=self.experts.ep),
            dialect=f"ZeRO stage {self.stage}" if self.stage else "ZeRO off",
            notes=[*self._opaque_names(), *(f for f in self.found if f.kind == "note")],
            files=sorted({f.path for f in self.files} | set(others)),
            names=[name for one in self._objects for name in one.names],
            open_findings=[*self._check_names(), *(f for f in self.found if f.kind != "note")],
            counters=[scalar for one in self._objects for scalar in one.counters],
            streams=self.streams,
            ranks={f.path: self.rank(f) for f in self.files if f.role not in _OF_NO_RANK},
            stage=self.stage,
            grid=self.grid,
            experts=self.experts,
            groups={mp: state.groups for mp, state in sorted(self.models.items())},
            gaps=self.gaps,
            averaged=frozenset(key for key in keys if key in tensors),
            placed=weights.placed,
            info=self.head.info,
            steps=steps,
        )

    def _extra(self) -> Iterator[TensorInfo]:
        """Yield tensors of the other state, one a rank."""
        for one in self._objects:
            storages = self.streams[one.path].storages
            for name, ref in one.tensors.items():
                yield rank_tensor(name, FlatTensor(one.path, one.rank, ref, storages))

    def _opaque_names(self) -> Iterator[Finding]:
        yield from opaque_notes(self._opaque)

    def _check_names(self) -> Iterator[Finding]:
        grid = self.grid
        for file in self.files:
            if not self._inside(file):
                what = (
                    f"{file.path} lies outside the job of {grid.mp} model-parallel ranks and"
                    f" {grid.dp} partitions: another job's save was written over"
                )
                yield finding("world-size", what, file=file.path)
        yield from check_grid(
            self.files, mp=grid.mp, dp=grid.dp, tp=grid.tp, stage=self.stage, roles=self._roles
        )
        if FileRole.EXPERT in self._roles:
            yield from self.experts.check(self.files)


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
