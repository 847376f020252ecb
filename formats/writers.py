"""The writers, one a format that can be written, and one more where a name asks for one file.

Apart from the catalog of those that read: every verb imports that, and few write. Each writer is
imported when it is asked for: a transfer needs one of them, and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint.sharding import Rules
from ftckpt.discovery.recognise import Format
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.storage.suggestions import hint_for_name
from ftckpt.transfer.layout import Writer

from .catalog import formats
from .support import WRITTEN


def _dcp() -> Writer:
    from ftckpt.formats.dcp.writer import DcpWriter

    return DcpWriter()


def _deepspeed_universal() -> Writer:
    from ftckpt.formats.deepspeed.universal.writer import DeepSpeedUniversalWriter

    return DeepSpeedUniversalWriter()


def _deepspeed() -> Writer:
    from ftckpt.formats.deepspeed.writer import DeepSpeedWriter

    return DeepSpeedWriter()


def _megatron_dist() -> Writer:
    from ftckpt.formats.megatron.torch_dist.writer import MegatronDistWriter

    return MegatronDistWriter()


def _megatron_fsdp() -> Writer:
    from ftckpt.formats.megatron.fsdp.writer import MegatronFsdpWriter

    return MegatronFsdpWriter()


def _megatron() -> Writer:
    from ftckpt.formats.megatron.writer import MegatronWriter

    return MegatronWriter()


def _orbax() -> Writer:
    from ftckpt.formats.orbax.writer import OrbaxWriter

    return OrbaxWriter()


def _ranks() -> Writer:
    from ftckpt.formats.ranks.writer import RanksWriter

    return RanksWriter()


def _safetensors() -> Writer:
    from ftckpt.formats.safetensors.writer import SafetensorsWriter

    return SafetensorsWriter()


def _torch_checkpointing() -> Writer:
    from ftckpt.formats.torch_checkpointing.writer import TorchCheckpointingWriter

    return TorchCheckpointingWriter()


def _torchsave() -> Writer:
    from ftckpt.formats.torchsave.writer import TorchSaveWriter

    return TorchSaveWriter()


def _safetensors_file() -> Writer:
    from ftckpt.formats.safetensors.layout import SafetensorsFileWriter

    return SafetensorsFileWriter()


# By the name of the format.
WRITERS: Mapping[str, Callable[[], Writer]] = {
    "dcp": _dcp,
    "deepspeed-universal": _deepspeed_universal,
    "deepspeed": _deepspeed,
    "megatron-dist": _megatron_dist,
    "megatron-fsdp": _megatron_fsdp,
    "megatron": _megatron,
    "orbax": _orbax,
    "ranks": _ranks,
    "safetensors": _safetensors,
    "torch-checkpointing": _torch_checkpointing,
    "torchsave": _torchsave,
}


class FileWriter(NamedTuple):
    """The writer of results that are one file.

    Attributes:
        format: its name.
        make: returns the writer.
    """

    format: str
    make: Callable[[], Writer]


# By how the destination's name ends; these go before those of the same format that take any name.
FILE_WRITERS: Mapping[str, FileWriter] = {
    ".safetensors": FileWriter("safetensors", _safetensors_file)
}


# What people call the formats elsewhere, by the name that is used here.
CALLED = {
    "safetensors": ("hf", "huggingface", "hugging-face", "transformers"),
    "torchsave": ("pt", "pth", "bin", "torch", "pytorch", "torch-save", "torch.save"),
    "dcp": ("torch-dcp", "distributed", "torchtitan", "fsdp", "fsdp2"),
    "megatron-dist": ("torch-dist", "mcore", "nemo", "megatron-bridge"),
    "megatron-fsdp": ("fsdp-dtensor",),
    "megatron": ("megatron-lm", "legacy"),
    "deepspeed": ("zero", "ds"),
    "deepspeed-universal": ("universal", "ucp"),
    "orbax": ("jax", "flax", "maxtext"),
}


def _near(name: str) -> str:
    """Return a hint at the format that somebody means by another name; "" if it is unknown."""
    asked = name.lower().replace("_", "-")
    meant = next((own for own, others in CALLED.items() if asked in others), None)
    return f"did you mean {meant}" if meant else hint_for_name(name, WRITTEN).rstrip("?")


def _reader(name: str, known: Sequence[Format]) -> Format:
    """Return what reads the results of a format's writer."""
    own = next(one for one in known if one.name == name)
    if name != "safetensors":
        return own
    from ftckpt.formats.trainer_dirs.weight_folders import FoldersReader

    return FoldersReader(own, next(one for one in known if one.name == "bundle"))


def format_and_writer(
    name: str, rules: Rules | None = None, destination: str = ""
) -> tuple[Format, Writer]:
    """Return a format and the writer that makes checkpoints of it.

    Args:
        name: of the format.
        rules: see `catalog.formats`.
        destination: path or URL of the result: its name may ask for one file.

    Raises:
        UsageError: the name asks for a file of another format, or no such format exists.
        UnsupportedError: the format is known, and nothing here writes it.
    """
    make = WRITERS.get(name)
    for ending, one in FILE_WRITERS.items():
        if not destination.endswith(ending):
            continue
        if one.format != name:
            raise UsageError(
                f"{destination} is a name of {one.format}, and {name} is what would be written",
                hint=f"another name, or --to {one.format}",
            )
        make = one.make
    if make is not None:
        return _reader(name, formats(rules)), make()
    hint = f"--to takes one of {', '.join(WRITTEN)}"
    if any(one.name == name for one in formats(rules)):
        raise UnsupportedError(f"{name} checkpoints are not written", hint=hint)
    near = _near(name)
    raise UsageError(f"{name!r} is not a format", hint=f"{near}? {hint}" if near else hint)
