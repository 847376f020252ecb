"""Sort the tensors of an adapter by the module that they belong to, by PEFT's names.

Experts that a model holds as one parameter and its files as one module each.

transformers 5 packs them when it loads: `gate_up_proj` is, expert by expert, rows of `gate_proj`
and then those of `up_proj` (`qwen2_moe` in transformers/conversion_mapping.py). PEFT trains the
parameter (`target_parameters`); the base on disk has the modules.

Take the adapter out of a training state: its tensors under the names that PEFT saves.

In a training state they have the adapter's own name (`lora_A.default.weight`), a module that was
trained whole has its original beside it, and a shard of ZeRO 3 has the masters alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, TensorInfo
from ftckpt.errors import CorruptError, NotFoundError, UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG
from ftckpt.formats.huggingface.weights import check_not_empty, is_of_adapter
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .bridge import configuration, peft_name, read_adapter, require_readable

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


_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Kinds of models that are packed so, by `model_type`.
_KINDS = frozenset(
    ("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe")
)


class ExpertRows(NamedTuple):
    """Where a tensor of the base lies in the parameter.

    Attributes:
        expert: its number.
        start, stop: rows of that expert's matrix.
    """

    expert: int
    start: int
    stop: int


class PackedExperts(NamedTuple):
    """A parameter that the base stores in parts.

    Attributes:
        shape: of the parameter.
        parts: the base's tensors, by name.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, ExpertRows]


def packed(name: str, held: Mapping[str, TensorInfo], kind: object) -> PackedExperts | None:
    """Return a parameter that is stored in parts; None where the base has no such parts.

    Args:
        name: of the parameter.
        held: the base's tensors.
        kind: its `model_type`.
    """
    module, _, last = name.rpartition(".")
    if kind not in _KINDS or last not in _PARTS or not module.endswith(".experts"):
        return None
    parts: dict[str, ExpertRows] = {}
    expert, shapes = 0, set()
    while f"{module}.{expert}.{_PARTS[last][0]}.weight" in held:
        row = 0
        for one in _PARTS[last]:
            info = held.get(f"{module}.{expert}.{one}.weight")
            if info is None or len(info.shape) != 2:
                return None
            shapes.add(info.shape)
            parts[info.name] = ExpertRows(expert, row, row + info.shape[0])
            row += info.shape[0]
        expert += 1
    inside = sum(other.startswith(f"{module}.") for other in held)
    if len(shapes) != 1 or inside % max(expert, 1):
        return None  # an expert is missing, or they differ
    rows, width = shapes.pop()
    return PackedExperts((expert, rows * len(_PARTS[last]), width), parts)


_MATRIX = re.compile(
    r"(?P<name>.+\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector))"
    r"(?:\.(?P<adapter>[^.]+))??(?P<end>\.weight|\.bias)?"
)
_WHOLE = re.compile(r"(?P<name>.+)\.modules_to_save\.(?P<adapter>[^.]+)(?P<end>\..+)")


def adapter_alone(content: Content, *, masters: bool = False) -> Content:
    """Return the tensors of the one adapter in a content.

    Args:
        content: a training state, or an adapter.
        masters: whether each is rounded from its fp32 master. A tensor of which only the master is
            stored is taken from it in any case.

    Raises:
        NotFoundError: it holds none.
        UsageError: it holds several.
    """
    stored = [content.checkpoint.tensors[key] for key in content.tensors]
    trained = {info.name for info in stored if info.kind is Kind.MASTER}
    found: dict[str, TensorInfo] = {}
    adapters: set[str] = set()
    of_bridge: list[str] = []
    for info in stored:
        weight = info.component == "model" and info.kind is Kind.PARAM
        match = _WHOLE.fullmatch(info.name) or _MATRIX.fullmatch(info.name)
        bridged = peft_name(info.name)
        # What else was trained (a bias) belongs to the adapter too.
        known = match or bridged or info.name in trained
        if not (weight or info.kind is Kind.MASTER) or not known:
            continue
        if match is not None:
            adapters.add(match["adapter"] or "")
        if bridged:
            of_bridge.append(info.name)
        name = bridged or (info.name if match is None else _saved_name(match))
        name = PREFIX + name.removeprefix(PREFIX)
        if name not in found or (info.kind is Kind.MASTER) == masters:
            found[name] = info
    if not any(is_of_adapter(name) for name in found):
        raise NotFoundError(
            f"{content.checkpoint.source.url} holds no tensors of an adapter (lora_A, lora_B)"
        )
    if len(adapters) > 1:
        raise UsageError(
            f"{content.checkpoint.source.url} holds {counted(len(adapters), 'adapter')}:"
            f" {listed(sorted(adapters))}",
            hint="--drop '*.NAME.*' leaves the tensors of one of them out",
        )
    made = []
    for name, info in found.items():
        box = Box.whole(info.shape)
        copies = (Copy(box, info.key, box),)
        made.append(TargetTensor("model", name, Kind.PARAM, info.shape, info.dtype, copies))
    rest = f"{counted(len(stored) - len(made), 'tensor')} that are not the adapter's"
    state = [f"non-tensor state: {listed(list(content.objects), 3)}"] if content.objects else []
    beside = _said_by_bridge(content, of_bridge, found) if of_bridge else {}
    return replace(
        content.with_tensors(made), objects={}, dropped=(*content.dropped, rest, *state),
        beside={**content.beside, **beside},
    )  # fmt: skip


def _said_by_bridge(
    content: Content, names: Sequence[str], found: Mapping[str, TensorInfo]
) -> Mapping[str, bytes]:
    """Return the `adapter_config.json` of an adapter of Megatron-Bridge, if it says what it is."""
    adapter = read_adapter(content.checkpoint)
    require_readable(adapter, content.checkpoint, names)
    return {} if adapter is None else {ADAPTER_CONFIG: configuration(adapter, found)}


def _saved_name(match: re.Match[str]) -> str:
    """Return the name under which PEFT saves a tensor of a training state."""
    end = match["end"] or ""
    if match["name"].endswith("lora_magnitude_vector"):
        end = ""
    return match["name"] + end
