"""The writers, one a format that can be written, and one more where a name asks for one file.

Apart from the catalog of those that read: every verb imports that, and few write.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.nearby import hint_for_name
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
from .safetensors_file_writer import SafetensorsFileWriter
from .safetensors_writer import SafetensorsWriter
from .support import WRITTEN
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
# By how the destination's name ends; these go before those of the same format that take any name.
FILE_WRITERS: Mapping[str, Writer] = {".safetensors": SafetensorsFileWriter()}


def format_and_writer(
    name: str, rules: Rules | None = None, destination: str = ""
) -> tuple[Format, Writer]:
    """Return a format and the writer that makes checkpoints of it.

    Args:
        name: of the format.
        rules: see `catalog.formats`.
        destination: path or URL of the result: its name may ask for one file.

    Raises:
        UsageError: the name asks for a file of another format, or there is no such format.
        UnsupportedError: the format is known, and nothing here writes it.
    """
    asked = [one for ending, one in FILE_WRITERS.items() if destination.endswith(ending)]
    for one in asked:
        if one.name != name:
            raise UsageError(
                f"{destination} is a name of {one.name}, and {name} is what would be written",
                hint=f"another name, or --to {one.name}",
            )
    for writer in (*asked, *WRITERS):
        if writer.name == name:
            return next(one for one in formats(rules) if one.name == name), writer
    hint = f"--to takes one of {', '.join(WRITTEN)}"
    if any(one.name == name for one in formats(rules)):
        raise UnsupportedError(f"{name} checkpoints are not written", hint=hint)
    near = hint_for_name(name, WRITTEN)
    raise UsageError(f"{name!r} is no format", hint=f"{near.rstrip('?')}? {hint}" if near else hint)
