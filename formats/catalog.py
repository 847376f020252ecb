"""The formats in the order in which they are asked: the first that recognises a place reads it.

`WRITERS` are those that can be written, one a name.
"""

from __future__ import annotations

from dataclasses import replace

from ftckpt.errors import UnsupportedError
from ftckpt.registry import Format
from ftckpt.rules import Rules
from ftckpt.transfer.layout import Writer

from .bundle import Bundle
from .dcp import Dcp
from .dcp_writer import DcpWriter
from .deepspeed import DeepSpeed
from .deepspeed_universal import DeepSpeedUniversal
from .deepspeed_universal_writer import DeepSpeedUniversalWriter
from .deepspeed_writer import DeepSpeedWriter
from .megatron import Megatron
from .megatron_dist import MegatronDist
from .megatron_dist_writer import MegatronDistWriter
from .megatron_writer import MegatronWriter
from .ranks import Ranks
from .ranks_writer import RanksWriter
from .recognised import RECOGNISED
from .safetensors import Safetensors
from .safetensors_writer import SafetensorsWriter
from .torchsave import TorchSave
from .torchsave_writer import TorchSaveWriter

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

WRITERS: tuple[Writer, ...] = (
    DcpWriter(),
    DeepSpeedUniversalWriter(),
    DeepSpeedWriter(),
    MegatronDistWriter(),
    MegatronWriter(),
    RanksWriter(),
    SafetensorsWriter(),
    TorchSaveWriter(),
)


def formats(rules: Rules | None) -> tuple[Format, ...]:
    """Return the formats in their order, with a user's table of how tensors are cut.

    Args:
        rules: asked before what a format knows itself; None for the formats as they are.
    """
    if rules is None:
        return FORMATS
    return tuple(
        replace(one, rules=rules) if isinstance(one, (Megatron, DeepSpeed)) else one
        for one in FORMATS
    )


def format_and_writer(name: str, rules: Rules | None = None) -> tuple[Format, Writer]:
    """Return a format and the writer that makes checkpoints of it.

    Args:
        name: of the format.
        rules: see `formats`.

    Raises:
        UnsupportedError: nothing here writes that format.
    """
    for writer in WRITERS:
        if writer.name == name:
            return next(one for one in formats(rules) if one.name == name), writer
    known = ", ".join(writer.name for writer in WRITERS)
    raise UnsupportedError(
        f"{name} checkpoints cannot be written", hint=f"ftckpt convert --to one of: {known}"
    )
