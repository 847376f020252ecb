"""Find the parameter that a tensor belongs to; renaming one renames its optimizer state.

Weights, masters and moments carry the parameter's name itself. Other optimizer state carries it
and a word more (`layers.0.weight.step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ftckpt.checkpoint import Kind
from ftckpt.transfer.content import TargetTensor


def parameter_names(tensors: Iterable[TargetTensor]) -> frozenset[str]:
    """Return the names of the parameters and buffers that `tensors` are of."""
    return frozenset(wanted.name for wanted in tensors if wanted.kind is not Kind.OTHER)


def parted(wanted: TargetTensor, parameters: Set[str]) -> tuple[str, str]:
    """Return the name of the parameter that a tensor is of, and what follows it.

    The longest parameter's name that the tensor's own begins with, at a dot; where there is none,
    the tensor stands for itself.
    """
    head, rest = wanted.name, ""
    while wanted.kind is Kind.OTHER and head not in parameters:
        shorter, dot, word = head.rpartition(".")
        if not dot:
            return wanted.name, ""
        head, rest = shorter, f".{word}{rest}"
    return head, rest
