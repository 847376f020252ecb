"""Show parts of arrays as tensors of their own: slices, axes exchanged, joined or added.

Strides change, bytes do not move. Whatever reads strided tensors reads these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import ClassVar, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Payload, Piece, TensorInfo
from ftckpt.checkpoint.layer import CheckpointLayer
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.storage.computed import computed_name

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
