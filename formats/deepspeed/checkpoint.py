"""An opened DeepSpeed checkpoint: its counters, its checks, and what a writer needs of it."""

from __future__ import annotations

from collections import Counter as Votes
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Checkpoint, Extent, Payload, Piece, Scalar, StepRole, TensorInfo
from ftckpt.checkpoint.alone import stored_alone
from ftckpt.checkpoint.dtypes import DType, decode_scalar
from ftckpt.checkpoint.steps import Allowance, is_counter
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.parse_files import read_stream
from ftckpt.progress import NULL, Counter

from .experts import ExpertLayers
from .geometry import DeepSpeedGrid, PlacedParameter


class StepCopy(NamedTuple):
    """One rank's copy of a group's step counter."""

    mp: int
    group: int
    rank: int | None
    extent: Extent
    dtype: DType


@dataclass(kw_only=True, repr=False)
class DeepSpeedCheckpoint(RanksCheckpoint):
    """An opened DeepSpeed checkpoint.

    Attributes:
        stage: of ZeRO; 0 where it is off.
        grid: sizes of the job's parallel groups.
        groups: by model-parallel rank, name -> shape of what it holds of each parameter, in flat
            order: one mapping a parameter group, or sub-group of stage 3.
        gaps: by model-parallel rank, elements after each parameter of each group; () for none.
        experts: the layers of experts.
        averaged: keys of tensors of which each tensor-parallel rank has a copy of its own, and
            DeepSpeed would take the mean: they are read only where the copies are equal.
        placed: where each parameter lies on the model-parallel ranks, by name.
        info: `universal_checkpoint_info`, where recorded.
        steps: every copy of the optimizer's step counters.
    """

    format: ClassVar[str] = "deepspeed"
    groups_number_states: ClassVar[bool] = False

    stage: int
    grid: DeepSpeedGrid
    groups: Mapping[int, tuple[Mapping[str, Shape], ...]]
    gaps: Mapping[int, tuple[tuple[int, ...], ...]]
    experts: ExpertLayers
    averaged: frozenset[str] = frozenset()
    placed: Mapping[str, PlacedParameter] = field(default_factory=dict, repr=False)
    info: Mapping[str, Any] | None = None
    steps: Sequence[StepCopy] = ()
    _equal: dict[str, bool] = field(default_factory=dict, repr=False)
    _averaged_at: dict[tuple[str, int], str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Index the pieces of averaged tensors by their place."""
        for key in self.averaged:
            for piece in self.tensors[key].pieces:
                self._averaged_at[piece.extent.file, piece.extent.offset] = key

    def tree(self, file: str) -> Any:
        """Parse one file again and return all of it as inert data.

        Raises:
            CorruptError, UnsafeError: as on opening.
        """
        return read_stream(self.source, file).tree

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece; see `Checkpoint.payload`.

        Raises:
            UnsupportedError: the ranks' copies of an averaged parameter differ. Then
                there is nothing exact to copy: DeepSpeed's mean is not any rank's.
        """
        key = self._averaged_at.get((piece.extent.file, piece.extent.offset))
        if key is not None and not self._copies_equal(key):
            raise UnsupportedError(
                f"{key} is to be averaged over tensor-parallel ranks, whose copies differ: merging"
                " it would make a value that no rank has",
                hint="convert it with DeepSpeed's ds_to_universal.py, which takes the mean",
                tensor=key,
            )
        return super().payload(piece)

    def for_rank(self, tensors: Mapping[str, TensorInfo]) -> Checkpoint | None:
        """Return what reads some tensors in another process; see `Checkpoint.for_rank`.

        Raises:
            UnsupportedError: an averaged parameter has copies that differ; see `payload`.
        """
        for info in tensors.values():
            for piece in info.pieces:
                if (piece.extent.file, piece.extent.offset) in self._averaged_at:
                    self.payload(piece)
        return stored_alone(self, tensors)

    def group_members(self) -> Sequence[Collection[str]]:
        """Return the parameters of each group of the optimizer's settings; none if not recorded."""
        found: list[set[str]] = []
        for groups in self.groups.values():
            for number, members in enumerate(groups):
                if number == len(found):
                    found.append(set())
                found[number].update(members)
        return found

    def _copies_equal(self, key: str) -> bool:
        """Read all copies of a small tensor and compare them, once."""
        if key not in self._equal:
            copies: dict[Any, set[bytes]] = defaultdict(set)
            pieces = self.tensors[key].pieces
            for piece, data in zip(
                pieces, self.source.read_many([p.extent for p in pieces]), strict=True
            ):
                copies[piece.box, piece.flat].add(data)
            self._equal[key] = all(len(found) == 1 for found in copies.values())
        return self._equal[key]

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield ranks that are missing, shapes that disagree, odd archives, mixed steps."""
        yield from super().check(counter)
        yield from self._check_steps()

    def _check_steps(self) -> Iterator[Finding]:
        """Yield ranks whose step is not that of the group's other partitions.

        All partitions of a group, on all slices and stages, are stepped together, so one counter is
        proof. Where a file has two, the core compares them with all files' and says so.
        """
        groups: dict[int, dict[tuple[int, int | None], float]] = defaultdict(dict)
        files: dict[tuple[int, int | None], str] = {}
        counters = Votes((s.mp, s.rank) for s in self.steps)
        for copy, value in self._step_values(self.steps):
            groups[copy.group][copy.mp, copy.rank] = value
            files[copy.mp, copy.rank] = copy.extent.file
        yield from self._check_clock(groups)
        for group, values in sorted(groups.items()):
            most = max(Votes(values.values()).items(), key=lambda item: (item[1], item[0]))[0]
            for place, value in values.items():
                if value != most and counters[place] == 1:
                    what = (
                        f"{files[place]} is of optimizer step {value:g}, the other partitions of"
                        f" group {group} of {most:g}: the file is of another save"
                    )
                    yield finding("mixed-steps", what, file=files[place], rank=place[1])

    def _check_clock(
        self, groups: Mapping[int, Mapping[tuple[int, int | None], float]]
    ) -> Iterator[Finding]:
        """Yield model files that count other steps than the optimizer has made.

        DeepSpeed counts what a loss scale skipped. A job that loaded no optimizer began to count
        anew there, so that it proves nothing.
        """
        made = {value for values in groups.values() for value in values.values()}
        if len(made) != 1 or not {"global_steps", "skipped_steps"} <= self.objects.keys():
            return
        steps, skipped = (self.load_object(name) for name in ("global_steps", "skipped_steps"))
        if not is_counter(steps) or not is_counter(skipped) or made == {steps - skipped}:
            return
        file = next((s.file for s in self.counters if s.name == "global_steps"), None)
        what = (
            f"{file} counts {steps:g} steps, {skipped:g} of them skipped, the optimizer has made"
            f" {made.pop():g}: files of two saves, or a job that began with a new optimizer"
        )
        yield finding("clocks-differ", what, file=file)

    def _step_values(self, copies: Sequence[StepCopy]) -> Iterator[tuple[StepCopy, float]]:
        blocks = self.source.read_many([copy.extent for copy in copies])
        for copy, block in zip(copies, blocks, strict=True):
            value = decode_scalar(copy.dtype, block)
            if value is not None and isfinite(value):
                yield copy, value

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the counters in the non-tensor state, then the optimizer's, one a group."""
        allowance = Allowance(limit)
        for scalar in self.counters:
            if allowance.take(scalar.file):
                yield scalar
        wanted = []
        for copy in self.steps:
            if allowance.take(copy.extent.file):
                wanted.append(copy)
        for copy, value in self._step_values(wanted):
            name = f"optimizer.state.{copy.group}.step"
            yield Scalar(copy.extent.file, name, value, StepRole.OPTIMIZER)
