"""The writers, one a format that can be written.

Apart from the catalog of those that read: every verb imports that, and few write.
"""

from __future__ import annotations

from ftckpt.errors import UnsupportedError
from ftckpt.registry import Format
from ftckpt.rules import Rules
from ftckpt.transfer.layout import Writer

from .catalog import formats
from .dcp_writer import DcpWriter
from .deepspeed_universal_writer import DeepSpeedUniversalWriter
from .deepspeed_writer import DeepSpeedWriter
from .megatron_dist_writer import MegatronDistWriter
from .megatron_writer import MegatronWriter
from .ranks_writer import RanksWriter
from .safetensors_writer import SafetensorsWriter
from .torchsave_writer import TorchSaveWriter

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


def format_and_writer(name: str, rules: Rules | None = None) -> tuple[Format, Writer]:
    """Return a format and the writer that makes checkpoints of it.

    Args:
        name: of the format.
        rules: see `catalog.formats`.

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
