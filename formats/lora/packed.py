"""Experts that a model holds as one parameter and its files as one module each.

transformers 5 packs them when it loads: `gate_up_proj` is, expert by expert, rows of `gate_proj`
and then those of `up_proj` (`qwen2_moe` in transformers/conversion_mapping.py). PEFT trains the
parameter (`target_parameters`); the base on disk has the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import TensorInfo

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Kinds of models that are packed so, by `model_type`.
_KINDS = frozenset(
    ("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe")
)


class ExpertRows(NamedTuple):
    """Where a tensor of the base lies in the parameter.

    Attributes:
        expert: its number.
        start, stop: rows of that expert's matrix.
    """

    expert: int
    start: int
    stop: int


class PackedExperts(NamedTuple):
    """A parameter that the base stores in parts.

    Attributes:
        shape: of the parameter.
        parts: the base's tensors, by name.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, ExpertRows]


def packed(name: str, held: Mapping[str, TensorInfo], kind: object) -> PackedExperts | None:
    """Return a parameter that is stored in parts; None where the base has no such parts.

    Args:
        name: of the parameter.
        held: the base's tensors.
        kind: its `model_type`.
    """
    module, _, last = name.rpartition(".")
    if kind not in _KINDS or last not in _PARTS or not module.endswith(".experts"):
        return None
    parts: dict[str, ExpertRows] = {}
    expert, shapes = 0, set()
    while f"{module}.{expert}.{_PARTS[last][0]}.weight" in held:
        row = 0
        for one in _PARTS[last]:
            info = held.get(f"{module}.{expert}.{one}.weight")
            if info is None or len(info.shape) != 2:
                return None
            shapes.add(info.shape)
            parts[info.name] = ExpertRows(expert, row, row + info.shape[0])
            row += info.shape[0]
        expert += 1
    inside = sum(other.startswith(f"{module}.") for other in held)
    if len(shapes) != 1 or inside % max(expert, 1):
        return None  # an expert is missing, or they differ
    rows, width = shapes.pop()
    return PackedExperts((expert, rows * len(_PARTS[last]), width), parts)
