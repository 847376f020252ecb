"""Relate Megatron's local replicas to the tensors that they repeat.

A rank that reads a shard which another rank wrote may write it a second time, into its own file, so
that each rank loads from its own disk. DCP tells shards by (name, offsets), so a second copy has
another name:

    decoder.final_layernorm.weight                    the tensor, all its chunks
    __shadow_3__decoder.final_layernorm.weight        chunks that rank 3 wrote again, perhaps few
    decoder.final_layernorm.weight.__tp_replica_1     the whole tensor again, by tensor rank 1

The last form has no plain name: every tensor rank writes one, and the lowest counts as the tensor.

Source: megatron/core/dist_checkpointing/strategies/local_replica.py of Megatron-LM's pull requests
4628 and 5556 (`__shadow_R__`), and 3392 (`.__tp_replica_R`), which are open in November 2026.
"""

from __future__ import annotations

import re

from ftckpt.findings import Finding, counted, finding, listed

from .metadata import DcpMetadata, MetadataItem
from .records import Offsets, TensorEntry

# No cluster has more ranks than seven digits can count.
_SHADOW = re.compile(r"__shadow_(\d{1,7})__(.+)", re.DOTALL)
_TP_REPLICA = re.compile(r"(.+)\.__tp_replica_(\d{1,7})", re.DOTALL)
_Boxes = frozenset[tuple[Offsets, Offsets]]


def relate(meta: DcpMetadata) -> list[Finding]:
    """Make the chunks of local replicas copies of the tensor's own; return notes about them.

    A replica has its tensor's shape and type, and each of its chunks is one of the tensor's.
    What only has such a name stays a tensor of its own, which the checks then judge.

    Args:
        meta: is changed: `tensors` loses the replicas, `copies` gets their chunks.
    """
    _name_first(meta)
    boxes: dict[str, _Boxes] = {}
    related: list[tuple[str, str]] = []  # names of a replica and of its tensor
    for name, entry in meta.tensors.items():
        tensor = _tensor_of(name)
        if tensor and _repeats(entry, meta.tensors.get(tensor), tensor, boxes):
            related.append((name, tensor))
    chunks = 0
    for name, tensor in related:
        entry = meta.tensors.pop(name)
        meta.reformulated.pop(name, None)
        chunks += len(entry.chunks)
        meta.copies += [MetadataItem(tensor, c, c.item) for c in entry.chunks if c.item is not None]
    if not related:
        return []
    tensors = counted(len({tensor for _, tensor in related}), "tensor")
    return [finding(
        "note",
        f"{counted(chunks, 'shard')} of {tensors} lie here again as local replicas "
        f"({listed([name for name, _ in related], 1)}): `verify --level values` compares them, "
        "and a reshard or convert writes each tensor once",
    )]  # fmt: skip


def _tensor_of(name: str) -> str:
    """Return the name of the tensor that `name` says it repeats; empty if it says none."""
    match = _SHADOW.fullmatch(name)
    if match is not None:
        # A shadow of a tensor rank's copy: that copy has the tensor's name, or is a replica too.
        inner = _TP_REPLICA.fullmatch(match[2])
        return inner[1] if inner else match[2]
    match = _TP_REPLICA.fullmatch(name)
    return match[1] if match else ""


def _name_first(meta: DcpMetadata) -> None:
    """Give the lowest tensor rank's copy the tensor's name, if nothing else has it."""
    lowest: dict[str, tuple[int, str]] = {}
    for name in meta.tensors:
        match = _TP_REPLICA.fullmatch(name)
        if match is None or _SHADOW.fullmatch(name):
            continue
        if match[1] not in meta.tensors and match[1] not in meta.objects:
            one = (int(match[2]), name)
            lowest[match[1]] = min(one, lowest.get(match[1], one))
    renamed = {first: name for name, (_, first) in lowest.items()}
    # Each in its place: the order of a store's tensors is the trainer's.
    meta.tensors = {renamed.get(name, name): entry for name, entry in meta.tensors.items()}
    for first, name in renamed.items():
        if first in meta.reformulated:
            meta.reformulated[name] = meta.reformulated.pop(first)
        if first in meta.paths:
            *outer, last = meta.paths.pop(first)
            meta.paths[name] = (*outer, str(last).rpartition(".__tp_replica_")[0])


def _repeats(
    entry: TensorEntry, whole: TensorEntry | None, tensor: str, boxes: dict[str, _Boxes]
) -> bool:
    """Return whether an entry has the shape, the type and only chunks of `whole`, all placed."""
    if whole is None or (whole.size, whole.dtype) != (entry.size, entry.dtype):
        return False
    if tensor not in boxes:
        boxes[tensor] = frozenset((chunk.offsets, chunk.sizes) for chunk in whole.chunks)
    return all(
        chunk.item is not None and (chunk.offsets, chunk.sizes) in boxes[tensor]
        for chunk in entry.chunks
    )
