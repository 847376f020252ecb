"""Logical tensors, their pieces, and where the bytes of each lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.extents import Box, Extent

if TYPE_CHECKING:
    from ftckpt.storage.source import Source

    from .dtypes import DType


class Piece(NamedTuple):
    """A part of a logical tensor and the place of its bytes.

    Attributes:
        box: its elements in the global tensor.
        extent: its bytes. If `packed`, they are a record of the format's own (a torch.save stream,
            perhaps compressed) and `Checkpoint.payload` finds the elements in it.
        flat: half-open element range in C order inside `box`, if the piece holds only that range (a
            ZeRO or distributed-optimizer partition); None means all of the box.
        strides: in elements, if the elements are not dense in C order; None means dense.
        replica: 0 for the main copy, then 1, 2, …
        rank: the rank that wrote it, if known.
        packed: whether `extent` must go through `Checkpoint.payload`.
        first: of a packed record that holds more than this piece, the element (counted in the
            record's C order) with which the piece begins.
    """

    box: Box
    extent: Extent
    flat: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None
    replica: int = 0
    rank: int | None = None
    packed: bool = False
    first: int = 0


class Payload(NamedTuple):
    """The element bytes of one piece.

    Attributes:
        extent: the bytes in the file; raw elements unless `transforms` is not empty.
        strides: in elements, or None for dense C order; the first element is at `extent.offset`.
        transforms: names of stream transforms to undo over the whole `extent`, in order.
        inner: (offset, length) of the element bytes in the decoded stream; None without transforms.
        record: the run of bytes of the file around them that has a CRC-32 of its own, and that;
            None where a format does not meet it on the way, or the elements are transformed.
    """

    extent: Extent
    strides: tuple[int, ...] | None = None
    transforms: tuple[str, ...] = ()
    inner: tuple[int, int] | None = None
    record: tuple[Extent, int] | None = None


class Kind(StrEnum):
    """A tensor's role in training; never part of its name."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"
    SCALE = "scale"  # of quantised weights: never a parameter
    OTHER = "other"

    # The enum's own hash calls Python code: there are many tensors.
    __hash__ = str.__hash__


class TensorInfo(NamedTuple):
    """One logical tensor.

    Attributes:
        component: `model`, `optimizer`, `ema` or `extra:<name>`.
        name: fully qualified name in the unsharded model, as the trainer's state_dict spells it.
        shape: global shape.
        pieces: where its elements are; main pieces tile `shape`, replicas repeat them.
        stored_name: the format's name, if it differs from `name`.
    """

    component: str
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: DType
    pieces: Sequence[Piece]
    stored_name: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense logical tensor, each element once."""
        return self.dtype.nbytes(self.numel)

    @property
    def key(self) -> str:
        """Its key in `Checkpoint.tensors` (see `tensor_key`)."""
        return tensor_key(self.component, self.kind, self.name)


# Looked up once: access to an enum's members is slow, and there are many tensors.
_TOLD_BY_KIND = frozenset((Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ))


def tensor_key(component: str, kind: Kind, name: str) -> str:
    """Return the key of a tensor: its name alone for weights and buffers of the model.

    Others get a prefix: `exp_avg:layers.0.weight` (the optimizer's),
    `optimizer:layers.0.weight.step`, `ema:layers.0.weight`, `extra:rng:torch_state`.
    """
    if component == "model":
        return f"{kind}:{name}" if kind in _TOLD_BY_KIND else name
    if kind not in _TOLD_BY_KIND:
        return f"{component}:{name}"
    return f"{kind}:{name}" if component == "optimizer" else f"{component}:{kind}:{name}"


class TensorSource(Protocol):
    """A checkpoint, as far as reading tensors needs it."""

    source: Source

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by key."""

    def payload(self, piece: Piece) -> Payload:
        """Find the element bytes of a piece (see `ftckpt.checkpoint.Checkpoint.payload`)."""
