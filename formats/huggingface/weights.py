"""Weights of a model folder that hold nothing: saved where a rank had no part of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ftckpt.checkpoint import TensorInfo
from ftckpt.findings import Finding, counted, finding, listed

# How PEFT names the matrices of an adapter; none of them is ever empty (peft/tuners/lora).
_ADAPTER = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B")
_SAVED = (".lora_A.weight.", ".lora_embedding_A.")

_PAIRED = (".lora_A.weight.", ".lora_B.weight.", ".lora_embedding_A.", ".lora_embedding_B.")

_SIDE = r"(\.lora_(?:embedding_)?)[AB](?=\.weight$|$)"
_MANY = r"\.lora_(?:embedding_)?[AB]\.?\d"  # several for one: HydraLoRA, LoRAMoE
_FIRST = r"\.lora_(?:embedding_)?A(?:\.weight)?$"

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

    PEFT loads what is there, and leaves the other as it is at first, without a word. But forks save
    several B for one A, only the B that they train, or groups of ranks: so only what modules of the
    same file contradict is damage.
    """
    weights = list(tensors)
    shapes = {one.name: one.shape for one in weights if f"{one.name}.".endswith(_PAIRED)}
    lone, pairs = [], []
    for name in shapes:
        first = re.search(_FIRST, name)
        other = re.sub(_SIDE, r"\1B" if first else r"\1A", name)
        if other not in shapes:
            lone.append(name)
        elif first and len(shapes[name]) == len(shapes[other]) == 2:
            pairs.append((name, shapes[name], shapes[other]))
    if lone:
        yield from _lone(lone, shapes, weights, file)
    yield from _unlike(pairs, file)


def _lone(
    lone: Collection[str],
    shapes: Collection[str],
    weights: Iterable[TensorInfo],
    file: str,
) -> Iterator[Finding]:
    """Yield those whose pair is lost: other modules have both, and this one has no other form."""
    modules = {_module(name) for name in lone}
    paired = len(shapes) > len(lone)
    forms = modules & {_module(one.name) for one in weights if re.search(_MANY, one.name)}
    for kind, names in (
        ("missing-tensor", [one for one in lone if paired and _module(one) not in forms]),
        ("state-unknown", [one for one in lone if not paired or _module(one) in forms]),
    ):
        if names:
            many = counted(len(names), "matrix", "matrices")
            what = f"{many} of an adapter without the other of the pair: {listed(names, 3)}"
            yield finding(kind, what, file=file)


def _unlike(
    pairs: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]], file: str
) -> Iterator[Finding]:
    """Yield pairs of two ranks; one rank may be of several groups, in all modules of a name."""
    fit: set[str] = set()
    wrong: list[str] = []
    grouped: list[tuple[str, str]] = []
    slices: list[tuple[str, str]] = []  # of rows of A, as the first rank of FSDP has them
    for name, first, second in pairs:
        ranks = sorted((first[0], second[1]))
        said = f"{name} of {list(first)} beside {list(second)}"
        sort = _module(name).rpartition(".")[2]
        if ranks[0] == ranks[1]:
            fit.add(sort)
        elif first[0] and first[0] < second[1] and not second[1] % first[0]:
            slices.append((sort, said))
        elif ranks[0] and not ranks[1] % ranks[0]:
            grouped.append((sort, said))
        else:
            wrong.append(said)
    wrong += [said for sort, said in (*grouped, *slices) if sort in fit]
    unsure = [said for sort, said in grouped if fit and sort not in fit]
    unsure += [said for sort, said in slices if sort not in fit]
    for kind, found in (("shape-mismatch", wrong), ("state-unknown", unsure)):
        if found:
            what = f"matrices of an adapter that are no pair: {listed(found, 3)}"
            yield finding(kind, what, file=file)


def _module(name: str) -> str:
    return name.partition(".lora_")[0]
