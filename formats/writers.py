"""The writers, one a format that can be written, and one more where a name asks for one file.

Apart from the catalog of those that read: every verb imports that, and few write.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.checkpoint.rules import Rules
from ftckpt.discovery.recognise import Format
from ftckpt.discovery.suggestions import hint_for_name
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.dcp.writer import DcpWriter
from ftckpt.formats.deepspeed.universal.writer import DeepSpeedUniversalWriter
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.formats.megatron.torch_dist.writer import MegatronDistWriter
from ftckpt.formats.megatron.writer import MegatronWriter
from ftckpt.formats.ranks.writer import RanksWriter
from ftckpt.formats.safetensors.one_file_writer import SafetensorsFileWriter
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.torchsave.writer import TorchSaveWriter
from ftckpt.transfer.layout import Writer

from .catalog import formats
from .support import WRITTEN

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
