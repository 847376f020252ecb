"""Find which rank of a stage holds which parameters in its buckets.

A group of data-parallel ranks holds the optimizer state of one pipeline stage as one tensor rank
(or, for experts, one expert and tensor rank) has it. How many layers a stage has is not taken from
arguments: that number is the one whose parameters fill the buckets to the last element.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.megatron.job.registration import EMBEDDING, OUTPUT, Registration
from ftckpt.formats.megatron.optimizer.buffers import ALIGNMENT, Parameter, Slot, lay_out

from .chunks import Buckets, Owned

# Name -> the boxes of a rank's own part, in the order of that part.
Parts = Mapping[str, tuple[Box, ...]]


class Attempt:
    """One order of the parameters, and the ranks that may have laid them out so."""

    def __init__(
        self,
        groups: Sequence[Mapping[int, Buckets]],
        ranks: Sequence[Parts],
        order: Registration,
        stages: int,
        dtype: DType,
    ) -> None:
        """Prepare.

        Args:
            groups: of each group, the buckets of each of its buffers; ranks of a stage follow each
                other, then comes the next stage.
            ranks: of each rank of a stage, its parts of the parameters of all stages.
            order: of all parameters; what no rank has is left out.
            stages: number of pipeline stages.
            dtype: of the parameters.
        """
        self._groups, self._ranks, self._stages, self._dtype = groups, ranks, stages, dtype
        self._order = order
        # With tied embeddings the last of several stages has a copy in place of an output layer.
        self._tied = stages > 1 and EMBEDDING in order.before and OUTPUT not in order.after
        self._after = (*order.after, EMBEDDING) if self._tied else order.after

    def owned(self) -> dict[str, list[Owned]] | None:
        """Return what each rank has of each parameter; None where the buckets are others.

        Chunks of the model follow each other through the stages: all stages, and then all again.
        """
        chunks = len(self._groups[0])
        if any(sorted(group) != list(range(chunks)) for group in self._groups):
            return None
        found: dict[str, list[Owned]] = defaultdict(list)
        seen: Counter[tuple[str, Box]] = Counter()
        at = 0
        for chunk in range(chunks):
            for stage in range(self._stages):
                begin = stage * len(self._ranks)
                group = self._groups[begin : begin + len(self._ranks)]
                ends = (
                    self._order.before if chunk == stage == 0 else (),
                    self._after if (chunk, stage) == (chunks - 1, self._stages - 1) else (),
                )
                buckets = [buffers[chunk] for buffers in group]
                taken = self._layers_of(buckets, at, ends)
                if taken is None:
                    return None
                count, laid = taken
                at += count
                for parts, held, slots in zip(self._ranks, buckets, laid, strict=True):
                    for name, slot in slots.items():
                        place = (name, parts[name][0])
                        found[name].append(Owned(parts[name], held, slot, seen[place]))
                        seen[place] += 1
        return None if any(self._order.layers[at:]) else dict(found)

    def _layers_of(
        self, buckets: Sequence[Buckets], at: int, ends: tuple[Sequence[str], Sequence[str]]
    ) -> tuple[int, list[Mapping[str, Slot]]] | None:
        """Return how many layers from `at` on fill the buckets of a stage, and each rank's slots.

        Args:
            buckets: of each rank of the stage.
            at: the first layer that no stage has yet.
            ends: what the stage has before and after its layers.
        """
        before, after = ends
        first = self._ranks[0]
        room = sum(_sizes(buckets[0]))
        fixed = sum(_numel(first, name) for name in (*before, *after))
        layers = self._order.layers[at:]
        filled = accumulate(
            (sum(_numel(first, n) for n in names) for names in layers), initial=fixed
        )
        for count, numel in enumerate(filled):
            held = [*before, *(n for names in layers[:count] for n in names), *after]
            # Between two parameters lie fewer elements than their alignment.
            if numel <= room <= numel + ALIGNMENT * len(held):
                laid = [
                    self._laid(parts, held, own)
                    for parts, own in zip(self._ranks, buckets, strict=True)
                ]
                if all(slots is not None for slots in laid):
                    return count, [slots for slots in laid if slots is not None]
        return None

    def _laid(self, parts: Parts, held: Sequence[str], own: Buckets) -> Mapping[str, Slot] | None:
        """Return the slots of one rank; None where its buckets or their cuts are others."""
        parameters = [
            Parameter(n, (_numel(parts, n),), self._dtype, self._tied and n == EMBEDDING)
            for n in held
            if n in parts
        ]
        sizes = _sizes(own)
        laid = lay_out(parameters, sizes)
        if laid.buckets != sizes or sorted(own) != list(range(len(sizes))):
            return None
        fits = all(
            {slot.start, slot.start + slot.length} <= bucket.cuts
            for slot in laid.slots.values()
            for bucket in own[slot.bucket].values()
        )
        return laid.slots if fits else None


def _numel(parts: Parts, name: str) -> int:
    return sum(box.volume for box in parts.get(name, ()))


def _sizes(buckets: Buckets) -> tuple[int, ...]:
    """Return the size of each bucket; -1 where its states disagree."""
    sizes = ({bucket.numel for bucket in buckets[number].values()} for number in sorted(buckets))
    return tuple(found.pop() if len(found) == 1 else -1 for found in sizes)
