"""What a translation between names of model code shows besides the tensors of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from ftckpt.checkpoint import Box, Checkpoint, Payload, Piece, TensorInfo
from ftckpt.checkpoint.layer import CheckpointLayer
from ftckpt.errors import UnsupportedError
from ftckpt.formats.state.paths import RecordedPaths
from ftckpt.transfer.content import Copy, TargetTensor

from .arrays import ArrayView
from .rotary import Rotated, rotated


@dataclass
class TensorViews:
    """What a translation shows besides the checkpoint's own tensors.

    Attributes:
        checkpoint: the source.
        arrays: slices and transposed tensors; made when the first is wanted.
        turned: tensors with rows in another order, by key.
    """

    checkpoint: Checkpoint
    arrays: ArrayView | None = None
    turned: dict[str, Rotated] = field(default_factory=dict)

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

    def finished(self) -> Checkpoint:
        """Return the checkpoint that shows all of it."""
        base = self.checkpoint if self.arrays is None else self.arrays.finished()
        return rotated(base, self.turned)


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
