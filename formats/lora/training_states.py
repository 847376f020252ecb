"""Take the adapter out of a training state: its tensors under the names that PEFT saves.

In a training state they have the adapter's own name (`lora_A.default.weight`), a module that was
trained whole has its original beside it, and a shard of ZeRO 3 has the masters alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftckpt.checkpoint import Box, Kind, TensorInfo
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG
from ftckpt.formats.huggingface.weights import is_of_adapter
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .bridge import configuration, peft_name, read_adapter, require_readable
from .tensors import PREFIX

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
