"""Find weights that are tied: two names whose bytes are the same bytes of the same files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftckpt.checkpoint import TensorInfo


def aliases_of(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Return the tensors whose pieces are the very bytes of an earlier one: key -> its key."""
    owners: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for tensor in tensors:
        if tensor.numel and tensor.pieces:
            bytes_of = tuple((p.box, p.extent, p.strides) for p in tensor.pieces)
            owner = owners.setdefault(bytes_of, tensor.key)
            if owner != tensor.key:
                aliases[tensor.key] = owner
    return aliases
