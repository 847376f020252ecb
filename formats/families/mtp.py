"""Layers behind the others that predict further tokens: multi-token prediction.

    [mtp]
    count = "num_nextn_predict_layers"     # the field of config.json that says how many
    copies = {"shared_head.head.weight" = "lm_head.weight"}   # stored again in each such layer
    layers = "mtp.layers."                 # files begin their names so, and number them from 0
    names = {"mtp.fc.weight" = "eh_proj.weight"}   # what files call otherwise, {layer} a number
    swapped = true                         # files put the hidden state first in eh_proj's input
    kind = "full_attention"                # of these layers, in `layer_types`

Hugging Face's files number them on behind `num_hidden_layers`, or have a name for them (`layers`).
Megatron-core has `mtp.layers.0`, whose own layer is `transformer_layer` (`mtp_model_layer` in
memory of newer ones), torchtitan `mtp_layers.0`. All put the embedding before the hidden state in
`eh_proj`'s input, so that its columns stay; MiMo's files alone have it behind (`swapped`). A layer
is translated as layer number `num_hidden_layers` of a longer model. What stands in it a second time
is written and read as a copy: it must be equal.

Sources: multi_token_prediction.py of Megatron-core; `glm45_bridge`, `qwen3_next_bridge` and
`mimo_bridge` of Megatron-Bridge; mtp.py and `state_dict_adapter` of torchtitan's deepseek_v3;
model.safetensors.index.json of DeepSeek-V3.

`config.json` of a Hugging Face model, from the arguments of Megatron.

Source of the fields: `CONFIG_MAPPING` in Megatron-Bridge, and transformers' configuration classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ftckpt.checkpoint import Box, Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import CONFIG, weights_dtype
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

from .facts import ModelFacts, equal
from .shapes import Name, renamed
from .tables import Family

_HF = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
# Whose layers they are, and what such a layer is called as one of the others.
_OTHERS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "megatron": (
        re.compile(  # Qwen's files begin their names so, too
            r"mtp\.layers\.(\d{1,6})\.((?:transformer_layer|mtp_model_layer|enorm|hnorm|eh_proj"
            r"|final_layernorm)\..+)"
        ),
        "decoder.layers.",
    ),
    "torchtitan": (re.compile(r"mtp_layers\.(\d{1,6})\.(.+)"), "layers."),
}
_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")
# What stands beside the layer in Megatron-core's.
_BESIDE = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")

_name = cache(Name.of)

Translate = Callable[[Content, Mapping[str, Any]], Content]


def layout_of_mtp(content: Content, table: Family, config: Mapping[str, Any]) -> str:
    """Return whose names the layers have: `hf`, or a key of `_OTHERS`; "" where there are none.

    Args:
        content: of the whole model.
        table: of its family.
        config: of the whole model.
    """
    if not table.mtp:
        return ""
    names = parameter_names(content.tensors.values())
    for layout, (pattern, _) in _OTHERS.items():
        if any(pattern.fullmatch(name) for name in names):
            return layout
    first = config.get("num_hidden_layers")
    if type(first) is not int:
        return ""
    if any(_own_number(name, table) is not None for name in names):
        return "hf"
    numbers = {int(match[1]) for name in names if (match := _HF.fullmatch(name)) is not None}
    return "hf" if any(number >= first for number in numbers) else ""


def to_hugging_face_mtp(
    content: Content, table: Family, config: Mapping[str, Any], layout: str, translate: Translate
) -> Content:
    """Return a model with such layers under the names of Hugging Face's files.

    Args:
        content: of the whole model.
        table: of its family.
        config: of the whole model.
        layout: as `layout_of_mtp` returns it.
        translate: a model of so much more layers, by its `config.json`.

    Raises:
        UnsupportedError, UsageError: as of a translation, or another number of layers than the
            configuration says.
    """
    if layout == "hf":
        content = _numbered_on(content, table, config)
    longer = _longer(content, table, config, layout)
    first = config["num_hidden_layers"]
    if layout == "hf":
        rest, copies = _without_copies(content, table, first)
        made = translate(rest, longer)
        return _own_names(made.with_tensors([*made.tensors.values(), *copies]), table, first)
    made = translate(renamed(content, lambda name: _counted_on(name, layout, first)), longer)
    found = {w.name: w for w in made.tensors.values() if _is_weight(w)}
    again = []
    for number in range(first, longer["num_hidden_layers"]):
        for name, source in table.mtp["copies"].items():
            whole = found.get(source) or found.get("model.embed_tokens.weight")
            if whole is not None:
                again.append(whole._replace(name=f"model.layers.{number}.{name}"))
    return _own_names(made.with_tensors([*made.tensors.values(), *again]), table, first)


def from_hugging_face_mtp(
    content: Content, table: Family, config: Mapping[str, Any], layout: str, translate: Translate
) -> Content:
    """Return a model with such layers under the names of another layout.

    Args:
        content: under Hugging Face's names.
        table: of its family.
        config: of the whole model.
        layout: `megatron`, or a dialect of native rows.
        translate: a model of so much more layers, by its `config.json`.

    Raises:
        UnsupportedError, UsageError: as of a translation; a layout without such layers; a copy of
            the embedding or the output layer that differs from it.
    """
    content = _numbered_on(content, table, config)
    longer = _longer(content, table, config, "hf")
    first = config["num_hidden_layers"]
    if layout not in _OTHERS:
        raise UnsupportedError(
            f"{layout}'s {table.name} has no layers that predict further tokens, which this model"
            f" has behind layer {first - 1}",
            hint=" ".join(
                f"--drop '{one}'" for one in _places(table, first, longer["num_hidden_layers"])
            )
            + " leaves them out",
            kind="unknown-rule",
        )
    rest, copies = _without_copies(content, table, first)
    _require_equal(content, table, copies)
    made = translate(rest, longer)
    made = renamed(made, lambda name: _counted_apart(name, layout, first))
    if not copies:
        return made
    said = f"equal to the embedding and the output layer: {listed([c.name for c in copies], 3)}"
    return replace(made, dropped=(*made.dropped, said))


def _longer(
    content: Content, table: Family, config: Mapping[str, Any], layout: str
) -> dict[str, Any]:
    """Return the `config.json` of a model that has these layers among the others.

    Raises:
        UsageError: there are others than `config` says.
    """
    first, count = config.get("num_hidden_layers"), _count(table, config)
    pattern = _HF if layout == "hf" else _OTHERS[layout][0]
    names = parameter_names(content.tensors.values())
    found = {int(match[1]) for name in names if (match := pattern.fullmatch(name)) is not None}
    if type(first) is not int or first < 1:
        raise UsageError(f"{CONFIG} says num_hidden_layers = {first!r}, which is not a number")
    begin = first if layout == "hf" else 0
    further = sorted(number for number in found if number >= begin)
    if (
        type(count) is not int
        or len(further) != count
        or further != list(range(begin, begin + len(further)))
    ):
        raise UsageError(
            f"the model has {counted(len(further), 'layer')} to predict further tokens, and"
            f" {CONFIG} says {table.mtp['count']} = {count!r}",
            hint="--drop leaves them out",
        )
    return {
        **config, **_kinds(table, config, count),
        "num_hidden_layers": first + count, "first_mtp_layer": first,
    }  # fmt: skip


def _count(table: Family, config: Mapping[str, Any]) -> Any:
    """Return how many such layers a model has, if it has any."""
    said = config.get(table.mtp["count"])
    if said is None and table.shapes is not None:
        default = table.shapes.defaults.get(table.mtp["count"], "")
        return int(default) if default.isdecimal() else None
    return said


def _kinds(table: Family, config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the kinds of all layers, where they differ."""
    kind = table.mtp.get("kind")
    if not kind or table.shapes is None:
        return {}
    known = config.get("layer_types")
    if not isinstance(known, list):
        text = f"layer_types={kind} or every full_attention_interval"
        mine = table.shapes.layers(text, config)
        known = [kind if n in mine else "" for n in range(config["num_hidden_layers"])]
        known = [one or "linear_attention" for one in known]
    return {"layer_types": [*known, *[kind] * count]}


