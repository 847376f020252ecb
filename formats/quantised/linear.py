"""Which tensors of a model are weights of linear layers, by the names that transformers gives them.

transformers quantises modules of the class `Linear`, and the experts. A file has no classes: a name
that is not known here is refused, never guessed. The output head, routers and the small projections
of linear attention stay, as in the releases of DeepSeek and Qwen; so does what sees and hears.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.rules import name_pattern
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.transfer.content import TargetTensor

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
