"""Read a Hugging Face folder's `config.json`, and keep what it says of the weights' type true."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.errors import UnsafeError
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse
from ftckpt.transfer.content import Content

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
# Models with Mamba layers have `"time_step_limit": [0.0, Infinity]`.
_LIMITS = JsonLimits(
    32, objects=10_000, keys=1_000_000, items=1_000_000, naturals=False, infinities=True
)
LARGEST = 16 << 20  # bytes
_FLOATS = ("float64", "float32", "float16", "bfloat16")
# How it names the type of the weights: since transformers 5, and before.
DTYPE_FIELDS = ("dtype", "torch_dtype")


@runtime_checkable
class KeepsConfig(Protocol):
    """A checkpoint whose `config.json` may lie in a folder of it."""

    @property
    def config_file(self) -> str:
        """Its path in the checkpoint; `CONFIG` if it is not in a folder."""


@runtime_checkable
class ReplacesFiles(Protocol):
    """A checkpoint with other weights than its files, and other small files to go with them."""

    @property
    def replaced(self) -> Mapping[str, bytes]:
        """Contents by path."""


@runtime_checkable
class MayBePartial(Protocol):
    """A checkpoint that records whether a conversion left out weights of its model on demand."""

    @property
    def partial(self) -> bool:
        """Whether one did."""


def is_partial(checkpoint: Checkpoint) -> bool:
    """Return whether weights of a model were left out on demand, so that none of them is lost."""
    return isinstance(checkpoint, MayBePartial) and checkpoint.partial


def config_file(checkpoint: Checkpoint) -> str:
    """Return the path of a checkpoint's `config.json`, whether it is there or not."""
    return checkpoint.config_file if isinstance(checkpoint, KeepsConfig) else CONFIG


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint; empty where there is none.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    return parsed_json(checkpoint.source, config_file(checkpoint))


def parsed_json(source: Source, file: str) -> dict[str, Any]:
    """Return a small file of JSON; empty if it is absent or holds another value.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    if source.single or file not in source.entries:
        return {}
    size = source.size(file)
    if size > LARGEST:
        raise UnsafeError(
            f"{file} has {size} bytes, and no {file} has as many: it is not read",
            kind="unsafe-index",
            file=file,
        )
    raw = source.read(file)
    value = parse(raw, _LIMITS, file=file, what="text", bad="bad-index", unsafe="unsafe-index")
    return value if isinstance(value, dict) else {}


def parsed_config(text: str, file: str) -> dict[str, Any]:
    """Return the content of a `config.json` that the user names.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    value = parse(
        text.encode(), _LIMITS, file=file, what="text", bad="bad-index", unsafe="unsafe-index"
    )
    return value if isinstance(value, dict) else {}


def weights_dtype(content: Content) -> str:
    """Return the floating type that most of the model's weights have; "" where none has one."""
    weights = (w for w in content.tensors.values() if w.kind is Kind.PARAM)
    found = Counter(w.dtype.name for w in weights if w.component == "model")
    return next((name for name, _ in found.most_common() if name in _FLOATS), "")


def retyped_config(content: Content) -> bytes | None:
    """Return a `config.json` that says what type the weights are cast to; None where they are not.

    transformers loads weights in the type that it names, whatever the files hold.

    Raises:
        CorruptError, UnsafeError: the source's is damaged or hostile.
    """
    before, after = weights_dtype(Content.of(content.checkpoint)), weights_dtype(content)
    config = read_config(content.checkpoint) if before != after else {}
    said = [field for field in DTYPE_FIELDS if config.get(field) in _FLOATS]
    if not said or not after:
        return None
    config |= dict.fromkeys(said, after)
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
