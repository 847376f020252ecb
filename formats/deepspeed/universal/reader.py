"""Open a universal checkpoint: each folder holds the whole state of one parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import CorruptError, IncompleteError, NewerWriterError
from ftckpt.findings import finding
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint, StepCopy
from ftckpt.formats.deepspeed.names import (
    STATE,
    TMP,
    ZERO,
    DeepSpeedFile,
    FileRole,
    deepspeed_files,
)
from ftckpt.formats.deepspeed.parse_files import DeepSpeedParser
from ftckpt.formats.deepspeed.states import BASES
from ftckpt.formats.deepspeed.tensors import KINDS, FlatTensor
from ftckpt.formats.deepspeed.weights import Weights
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.ranks.tensors import PieceBoxes, RankEntry
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

_MASTER = "fp32"
# Every folder has a counter; this many show from which save the conversion was made.
STEPS = 256


class ParameterFile(NamedTuple):
    """One state of one parameter: `zero/<name>/<leaf>.pt`.

    Attributes:
        path: of the file.
        name: of the parameter.
        leaf: which state.
        copy: whether it is what the converter makes of a weight that it does not know by this name.
    """

    path: str
    name: str
    leaf: str
    copy: bool = False


def parameter_files(names: Iterable[str]) -> list[ParameterFile]:
    """Return the files of parameters among the names of a checkpoint, sorted."""
    found = []
    for path in sorted(names):
        folder, _, leaf = path.rpartition("/")
        top, _, name = folder.partition("/")
        if top == ZERO and name and leaf.endswith(".pt"):
            found.append(ParameterFile(path, name, leaf.removesuffix(".pt")))
    return found


class Parameters:
    """Collects what the folders hold.

    Attributes:
        tensors: masters, moments and counters; what the converter made of buffers, of frozen and
            of shared parameters is `extra:universal`: the compute copy, widened to fp32.
    """

    def __init__(self, opening: DeepSpeedParser, weights: Weights) -> None:
        """Read all folders.

        Raises:
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be mapped.
        """
        self._opening, self._weights = opening, weights
        self._shapes: dict[str, Shape] = {}
        for state in opening.models.values():
            for group in state.groups:
                for name in group:
                    placed = weights.placed.get(name)
                    self._shapes[name] = group[name] if placed is None else placed.shape
        self._held: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
        self._leaves: dict[str, set[str]] = defaultdict(set)
        self._counters: list[tuple[Extent, TensorInfo]] = []
        models = opening.models.values()
        self._called = {name: folder for state in models for name, folder in state.called.items()}
        own = {folder: name for name, folder in self._called.items()}
        files = [
            file._replace(name=own.get(file.name, file.name), copy=file.name in self._called)
            for file in parameter_files(opening.source.entries)
        ]
        for file in files:
            if not file.copy:
                self._leaves[file.name].add(file.leaf)
        opening.read(files, self._add)
        state_file = DeepSpeedFile(f"{ZERO}/{STATE}", FileRole.OPTIMIZER)
        if state_file.path in opening.source.entries:
            opening.read([state_file], self._add_state)
        else:
            what = f"{state_file.path} is missing: it holds the learning rates and the loss scale"
            opening.found.append(finding("missing-file", what, file=state_file.path))
        self._check()
        self._check_copies()
        order = {name: n for n, name in enumerate(self._shapes)}
        names = sorted(self._held, key=lambda name: (order.get(name, len(order)), name))
        self.tensors = [info for name in names for info in self._held[name].values()]

    def _add(self, file: ParameterFile, stream: TorchStream) -> None:
        """Add one file: a tensor, a dict around it, or a plain number."""
        value = stream.tree.get("param") if isinstance(stream.tree, dict) else stream.tree
        if not isinstance(value, TensorRef):
            if file.leaf == "step" and type(value) in (int, float):
                self._opening.keep_number(file.path, f"optimizer.{file.name}.step", stream)
                return
            raise NewerWriterError.of(file.path, expected="a tensor", found=value, file=file.path)
        wanted = self._shapes.get(file.name)
        bare = not isinstance(stream.tree, dict)
        if bare and wanted is not None and value.shape != () and value.dense:
            if value.numel != prod(wanted):
                raise CorruptError(
                    f"{file.path} holds {value.numel} elements where {file.name} has"
                    f" {prod(wanted)}",
                    kind="size-mismatch",
                    file=file.path,
                )
            value = value._replace(shape=wanted, strides=dense_strides(wanted))
        elif wanted is not None and value.shape != () and not self._fits(file, stream.tree, value):
            raise CorruptError(
                f"{file.path} holds a tensor of shape {list(value.shape)} where {file.name} is of"
                f" {list(wanted)}",
                kind="shape-mismatch",
                file=file.path,
            )
        self._held[file.name][file.path if file.copy else file.leaf] = self._info(
            file, value, stream
        )

    def _fits(self, file: ParameterFile, tree: Mapping[str, Any], value: TensorRef) -> bool:
        """Say whether a tensor has its parameter's shape; a vocabulary may have lost its padding.

        Experts of all ranks are put together in one tensor, of which the model's files have parts.
        """
        wanted = self._shapes[file.name]
        if value.shape == wanted or tree.get("is_expert_param"):
            return True
        vocabulary = tree.get("vocab_tensor") and value.shape[1:] == wanted[1:]
        return bool(vocabulary) and value.shape[:1] <= wanted[:1]

    def _info(self, file: ParameterFile, value: TensorRef, stream: TorchStream) -> TensorInfo:
        component, kind, name = "optimizer", KINDS.get(file.leaf, Kind.OTHER), file.name
        if file.copy or file.name not in self._shapes:
            component, kind = "extra:universal", Kind.OTHER
        elif file.leaf == _MASTER:
            kind = Kind.MASTER
        if kind is Kind.OTHER:
            name = f"{file.name}.{file.leaf}"
        boxes = PieceBoxes()
        entry = RankEntry(None, file.path, value, stream.storages)
        boxes.add(entry, value, [Patch(Box.whole(value.shape), (0,) * len(value.shape))])
        pieces = tuple(boxes.pieces)
        info = TensorInfo(component, name, kind, value.shape, value.dtype, pieces)
        if file.leaf == "step" and value.shape == ():
            self._counters.append((pieces[0].extent, info))
        return info

    def _add_state(self, file: DeepSpeedFile, stream: TorchStream) -> None:
        """Add the optimizer's other state, and the steps where no folder has them."""
        if not isinstance(stream.tree, dict):
            raise NewerWriterError.of(
                file.path, expected="a dict", found=stream.tree, file=file.path
            )
        self._opening.keep_objects(file, stream)
        inner = stream.tree.get(BASES[1])
        states = inner.get("state") if isinstance(inner, dict) else None
        if not isinstance(states, dict):
            return
        for number, group in enumerate(self._opening.head.groups):
            state = states.get(number)
            step = state.get("step") if isinstance(state, dict) else None
            if not isinstance(step, TensorRef) or step.shape != ():
                continue
            extent = FlatTensor(file.path, None, step, stream.storages).extent(0, 1)
            pieces = (Piece(Box((), ()), extent),)
            for name in group:
                info = TensorInfo("optimizer", f"{name}.step", Kind.OTHER, (), step.dtype, pieces)
                self._held[name].setdefault("step", info)
            self._counters.append((extent, self._held[next(iter(group))]["step"]))

    def _check(self) -> None:
        """Report folders that lack what the others have.

        A parameter that was never stepped has its master alone.
        """
        every = {leaf for name in self._shapes for leaf in self._leaves.get(name, ())} | {_MASTER}
        for name in self._shapes:
            has = self._leaves.get(name, set())
            if has == {_MASTER}:
                continue
            for leaf in sorted(every - has):
                path = f"{ZERO}/{self._called.get(name, name)}/{leaf}.pt"
                what = f"{path} is missing: other parameters have {leaf}"
                self._opening.found.append(finding("missing-file", what, file=path))

    def _check_copies(self) -> None:
        """Report what the converter has copied for some entries of the module and not for others.

        From a source of stage 1 or 2 it makes `fp32.pt` for every entry of `module` that it has no
        master of under the module's own name; converters that do not (stage 3, older ones, other
        programs) make none.
        """
        own = {name for name in self._shapes if name not in self._called}
        rest = dict.fromkeys(n for s in self._opening.models.values() for n in s.weights)
        rest = {name: f"{ZERO}/{name}/{_MASTER}.pt" for name in rest if name not in own}
        entries = self._opening.source.entries
        made = [name for name, path in rest.items() if path in entries]
        if not made:
            return
        for name, path in rest.items():
            if path not in entries:
                what = (
                    f"{path} is missing: the module has {name}, and {rest[made[0]]} shows that the"
                    " converter copied its entries"
                )
                self._opening.found.append(finding("missing-file", what, file=path))

    def steps(self) -> list[StepCopy]:
        """Return copies of step counters, spread over the parameters."""
        every = max(1, -(-len(self._counters) // STEPS))
        return [
            StepCopy(0, number, 0, extent, info.dtype)
            for number, (extent, info) in enumerate(self._counters[::every])
        ]


@dataclass(kw_only=True, repr=False)
class UniversalCheckpoint(DeepSpeedCheckpoint):
    """An opened universal checkpoint; `stage`, `grid` and `groups` are the source's."""

    format: ClassVar[str] = "deepspeed-universal"

    @property
    def loads_at_any_world(self) -> bool:
        """That is what it is for."""
        return True


def open_universal(source: Source, rules: Rules | None) -> UniversalCheckpoint:
    """Parse the pickles of all files (see `DeepSpeedUniversal.open`)."""
    files = deepspeed_files(source.entries)
    if not files and any(name.startswith(f"{TMP}/") for name in source.entries):
        raise IncompleteError(
            f"{TMP}/ is there and the model's files are not: the conversion did not finish",
            hint="convert the source again",
            kind="uncommitted",
            file=TMP,
        )
    with no_gc():  # many small records live until the end: collecting them costs triple
        opening = DeepSpeedParser(source, rules, (FileRole.MODEL,))
        weights = opening.weights()
        parameters = Parameters(opening, weights)
        return opening.checkpoint(
            UniversalCheckpoint,
            weights,
            parameters.tensors,
            steps=parameters.steps(),
            others=[f"{ZERO}/{STATE}", *(f.path for f in parameter_files(source.entries))],
        )
