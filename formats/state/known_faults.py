"""Faults of released writers that leave a trace in what they saved, each with its release.

A save that such a writer made loads without an error. Where its trace is found, the finding names
the release, so that one knows what is lost and what to do. A trace is something that no sound save
has; what a fault leaves that a sound save may have too is not looked for.

| writer | trace | source |
|---|---|---|
| Megatron-Core, before #5077 (2026-05-31) | a master and its moments end in zeros where the weight
  has numbers | https://github.com/NVIDIA/Megatron-LM/pull/5077 |
| TransformerEngine's FusedAdam under FSDP2, after #2721 and before 2.14 | a moment without a row,
  of a weight that has one | https://github.com/NVIDIA/TransformerEngine/pull/2795 |
| accelerate under FSDP2, before #4206 | every lora_A has the rows of one rank |
  https://github.com/huggingface/accelerate/pull/4206 |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, TensorInfo, tensor_key
from ftckpt.checkpoint.read_tensor import read_box, slabs
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# The zeros at the end of a shard are looked for in this many of its last bytes.
_TAIL = 16 << 20
_LORA_A = re.compile(r"\.lora_A\.(?:[^.]+\.)?weight$")


class FaultyWriter(NamedTuple):
    """A writer with a known fault.

    Attributes:
        called: its name and releases.
        pull: the change that mended it.
        advice: what to do with such a save.
    """

    called: str
    pull: str
    advice: str

    def said(self, what: str) -> str:
        """Return the message about a trace."""
        return f"{what}: {self.called} wrote so ({self.pull}); {self.advice}"


MEGATRON = FaultyWriter(
    "Megatron-Core with --dist-ckpt-optim-fully-reshardable and several buckets, before #5077,",
    "NVIDIA/Megatron-LM#5077",
    "masters and moments are those of other elements, the weights are sound: resume without the"
    " optimizer (--no-load-optim)",
)
TRANSFORMER_ENGINE = FaultyWriter(
    "TransformerEngine's FusedAdam under FSDP2, before 2.14,",
    "NVIDIA/TransformerEngine#2721, #2795",
    "the moments of this weight are not in the save",
)
ACCELERATE = FaultyWriter(
    "accelerate under FSDP2, before #4206,",
    "huggingface/accelerate#4206",
    "the rows of the other ranks are not in the save",
)


def explain(checkpoint: Checkpoint, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the traces of known faults (`known-fault`).

    Args:
        checkpoint: opened.
        findings: of the checks before, which tell where to look: nothing is read of a checkpoint
            whose masters cast to their weights.

    Raises:
        UnavailableError: the storage does not answer.
    """
    yield from _without_rows(checkpoint)
    yield from _one_rank(checkpoint)
    if checkpoint.format == "megatron-dist":
        differing = [f.tensor for f in findings if f.kind == "master-differs" and f.tensor]
        for key in differing:
            yield from _ends_in_zeros(checkpoint, checkpoint.tensors[key])


def _without_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield moments with an axis of no length, of weights that have elements."""
    for info in checkpoint.tensors.values():
        if info.kind not in (Kind.EXP_AVG, Kind.EXP_AVG_SQ) or info.numel or len(info.shape) < 2:
            continue
        weight = checkpoint.tensors.get(tensor_key("model", Kind.PARAM, info.name))
        if weight is None or not weight.numel or len(weight.shape) != len(info.shape):
            continue
        if all(one in (0, other) for one, other in zip(info.shape, weight.shape, strict=True)):
            what = f"{info.kind} of {info.name} is {list(info.shape)}, the weight"
            said = TRANSFORMER_ENGINE.said(f"{what} {list(weight.shape)}")
            yield finding("known-fault", said, tensor=info.key)


def _one_rank(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield an adapter of which every A has the same share of the rank that its B has."""
    shares: dict[tuple[int, int], str] = {}
    for info in checkpoint.tensors.values():
        if info.kind is not Kind.PARAM or len(info.shape) != 2 or not _LORA_A.search(info.name):
            continue
        other = checkpoint.tensors.get(
            tensor_key(info.component, Kind.PARAM, info.name.replace(".lora_A.", ".lora_B."))
        )
        if other is None or len(other.shape) != 2:
            continue
        shares.setdefault((info.shape[0], other.shape[1]), info.key)
        if info.shape[0] >= other.shape[1] or not info.shape[0]:
            return
    ranks = {-(-whole // held) for held, whole in shares}
    if len(ranks) == 1:
        (held, whole), key = next(iter(shares.items()))
        what = f"every lora_A has {held} rows of {whole}, as one of {ranks.pop()} ranks holds them"
        yield finding("known-fault", ACCELERATE.said(what), tensor=key)


def _ends_in_zeros(checkpoint: Checkpoint, master: TensorInfo) -> Iterator[Finding]:
    """Yield a master that, with both moments, ends in zeros where its weight does not."""
    around = [
        checkpoint.tensors.get(tensor_key(master.component, kind, master.name))
        for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    ]
    weight = checkpoint.tensors.get(tensor_key("model", Kind.PARAM, master.name))
    states = [one for one in around if one is not None and one.shape == master.shape]
    if weight is None or weight.shape != master.shape or len(states) < 2:
        return
    for box in sorted({piece.box for piece in master.pieces}):
        try:
            zeros = _zeros_of(checkpoint, [master, *states], weight, box)
        except FtckptError:  # the check of the content says what cannot be read
            return
        if zeros:
            what = f"{master.key} and its moments end in {zeros} zeros where the weight has numbers"
            yield finding("known-fault", MEGATRON.said(what), tensor=master.key)
            return


def _zeros_of(
    checkpoint: Checkpoint, states: Sequence[TensorInfo], weight: TensorInfo, box: Box
) -> int:
    """Return how many elements at the end of a shard are zero in all states and not the weight."""
    import numpy as np

    if not prod(box.sizes):
        return 0
    *_, last = slabs(box, _TAIL, states[0].dtype.itemsize)
    least = None
    for info in states:
        held = read_box(checkpoint, info, last).reshape(-1)
        nonzero = np.flatnonzero(held)
        zeros = held.size - (int(nonzero[-1]) + 1 if nonzero.size else 0)
        least = zeros if least is None else min(least, zeros)
        if not least:
            return 0
    assert least is not None
    held = read_box(checkpoint, weight, last).reshape(-1)[-least:]
    return least if np.count_nonzero(held) * 2 > least else 0
