"""Show a base with adapters merged into it; its tensors are computed when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.computed import ComputedCheckpoint, computed
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG, CONFIG, DTYPE_FIELDS, read_config
from ftckpt.strict_json import decode
from ftckpt.transfer.content import Content
from ftckpt.workers.budget import demand

from .arithmetic import MergedWeights, Rounding
from .fit import AdapterFit, LowRank, fit

_BASE = 192 << 20  # bytes: the interpreter, numpy, and blocks of every thread


class Merged(NamedTuple):
    """A base with adapters.

    Attributes:
        checkpoint: shows the merged tensors.
        weights: computes them.
        found: what is changed.
    """

    checkpoint: Checkpoint
    weights: MergedWeights
    found: AdapterFit

    @property
    def rounding(self) -> Rounding:
        """What rounding did to the values that were computed so far."""
        return self.weights.rounding

    def notes(self) -> list[str]:
        """Return what the user should know, in words."""
        said = []
        if self.found.untied:
            said.append(
                f"{self.found.untied} was tied to the embedding and is a tensor of its own now:"
                " the adapter changes one of them"
            )
        if self.found.untouched:
            said.append(
                "target_modules name more modules than the adapter has tensors of:"
                f" {listed(self.found.untouched)} stay as they are"
            )
        return said


def merge(
    base: Checkpoint,
    adapters: Sequence[Checkpoint],
    dtype: DType | None = None,
    *,
    allow_gaps: bool = False,
) -> Merged:
    """Return a base with adapters merged into it, in order.

    Args:
        base: opened; quantised weights are dequantised first (`Checkpoint.dequantised`).
        adapters: opened, each with its `adapter_config.json`.
        dtype: of the merged tensors; None for that which each has in the base.
        allow_gaps: see `fit`.

    Raises:
        UsageError, CorruptError, UnsupportedError, NotFoundError, RefusedError: see `fit`.
        NoResourceError: the matrices of an adapter need more memory than is allowed.
    """
    if base.decoding:
        raise UnsupportedError(
            f"{base.source.url} is a delta: an adapter is merged into a whole checkpoint",
            hint="ftckpt delta unpack writes it whole",
        )
    found = fit(base, adapters, allow_gaps=allow_gaps)
    largest = max(
        (4 * (c.a.numel + c.b.numel) for t in found.targets.values() for c in t.changes
         if isinstance(c, LowRank)), default=0,
    )  # fmt: skip
    demand(_BASE + 2 * largest, "merging an adapter of this rank")
    tensors: dict[str, TensorInfo] = {}
    targets, dtypes = {}, {}
    made_of: dict[str, Sequence[str]] = {}
    made = {}
    for target in found.targets.values():
        kind = target.info.kind
        info = TensorInfo(
            "model", target.name, kind, target.info.shape, dtype or target.info.dtype, ()
        )
        made[info.key] = info
        targets[info.key], dtypes[info.key] = target, info.dtype
        made_of[info.key] = [target.info.key]
    for key, info in base.tensors.items():
        tensors[key] = made.pop(key, info)
    tensors |= made
    weights = MergedWeights(base, targets, dtypes)
    beside = _config(base, found, dtype)
    # transformers would load the adapter that an `adapter_config.json` names on top of the result.
    checkpoint = computed(
        base, tensors, made_of, weights.fill, beside, without=(ADAPTER_CONFIG,), others=adapters
    )
    return Merged(checkpoint, weights, found)


def _config(base: Checkpoint, found: AdapterFit, dtype: DType | None) -> Mapping[str, bytes]:
    """Return the small files that go with the result: a configuration that holds of it."""
    replaced = dict(base.replaced) if isinstance(base, ComputedCheckpoint) else {}
    config = decode(replaced[CONFIG]) if CONFIG in replaced else read_config(base)
    if not config or not (found.apart or dtype):
        return replaced
    if found.apart:
        config["tie_word_embeddings"] = False
        if isinstance(text := config.get("text_config"), dict):
            text["tie_word_embeddings"] = False
    if dtype:
        config |= {field: dtype.name for field in DTYPE_FIELDS if field in config}
    return replaced | {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}


def require_weights_alone(content: Content) -> None:
    """Refuse to merge into a training state: its masters and averages would be of other weights.

    Raises:
        UsageError: it holds more than a model.
    """
    more = sorted({w.component for w in content.tensors.values() if w.component != "model"})
    if more:
        raise UsageError(
            f"an adapter is merged into weights alone, and the base holds {listed(more)}",
            hint="--only model",
        )
