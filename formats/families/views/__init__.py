"""What a translation between names of model code shows besides the tensors of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import ClassVar

from ftckpt.checkpoint import Box, Checkpoint, Payload, Piece, TensorInfo
from ftckpt.checkpoint.computed import CheckpointLayer, computed
from ftckpt.checkpoint.read_tensor import read_box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.state.paths import RecordedPaths
from ftckpt.transfer.content import Copy, TargetTensor

from .arrays import ArrayView, Rotated, rotated


@dataclass
class TensorViews:
    """What a translation shows besides the checkpoint's own tensors.

    Attributes:
        checkpoint: the source.
        arrays: slices and transposed tensors; made when the first is wanted.
        turned: tensors with rows in another order, by key.
        shaped: tensors with other axes behind the first, by key.
    """

    checkpoint: Checkpoint
    arrays: ArrayView | None = None
    turned: dict[str, Rotated] = field(default_factory=dict)
    shaped: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def source(self, wanted: TargetTensor) -> TensorInfo:
        """Return the tensor of the source that a tensor is, unchanged.

        Raises:
            UnsupportedError: it is put together from others.
        """
        if len(wanted.copies) == 1:
            copy = wanted.copies[0]
            info = self.checkpoint.tensors[copy.key]
            if copy.box == copy.source == Box.whole(info.shape) and info.shape == wanted.shape:
                return info
        raise UnsupportedError(
            f"{wanted.key} was changed before it was translated", tensor=wanted.key
        )

    def show(self, info: TensorInfo, fixed: Mapping[int, int], groups: list[list[int]]) -> str:
        """Return the key of a view of an array."""
        if self.arrays is None:
            self.arrays = ArrayView.of(self.checkpoint)
        place = "".join(f"[{index}]" for index in fixed.values())
        name = f"{info.key} {place} as {groups}"
        if name not in self.arrays.shown:
            self.arrays.show(name, info, fixed, groups)
        return name

    def rotate(self, wanted: TargetTensor, width: int, *, halves: bool) -> TargetTensor:
        """Return a tensor with its rows in the other order."""
        info = self.source(wanted)
        key = f"{info.key} rotated"
        self.turned[key] = Rotated(info.key, width, halves)
        box = Box.whole(wanted.shape)
        return wanted._replace(copies=(Copy(box, key, box),))

    def reshape(self, wanted: TargetTensor, shape: tuple[int, ...]) -> TargetTensor:
        """Return a tensor with other axes behind the first.

        Raises:
            UsageError: they do not hold as many elements.
            UnsupportedError: it is put together from others.
        """
        info = self.source(wanted)
        if not info.shape or info.shape[0] != shape[0] or prod(info.shape) != prod(shape):
            raise UsageError(
                f"{wanted.key} of {list(wanted.shape)} is to be {list(shape)}", tensor=wanted.key
            )
        key = f"{info.key} as {list(shape)}"
        self.shaped[key] = info.key, shape
        box = Box.whole(shape)
        return wanted._replace(shape=shape, copies=(Copy(box, key, box),))

    def finished(self) -> Checkpoint:
        """Return the checkpoint that shows all of it."""
        base = self.checkpoint if self.arrays is None else self.arrays.finished()
        return reshaped(rotated(base, self.turned), self.shaped)


def reshaped(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Checkpoint:
    """Return a checkpoint that shows tensors with other axes behind the first besides its own.

    Args:
        checkpoint: the source.
        wanted: by the key of the result: the key of the tensor as it is, and the shape.
    """
    if not wanted:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for key, (source, shape) in wanted.items():
        tensors[key] = checkpoint.tensors[source]._replace(name=key, shape=shape)

    def fill(key: str, offset: int, out: memoryview) -> None:
        info = checkpoint.tensors[wanted[key][0]]
        row = info.dtype.nbytes(prod(info.shape[1:]))
        first, last = offset // row, -(-(offset + len(out)) // row)
        box = Box((first, *(0 for _ in info.shape[1:])), (last - first, *info.shape[1:]))
        begin = offset - first * row
        out[:] = read_box(checkpoint, info, box).tobytes()[begin : begin + len(out)]

    made_of = {key: [source] for key, (source, _) in wanted.items()}
    return computed(checkpoint, tensors, made_of, fill, getattr(checkpoint, "replaced", {}))


@dataclass(kw_only=True, repr=False)
class FlatState(CheckpointLayer):
    """A checkpoint whose parameters stand at the top of the state, as torchtitan saves them.

    Attributes:
        paths: key -> path, of the parameters.
    """

    format: ClassVar[str] = "flat state"

    paths: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, base: Checkpoint, tensors: Mapping[str, TargetTensor]) -> FlatState:
        """Return a checkpoint of which `tensors` are written."""
        paths = {key: (w.name,) for key, w in tensors.items() if w.component == "model"}
        held = {f.name: getattr(base, f.name) for f in fields(Checkpoint) if f.init}
        layer = cls(**held, base=base, paths=paths)
        layer.step = base.step
        return layer

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece."""
        return self.base.payload(piece)

    def recorded_paths(self) -> RecordedPaths:
        """Return where everything stands in the saved state."""
        return RecordedPaths(self.paths, {})

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return no objects: none is an item by itself."""
        return {}
