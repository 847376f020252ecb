"""Weights of a model folder that hold nothing: saved where a rank had no part of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ftckpt.checkpoint import TensorInfo
from ftckpt.findings import Finding, counted, finding, listed

# How PEFT names the matrices of an adapter; none of them is ever empty (peft/tuners/lora).
_ADAPTER = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B")
_SAVED = (".lora_A.weight.", ".lora_embedding_A.")

_PAIRED = (".lora_A.weight.", ".lora_B.weight.", ".lora_embedding_A.", ".lora_embedding_B.")

_SIDE = re.compile(r"(\.lora_(?:embedding_)?)[AB](?=\.weight$|$)")
_FIRST = re.compile(r"\.lora_(?:embedding_)?A(?:\.weight)?$")

# Those of them that are zero before the first step, when an adapter changes nothing yet.
_ZERO_AT_FIRST = (".lora_B.weight", ".lora_embedding_A")


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor is a matrix of an adapter, under the name that PEFT saves."""
    return name.startswith("base_model.model.") and any(f"{name}.".endswith(p) for p in _SAVED)


def zero_at_first(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the keys of the matrices of an adapter that are zero until something is trained."""
    return [key for key, one in tensors.items() if one.name.endswith(_ZERO_AT_FIRST)]


def check_not_empty(tensors: Iterable[TensorInfo], file: str) -> Iterator[Finding]:
    """Yield `empty-weights` for weights without an element, and for an adapter that lacks some.

    A save of a sharded model that was not gathered (ZeRO-3, FSDP) leaves a file without tensors, or
    with tensors of zero size, and ends without an error (huggingface/peft issues 453 and 2892).

    Args:
        tensors: every weight of one model or adapter.
        file: the file that is named.
    """
    weights = list(tensors)
    empty = [one.name for one in weights if not one.numel]
    lost = [name for name in empty if any(part in f"{name}." for part in _ADAPTER)]
    if not weights:
        yield finding("empty-weights", f"{file} holds no tensor: no weight was saved", file=file)
    elif len(empty) == len(weights):
        what = (
            f"all {len(weights)} weights in {file} have zero elements: their values were not saved"
        )
        yield finding("empty-weights", what, file=file)
    elif lost:
        what = f"{counted(len(lost), 'weight')} of an adapter without elements: {listed(lost)}"
        yield finding("empty-weights", what, file=file)


def check_pairs(tensors: Iterable[TensorInfo], file: str) -> Iterator[Finding]:
    """Yield matrices of an adapter that stand alone, or that cannot be multiplied with the other.

    PEFT loads what is there, and leaves the other as it is at first, without a word.
    """
    shapes = {one.name: one.shape for one in tensors if f"{one.name}.".endswith(_PAIRED)}
    lone, unlike = [], []
    for name, shape in shapes.items():
        first = _FIRST.search(name)
        other = shapes.get(_SIDE.sub(r"\1B" if first else r"\1A", name))
        if other is None:
            lone.append(name)
        elif first and len(shape) == len(other) == 2 and shape[0] != other[1]:
            unlike.append(f"{name} of {list(shape)} beside {list(other)}")
    if lone:
        what = f"{counted(len(lone), 'matrix', 'matrices')} of an adapter without the other of the"
        yield finding("missing-tensor", f"{what} pair: {listed(lone, 3)}", file=file)
    if unlike:
        what = f"matrices of an adapter that are no pair: {listed(unlike, 3)}"
        yield finding("shape-mismatch", what, file=file)
