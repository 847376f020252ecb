"""Inert records of what a `torch.save` pickle holds: storages, tensors, subclasses.

Sources: `torch/storage.py` (storage classes), `torch/serialization.py` (persistent ids).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.pickles.inert import Sealed, refuse


class StorageType(NamedTuple):
    """A storage class: what its elements are."""

    dtype: DType
    untyped: bool


class StorageRef(NamedTuple):
    """A storage as one persistent id names it.

    Attributes:
        key: name of its record, unique in the stream.
        dtype: element type; bytes for an untyped storage.
        numel: elements of `dtype`.
        untyped: whether the storage class is the untyped one.
        location: device at the time of saving (`cuda:3`); says nothing about the bytes.
        first: element of the record where this storage begins (old storage views).
    """

    key: str
    dtype: DType
    numel: int
    untyped: bool = False
    location: str = ""
    first: int = 0


class StoredStorage(NamedTuple):
    """Where the bytes of one storage are.

    Attributes:
        extent: the record; meaningless where `inline` is set.
        dtype: element type that the persistent id gives.
        numel: elements of `dtype`.
        crc32: as recorded, None where not.
        inline: the bytes themselves, where they lie inside the pickle.
    """

    extent: Extent
    dtype: DType
    numel: int
    crc32: int | None = None
    inline: bytes | None = None


class TensorRef(NamedTuple):
    """A strided view of a storage. Two with one key share memory: tied weights, views.

    Attributes:
        key: of the storage, in `TorchStream.storages`.
        storage_offset: in elements of `dtype`.
        shape: sizes.
        strides: in elements.
        dtype: element type.
        requires_grad: as saved.
        conj: the values are the conjugates of the bytes.
        neg: the values are the negatives of the bytes.
        location: device at the time of saving.
        parameter: whether it was a Parameter.
    """

    key: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    location: str = ""
    parameter: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether its elements lie side by side in C order."""
        return is_dense(self.shape, self.strides)

    def span(self, storages: Mapping[str, StoredStorage]) -> Extent:
        """Return the bytes from its first element to its last, gaps of the strides included.

        Raises:
            KeyError: `storages` is of another stream.
            ValueError: the storage lies inside the pickle and has no extent.
        """
        extent, *_, inline = storages[self.key]
        if inline is not None:
            raise ValueError(f"storage {self.key!r} has no bytes of its own in the file")
        size = self.dtype.itemsize
        length = reach(self.shape, self.strides) * size
        return Extent(extent.file, extent.offset + self.storage_offset * size, length)


class Composite(metaclass=Sealed):
    """A tensor that is not a strided view of one storage.

    Attributes:
        how: `sparse`, `quantized`, `nested`, `meta`, `wrapper`.
        parts: names as in torch's own constructors -> TensorRef or plain value.
    """

    __slots__ = ("how", "parts")

    def __init__(self, how: str, parts: Mapping[str, Any]) -> None:
        self.how = how
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        refuse("changes a tensor after it was built")

    def __repr__(self) -> str:
        return f"<{self.how} tensor>"


class SubclassRef(metaclass=Sealed):
    """A tensor subclass, or a tensor with attributes: DTensor, ShardedTensor, a user's own.

    Attributes:
        type_name: qualified name of its class.
        base: what its rebuild function gave: TensorRef, or Composite `wrapper` with `dtype`,
            `shape` and `strides` of a tensor that has no storage of its own.
        state: its attributes, as pickled.
    """

    __slots__ = ("base", "state", "type_name")
    type_name: str
    base: Any
    state: Any

    def __setstate__(self, state: Any) -> None:
        refuse("changes a tensor subclass after it was built")

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether `strides` are those of C order; dimensions of one element do not count."""
    expected = 1
    if 0 in shape:
        return True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last one, both included; 0 for none."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1
