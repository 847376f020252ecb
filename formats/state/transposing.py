"""Tensors with their two axes exchanged, as a view: strides change, bytes do not move.

A file that stores a matrix by rows stores its transpose by columns. So no copy needs to exchange
axes: the source is shown with both, and what reads strided tensors reads these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ftckpt.checkpoint import Box, Payload, Piece, TensorInfo
from ftckpt.checkpoint.computed import CheckpointLayer
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.transfer.content import Content, Copy, TargetTensor


@dataclass(kw_only=True, repr=False)
class TransposedView(CheckpointLayer):
    """A checkpoint that shows some tensors a second time, transposed, under keys of their own.

    Attributes:
        originals: the piece of `base` that a transposed piece shows.
    """

    format: ClassVar[str] = "transposed view"

    originals: dict[Piece, Piece] = field(default_factory=dict)

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece; those of a transposed one are the original's."""
        original = self.originals.get(piece)
        if original is None:
            return self.base.payload(piece)
        found = self.base.payload(original)
        strides = found.strides or dense_strides(original.box.sizes)
        return found._replace(strides=strides[::-1])


def transposed(content: Content, keys: Collection[str]) -> Content:
    """Return the content with some of its matrices transposed.

    Args:
        content: what is to be written.
        keys: of tensors with two axes.

    Raises:
        UnsupportedError: a source tensor is cut in the middle of rows (a partition of an
            optimizer's flat buffer), so that no strides show it transposed.
    """
    if not keys:
        return content
    source = content.checkpoint
    tensors: dict[str, TensorInfo] = dict(source.tensors)
    view = TransposedView(
        source=source.source,
        tensors=tensors,
        objects=source.objects,
        aliases=source.aliases,
        topology=source.topology,
        commit=source.commit,
        dialect=source.dialect,
        notes=source.notes,
        base=source,
    )
    view.step = source.step

    def show(key: str) -> str:
        shown = f"{key} transposed"
        if shown not in tensors:
            tensors[shown] = _turned(view, source.tensors[key])._replace(name=shown)
        return shown

    def turn(wanted: TargetTensor) -> TargetTensor:
        copies = (Copy(_swap(c.box), show(c.key), _swap(c.source)) for c in wanted.copies)
        return wanted._replace(shape=wanted.shape[::-1], copies=tuple(copies))

    made = {key: turn(w) if key in keys else w for key, w in content.tensors.items()}
    return replace(content, checkpoint=view, tensors=made)


def _turned(view: TransposedView, info: TensorInfo) -> TensorInfo:
    pieces = []
    for piece in info.pieces:
        if piece.flat is not None:
            raise UnsupportedError(
                f"{info.key} is stored in parts that end in the middle of rows: it cannot be "
                "transposed on the way",
                hint="convert it to safetensors under its own names first",
                tensor=info.key,
            )
        strides = piece.strides or dense_strides(piece.box.sizes)
        turned = piece._replace(box=_swap(piece.box), strides=strides[::-1])
        view.originals[turned] = piece
        pieces.append(turned)
    return info._replace(shape=info.shape[::-1], pieces=pieces)


def _swap(box: Box) -> Box:
    return Box(box.offsets[::-1], box.sizes[::-1])
