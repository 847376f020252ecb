"""Pair each tensor of the target with its base, and with tensors that predict it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.delta.codec.blocks import BLOCK
from ftckpt.delta.codec.words import word_count, words_of

_HELPERS = {
    Kind.PARAM: (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OTHER),
    Kind.MASTER: (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OTHER),
    Kind.EXP_AVG_SQ: (Kind.EXP_AVG,),
}
_BUFFER = ".momentum_buffer"  # torch's SGD keeps it under the parameter's name
_TRAINED = ("model", "optimizer")  # components that one optimizer's rule ties together


class DeltaPair(NamedTuple):
    """One tensor of the target.

    Attributes:
        info: the tensor.
        base: key of the base's tensor of the same shape and type; None where there is none.
        helpers: by kind, the place in the list of pairs of a float32 tensor of the same parameter
            and shape that may help to predict it.
        kin: what the tensors of its parameter have in common (`family`), those that help to
            predict it among them.
    """

    info: TensorInfo
    base: str | None
    helpers: Mapping[Kind, int]
    kin: tuple[str, str]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        words = words_of(self.info.dtype)
        return -(-word_count(self.info.dtype, self.info.numel) // (BLOCK * words.each))

    def block_nbytes(self, block: int) -> int:
        """Return the bytes of one block's elements."""
        words = words_of(self.info.dtype)
        whole = BLOCK * words.each * words.size
        return min(whole, self.info.nbytes - block * whole)


def pair(
    target: Iterable[TensorInfo],
    base: Mapping[str, TensorInfo],
    renamed: Mapping[str, str] | None = None,
) -> list[DeltaPair]:
    """Return every tensor of the target with what it can be stored against, in the same order.

    Sharding does not matter: tensors are matched by key, and need equal shape and type.

    Args:
        target: its tensors; aliases are left out by the caller.
        base: the base's tensors by key; empty without a base.
        renamed: key in the target -> key in the base, where they differ.
    """
    tensors = list(target)
    renamed = renamed or {}
    places = {
        (family(info), info.kind): number
        for number, info in enumerate(tensors)
        if info.dtype.name == "float32" and (info.kind is not Kind.OTHER or is_momentum(info))
    }
    pairs = []
    for info in tensors:
        key = renamed.get(info.key, info.key)
        held = base.get(key)
        fits = held is not None and (held.shape, held.dtype) == (info.shape, info.dtype)
        helpers = {}
        for kind in _HELPERS.get(info.kind, ()):
            number = places.get((family(info), kind))
            if number is not None and tensors[number].shape == info.shape:
                helpers[kind] = number
        pairs.append(DeltaPair(info, key if fits else None, helpers, family(info)))
    return pairs


def family(info: TensorInfo) -> tuple[str, str]:
    """Return what the tensors of one parameter have in common, and no others."""
    name = info.name.removesuffix(_BUFFER) if is_momentum(info) else info.name
    return ("" if info.component in _TRAINED else info.component, name)


def is_momentum(info: TensorInfo) -> bool:
    """Say whether a tensor is the momentum buffer of a parameter."""
    return info.component == "optimizer" and info.name.endswith(_BUFFER)
