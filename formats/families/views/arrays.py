"""Show parts of arrays as tensors of their own: slices, axes exchanged, joined or added.

Strides change, bytes do not move. Whatever reads strided tensors reads these.

Give the rows of each head the order that another rotary embedding needs.

A head of width w is rotated in pairs of rows. Meta's code and torchtitan's take neighbours, rows 2i
and 2i+1; that of transformers takes halves, rows i and w/2+i. So row 2i+s of the one is row
s*w/2+i of the other. Rows are moved when they are read, some heads at a time; nothing is computed.

Source: `permute` in convert_llama_weights_to_hf.py of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Payload, Piece, TensorInfo
from ftckpt.checkpoint.computed import CheckpointLayer, computed
from ftckpt.checkpoint.read_tensor import dense_strides, read_box
from ftckpt.errors import UnsupportedError
from ftckpt.storage.computed import computed_name

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


_COMPUTED = computed_name("")


class _Seen(NamedTuple):
    """Where a piece of a view lies in a piece of the checkpoint: element, and strides."""

    original: Piece
    first: int
    strides: tuple[int, ...]
    itemsize: int


class _Run(NamedTuple):
    """Elements of one axis of a view at equal distances in a piece.

    Attributes:
        at: first index in the view.
        length: how many.
        stride: elements of the piece between neighbours.
        first: element of the piece.
    """

    at: int
    length: int
    stride: int
    first: int


@dataclass(kw_only=True, repr=False)
class ArrayView(CheckpointLayer):
    """A checkpoint that shows parts of its arrays besides its own tensors.

    Attributes:
        shown: the views, by key.
        seen: where each of their pieces lies.
        held: where the pieces of arrays are, of which one may be shown many times.
    """

    format: ClassVar[str] = "array view"

    shown: dict[str, TensorInfo] = field(default_factory=dict)
    seen: dict[Piece, _Seen] = field(default_factory=dict)
    held: dict[Piece, Payload] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Checkpoint) -> ArrayView:
        """Return a view of a checkpoint that shows nothing yet."""
        view = cls(
            source=base.source, tensors=base.tensors, objects=base.objects, base=base,
            topology=base.topology, commit=base.commit, dialect=base.dialect, notes=base.notes,
        )  # fmt: skip
        view.step = base.step
        return view

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece: of its own, or of the array that it shows."""
        if piece.extent.file.startswith(_COMPUTED) and piece not in self.seen:
            return Payload(piece.extent)
        seen = self.seen.get(piece)
        if seen is None:
            return self.base.payload(piece)
        found = self._held(seen.original)
        reach = 1 + sum((n - 1) * s for n, s in zip(piece.box.sizes, seen.strides, strict=True))
        offset, length = seen.first * seen.itemsize, reach * seen.itemsize
        if found.inner is None:
            place = Extent(found.extent.file, found.extent.offset + offset, length)
            return Payload(place, seen.strides)
        return found._replace(strides=seen.strides, inner=(found.inner[0] + offset, length))

    def show(
        self,
        name: str,
        info: TensorInfo,
        fixed: Mapping[int, int],
        groups: Sequence[Sequence[int]],
        *,
        neighbours: bool = False,
    ) -> TensorInfo:
        """Add the view of a part of an array, as a tensor of the model; return it.

        Args:
            name: of the view.
            info: the array.
            fixed: axis of the array -> the index along it.
            groups: the array's axes that make each axis of the view; none for an axis of one.
            neighbours: whether the first axis shows every other element first.

        Raises:
            UnsupportedError: pieces that end in the middle of rows, or another view of that name.
        """
        if name in self.shown:
            raise UnsupportedError(f"two arrays become {name}", tensor=name)
        shape = tuple(prod(info.shape[n] for n in group) for group in groups)
        pieces: list[Piece] = []
        for piece in info.pieces:
            pieces += self._pieces(info, piece, fixed, groups, neighbours)
        self.shown[name] = TensorInfo("model", name, Kind.PARAM, shape, info.dtype, pieces)
        return self.shown[name]

    def _pieces(
        self,
        info: TensorInfo,
        piece: Piece,
        fixed: Mapping[int, int],
        groups: Sequence[Sequence[int]],
        neighbours: bool,
    ) -> Iterator[Piece]:
        if piece.flat is not None:
            raise UnsupportedError(
                f"{info.key} is stored in parts that end in the middle of rows", tensor=info.key
            )
        for axis, index in fixed.items():
            if not 0 <= index - piece.box.offsets[axis] < piece.box.sizes[axis]:
                return
        payload = self._held(piece)
        strides = payload.strides or dense_strides(piece.box.sizes)
        begin = sum((i - piece.box.offsets[axis]) * strides[axis] for axis, i in fixed.items())
        axes = [
            _runs(info.shape, piece.box, strides, group, neighbours and group is groups[0])
            for group in groups
        ]
        for runs in product(*axes):
            box = Box(tuple(r.at for r in runs), tuple(r.length for r in runs))
            first = begin + sum(r.first for r in runs)
            steps = tuple(r.stride for r in runs)
            new = piece._replace(box=box, strides=steps, first=first)
            self.seen[new] = _Seen(piece, first, steps, info.dtype.itemsize)
            if payload.inner is None:  # else the record as it is stored, of which this is a part
                place = self.payload(new).extent
                seen = self.seen.pop(new)
                new = new._replace(extent=place, first=0)
                self.seen[new] = seen
            yield new

    def _held(self, piece: Piece) -> Payload:
        if piece not in self.held:
            self.held[piece] = self.base.payload(piece)
        return self.held[piece]

    def finished(self) -> ArrayView:
        """Return the checkpoint with all that was shown."""
        self.tensors = {**self.base.tensors, **self.shown}
        return self


