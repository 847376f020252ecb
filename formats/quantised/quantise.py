"""Show a model with its linear weights as codes and scales, computed when they are read.

Which tensors of a model are weights of linear layers, by the names that transformers gives them.

transformers quantises modules of the class `Linear`, and the experts. A file has no classes: a name
that is not known here is refused, never guessed. The output head, routers and the small projections
of linear attention stay, as in the releases of DeepSeek and Qwen; so does what sees and hears.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import xxhash

from ftckpt.checkpoint import Box, Kind, TensorInfo
from ftckpt.checkpoint.computed import ComputedCheckpoint, computed
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.sharding import name_pattern
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.config import CONFIG, DTYPE_FIELDS, read_config
from ftckpt.strict_json import decode
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .encoding import FP8_BLOCK, MX_BLOCK, Deviation, EncodedTensor, EncodedWeights

_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))
_LINEAR = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2"),
        *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    )
)
_OTHERS = frozenset(
    (
        *("embed_tokens", "wte", "wpe", "embed_in", "embed_positions", "word_embeddings"),
        *("lm_head", "embed_out", "score", "classifier", "eh_proj", "fc"),
        *("gate", "router", "shared_expert_gate"),
        *("in_proj_a", "in_proj_b", "in_proj_ba", "x_proj", "dt_proj", "weights_proj"),
    )
)  # fmt: skip
_APART = re.compile(
    r"(?:.*\.)?(visual|vision_tower|vision_model|vision_encoder|audio_tower|multi_modal_projector"
    r"|mm_projector|patch_embed|rotary_emb|.*norm.*)\..*"
)
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


class LinearWeights(NamedTuple):
    """What becomes codes.

    Attributes:
        quantised: names of weights.
        others: modules of matrices that stay as they are, in order.
    """

    quantised: Sequence[str]
    others: Sequence[str]


def choose(
    tensors: Iterable[TargetTensor],
    config: Mapping[str, Any],
    *,
    more: Sequence[str] = (),
    fewer: Sequence[str] = (),
) -> LinearWeights:
    """Return which weights of a model are quantised.

    Args:
        tensors: of the model.
        config: its `config.json`.
        more: patterns of weights or modules that are quantised whatever their names say.
        fewer: patterns of those that are not.

    Raises:
        UsageError: a pattern matches nothing, or a weight has a name that is not known.
        UnsupportedError: experts in one tensor are stored input first, or nothing says it.
    """
    weights = [one for one in tensors if _is_matrix(one)]
    wanted = _matched(weights, more, "--quantised")
    unwanted = _matched(weights, fewer, "--unquantised")
    if both := wanted & unwanted:
        raise UsageError(f"--quantised and --unquantised both match {listed(sorted(both))}")
    quantised, others, unknown = [], [], []
    for one in weights:
        name = one.name
        if name in unwanted:
            said: bool | None = False
        else:
            said = True if name in wanted else _is_linear(one)
        if said and name.endswith(EXPERTS):
            _require_output_first(one, config)
        if said is None:
            unknown.append(name)
        elif said:
            quantised.append(name)
        else:
            others.append(_module(name))
    if unknown:
        raise UsageError(
            f"whether {listed(unknown)} {'is a' if len(unknown) == 1 else 'are'} linear"
            f" layer{'' if len(unknown) == 1 else 's'} is not known by name",
            hint="--quantised NAME or --unquantised NAME says it; `*` stands for any text",
        )
    if not quantised:
        raise UsageError("no weight is that of a linear layer: there is nothing to quantise")
    return LinearWeights(quantised, others)


def _is_matrix(one: TargetTensor) -> bool:
    floats = one.kind is Kind.PARAM and one.dtype.name in _FLOATS
    named = one.name.endswith((".weight", *EXPERTS))
    return floats and named and len(one.shape) > 1 and 0 not in one.shape


def _is_linear(one: TargetTensor) -> bool | None:
    """Say whether a matrix is the weight of a linear layer; None where its name is not known."""
    if _APART.fullmatch(one.name):
        return False
    if one.name.endswith(EXPERTS):
        return len(one.shape) == 3 or None
    leaf = _module(one.name).rpartition(".")[2]
    if len(one.shape) != 2:  # a convolution
        return False
    return True if leaf in _LINEAR else (False if leaf in _OTHERS else None)


def _require_output_first(one: TargetTensor, config: Mapping[str, Any]) -> None:
    """Refuse experts that are not `[experts, out, in]`, as those of transformers in FP8 are."""
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    axis = 2 if one.name.endswith(EXPERTS[0]) else 1
    if len(one.shape) != 3 or one.shape[axis] != width or one.shape[3 - axis] == width:
        raise UnsupportedError(
            f"{one.name} is {list(one.shape)}, and hidden_size is {width}: whether it is stored"
            " output first is not known, and FP8 experts are",
            hint="--unquantised keeps it as it is",
            tensor=one.key,
        )


def _matched(weights: Sequence[TargetTensor], patterns: Sequence[str], flag: str) -> set[str]:
    found: set[str] = set()
    for text in patterns:
        pattern = name_pattern(text)
        names = {
            one.name
            for one in weights
            if pattern.fullmatch(one.name) or pattern.fullmatch(_module(one.name))
        }
        if not names:
            raise UsageError(
                f"{flag} {text} matches no matrix of the model",
                hint="`ftckpt inspect --tensors` lists the names",
            )
        found |= names
    return found


def _module(name: str) -> str:
    return name.removesuffix(".weight")


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