def _own_number(name: str, table: Family) -> tuple[int, str] | None:
    """Return the number of a layer of which files have names of their own, and what it is there."""
    for own, meant in table.mtp.get("names", {}).items():
        numbers = _name(own).numbers(name)
        if numbers is not None:
            return int(numbers.get("layer", 0)), meant
    begin = table.mtp.get("layers")
    if not begin or not name.startswith(begin) or _OTHERS["megatron"][0].fullmatch(name):
        return None
    number, _, rest = name.removeprefix(begin).partition(".")
    known = number.isdecimal() and number.isascii() and len(number) < 7 and rest
    return (int(number), rest) if known else None


def _numbered_on(content: Content, table: Family, config: Mapping[str, Any]) -> Content:
    """Return a content whose further layers have numbers behind the others.

    Raises:
        UsageError: `config` does not say how many others there are.
        UnsupportedError: two tensors have one place.
    """
    first = config.get("num_hidden_layers")
    if not table.mtp.get("layers"):
        return content
    if type(first) is not int:
        raise UsageError(f"{CONFIG} says num_hidden_layers = {first!r}, which is not a number")
    parameters = parameter_names(content.tensors.values())
    made: dict[str, TargetTensor] = {}
    for wanted in content.tensors.values():
        parameter, rest = parted(wanted, parameters)
        found = None if wanted.component.startswith("extra:") else _own_number(parameter, table)
        if found is not None:
            number, meant = found
            wanted = _in_place(wanted, meant, table)
            wanted = wanted._replace(name=f"model.layers.{first + number}.{meant}{rest}")
        if wanted.key in made:
            raise UnsupportedError(f"two tensors of the source become {wanted.key}")
        made[wanted.key] = wanted
    return content.with_tensors(made.values())


