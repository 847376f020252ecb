"""Compute which DeepSpeed ranks hold each parameter, and which part of it.

The ranks of a job form a grid: pipeline stages, tensor slices, data-parallel partitions. A
parameter belongs to one stage (to several where it is tied), to one rank of each tensor slice
there, and is whole or cut over the slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Topology
from ftckpt.checkpoint.sharding import Slab
from ftckpt.errors import CorruptError, FtckptError, UnsupportedError
from ftckpt.findings import from_error
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.ranks.tensors import Report

from .names import DeepSpeedFile, FileRole
from .slices import CutOf, SliceCut, place
from .states import ModelState

# Stages, or slices, of the largest job that is believed: what is kept of a parameter grows with it.
MOST = 1024


class DeepSpeedGrid(NamedTuple):
    """The sizes of the job's parallel groups; `evidence` says in words how they are known."""

    pp: int
    tp: int
    dp: int
    evidence: str = ""

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks."""
        return self.pp * self.tp

    def rank(self, mp: int, dp: int | None) -> int:
        """Return the global rank, in DeepSpeed's order of axes: pipeline, data, tensor.

        Source: `runtime/pipe/topology.py` (`PipeModelDataParallelTopology`).
        """
        stage, tp = divmod(mp, self.tp)
        return (stage * self.dp + (dp or 0)) * self.tp + tp

    def topology(self) -> Topology:
        """Return it as every format says it."""
        return Topology(
            world_size=self.mp * self.dp,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            evidence=self.evidence,
        )


def grid_of(files: Sequence[DeepSpeedFile], state: ModelState) -> DeepSpeedGrid:
    """Return the sizes of the job's groups, as one model's file records them, else as names show.

    Where names show more ranks than `mp_world_size`, they decide: with some modes of sequence
    parallelism DeepSpeed records 1 whatever the number.

    Args:
        files: of the checkpoint.
        state: what any of the model's files says.

    Raises:
        CorruptError: the job would be absurdly large (`world-size`).
    """
    dp = state.dp or 1 + max((f.dp or 0 for f in files), default=0)
    if state.parallel is not None:
        grid = DeepSpeedGrid(*state.parallel, dp, state.file.path)
    else:
        seen = 1 + max((f.mp for f in files if f.role is not FileRole.LAYER), default=0)
        mp = max(seen, state.mp or 0)
        slices = [f.mp for f in files if f.role is FileRole.LAYER]
        tp = 1 + max(slices) if slices else mp
        said = "the files' names" if mp == seen else state.file.path
        grid = DeepSpeedGrid(-(-mp // tp), tp, dp, said)
    if grid.pp > MOST or grid.tp > MOST:
        raise CorruptError(
            f"a job of {grid.pp} pipeline stages and {grid.tp} tensor slices is none that trains",
            kind="world-size",
            file=state.file.path,
        )
    return grid


class ParameterPart(NamedTuple):
    """What one model-parallel rank holds of a parameter.

    Attributes:
        mp: the rank.
        shape: of its own tensor.
        slabs: boxes of the parameter and where each lies in that tensor, in its order.
        replicas: for each slab 0 for the main copy; ranks of a replicated parameter and stages of
            a tied one hold further ones.
    """

    mp: int
    shape: Shape
    slabs: tuple[Slab, ...]
    replicas: tuple[int, ...]


class PlacedParameter(NamedTuple):
    """A parameter, its global shape, its cut and the parts by model-parallel rank."""

    name: str
    shape: Shape
    cut: SliceCut
    parts: Mapping[int, ParameterPart]


def place_all(
    held: Mapping[int, Mapping[str, Shape]], grid: DeepSpeedGrid, cut_of: CutOf, report: Report
) -> dict[str, PlacedParameter]:
    """Return where each parameter lies.

    A parameter whose parts contradict each other is reported and left out. Where the file of a
    slice is missing, its part is taken to be as large as the first, so that it shows as a hole.

    Args:
        held: name -> shape of what each model-parallel rank holds, in order.
        grid: sizes of the groups.
        cut_of: see `deepspeed_slices.cuts_of`.
        report: takes findings.

    Raises:
        UnsupportedError: no rule says how a parameter is cut.
    """
    stages: dict[str, list[int]] = {}
    for mp in sorted(held):
        for name in held[mp]:
            mine = stages.setdefault(name, [])
            if mp // grid.tp not in mine:
                mine.append(mp // grid.tp)
    placed = {}
    for name, its in stages.items():
        try:
            placed[name] = _placed(name, its, held, grid, cut_of)
        except UnsupportedError:
            raise
        except FtckptError as error:
            report(from_error(error))
    return placed


def _placed(
    name: str,
    stages: Sequence[int],
    held: Mapping[int, Mapping[str, Shape]],
    grid: DeepSpeedGrid,
    cut_of: CutOf,
) -> PlacedParameter:
    parts: dict[int, ParameterPart] = {}
    whole: Shape = ()
    cut = SliceCut()
    for number, stage in enumerate(stages):
        ranks = range(stage * grid.tp, (stage + 1) * grid.tp)
        known = [held.get(mp, {}).get(name) for mp in ranks]
        first = next(shape for shape in known if shape is not None)
        shapes = [first if shape is None else shape for shape in known]
        cut = cut_of(name, shapes) if grid.tp > 1 else SliceCut()
        found, slabs = place(name, cut, shapes)
        if number and found != whole:
            continue  # a tied copy of another shape is another tensor's; its bytes show as unused
        whole = found
        for tp, mp in enumerate(ranks):
            replica = number if cut.axis is not None else number * grid.tp + tp
            replicas = (replica,) * len(slabs[tp])
            if cut.mapped is not None:
                replicas = tuple(number * grid.tp + n for n in cut.mapped.parts[tp].replicas)
            parts[mp] = ParameterPart(mp, shapes[tp], slabs[tp], replicas)
    return PlacedParameter(name, whole, cut, parts)


class SliceRange(NamedTuple):
    """A run of a rank's own tensor as the data model has it.

    Attributes:
        box: of the global tensor.
        flat: elements inside the box in C order; None for all of it.
        at: first element, counted from the start of the run.
        numel: number of elements.
        replica: as `ParameterPart.replicas` has it.
    """

    box: Box
    flat: tuple[int, int] | None
    at: int
    numel: int
    replica: int


def ranges(part: ParameterPart, start: int, stop: int) -> Iterator[SliceRange]:
    """Yield where elements `start` to `stop` of a rank's own tensor lie in the global one.

    Raises:
        UnsupportedError: the rank's tensor packs sub-blocks along an inner axis, so that a run of
            it is not a run of any box.
    """
    if not part.shape or len(part.slabs) == 1:
        whole = (start, stop) == (0, prod(part.shape))
        flat = None if whole else (start, stop)
        yield SliceRange(part.slabs[0].box, flat, 0, stop - start, part.replicas[0])
        return
    begin = 0
    for slab, replica in zip(part.slabs, part.replicas, strict=True):
        axis = next(d for d, n in enumerate(slab.box.sizes) if n != part.shape[d])
        if prod(part.shape[:axis]) != 1:
            raise UnsupportedError(
                f"sub-blocks packed along axis {axis} of a partitioned tensor cannot be mapped"
            )
        volume = slab.box.volume
        low, high = max(start, begin), min(stop, begin + volume)
        if low < high:
            flat = None if high - low == volume else (low - begin, high - begin)
            yield SliceRange(slab.box, flat, low - start, high - low, replica)
        begin += volume
