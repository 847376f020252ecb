"""Cut tensors of Hugging Face's that hold all experts of a layer, and stack Megatron-core's.

`gate_up_proj` of GPT-OSS is [experts, in, 2 out]; its columns come from gate and up in turn. One
expert of Megatron-core's is [2 out, in], first the gate. Elements are moved when they are read, and
the last experts are kept: strides alone would show the same, and rows that lie across a file would
each cost a read of the whole expert.

Source: `GPTOSSMLPGateUpProjMapping` and `GPTOSSMLPDownProjMapping` of Megatron-Bridge.

Show tensors with a number added to each element, in float32 and rounded once.

Megatron-core keeps the norm behind linear attention less one, because its other norms are so; in
transformers that norm has the weight itself. Weights and masters are changed; moments are the same
on both sides. An element far from one is rounded to its type, as Megatron-Bridge rounds it.

Source: `RMSNorm2ZeroCenteredRMSNormMapping` of Megatron-Bridge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.computed import computed
from ftckpt.checkpoint.read_tensor import read_box
from ftckpt.checkpoint.rounding import from_bfloat16, to_bfloat16
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.formats.families.tables import TableEntry
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.transfer.content import Content, Copy, TargetTensor

from . import TensorViews
from .joins import Join

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


_BLOCK = 8 << 20  # bytes that are moved at a time
_KEPT = 4  # experts that are kept
_MOST = 40 << 20  # bytes of one; a larger one is read in parts


class Stack(NamedTuple):
    """All experts of a layer.

    Attributes:
        entry: the row of the table.
        wanted: what holds all of them.
        names: of the tensors of Megatron-core, by expert.
    """

    entry: TableEntry
    wanted: TargetTensor
    names: list[str]


class _Moved(NamedTuple):
    """Experts whose elements are in another order than in the source.

    Attributes:
        sources: a tensor for each expert, and which slice of its first axis it is, if of one.
        shape: of one expert of the result.
        turned: whether its two axes are exchanged.
        parts: 0; 1 where rows in turn become two parts, -1 where two parts become rows in turn.
    """

    sources: Sequence[tuple[TensorInfo, int | None]]
    shape: tuple[int, ...]
    turned: bool
    parts: int


def unstacked(
    content: Content, stacks: Iterable[Stack]
) -> tuple[Content, dict[str, list[TargetTensor]]]:
    """Return the experts of each stack by its key, and the content whose checkpoint shows them.

    Raises:
        UnsupportedError: a stack was changed before.
        UsageError: it holds another number of experts, no element, or no gate and up.
    """
    views = TensorViews(content.checkpoint)
    shown: dict[str, tuple[TensorInfo, _Moved]] = {}
    made: dict[str, list[TargetTensor]] = {}
    for entry, wanted, names in stacks:
        info = views.source(wanted)
        if len(info.shape) < 2 or info.shape[0] != len(names):
            raise UsageError(
                f"{wanted.key} of {list(info.shape)} does not hold the {len(names)} experts that"
                f" {CONFIG} describes",
                tensor=wanted.key,
            )
        shape = _turned(info.shape[1:], entry)
        _require_rows(wanted, shape, entry)
        moved = _Moved([], shape, _turns(shape, entry), _parts(entry))
        box = Box.whole(shape)
        experts = []
        for expert, name in enumerate(names):
            key = f"{info.key} expert {expert}"
            shown[key] = (
                info._replace(name=key, shape=shape),
                moved._replace(sources=[(info, expert)]),
            )
            copies = (Copy(box, key, box),)
            experts.append(wanted._replace(name=name, shape=shape, copies=copies))
        made[wanted.key] = experts
    return _shown(content, shown), made


def stacked(
    content: Content,
    wholes: Mapping[tuple[str, str, str], tuple[TableEntry, Mapping[int, TargetTensor]]],
    count: int,
) -> tuple[Content, list[TargetTensor]]:
    """Return tensors that hold all experts, and the content whose checkpoint shows them.

    Args:
        content: with the experts.
        wholes: by component, kind and name of the whole: its row, and its experts by number.
        count: how many experts the model has; 0 where nothing says it.

    Raises:
        UnsupportedError: an expert is missing, was changed before, or they differ in type or shape.
        UsageError: one holds no element, or no gate and up.
    """
    views = TensorViews(content.checkpoint)
    shown: dict[str, tuple[TensorInfo, _Moved]] = {}
    results = []
    for (_, _, name), (entry, experts) in wholes.items():
        ordered = _ordered(name, experts, count)
        some = ordered[0]
        _require_rows(some, some.shape, entry)
        sources = [(views.source(expert), None) for expert in ordered]
        shape = _turned(some.shape, entry)
        whole = (len(ordered), *shape)
        key = f"{sources[0][0].key} and all experts"
        moved = _Moved(sources, shape, _turns(shape, entry), -_parts(entry))
        shown[key] = sources[0][0]._replace(name=key, shape=whole), moved
        box = Box.whole(whole)
        results.append(some._replace(name=name, shape=whole, copies=(Copy(box, key, box),)))
    return _shown(content, shown), results


def _shown(content: Content, shown: Mapping[str, tuple[TensorInfo, _Moved]]) -> Content:
    if not shown:
        return content
    base = content.checkpoint
    tensors = {**base.tensors, **{key: info for key, (info, _) in shown.items()}}
    made_of = {
        key: [source.key for source, _ in moved.sources] for key, (_, moved) in shown.items()
    }

    kept = _Kept(base)

    def fill(key: str, offset: int, out: memoryview) -> None:
        info, moved = shown[key]
        _fill(kept, info, moved, offset, out)

    made = computed(base, tensors, made_of, fill, getattr(base, "replaced", {}))
    made.step = base.step
    return replace(content, checkpoint=made)


class _Kept:
    """The last experts that were moved."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._held: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._lock = Lock()

    def rows(self, info: TensorInfo, moved: _Moved, expert: int, first: int, last: int) -> Array:
        """Return rows of one expert of the result."""
        if not moved.turned or info.dtype.nbytes(prod(moved.shape)) > _MOST:
            return _rows(self._checkpoint, moved, expert, first, last)
        with self._lock:
            whole = self._held.get((info.key, expert))
        if whole is None:  # two threads may both read it
            whole = _rows(self._checkpoint, moved, expert, 0, moved.shape[0])
            with self._lock:
                self._held[info.key, expert] = whole
                while len(self._held) > _KEPT:
                    self._held.popitem(last=False)
        return whole[first:last]


