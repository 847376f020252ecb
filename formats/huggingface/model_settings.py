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

# Where it was written and by what; the type of the weights is compared with the weights.
_ASIDE = frozenset(
    {
        *DTYPE_FIELDS, "_name_or_path", "transformers_version", "peft_version", "use_cache",
        "auto_mapping", "base_model_name_or_path", "inference_mode", "revision",
        "_attn_implementation", "_attn_implementation_autoset",
    }
)  # fmt: skip
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
    for name, file in _files(checkpoint).items():
        if name not in _files(other):
            continue
        try:
            mine = dict(_leaves(parsed_json(checkpoint.source, file)))
        except FtckptError as error:
            yield error
            continue
        try:
            theirs = dict(_leaves(parsed_json(other.source, _files(other)[name])))
        except FtckptError:
            continue  # which is told of the other
        for path in mine.keys() & theirs.keys():
            text = mine[path]
            shown = text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
            yield Field(f"{name}.{path}", None, shown, text.encode("utf-8", "surrogatepass"))


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the files that say what the model is: path, by the name that both give them."""
    source = checkpoint.source
    known = {"config.json": config_file(checkpoint), ADAPTER_CONFIG: ADAPTER_CONFIG}
    return {n: f for n, f in known.items() if not source.single and f in source.entries}


def _leaves(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting as text that is equal for equal values; PEFT writes sets in any order."""
    for key, member in value.items():
        if key in _ASIDE:
            continue
        if isinstance(member, dict) and member:
            yield from _leaves(member, f"{before}{key}.")
        else:
            if isinstance(member, list) and all(isinstance(one, str) for one in member):
                member = sorted(member)
            yield before + key, json.dumps(member, sort_keys=True)
