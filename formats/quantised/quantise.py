"""Show a model with its linear weights as codes and scales, computed when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import xxhash

from ftckpt.checkpoint import Box, Kind, TensorInfo
from ftckpt.checkpoint.computed import ComputedCheckpoint, computed
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.config import CONFIG, DTYPE_FIELDS, read_config
from ftckpt.strict_json import decode
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .encoded import Deviation, EncodedTensor, EncodedWeights
from .encoding import FP8_BLOCK, MX_BLOCK
from .linear import EXPERTS, choose

# As flags spell them.
SCHEMES = ("fp8-block", "mxfp4")
_WIDE = 16  # bits of a type that matrices beside the quantised ones keep
_GPT_OSS = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


class Quantised(NamedTuple):
    """A model with its linear weights quantised.

    Attributes:
        content: what is written.
        names: of the weights that are quantised.
        others: modules of matrices that stay.
        weights: computes them.
    """

    content: Content
    names: Sequence[str]
    others: Sequence[str]
    weights: EncodedWeights

    @property
    def deviation(self) -> Deviation:
        """How far the weights that were computed so far are from what they were."""
        return self.weights.deviation


def require_folder(to: str, destination: str) -> None:
    """Refuse a target that cannot say how its weights are quantised.

    Args:
        to: name of the target format.
        destination: where it goes.

    Raises:
        UsageError: it is another format, or one file.
    """
    if to not in ("", "safetensors") or destination.endswith(".safetensors"):
        raise UsageError(
            "quantised weights are written to a folder of safetensors, whose config.json says how",
            hint="--to safetensors, and DST is a folder",
        )


def quantise(
    content: Content, scheme: str, *, more: Sequence[str] = (), fewer: Sequence[str] = ()
) -> Quantised:
    """Return a model with its linear weights, or GPT-OSS's experts, as codes and scales.

    What is not quantised keeps its type, but for matrices of more than 16 bits, which become
    bfloat16.

    Args:
        content: a model's weights alone, under the names and with the `config.json` of Hugging
            Face.
        scheme: one of `SCHEMES`.
        more: see `choose`.
        fewer: see `choose`.

    Raises:
        UsageError: it holds more than a model, no `config.json`, or names that are not known.
        UnsupportedError: the model is none that the scheme is for.
        NoResourceError: a line of blocks needs more memory than is allowed.
    """
    if scheme not in SCHEMES:
        raise UsageError(f"{scheme} is not a way to quantise: {listed(SCHEMES)} are")
    components = sorted({w.component for w in content.tensors.values()} - {"model"})
    if components or content.objects:
        raise UsageError(
            f"weights alone are quantised, and there is {listed([*components, *content.objects])}",
            hint="--only model",
        )
    config = _config(content)
    if not config:
        raise UsageError(
            f"{content.checkpoint.source.url} has no {CONFIG}, which is to say how weights are"
            " quantised",
            hint="--beside DIR takes it from the folder of the model",
        )
    if scheme == "mxfp4":
        names, others = _experts(content, config, (*more, *fewer)), list(_GPT_OSS)
    else:
        chosen = choose(content.tensors.values(), config, more=more, fewer=fewer)
        # The head is a layer of the model even where it is the embedding and stands in no file.
        others = sorted({*chosen.others, "lm_head"}, key=_order)
        names = list(chosen.quantised)
    return _quantised(content, scheme, names, others, config)


def _quantised(
    content: Content,
    scheme: str,
    names: Sequence[str],
    others: Sequence[str],
    config: Mapping[str, Any],
) -> Quantised:
    base, wanted = content.checkpoint, set(names)
    if shared := wanted & {*content.aliases, *content.aliases.values()}:
        raise UnsupportedError(
            f"{listed(sorted(shared))} shares its values with another weight: such a weight is not"
            " quantised by this version",
            hint="--unquantised keeps it as it is",
        )
    made: dict[str, TensorInfo] = {}
    made_of: dict[str, Sequence[str]] = {}
    targets: dict[str, EncodedTensor] = {}
    tensors: list[TargetTensor] = []
    for one in content.tensors.values():
        if one.name not in wanted:
            wide = one.kind is Kind.PARAM and one.dtype.family == "float" and len(one.shape) > 1
            if wide and one.dtype.bits > _WIDE:
                one = one._replace(dtype=DTYPES["bfloat16"])
            tensors.append(one)
            continue
        # Its key says what it is made of: an interrupted run is not to go on with another.
        mark = xxhash.xxh3_64_hexdigest(repr((scheme, one)).encode())
        fills = content.whole(one.key).fills
        for role, info in _stored(scheme, one):
            held = info._replace(name=f"{mark} {info.name}")
            made[held.key] = held
            made_of[held.key] = sorted({copy.key for copy in one.copies})
            targets[held.key] = EncodedTensor(one, role, mark, fills)
            box = Box.whole(info.shape)
            copy = Copy(box, held.key, box)
            tensors.append(
                TargetTensor("model", info.name, info.kind, info.shape, info.dtype, (copy,))
            )
    taken = {copy.key for one in tensors for copy in one.copies}
    shown = {key: info for key, info in base.tensors.items() if key in taken} | made
    weights = EncodedWeights(content, targets, packed=scheme == "mxfp4")
    said = _configured(config, scheme, others)
    beside = dict(base.replaced) if isinstance(base, ComputedCheckpoint) else {}
    checkpoint = computed(base, shown, made_of, weights.fill, beside)
    content = replace(
        content.with_tensors(tensors),
        checkpoint=checkpoint,
        beside={**content.beside, CONFIG: said},
    )
    return Quantised(content, names, others, weights)


def _stored(scheme: str, one: TargetTensor) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors that a weight becomes."""
    if scheme == "mxfp4":
        lead, inside, outside = one.shape
        byte, shape = DTYPES["uint8"], (lead, outside, inside // MX_BLOCK)
        codes = TensorInfo(
            "model", f"{one.name}_blocks", Kind.PARAM, (*shape, MX_BLOCK // 2), byte, ()
        )
        yield "codes", codes
        yield "scales", TensorInfo("model", f"{one.name}_scales", Kind.SCALE, shape, byte, ())
        return
    codes = TensorInfo("model", one.name, Kind.PARAM, one.shape, DTYPES["float8_e4m3fn"], ())
    yield "codes", codes
    counts = [-(-size // FP8_BLOCK) for size in one.shape[-2:]]
    yield "scales", TensorInfo(
        "model", f"{one.name}_scale_inv", Kind.SCALE, (*one.shape[:-2], *counts),
        DTYPES["float32"], (),
    )  # fmt: skip


def _experts(content: Content, config: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """Return the names of GPT-OSS's experts, which alone it has in MXFP4."""
    if config.get("model_type") != "gpt_oss":
        raise UnsupportedError(
            f"MXFP4 with blocks and scales is GPT-OSS's, and this is {config.get('model_type')}",
            hint="fp8-block is for other models",
        )
    if flags:
        raise UsageError("of GPT-OSS the experts are quantised, and nothing else can be")
    found = [one for one in content.tensors.values() if one.name.endswith(EXPERTS)]
    for one in found:
        width = config.get("hidden_size")
        axis = 1 if one.name.endswith(EXPERTS[0]) else 2
        if len(one.shape) != 3 or one.shape[axis] != width or one.shape[1] % MX_BLOCK:
            raise UnsupportedError(
                f"{one.name} is {list(one.shape)}: experts of GPT-OSS are stored input first, of a"
                f" multiple of {MX_BLOCK}, and hidden_size is {width}",
                tensor=one.key,
            )
        if one.dtype.family != "float" or one.dtype.bits < _WIDE:
            raise UnsupportedError(f"{one.name} is {one.dtype.name}", tensor=one.key)
    if not found:
        raise UsageError(f"{content.checkpoint.source.url} holds no experts of GPT-OSS")
    return [one.name for one in found]


def _config(content: Content) -> dict[str, Any]:
    """Return the `config.json` that goes with a content."""
    base = content.checkpoint
    beside = dict(base.replaced) if isinstance(base, ComputedCheckpoint) else {}
    beside |= content.beside
    if CONFIG in beside:
        found = decode(beside[CONFIG])
        return found if isinstance(found, dict) else {}
    return read_config(base)


def _configured(config: Mapping[str, Any], scheme: str, others: Sequence[str]) -> bytes:
    """Return a `config.json` that says how the weights are quantised."""
    made = {**config}
    made |= {f: "bfloat16" for f in DTYPE_FIELDS if made.get(f) in ("float32", "float64")}
    said: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": list(others)}
    if scheme == "fp8-block":
        said |= {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    made["quantization_config"] = said
    return json.dumps(made, indent=2, sort_keys=True).encode() + b"\n"


def _order(name: str) -> list[tuple[int, str]]:
    """Return what sorts names with their numbers as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
