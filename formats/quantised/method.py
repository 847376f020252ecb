"""Read which method of quantisation a folder records, in `config.json` or in a file of its own.

Before transformers kept it in `config.json`, each library wrote a file: AutoGPTQ
`quantize_config.json`, AutoAWQ `quant_config.json`, ModelOpt `hf_quant_config.json` to this day.
mlx-lm calls the object `quantization`, names no method in it, and adds modules of other settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from ftckpt.formats.huggingface.config import CONFIG, parsed_json
from ftckpt.storage.source import Source

from .schemes import (
    BNB_INT8,
    MXFP4_BLOCKS,
    MXFP4_PACKED,
    WORD_BITS,
    Scheme,
    awq_words,
    block_fp8,
    bnb_4bit,
    gptq_words,
    mlx_words,
    packed_fp4,
    packed_words,
    scaled,
)

MODELOPT = "hf_quant_config.json"
# Files of one library each, and the method that they mean where they do not name one.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_FIELDS = ("quantization_config", "compression_config")


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
    said = _recorded(config)
    if said is not None:
        return method_of(said)
    for file, method in OWN_FILES.items():
        if found := parsed_json(source, file):
            return method_of({"quant_method": method, **found})
    own = parsed_json(source, MODELOPT).get("quantization")
    return method_of({"quant_method": "modelopt", **own}) if isinstance(own, dict) else None


def _recorded(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a `config.json` says, of the model or of a part of it (`text_config`)."""
    for one in (config, *(part for part in config.values() if isinstance(part, dict))):
        for field in _FIELDS:
            said = one.get(field)
            if isinstance(said, dict) and said:
                return said
    own = config.get("quantization")
    return own if isinstance(own, dict) and _is_of_mlx(own) else None


def _is_of_mlx(said: Mapping[str, Any]) -> bool:
    return "quant_method" not in said and {"group_size", "bits"} <= said.keys()


def method_of(said: Mapping[str, Any]) -> QuantMethod:
    """Return the method that a `quantization_config` means."""
    name = str(said.get("quant_method") or ("mlx" if _is_of_mlx(said) else "not named"))
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


def _gptq(name: str, said: Mapping[str, Any]) -> QuantMethod:
    """GPTQ as AutoGPTQ and GPTQModel keep it; modules may have their own settings (`dynamic`)."""
    kind = str(said.get("checkpoint_format") or "gptq").lower()
    bits, group = said.get("bits"), said.get("group_size", -1)
    known = kind in ("gptq", "gptq_v2") and not said.get("is_marlin_format")
    if not known or bits not in WORD_BITS or not _is_group(group):
        return QuantMethod(f"{name} ({bits} bits, {kind})", ())
    group = max(group, 0)
    own = said.get("dynamic")
    others = [one for one in WORD_BITS if one != bits] if isinstance(own, dict) and own else []
    groups = {group, *_numbers_of(own, "group_size")}
    return QuantMethod(
        name,
        tuple(
            gptq_words(b, max(g, 0), plus_one=kind == "gptq")
            for b in (bits, *others)
            for g in sorted(groups, key=lambda one: one != group)
        ),
    )


def _awq(name: str, said: Mapping[str, Any]) -> QuantMethod:
    bits = said.get("bits", said.get("w_bit"))
    group = said.get("group_size", said.get("q_group_size", -1))
    kind = str(said.get("version") or said.get("checkpoint_format") or "gemm").lower()
    if bits != 4 or kind not in ("gemm", "awq") or not _is_group(group):
        return QuantMethod(f"{name} ({bits} bits, {kind})", ())
    return QuantMethod(name, (awq_words(max(group, 0)),))


def _mlx(name: str, said: Mapping[str, Any]) -> QuantMethod:
    """mlx: one setting for all, and one for each module that has its own."""
    own = [(one, module) for module, one in said.items() if isinstance(one, dict)]
    schemes: list[Scheme] = []
    for settings, module in [*own, (said, "")]:
        bits, group = settings.get("bits"), settings.get("group_size")
        mode = settings.get("mode") or said.get("mode") or "affine"
        if mode != "affine" or bits not in (2, 3, 4, 5, 6, 8) or not _is_group(group):
            return QuantMethod(f"{name} ({bits} bits, {mode})", ())
        schemes.append(mlx_words(bits, max(group, 0), module))
    return QuantMethod(name, tuple(schemes))


def _is_group(size: object) -> TypeGuard[int]:
    """Say whether it may be the size of a group; -1 stands for one group of all."""
    return type(size) is int and (size > 0 or size == -1)


def _numbers_of(settings: object, field: str) -> list[int]:
    """Return a field's numbers in settings by module."""
    if not isinstance(settings, dict):
        return []
    found = (one.get(field) for one in settings.values() if isinstance(one, dict))
    return [number for number in found if type(number) is int and _is_group(number)]


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
    "gptq": _gptq,
    "awq": _awq,
    "mlx": _mlx,
}
