"""The result of a comparison: by tensor, component and layer, and for other state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import ExitCode, worst
from ftckpt.findings import Finding

from .arithmetic import Tally
from .evidence import Basis
from .state import ComparedPair, DiffStatus, StateDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor compares. What ends in `_a` is of the first checkpoint, in `_b` of the second.

    Attributes:
        key: its key (`ftckpt.checkpoint.tensor_key`).
        component: as its checkpoint says.
        part: the column of the summaries: `model`, `master`, `exp_avg`, …
        layer: the row of the summaries.
        status: the verdict.
        evidence: what the verdict rests on.
        shape_a, shape_b: global shapes; None on the side that lacks it.
        dtype_a, dtype_b: names of the element types.
        elements: how many were compared; of equal tensors how many there are.
        rows: of a vocabulary, how many rows were compared; the others are padding.
        changed: elements with other bits.
        beyond: of them, those beyond the tolerances; None where none were given.
        max_abs: largest absolute difference.
        max_ulp: largest distance in units in the last place; None across types.
        relative_l2: L2 norm of the difference over that of the first.
        cosine: of the angle between the two; None where one is zero.
        nan_a, nan_b, inf_a, inf_b: elements that are NaN, or infinite; the numbers above are of
            the others.
    """

    key: str
    component: str
    part: str
    layer: str
    status: DiffStatus
    evidence: Basis
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    elements: int = 0
    rows: int | None = None
    changed: int | None = None
    beyond: int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    nan_a: int | None = None
    nan_b: int | None = None
    inf_a: int | None = None
    inf_b: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Tensors taken together: a component, a layer, or all.

    Attributes:
        name: of the component or the layer.
        tensors: how many.
        counts: of them, by `DiffStatus`.
        elements: of those compared.
        changed: elements with other bits.
        max_abs: largest absolute difference, of integers too; None where elements changed and none
            of them has a value (raw bits).
        relative_l2: of all the floating-point tensors that changed, taken as one; None where
            elements changed and all of them are integers or raw bits.
    """

    name: str
    tensors: int
    counts: Mapping[str, int]
    elements: int
    changed: int
    max_abs: float | None
    relative_l2: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One component of one layer, for a picture.

    Attributes:
        layer: the row.
        part: the column.
        relative_l2: see `Summary`.
        changed: share of its elements with other bits.
    """

    layer: str
    part: str
    relative_l2: float | None
    changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """Two checkpoints compared.

    Attributes:
        total: all tensors.
        tensors: those that are not equal, by relative change, the largest first; those that are
            only recorded as equal come last.
        components: in the order of the first checkpoint.
        layers: in natural order.
        cells: layer by component, where anything was compared.
        state: fields of other state that differ, those too that follow the grid of ranks.
        state_fields: how many fields were compared.
        layout_counts: whether those that follow the grid count as differences.
        evidence: number of tensors by what the verdict about them rests on.
        true_vocab_rows: rows of a vocabulary that are no padding, where known.
        bytes_read: of both checkpoints.
        findings: what could not be read.
        seconds: wall time.
    """

    SAID: ClassVar = ("equal",)

    total: Summary
    tensors: Sequence[TensorDifference]
    components: Sequence[Summary]
    layers: Sequence[Summary]
    cells: Sequence[Cell]
    state: Sequence[StateDifference]
    state_fields: int
    layout_counts: bool
    evidence: Mapping[str, int]
    true_vocab_rows: int | None
    bytes_read: int
    findings: Sequence[Finding]
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal, or close."""
        return self.code is ExitCode.OK

    @property
    def code(self) -> ExitCode:
        """OK where all that was compared is equal or close, else the worst of what was found.

        What is recorded as equal and was not read counts as equal: the caller said so.
        """
        same = (DiffStatus.EQUAL, DiffStatus.CLOSE, DiffStatus.RECORDED)
        counted = self.layout_counts or not all(one.layout for one in self.state)
        differs = any(status not in same for status in self.total.counts)
        differs = differs or (bool(self.state) and counted)
        codes = [finding.code for finding in self.findings]
        return worst([*codes, ExitCode.DIFFERENT if differs else ExitCode.OK])


def part_of(component: str, kind: Kind) -> str:
    """Return the column of the summaries: what of a parameter a tensor is."""
    told = kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ) and component == "optimizer"
    return str(kind) if told else component


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, else without its last word.

    `model.layers.3.mlp.experts.7.w1` is of `model.layers.3`, `embed.weight` of `embed`.
    """
    match = _NUMBERED.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which `layers.10` comes after `layers.9`."""
    words = re.split(r"(\d+)", text)
    return [(0, int(w), "") if w.isdecimal() and len(w) < 20 else (1, 0, w) for w in words]


_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def difference(
    pair: ComparedPair, evidence: Basis, tally: Tally | None, *, tolerant: bool, status: DiffStatus
) -> TensorDifference:
    """Return what is known of one tensor."""
    side = pair.either
    shapes = [s.wanted.shape if s is not None else None for s in (pair.ours, pair.theirs)]
    dtypes = [s.wanted.dtype.name if s is not None else None for s in (pair.ours, pair.theirs)]
    compared = status in (DiffStatus.EQUAL, DiffStatus.CLOSE, DiffStatus.DIFFERENT)
    told: dict[str, Any] = {}
    if tally is not None and tally.changed:
        measured = tally.max_ulp is not None or len(set(dtypes)) == 2
        told = {"changed": tally.changed, "beyond": tally.beyond if tolerant else None}
        if measured:
            told |= {
                name: getattr(tally, name)
                for name in ("max_abs", "max_ulp", "nan_ours", "nan_theirs", "inf_ours",
                             "inf_theirs", "relative", "cosine")
            }  # fmt: skip
    return TensorDifference(
        key=pair.key,
        component=side.component,
        part=part_of(side.component, side.kind),
        layer=layer_of(side.name),
        status=status,
        evidence=evidence,
        shape_a=shapes[0],
        shape_b=shapes[1],
        dtype_a=dtypes[0],
        dtype_b=dtypes[1],
        elements=_compared(pair) if compared else 0,
        rows=pair.rows,
        **{_FIELDS.get(name, name): value for name, value in told.items()},
    )


_FIELDS = {
    "nan_ours": "nan_a", "nan_theirs": "nan_b", "inf_ours": "inf_a", "inf_theirs": "inf_b",
    "relative": "relative_l2",
}  # fmt: skip


def _compared(pair: ComparedPair) -> int:
    shape = pair.either.shape
    return prod(shape) if pair.rows is None else pair.rows * prod(shape[1:])


class Summaries:
    """Adds tensors up as their verdicts come."""

    def __init__(self) -> None:
        self._total = _Sum("all")
        self._parts: dict[str, _Sum] = {}
        self._layers: dict[str, _Sum] = {}
        self._cells: dict[tuple[str, str], _Sum] = {}

    def add(self, tensor: TensorDifference, tally: Tally | None) -> None:
        """Count one tensor in, everywhere it belongs."""
        cell = (tensor.layer, tensor.part)
        for held in (
            self._total,
            self._parts.setdefault(tensor.part, _Sum(tensor.part)),
            self._layers.setdefault(tensor.layer, _Sum(tensor.layer)),
            self._cells.setdefault(cell, _Sum(tensor.layer)),
        ):
            held.add(tensor, tally)

    @property
    def total(self) -> Summary:
        """All that was added."""
        return self._total.summary()

    @property
    def components(self) -> list[Summary]:
        """What was added, by component."""
        return [held.summary() for held in self._parts.values()]

    @property
    def layers(self) -> list[Summary]:
        """What was added, by layer, in natural order."""
        return [self._layers[name].summary() for name in sorted(self._layers, key=natural)]

    @property
    def cells(self) -> list[Cell]:
        """What was compared, by layer and component."""
        done = [(*place, held.summary()) for place, held in self._cells.items()]
        return [
            Cell(layer, part, held.relative_l2, held.changed / held.elements)
            for layer, part, held in sorted(done, key=lambda cell: natural(cell[0]))
            if held.elements
        ]


class _Sum:
    """Tensors taken together, as they are added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.elements = 0
        self.changed = 0
        self.max_abs: float | None = None
        self.tally = Tally()

    def add(self, tensor: TensorDifference, tally: Tally | None) -> None:
        self.counts[tensor.status] += 1
        self.elements += tensor.elements
        self.changed += tensor.changed or 0
        if tensor.max_abs is not None:
            self.max_abs = max(self.max_abs or 0, tensor.max_abs)
        # A counter among the buffers would have a larger norm than all weights together.
        floats = DTYPES[tensor.dtype_a or ""].family in ("float", "complex") if tally else False
        if tally is not None and tally.changed and floats:
            self.tally.add(tally)

    def summary(self) -> Summary:
        nothing = None if self.changed else 0.0
        relative = self.tally.relative if self.tally.elements else nothing
        return Summary(
            self.name, self.counts.total(), dict(self.counts), self.elements, self.changed,
            nothing if self.max_abs is None else self.max_abs, relative,
        )  # fmt: skip


def ordered(tensors: Iterable[TensorDifference]) -> list[TensorDifference]:
    """Return tensors by relative change, what has none first: it is another tensor altogether.

    Tensors that are recorded as equal come last.
    """
    infinite = float("inf")

    def rank(tensor: TensorDifference) -> tuple[bool, float, str]:
        relative, recorded = tensor.relative_l2, tensor.status is DiffStatus.RECORDED
        return (recorded, -(infinite if relative is None else relative), tensor.key)

    return sorted(tensors, key=rank)