def _own_names(content: Content, table: Family, first: int) -> Content:
    """Return a content whose further layers have the names of Hugging Face's files."""
    begin = table.mtp.get("layers")
    if not begin:
        return content
    other = {meant: own for own, meant in table.mtp.get("names", {}).items()}
    parameters = parameter_names(content.tensors.values())
    made = []
    for wanted in content.tensors.values():
        parameter, rest = parted(wanted, parameters)
        match = None if wanted.component.startswith("extra:") else _HF.fullmatch(parameter)
        if match is not None and int(match[1]) >= first:
            number = str(int(match[1]) - first)
            own = _name(other[match[2]]) if match[2] in other else None
            if own is not None and (own.words or number == "0"):
                name = own.fill({"layer": number})
            else:
                name = f"{begin}{number}.{match[2]}"
            wanted = _in_place(wanted, match[2], table)._replace(name=name + rest)
        made.append(wanted)
    return content.with_tensors(made)


def _in_place(wanted: TargetTensor, meant: str, table: Family) -> TargetTensor:
    """Return a tensor with its columns in the order of the other side."""
    if not table.mtp.get("swapped") or meant != "eh_proj.weight" or len(wanted.shape) != 2:
        return wanted
    rows, columns = wanted.shape
    if columns % 2:
        raise UsageError(
            f"{wanted.key} of {list(wanted.shape)} does not hold two halves side by side",
            tensor=wanted.key,
        )
    half = columns // 2
    copies = []
    for begin, to in ((0, half), (half, -half)):
        for copy in wanted.moved(Box((0, begin), (rows, half)), 0):
            offsets = (copy.box.offsets[0], copy.box.offsets[1] + to)
            copies.append(Copy(Box(offsets, copy.box.sizes), copy.key, copy.source))
    return wanted._replace(copies=tuple(copies))


def _places(table: Family, first: int, last: int) -> list[str]:
    """Return patterns of the names that such layers have in files."""
    begin = table.mtp.get("layers")
    if not begin:
        return [f"model.layers.{number}.*" for number in range(first, last)]
    whole = [own for own in table.mtp.get("names", {}) if not own.startswith(begin)]
    return [f"{begin}*", *whole]


def _counted_on(name: str, layout: str, first: int) -> str:
    """Return the name that a tensor of such a layer has as one of the others."""
    pattern, others = _OTHERS[layout]
    match = pattern.fullmatch(name)
    if match is None:
        return name
    inner = _INNER.fullmatch(match[2]) if layout == "megatron" else None
    return f"{others}{int(match[1]) + first}.{inner[1] if inner else match[2]}"


def _counted_apart(name: str, layout: str, first: int) -> str:
    """Return the name of a tensor of one of the others, as such a layer has it."""
    pattern, others = _OTHERS[layout]
    number, dot, rest = name.removeprefix(others).partition(".")
    if not name.startswith(others) or not number.isdecimal() or int(number) < first:
        return name
    if layout == "megatron" and not rest.startswith(_BESIDE):
        rest = f"transformer_layer.{rest}"
    begin = "mtp.layers." if layout == "megatron" else "mtp_layers."
    made = f"{begin}{int(number) - first}{dot}{rest}"
    assert pattern.fullmatch(made)
    return made


def _without_copies(
    content: Content, table: Family, first: int
) -> tuple[Content, Sequence[TargetTensor]]:
    """Return a content without what such layers hold a second time, and these tensors."""
    rest: list[TargetTensor] = []
    copies: list[TargetTensor] = []
    for wanted in content.tensors.values():
        match = _HF.fullmatch(wanted.name)
        again = match and int(match[1]) >= first and match[2] in table.mtp["copies"]
        (copies if again else rest).append(wanted)
    return content.with_tensors(rest), copies


