"""Read which method of quantisation a folder records: `config.json`, `hf_quant_config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.formats.huggingface.config import CONFIG, parsed_json
from ftckpt.storage.source import Source

from .schemes import (
    BNB_INT8,
    MXFP4_BLOCKS,
    MXFP4_PACKED,
    Scheme,
    block_fp8,
    bnb_4bit,
    in_words,
    packed_fp4,
    packed_words,
    scaled,
)

MODELOPT = "hf_quant_config.json"


class QuantMethod(NamedTuple):
    """What a folder says of its weights.

    Attributes:
        name: as it is recorded (`fp8`, `compressed-tensors`).
        schemes: the ways in which weights may be stored; none where the method is not known.
        symmetric: whether no zero points are meant.
    """

    name: str
    schemes: tuple[Scheme, ...]
    symmetric: bool = True


def read_method(source: Source) -> QuantMethod | None:
    """Return the method that a folder records; None where it records none.

    Raises:
        CorruptError, UnsafeError: a configuration file is damaged or hostile.
    """
    config = parsed_json(source, CONFIG)
    said = config.get("quantization_config") or config.get("compression_config")
    if said is None and isinstance(text := config.get("text_config"), dict):
        said = text.get("quantization_config")
    if isinstance(said, dict):
        return method_of(said)
    own = parsed_json(source, MODELOPT).get("quantization")
    return method_of({"quant_method": "modelopt", **own}) if isinstance(own, dict) else None


def method_of(said: Mapping[str, Any]) -> QuantMethod:
    """Return the method that a `quantization_config` means."""
    name = str(said.get("quant_method") or "not named")
    known = _KNOWN.get(name)
    return QuantMethod(name, ()) if known is None else known(name, said)


def _fp8(name: str, said: Mapping[str, Any]) -> QuantMethod:
    exponents = said.get("scale_fmt") == "ue8m0"
    grid = _pair(said.get("weight_block_size"))
    return QuantMethod(name, block_fp8(grid or (0, 0), exponents=exponents))


def _compressed(name: str, said: Mapping[str, Any]) -> QuantMethod:
    schemes: dict[Scheme, None] = {}
    groups = said.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict):
                kind = str(group.get("format") or said.get("format") or "")
                scheme = _of_group(kind, weights)
                if scheme is None:
                    return QuantMethod(f"{name} ({kind or 'no format'})", ())
                schemes[scheme] = None
    symmetric = all(
        group.get("weights", {}).get("symmetric", True)
        for group in (groups or {}).values()
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    )
    return QuantMethod(name, tuple(schemes), symmetric=symmetric)


def _of_group(kind: str, weights: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a group of compressed-tensors."""
    bits = weights.get("num_bits")
    if kind == "nvfp4-pack-quantized":
        return packed_fp4(".weight_packed", ".weight_global_scale")
    if kind == "mxfp4-pack-quantized":
        return MXFP4_PACKED
    if kind == "mxfp8-quantized":
        return scaled("MXFP8", (1, 32), exponents=True)
    if kind == "pack-quantized" and bits in (2, 4, 8):
        return packed_words(int(bits))
    if kind not in ("float-quantized", "int-quantized", "naive-quantized") or bits != 8:
        return None
    integers = weights.get("type") == "int"
    grid = _grid_of(weights)
    if grid is None:
        return None
    return scaled("int8" if integers else "FP8", grid, integers=integers)


def _grid_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "tensor":
        return (0, 0)
    if strategy == "channel":
        return (1, 0)
    if strategy == "group" and isinstance(size, int) and size > 0:
        return (1, size)
    return _pair(weights.get("block_structure")) if strategy == "block" else None


def _modelopt(name: str, said: Mapping[str, Any]) -> QuantMethod:
    algorithm = str(said.get("quant_algo") or "")
    fp8 = scaled("FP8", (0, 0))
    fp4 = packed_fp4(".weight", ".weight_scale_2")
    table: dict[str, tuple[Scheme, ...]] = {
        "FP8": (fp8,),
        "FP8_PER_CHANNEL_PER_TOKEN": (scaled("FP8", (1, 0)),),
        "NVFP4": (fp4,),
        "MIXED_PRECISION": (fp8, fp4),
    }
    schemes = table.get(algorithm, ())
    return QuantMethod(name if schemes else f"{name} ({algorithm or 'no quant_algo'})", schemes)


def _bitsandbytes(name: str, said: Mapping[str, Any]) -> QuantMethod:
    if said.get("load_in_8bit") or said.get("_load_in_8bit"):
        return QuantMethod(name, (BNB_INT8,))
    kind = said.get("bnb_4bit_quant_type", "fp4")
    return QuantMethod(name, (bnb_4bit(kind),) if kind in ("nf4", "fp4") else ())


def _words(name: str, said: Mapping[str, Any]) -> QuantMethod:
    bits = said.get("bits", said.get("w_bit"))
    gemm = name == "gptq" or str(said.get("version", "gemm")).lower() == "gemm"
    if bits not in (2, 4, 8) or not gemm:
        return QuantMethod(f"{name} ({bits} bits, {said.get('version', 'no version')})", ())
    return QuantMethod(name, (in_words(name.upper(), bits),))


def _pair(value: object) -> tuple[int, int] | None:
    """Return two sizes from a list; None where it is anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None
    rows, columns = value
    good = all(type(one) is int and one > 0 for one in value)
    return (rows, columns) if good else None


_KNOWN = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda name, said: QuantMethod(name, (MXFP4_BLOCKS,)),
    "bitsandbytes": _bitsandbytes,
    "gptq": _words,
    "awq": _words,
}
