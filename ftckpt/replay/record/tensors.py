"""Tensors of a running training: their bytes, and their digests on their device.

The digest consists of the two sums of `ftckpt.digests.tensors`, whose integer additions do not
depend on the order of reduction; so two processes and two devices agree.

The two sums of the tensor digest, computed on the tensor's device.

`ftckpt.digests.tensors` has the definition and computes it with NumPy. This is the same arithmetic
in torch: int64 wraps modulo 2^64 as uint64 does, and a logical shift is an arithmetic one with
masked upper bits. Integer sums do not depend on a device's order of reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.digests.tensors import TensorDigest

if TYPE_CHECKING:
    import torch


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as the int64 of the same bits
_MIX = 0xE9846AF9B1A615D
# Elements mixed at once: at most four buffers of 128 MiB.
_CHUNK = 1 << 24


def device_sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Return S1 and S2 of a contiguous tensor on any device; ends with one transfer of 16 bytes."""
    import torch

    whole = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    words = _words(tensor.reshape(-1))
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        x = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        x.mul_(_GOLDEN).bitwise_xor_(_wide(part))
        for shift, factor in ((32, _MIX), (32, _MIX), (28, 1)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
            x.mul_(factor)
        whole[0] += x.sum()
        whole[1] += x.mul_(x).sum()
    first, second = whole.tolist()
    return first & _MASK, second & _MASK


def _words(elements: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as integers of their width; 16 bytes as two words."""
    import torch

    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return elements.view(narrow.get(elements.element_size(), torch.int64))


def _wide(part: torch.Tensor) -> torch.Tensor:
    import torch

    wide = part.to(torch.int64)
    bits = 8 * part.element_size()
    return wide if bits == 64 else wide.bitwise_and_((1 << bits) - 1)


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
