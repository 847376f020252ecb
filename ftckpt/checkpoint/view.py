"""One tensor of an open checkpoint, as a user reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.amounts import human_bytes
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Box

from .coverage import check_coverage
from .read_tensor import read_box

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .pieces import TensorInfo, TensorSource

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TensorView:
    """A tensor of an open checkpoint, or a box of one; `numpy` and `torch` read it.

    Integers and slices without a step cut a smaller view, and only its bytes are read (of a
    compressed record or a flat range, all of it).

    Attributes:
        info: the tensor, its global shape and its pieces.
        box: of the tensor.
        axes: the tensor's axes that the view has: an integer index removes one.
    """

    checkpoint: TensorSource
    info: TensorInfo
    box: Box
    axes: tuple[int, ...]

    @staticmethod
    def of(checkpoint: TensorSource, info: TensorInfo) -> TensorView:
        """Return the view of a whole tensor."""
        return TensorView(checkpoint, info, Box.whole(info.shape), tuple(range(len(info.shape))))

    @property
    def name(self) -> str:
        """The key in the checkpoint."""
        return self.info.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(self.box.sizes[axis] for axis in self.axes)

    @property
    def dtype(self) -> str:
        """Torch's name of the element type: `bfloat16`."""
        return self.info.dtype.name

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.info.dtype.nbytes(prod(self.shape))

    def __getitem__(self, index: Any) -> TensorView:
        """Cut a smaller view by integers, slices without a step, and `...`.

        Raises:
            IndexError: it lies outside, has more axes, or is of another kind.
        """
        words = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in words:
            at = words.index(Ellipsis)
            words[at : at + 1] = [slice(None)] * (len(self.axes) - len(words) + 1)
        if len(words) > len(self.axes):
            raise IndexError(f"{self.name} has {len(self.axes)} axes, not {len(words)}")
        offsets, sizes, axes = list(self.box.offsets), list(self.box.sizes), list(self.axes)
        for axis, word in zip(self.axes, words, strict=False):
            start, stop = self._span(word, sizes[axis])
            offsets[axis], sizes[axis] = offsets[axis] + start, stop - start
            if not isinstance(word, slice):
                axes.remove(axis)
        return TensorView(
            self.checkpoint, self.info, Box(tuple(offsets), tuple(sizes)), tuple(axes)
        )

    def _span(self, word: Any, size: int) -> tuple[int, int]:
        """Return the half-open range that an index takes of an axis."""
        if isinstance(word, slice) and word.step in (None, 1):
            start, stop, _ = word.indices(size)
            return start, max(start, stop)
        try:
            at = word.__index__()
        except AttributeError:
            raise IndexError(
                f"{word!r}: integers and slices without a step are read; others index .numpy()"
            ) from None
        at += size * (at < 0)
        if not 0 <= at < size:
            raise IndexError(f"{word} lies outside an axis of {size} elements of {self.name}")
        return at, at + 1

    def __len__(self) -> int:
        if not self.axes:
            raise TypeError(f"{self.name} has no axes, and so no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[TensorView]:
        return (self[at] for at in range(len(self)))

    def __bool__(self) -> bool:
        """Return True: a view says nothing of values."""
        return True

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {self.shape}, {human_bytes(self.nbytes)}>"

    def numpy(self) -> Array:
        """Read it as an array of its shape, in C order.

        Raises:
            UnsupportedError: numpy has no such type (`bfloat16`, 8 bits and less).
            CorruptError: bytes are missing, or the pieces do not tile the tensor.
        """
        kind = self.info.dtype.numpy
        if not kind:
            raise UnsupportedError(
                f"numpy has no type {self.dtype}, which {self.name} is of",
                hint=".torch() reads it", tensor=self.name,
            )  # fmt: skip
        return self._items().view(kind)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read it for numpy; see `numpy`."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def torch(self) -> torch.Tensor:
        """Read it as a tensor of torch, on the CPU.

        Raises:
            MissingPackageError: torch is not installed.
            UnsupportedError: torch has no such type.
            CorruptError: bytes are missing, or the pieces do not tile the tensor.
        """
        from ftckpt.packages import needing

        with needing("a tensor of torch", ".numpy() reads an array"):
            import torch
        kind = getattr(torch, self.dtype, None)
        if kind is None or self.info.dtype.family == "opaque":
            raise UnsupportedError(
                f"torch has no plain type {self.dtype}, which {self.name} is of",
                hint="ftckpt.checkpoint.read_tensor.read_tensor returns its bytes",
                tensor=self.name,
            )
        raw = self._items().reshape(-1).view("u1")
        return torch.from_numpy(raw).view(kind).reshape(self.shape)

    def _items(self) -> Array:
        """Return the elements as raw items of their size, of the view's shape."""
        for gap in check_coverage(self.info.shape, self.info.pieces):
            message = f"{self.name}: {gap.message}"
            raise CorruptError(message, kind=gap.kind, tensor=self.name)
        return read_box(self.checkpoint, self.info, self.box).reshape(self.shape)
