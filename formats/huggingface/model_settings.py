"""Compare what two folders say of the model: equal weights are another model by another setting.

`rope_theta` or `lora_alpha` change what the same tensors compute. Only what both say is compared:
a version of transformers that writes more fields makes no difference.

Read how positions are rotated, in the one spelling of transformers 5.

Before, `rope_theta`, `rope_scaling` and some names of single families said it side by side; since,
`rope_parameters` says it, for each type of layer where they differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.comparison import Field, Fields
from ftckpt.errors import FtckptError

from .config import ADAPTER_CONFIG, DTYPE_FIELDS, config_file, parsed_json

ROPE = "rope_parameters"
_SCALING, _BASE, _SHARE, _TYPE = "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_type"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# GPT-NeoX had names of its own; Gemma 3 and ModernBERT had a base for sliding attention.
_BASES = (_BASE, "global_rope_theta", "rotary_emb_base")
_SHARES = (_SHARE, "rotary_pct")
_LOCAL = ("rope_local_base_freq", "local_rope_theta")
_OLD = frozenset({_SCALING, *_BASES, *_SHARES, *_LOCAL})


def with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config, and those of its parts, with what old fields say in `rope_parameters`.

    What that says itself stands before them. A shape that no release writes is left as it is.
    """
    found = {
        key: with_rope(member)
        if isinstance(member, dict) and key not in (ROPE, _SCALING)
        else member
        for key, member in config.items()
    }
    new, scaling = config.get(ROPE), config.get(_SCALING)
    if not isinstance(new, dict | None) or not isinstance(scaling, dict | None):
        return found
    share = _first(config, _SHARES, _SHARE)
    told = _first(config, _BASES, _BASE) | share
    if _SCALING in config:
        told |= _typed(scaling or {_TYPE: "default"})
    local = _first(config, _LOCAL, _BASE)
    if _is_nested(new):
        rope = {name: part and {**share, **_typed(part)} for name, part in (new or {}).items()}
    elif local and not new:
        rope = {_FULL: told, _SLIDING: {_TYPE: "default", **local}}
    else:
        rope = told | _typed(new or {})
    found = {key: member for key, member in found.items() if key not in _OLD}
    return found | {ROPE: rope} if rope else found


def by_layer_type(mine: Any, theirs: Any) -> Any:
    """Return my `rope_parameters` by the types of layers that theirs name, where mine name none.

    Scaling was that of full attention alone in the families that had sliding attention.
    """
    if not isinstance(mine, dict) or _is_nested(mine) or not _is_nested(theirs):
        return mine
    base = {key: mine[key] for key in (_BASE,) if key in mine}
    return {name: mine if name == _FULL else base for name, part in theirs.items() if part}


def _is_nested(rope: Any) -> bool:
    return isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())


def _first(config: Mapping[str, Any], names: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return the first of several fields that is set, under one name; empty without any."""
    known = next((config[one] for one in names if config.get(one) is not None), None)
    return {} if known is None else {name: known}


def _typed(part: Any) -> dict[str, Any]:
    """Return the parameters of one type of layer; the type had a shorter name."""
    if not isinstance(part, dict):
        return {}
    kind = part.get(_TYPE, part.get("type"))
    rest = {key: member for key, member in part.items() if key != "type"}
    return rest if kind is None else rest | {_TYPE: kind}


# Where it was written and by what, and how a process runs it; the type of the weights is compared
# with the weights.
_ASIDE = frozenset(
    {
        *DTYPE_FIELDS, "_name_or_path", "transformers_version", "peft_version", "use_cache",
        "auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "_commit_hash",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "_attn_implementation_internal", "_experts_implementation",
        "_experts_implementation_internal", "gradient_checkpointing", "output_attentions",
        "output_hidden_states", "return_dict", "torchscript",
    }
)  # fmt: skip
# PEFT writes these sets in any order; in any other list the order is a setting (`layer_types`).
_SETS = frozenset({"target_modules", "exclude_modules", "modules_to_save", "feedforward_modules"})
_LONG = 48  # characters of a value that are shown


def with_settings(fields: Fields, ours: Checkpoint, theirs: Checkpoint) -> Fields:
    """Return what reads the other state of two checkpoints together with what both say of a model.

    Args:
        fields: reads the rest.
        ours: the first, opened.
        theirs: the second.
    """

    def more(checkpoint: Checkpoint) -> Iterable[Field | FtckptError]:
        other = theirs if checkpoint is ours else ours
        return chain(fields(checkpoint), _settings(checkpoint, other))

    return more


def _settings(checkpoint: Checkpoint, other: Checkpoint) -> Iterator[Field | FtckptError]:
    beside = _files(other)
    for name, file in _files(checkpoint).items():
        if name not in beside:
            continue
        try:
            mine = parsed_json(checkpoint.source, file)
        except FtckptError as error:
            yield error
            continue
        try:
            theirs = parsed_json(other.source, beside[name])
        except FtckptError:
            continue  # which is told of the other
        for path, text in shared_settings(mine, theirs):
            shown = text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
            yield Field(f"{name}.{path}", None, shown, text.encode("utf-8", "surrogatepass"))


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the files that say what the model is: path, by the name that both give them."""
    source = checkpoint.source
    known = {"config.json": config_file(checkpoint), ADAPTER_CONFIG: ADAPTER_CONFIG}
    return {n: f for n, f in known.items() if not source.single and f in source.entries}


def shared_settings(
    mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield what mine says of every setting that both have, as text that is equal for equal values.

    Which settings these are is the same from both sides: an object against null differs as a whole.
    They come in the order of my file.
    """
    return _shared(with_rope(mine), with_rope(theirs))


def _shared(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], before: str = ""
) -> Iterator[tuple[str, str]]:
    for key, member in mine.items():
        if key in _ASIDE or key not in theirs:
            continue
        other = theirs[key]
        if key == ROPE:
            member, other = by_layer_type(member, other), by_layer_type(other, member)
        if isinstance(member, dict) and isinstance(other, dict) and member and other:
            yield from _shared(member, other, f"{before}{key}.")
        else:
            yield before + key, json.dumps(_plain(member, key), sort_keys=True)


def _plain(value: Any, key: str = "") -> Any:
    """Return a value in the one spelling that stands for all that mean the same."""
    if isinstance(value, float) and value.is_integer():
        return int(value)  # a reader takes 10000.0 and 10000 for the same
    if value == {}:
        return None  # nothing is set
    if isinstance(value, dict) and value.get("__float__") in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])  # so writes transformers 5 what JSON has no word for
    if isinstance(value, dict):
        return {name: _plain(member, name) for name, member in value.items()}
    if not isinstance(value, list):
        return value
    if key.endswith("_token_id") and len(value) == 1:
        return _plain(value[0])  # generation ends at one of these: one is one
    if key in _SETS and all(isinstance(one, str) for one in value):
        return sorted(set(value))
    return [_plain(one) for one in value]