def _fill(kept: _Kept, info: TensorInfo, moved: _Moved, offset: int, out: memoryview) -> None:
    """Put the bytes of the result that begin at `offset` into `out`."""
    import numpy as np

    target = np.frombuffer(out, np.uint8)
    end = offset + len(target)
    row = info.dtype.nbytes(prod(moved.shape[1:]))
    each = row * moved.shape[0]
    step = max(_BLOCK // max(row, 1), 1)
    at = offset
    while at < end:
        expert, inside = divmod(at, each)
        first = inside // row
        last = min(first + step, moved.shape[0], -(-(end - expert * each) // row))
        data = kept.rows(info, moved, expert, first, last).reshape(-1).view(np.uint8)
        begin = expert * each + first * row
        upto = min(end, begin + len(data))
        target[at - offset : upto - offset] = data[at - begin : upto - begin]
        at = upto


def _rows(checkpoint: Checkpoint, moved: _Moved, expert: int, first: int, last: int) -> Array:
    """Return rows of one expert of the result."""
    import numpy as np

    info, slice_ = moved.sources[expert]
    lead = () if slice_ is None else (slice_,)

    def read(axis: int, begin: int, count: int) -> Array:
        sizes = list(info.shape[len(lead) :])
        sizes[axis] = count
        offsets = [begin if n == axis else 0 for n in range(len(sizes))]
        box = Box((*lead, *offsets), (*(1 for _ in lead), *sizes))
        found: Array = read_box(checkpoint, info, box).reshape(sizes)
        return found

    axis = 1 if moved.turned else 0
    half = moved.shape[0] // 2
    if moved.parts == 1 and last - first == moved.shape[0]:
        both = read(axis, 0, last)
        both = both.T if moved.turned else both
        return np.ascontiguousarray(np.concatenate([both[::2], both[1::2]]))
    if moved.parts == 1:  # rows of the first part, then of the second, each every other one
        parts = []
        for part in (0, 1):
            begin, stop = max(first - part * half, 0), min(last - part * half, half)
            if begin < stop:
                both = read(axis, 2 * begin, 2 * (stop - begin))
                parts.append((both.T if moved.turned else both)[part::2])
        return np.ascontiguousarray(np.concatenate(parts))
    if moved.parts == -1 and not moved.turned:
        begin, stop = first // 2, -(-last // 2)
        pairs = [read(0, begin + part * half, stop - begin) for part in (0, 1)]
        rows = np.stack(pairs, axis=1).reshape(-1, *pairs[0].shape[1:])
        return np.ascontiguousarray(rows[first - 2 * begin : last - 2 * begin])
    found = read(axis, first, last - first)
    if moved.parts == -1:
        wide = found.shape[0] // 2
        found = found.reshape(2, wide, -1).swapaxes(0, 1).reshape(found.shape)
    return np.ascontiguousarray(found.T if moved.turned else found)


def _turned(shape: tuple[int, ...], entry: TableEntry) -> tuple[int, ...]:
    return shape[::-1] if _turns(shape, entry) else shape


def _turns(shape: tuple[int, ...], entry: TableEntry) -> bool:
    return entry.transposed and len(shape) == 2


def _parts(entry: TableEntry) -> int:
    return int(entry.join is Join.ALTERNATE)


def _require_rows(wanted: TargetTensor, shape: tuple[int, ...], entry: TableEntry) -> None:
    """Refuse an expert without elements, and one of Megatron-core's with odd rows."""
    if 0 in shape or (_parts(entry) and shape[0] % 2):
        held = "gate and up" if _parts(entry) else "element: the save lost its values"
        raise UsageError(f"{wanted.key} of {list(wanted.shape)} holds no {held}", tensor=wanted.key)


def _ordered(name: str, experts: Mapping[int, TargetTensor], count: int) -> list[TargetTensor]:
    count = count or 1 + max(experts)
    absent = [number for number in range(count) if number not in experts]
    some = next(iter(experts.values()))
    if absent or len(experts) != count:
        more = sorted(number for number in experts if number >= count)
        raise UnsupportedError(
            f"{name} holds {count} experts; "
            + (
                f"missing: {listed([str(n) for n in absent], 3)}" if absent else f"there: {more[0]}"
            ),
            tensor=some.key,
        )
    ordered = [experts[number] for number in range(count)]
    if len({(one.dtype, one.shape) for one in ordered}) > 1:
        raise UnsupportedError(
            f"the experts of {name} differ in type or shape, so that they make no one tensor",
            tensor=some.key,
        )
    return ordered


_FLOATS = ("float64", "float32", "bfloat16", "float16")
_CHANGED = (Kind.PARAM, Kind.MASTER)


def added(content: Content, wanted: Mapping[str, float]) -> Content:
    """Return the content with numbers added to some of its tensors.

    Args:
        content: what is to be written.
        wanted: by key of a tensor: what is added to each of its elements.

    Raises:
        UnsupportedError: a tensor was changed before, or does not hold floats.
    """
    if not wanted:
        return content
    base = content.checkpoint
    views = TensorViews(base)
    tensors, made = dict(base.tensors), dict(content.tensors)
    numbers: dict[str, tuple[TensorInfo, float]] = {}
    for key, number in wanted.items():
        info = views.source(content.tensors[key])
        if info.dtype.name not in _FLOATS:
            raise UnsupportedError(f"{key} is {info.dtype.name}: it cannot be computed", tensor=key)
        if not info.shape or not prod(info.shape):
            raise UnsupportedError(f"{key} has no rows to compute", tensor=key)
        shown = f"{info.key} {number:+}"
        numbers[shown] = info, number
        tensors[shown] = info._replace(name=shown)
        box = Box.whole(info.shape)
        made[key] = content.tensors[key]._replace(copies=(Copy(box, shown, box),))

    def fill(key: str, offset: int, out: memoryview) -> None:
        info, number = numbers[key]
        row = info.dtype.nbytes(prod(info.shape[1:]))
        first, last = offset // row, -(-(offset + len(out)) // row)
        zeros = (0 for _ in info.shape[1:])
        box = Box((first, *zeros), (last - first, *info.shape[1:]))
        data = _sum(read_box(base, info, box), info.dtype.name, number)
        begin = offset - first * row
        out[:] = data[begin : begin + len(out)]

    made_of: Mapping[str, Sequence[str]] = {key: [info.key] for key, (info, _) in numbers.items()}
    shows = computed(base, tensors, made_of, fill, getattr(base, "replaced", {}))
    shows.step = base.step
    return replace(content, checkpoint=shows, tensors=made)


def is_changed(wanted: TargetTensor) -> bool:
    """Say whether a tensor of a parameter that is stored otherwise is itself stored so."""
    return wanted.kind in _CHANGED


def _sum(values: np.ndarray[Any, Any], dtype: str, number: float) -> bytes:
    import numpy as np

    kept = np.ascontiguousarray(values)
    if dtype == "bfloat16":
        wide = from_bfloat16(kept.view(np.uint16))
        return to_bfloat16(wide + np.float32(number)).tobytes()
    known = kept.view(np.dtype(dtype))
    if dtype == "float64":
        return (known + number).tobytes()
    return (known.astype(np.float32) + np.float32(number)).astype(known.dtype).tobytes()
