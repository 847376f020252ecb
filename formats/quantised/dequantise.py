"""Show a checkpoint's weights in a floating type, whatever keeps them in codes."""

from __future__ import annotations

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DType

from .schemes import require_known


def dequantised(checkpoint: Checkpoint, dtype: DType) -> Checkpoint:
    """Return a checkpoint with its quantised weights as if they were stored in a floating type.

    Raises:
        UnsupportedError: how a weight is computed is not known, or not from this format.
        CorruptError: what belongs to a weight is lost, or does not fit.
    """
    found = checkpoint.dequantised(dtype)
    if any(info.dtype.family != "float" for info in found.tensors.values()):
        from .subclasses import without_codes

        found = without_codes(found, dtype)
    require_known(found)
    return found
