"""The formats in the order in which they are asked: the first that recognises a place reads it."""

from __future__ import annotations

from dataclasses import replace

from ftckpt.registry import Format
from ftckpt.rules import Rules

from .bundle import Bundle
from .dcp import Dcp
from .deepspeed import DeepSpeed
from .deepspeed_universal import DeepSpeedUniversal
from .megatron import Megatron
from .megatron_dist import MegatronDist
from .ranks import Ranks
from .recognised import RECOGNISED
from .safetensors import Safetensors
from .torchsave import TorchSave

# What is known by name and refused comes last, so that it never hides what can be read.
# A directory of several parts comes before the formats that would read one part of it.
_PARTS: tuple[Format, ...] = (Dcp(), Safetensors(), TorchSave())
FORMATS: tuple[Format, ...] = (
    MegatronDist(),  # a DCP store too
    Dcp(),
    Bundle(_PARTS),
    Safetensors(),
    Ranks(),
    Megatron(),
    DeepSpeedUniversal(),
    DeepSpeed(),
    TorchSave(),
    *RECOGNISED,
)


def formats(rules: Rules | None) -> tuple[Format, ...]:
    """Return the formats in their order, with a user's table of how tensors are cut.

    Args:
        rules: asked before what a format knows itself; None for the formats as they are.
    """
    if rules is None:
        return FORMATS
    return tuple(
        replace(one, rules=rules)
        if isinstance(one, (Megatron, DeepSpeed, DeepSpeedUniversal))
        else one
        for one in FORMATS
    )
