"""Compare what two folders say of the model: equal weights are another model by another setting.

`rope_theta` or `lora_alpha` change what the same tensors compute. Only what both say is compared:
a version of transformers that writes more fields makes no difference.
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
from .rope_settings import ROPE, by_layer_type, with_rope

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
