"""Tensors of a running training: their bytes, and their digests on their device.

The digest consists of the two sums of `ftckpt.digests.tensors`, whose integer additions do not
depend on the order of reduction; so two processes and two devices agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.digests.tensors import TensorDigest

from .device_sums import device_sums

if TYPE_CHECKING:
    import torch


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor dense in C order, on its device; the local part of a distributed one.

    None for a sparse or quantized tensor, one without storage, or one of a type without a name.
    """
    import torch

    tensor = _local(tensor)
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    if not dense or tensor.device.type == "meta" or _dtype(tensor) not in DTYPES:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def raw_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a `plain` tensor in main memory, without copying them."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return `dtype[shape]:S1S2`, the sums in hexadecimal; of a distributed tensor's local part.

    A tensor that is not `plain` gives only type and shape.
    """
    local = _local(tensor)
    head = f"{_dtype(local)}[{','.join(map(str, local.shape))}]"
    dense = plain(local)
    if dense is None:
        return f"{head}:not read"
    if dense.device.type == "cpu":
        digest = TensorDigest(DTYPES[_dtype(dense)], dense.shape)
        digest.update(Box.whole(tuple(dense.shape)), raw_bytes(dense))
        sums = digest.sums
    else:
        sums = device_sums(dense)
    return f"{head}:{sums[0]:016x}{sums[1]:016x}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
