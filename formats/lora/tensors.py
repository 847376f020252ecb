"""Sort the tensors of an adapter by the module that they belong to, by PEFT's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.weights import check_not_empty

PREFIX = "base_model.model."
_BASE = ".base_layer"
# Ends of names, and what the tensor is for its module.
ROLES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_MAX_FACTOR = 256 << 20  # bytes of a matrix in float32: it is held while its weight is computed


class Trained(NamedTuple):
    """The tensors of one module, by role: A and B, or embedding_A and embedding_B; others.

    Attributes:
        module: as the base calls it.
        level: how deep it lies in others of the same module (PEFT nests those of parameters).
        parts: the tensors.
    """

    module: str
    level: int
    parts: Mapping[str, TensorInfo]


class AdapterTensors(NamedTuple):
    """All tensors of an adapter.

    Attributes:
        trained: products of two matrices.
        whole: tensors that replace one of the base, by its name.
        bases: the base's own weight below an adapted module, stored with it, by its name.
    """

    trained: tuple[Trained, ...]
    whole: Mapping[str, TensorInfo]
    bases: Mapping[str, TensorInfo]


def sort_tensors(adapter: Checkpoint) -> AdapterTensors:
    """Return the tensors of an adapter by what they are for.

    Raises:
        CorruptError: it has none, or empty ones, or one of two matrices.
        UnsupportedError: a name or a type that is not known.
    """
    where = adapter.source.url
    tensors = [one for one in adapter.tensors.values() if one.component == "model"]
    for found in check_not_empty(tensors, where):
        raise CorruptError(
            f"{found.message}: there is nothing to merge", kind=found.kind, file=found.file
        )
    grouped: dict[str, dict[str, TensorInfo]] = {}
    whole: dict[str, TensorInfo] = {}
    bases: dict[str, TensorInfo] = {}
    odd = []
    for info in tensors:
        name = info.name.removeprefix(PREFIX)
        end = next((one for one in ROLES if name.endswith(one)), "")
        known: dict[str, TensorInfo] = {}
        role = name
        if end:
            known, role = grouped.setdefault(name.removesuffix(end), {}), ROLES[end]
        elif ".lora_" in name or ".modules_to_save." in name or ".original_module." in name:
            odd.append(info.name)
        elif f"{_BASE}." in name:
            bases[name.replace(_BASE, "")] = info
        else:
            known = whole
        if known.setdefault(role, info) is not info:
            raise CorruptError(
                f"{where} holds {known[role].name} and {info.name}, which are one tensor",
                kind="duplicate-tensor",
            )
        if info.dtype.name not in _FLOATS:
            raise UnsupportedError(f"{info.name} is {info.dtype.name}: it is not merged")
        if end and info.numel * 4 > _MAX_FACTOR:
            raise UnsupportedError(
                f"{info.name} has {info.numel} elements: more than is held at once"
            )
    if odd:
        raise UnsupportedError(
            f"{where} has tensors of which no use is known: {listed(odd)}",
            hint="PEFT's save_pretrained writes an adapter under names that are known",
        )
    trained = [
        Trained(module.replace(_BASE, ""), module.count(_BASE), parts)
        for module, parts in grouped.items()
    ]
    for one in trained:
        kinds = set(one.parts)
        if not (kinds >= {"A", "B"} or kinds >= {"embedding_A", "embedding_B"}):
            raise CorruptError(
                f"{where} has {listed([t.name for t in one.parts.values()])} without the other"
                " matrix: its values were lost",
                kind="missing-tensor",
            )
    if not trained and not whole:
        raise CorruptError(f"{where} holds no adapter", kind="empty-weights")
    return AdapterTensors(tuple(trained), whole, bases)
