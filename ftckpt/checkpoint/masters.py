"""Find the masters that stand for weights which are not stored, as ZeRO 3 leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .optimizer_states import is_numbered
from .pieces import Kind


class DescribedTensor(Protocol):
    """A tensor that says of what it is."""

    @property
    def component(self) -> str:
        """As `TensorInfo` has it."""

    @property
    def name(self) -> str:
        """As `TensorInfo` has it."""

    @property
    def kind(self) -> Kind:
        """As `TensorInfo` has it."""


def masters_alone(tensors: Mapping[str, DescribedTensor], aliases: Mapping[str, str]) -> list[str]:
    """Return the keys of masters of parameters whose weights are not among the tensors.

    Masters that a state has by numbers name no parameter, and are left out.

    Args:
        tensors: by key.
        aliases: key -> key of the tensor that owns the same bytes (tied weights).
    """
    masters = {key: one.name for key, one in tensors.items() if one.kind is Kind.MASTER}
    if not masters:
        return []
    weights = {one.name for one in tensors.values() if one.component == "model"}
    # Of tied weights one may be stored, and the masters of both.
    for key, owner in aliases.items():
        names = {tensors[one].name for one in (key, owner) if one in tensors}
        if names & weights:
            weights |= names
    return [key for key, name in masters.items() if name not in weights and not is_numbered(name)]