def _runs(
    shape: Sequence[int],
    box: Box,
    strides: Sequence[int],
    group: Sequence[int],
    neighbours: bool,
) -> list[_Run]:
    """Return the runs of axes that become one, in a piece."""
    if not group:
        return [_Run(0, 1, 1, 0)]
    *outer, last = group
    at, count, stride = box.offsets[last], box.sizes[last], strides[last]
    runs = [_Run(at, count, stride, 0)]
    if neighbours:  # they become halves
        runs = []
        for side in (0, 1):
            skipped = (at + side) % 2
            if count > skipped:
                first = (at + skipped) // 2 + (shape[last] // 2) * ((at + skipped) % 2)
                runs.append(_Run(first, (count - skipped + 1) // 2, 2 * stride, skipped * stride))
    width = shape[last]
    for axis in reversed(outer):
        start, many, step = box.offsets[axis], box.sizes[axis], strides[axis]
        [only] = runs if len(runs) == 1 else [None]
        if only is not None and only.length == width and step == width * only.stride:
            runs = [_Run(start * width, many * width, only.stride, only.first)]
        else:
            runs = [
                _Run((start + n) * width + run.at, run.length, run.stride, n * step + run.first)
                for n in range(many)
                for run in runs
            ]
        width *= shape[axis]
    return runs


_BLOCK = 8 << 20  # bytes that are moved at a time


class Rotated(NamedTuple):
    """A tensor whose rows are in the other order.

    Attributes:
        key: of the tensor as it is.
        width: rows of a head.
        halves: whether the result has halves; else it has neighbours.
    """

    key: str
    width: int
    halves: bool


def rotated(checkpoint: Checkpoint, wanted: Mapping[str, Rotated]) -> Checkpoint:
    """Return a checkpoint that shows tensors in the other order besides its own.

    Args:
        checkpoint: the source.
        wanted: by the key of the result; its rows are whole heads.
    """
    if not wanted:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for key, one in wanted.items():
        tensors[key] = checkpoint.tensors[one.key]._replace(name=key)

    def fill(key: str, offset: int, out: memoryview) -> None:
        one = wanted[key]
        _fill(checkpoint, checkpoint.tensors[one.key], one, offset, out)

    made_of: Mapping[str, Sequence[str]] = {key: [one.key] for key, one in wanted.items()}
    replaced = getattr(checkpoint, "replaced", {})
    return computed(checkpoint, tensors, made_of, fill, replaced)


def _fill(
    checkpoint: Checkpoint, info: TensorInfo, one: Rotated, offset: int, out: memoryview
) -> None:
    """Put the bytes of the result that begin at `offset` into `out`."""
    import numpy as np

    row = info.dtype.nbytes(prod(info.shape[1:]))
    target = np.frombuffer(out, np.uint8)
    end = offset + len(target)
    step = max(_BLOCK // max(row, 1) // one.width, 1) * one.width
    first, last = offset // row, -(-end // row)
    while first < last:
        stop = min((first // step + 1) * step, last)
        data = _rows(checkpoint, info, one, first, stop).reshape(-1).view(np.uint8)
        begin, upto = max(offset, first * row), min(end, stop * row)
        target[begin - offset : upto - offset] = data[begin - first * row : upto - first * row]
        first = stop


def _rows(checkpoint: Checkpoint, info: TensorInfo, one: Rotated, first: int, last: int) -> Array:
    """Return rows of the result."""
    import numpy as np

    def read(begin: int, end: int) -> Array:
        zeros = (0 for _ in info.shape[1:])
        return read_box(checkpoint, info, Box((begin, *zeros), (end - begin, *info.shape[1:])))

    width, half = one.width, one.width // 2
    if first % width == 0 and last % width == 0:
        whole = read(first, last)
        rest = whole.shape[1:]
        shape = (-1, half, 2, *rest) if one.halves else (-1, 2, half, *rest)
        made: Array = np.ascontiguousarray(whole.reshape(shape).swapaxes(1, 2))
        return made.reshape(whole.shape)
    parts = []
    while first < last:  # the rows of a head, or some of them
        begin = first - first % width
        stop = min(begin + width, last)
        wanted = np.arange(first - begin, stop - begin)
        pairs, sides = (wanted % half, wanted // half) if one.halves else divmod(wanted, 2)
        rows = 2 * pairs + sides if one.halves else sides * half + pairs
        lowest, highest = int(rows.min()), int(rows.max()) + 1
        parts.append(read(begin + lowest, begin + highest)[rows - lowest])
        first = stop
    return np.concatenate(parts)
