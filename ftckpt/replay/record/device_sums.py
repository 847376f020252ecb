"""The two sums of the tensor digest, computed on the tensor's device.

`ftckpt.digests.tensors` has the definition and computes it with NumPy. This is the same arithmetic
in torch: int64 wraps modulo 2^64 as uint64 does, and a logical shift is an arithmetic one with
masked upper bits. Integer sums do not depend on a device's order of reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
