"""What is resharded and converted: the data, our command line, and the other tools for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard_data import (
    SEVEN_BILLION,
    SMALL,
    Sizes,
    save_dcp_with_optimizer,
    save_hugging_face,
    save_megatron,
    save_zero,
)
from reshard_peers import (
    DCP_TO_TORCH_SAVE,
    DS_TO_UNIVERSAL,
    HUGGING_FACE_READER,
    PRETRAINED,
    ZERO_TO_FP32,
    Peer,
)

from ftckpt.transfer.layout import LayoutRequest


@dataclass(frozen=True)
class Case:
    """One thing to do.

    Attributes:
        title: of the table.
        make: writes the source of about so many bytes into a directory, and returns its path.
        words: of the command line, with {source} and {out}.
        to: the target's format.
        request: the same as `words`, for the call in this process.
        peers: other tools for it.
        maker: framework whose interpreter `make` needs, and gets.
    """

    title: str
    make: Callable[[Path, int, str], Path]
    words: Sequence[str]
    to: str
    request: LayoutRequest = field(default_factory=LayoutRequest)
    peers: Sequence[Peer] = ()
    maker: str = ""


def _megatron(tp: int, to: int, sizes: Sizes = SMALL, of: str = "") -> Case:
    return Case(
        f"Megatron with optimizer{of}, TP {tp} to {to}",
        lambda place, nbytes, _: save_megatron(place, nbytes, tp=tp, sizes=sizes),
        (*RESHARD, "--tp", str(to)), "megatron", LayoutRequest(tp=to),
    )  # fmt: skip


def _dcp(place: Path, nbytes: int, _: str) -> Path:
    return save_dcp_with_optimizer(place / "step-1", nbytes)


def _hugging_face(place: Path, nbytes: int, _: str) -> Path:
    return save_hugging_face(place / "model", nbytes)


def _zero2(place: Path, nbytes: int, python: str) -> Path:
    return save_zero(place / "zero", nbytes, ranks=4, stage=2, python=python)


RESHARD = ("reshard", "{source}", "{out}")
CONVERT = ("convert", "{source}", "{out}", "--to")
CASES = {
    "tp8-tp4": _megatron(8, 4),
    "tp4-tp8": _megatron(4, 8),
    "tp8-tp1": _megatron(8, 1),
    "tp8-tp4-7b": _megatron(8, 4, SEVEN_BILLION, ", tensors of a 7B model"),
    "tp4-tp8-7b": _megatron(4, 8, SEVEN_BILLION, ", tensors of a 7B model"),
    "tp8-tp1-7b": _megatron(8, 1, SEVEN_BILLION, ", tensors of a 7B model"),
    "dcp-safetensors": Case(
        "DCP with optimizer to safetensors",
        _dcp, (*CONVERT, "safetensors"), "safetensors", peers=[DCP_TO_TORCH_SAVE],
    ),
    "hf-shards": Case(
        "Hugging Face shards of another size",
        _hugging_face, (*RESHARD, "--max-shard-size", "500MB"), "safetensors",
        LayoutRequest(max_shard_size=500_000_000), [PRETRAINED],
    ),
    "hf-dcp": Case(
        "Hugging Face folder to DCP",
        _hugging_face, (*CONVERT, "dcp"), "dcp", peers=[HUGGING_FACE_READER],
    ),
    "zero2-dp4-dp2": Case(
        "DeepSpeed ZeRO-2, dp 4 to 2",
        _zero2, (*RESHARD, "--dp", "2"), "deepspeed", LayoutRequest(dp=2), maker="deepspeed",
    ),
    "zero2-safetensors": Case(
        "DeepSpeed ZeRO-2 with optimizer to safetensors",
        _zero2, (*CONVERT, "safetensors"), "safetensors", peers=[ZERO_TO_FP32], maker="deepspeed",
    ),
    "zero2-universal": Case(
        "DeepSpeed ZeRO-2 to universal",
        _zero2, (*CONVERT, "deepspeed-universal"), "deepspeed-universal",
        peers=[DS_TO_UNIVERSAL], maker="deepspeed",
    ),
}  # fmt: skip
