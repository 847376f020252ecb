"""Decide whether a source tensor can take an example's place, by type and ties."""

from __future__ import annotations

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.transfer.content import TargetTensor
from ftckpt.transfer.request.change_dtype import CASTABLE


def widens(dtype: DType, to: DType) -> bool:
    """Say whether every value of a type has itself in another one."""
    castable = {dtype.name, to.name} <= CASTABLE
    return dtype is to or (castable and dtype.bits < to.bits)


def require_castable(wanted: TargetTensor, info: TensorInfo) -> None:
    """Refuse a tensor that DeepSpeed would not make of the source's.

    Weights are cast to the compute type; an optimizer's state is never rounded.

    Args:
        wanted: of the source.
        info: of the example.

    Raises:
        UnsupportedError: it is of a type that cannot be cast, or would be rounded.
    """
    weight = info.component == "model" and {wanted.dtype.name, info.dtype.name} <= CASTABLE
    if not weight and not widens(wanted.dtype, info.dtype):
        raise UnsupportedError(
            f"{info.key} is {wanted.dtype.name}, and {info.dtype.name} in the example",
            tensor=info.key,
        )


def require_asked(wanted: TargetTensor, info: TensorInfo, source: Checkpoint) -> None:
    """Refuse a type that the user wants and the example has not.

    Raises:
        UsageError: the content has another type than its source, and so has the example.
    """
    stored = {source.tensors[copy.key].dtype for copy in wanted.copies}
    if wanted.dtype is not info.dtype and wanted.dtype not in stored:
        raise UsageError(
            f"--dtype contradicts --like: {info.key} is {info.dtype.name} in the example",
            hint="leave one of them out",
        )


def require_tied(alias: TargetTensor, owner: TargetTensor, source: Checkpoint) -> None:
    """Refuse to tie what the source holds apart, unless it is the same bit for bit; reads both.

    Raises:
        UnsupportedError: they differ, or are put together otherwise.
    """

    def digest(key: str) -> str:
        return digest_tensor(source, source.tensors[key])

    alike = len(alias.copies) == len(owner.copies)
    for one, other in zip(alias.copies, owner.copies, strict=False):
        keys = {source.aliases.get(copy.key, copy.key) for copy in (one, other)}
        same = len(keys) == 1 or len({*map(digest, keys)}) == 1
        alike = alike and same and (one.box, one.source) == (other.box, other.source)
    if not alike:
        raise UnsupportedError(
            f"{alias.key} is the same as {owner.key} in the example, and another in the source",
            hint="an example of a job that does not tie them",
            tensor=alias.key,
        )