def _require_equal(content: Content, table: Family, copies: Sequence[TargetTensor]) -> None:
    """Refuse what such a layer has of its own and no other layout can hold.

    Raises:
        UnsupportedError: it is not the tensor that the other layout has once.
    """
    weights = {w.name: w for w in content.tensors.values() if _is_weight(w)}
    for wanted in copies:
        match = _HF.fullmatch(wanted.name)
        name = table.mtp["copies"][match[2]] if match else ""
        other = weights.get(name) or weights.get("model.embed_tokens.weight")
        same = other is not None and equal(wanted, other, content.checkpoint)
        if not same or not _is_weight(wanted):
            raise UnsupportedError(
                f"{wanted.key} is not equal to {name}, of which other layouts have one",
                hint=f"--drop '{wanted.key}' leaves it out",
                tensor=wanted.key,
            )


def _is_weight(wanted: TargetTensor) -> bool:
    return wanted.component == "model" and wanted.kind is Kind.PARAM


def config_of(model: ModelFacts, content: Content) -> bytes:
    """Return the text of `config.json` for a model of Megatron.

    Args:
        model: what the checkpoint says of it.
        content: its tensors, under Hugging Face's names: they give the vocabulary, the type of the
            weights, and whether the embedding serves for the output too.

    Raises:
        UnsupportedError: heads that are rotated in part, or a router, that the family does not
            have.
    """
    family, args = model.family, model.arguments
    said: dict[str, Any] = dict(family.config)
    for field, names in family.arguments.items():
        value = next((v for name in names if (v := args.get(name)) is not None), None)
        if isinstance(value, (int, float, str)):
            said[field] = value
    if "n_head" not in said:
        said["num_attention_heads"] = model.heads.queries
        if family.name != "gpt_neox":
            said |= {"num_key_value_heads": model.heads.groups, "head_dim": model.heads.width}
    weights = [w for w in content.tensors.values() if w.kind is Kind.PARAM]
    embedding = {known.text for e in family.entries if e.vocabulary for known in e.hf}
    rows = [w.shape[0] for w in weights if w.name in embedding]
    if rows:
        said["vocab_size"] = rows[0]
    output = next(e.hf[0].text for e in reversed(family.entries) if e.vocabulary)
    said["tie_word_embeddings"] = output in content.aliases or output not in content.tensors
    if dtype := weights_dtype(content):
        said["torch_dtype"] = dtype
    _scaling(model, said)
    _routing(model, said)
    if family.name == "mistral":
        said["sliding_window"] = None  # its class has a window where nothing is said
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"


def _scaling(model: ModelFacts, said: dict[str, Any]) -> None:
    """Add Llama 3's scaling of rotary frequencies, with the constants that Megatron-core has."""
    args = model.arguments
    if args.flag("use_rope_scaling"):
        said["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(args.get("rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if args.get("rotary_seq_len_interpolation_factor", 1) != 1:
        said["rope_scaling"] = {
            "rope_type": "linear",
            "factor": float(args.get("rotary_seq_len_interpolation_factor")),
        }
    if (
        args.get("rotary_percent", 1.0) != 1.0
        and not {"rotary_pct", "partial_rotary_factor"} & said.keys()
    ):
        raise UnsupportedError(
            f"{model.family.name} rotates whole heads, the arguments say "
            f"rotary_percent = {args.get('rotary_percent')!r}"
        )


def _routing(model: ModelFacts, said: dict[str, Any]) -> None:
    """Say how the router weighs experts, and refuse what the family's router does not do."""
    args = model.arguments
    if not args.get("num_experts"):
        return
    if args.get("moe_layer_freq", 1) != 1:
        raise UnsupportedError(
            f"{model.family.name} has experts in every layer, the arguments say moe_layer_freq = "
            f"{args.get('moe_layer_freq')!r}"
        )
    before = args.flag("moe_router_pre_softmax")
    if "decoder_sparse_step" in said:
        said["norm_topk_prob"] = not before
    elif before or args.get("moe_router_score_function", "softmax") != "softmax":
        raise UnsupportedError(
            f"{model.family.name} weighs its experts by a softmax over the chosen ones, the "
            "arguments say otherwise (moe_router_pre_softmax, moe_router_score_function)"
        )
