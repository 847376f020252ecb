"""Predict what a resume would miss: one table, matched against names.

It decodes nothing and reads no tensor: it compares the names of a checkpoint's non-tensor state
(`Checkpoint.fields`) and its tensors with the names that the common trainers use. So the answer has
three values. *Absent* means: without a known name; an object of unknown content
(`rng.rank_0`, one pickled object) is *cannot tell*, never *present*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.findings import listed

from .training_state import MASTERS, MOMENTS, STEP, TABLE, WEIGHTS, StateRow


class Presence(StrEnum):
    """The verdict on one component of the training state."""

    PRESENT = "present"
    ABSENT = "absent"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class ResumeItem:
    """The verdict on one component of one checkpoint.

    Attributes:
        key: `StateRow.key`.
        title: `StateRow.title`.
        presence: present, absent or cannot tell.
        reason: one sentence with the evidence.
        consequence: the effect on a restart without it.
        where: names that show it, at most `SHOWN` of them.
        ranks: number of ranks that have it; None if it is not kept by rank or unknown.
        world_size: number of ranks of the job that wrote the checkpoint; None if unknown.
        missing: for optimizer moments and master weights: parameters without them, in order.
        needed: False if the checkpoint itself shows that a restart does not need it.
    """

    key: str
    title: str
    presence: Presence
    reason: str
    consequence: str
    where: tuple[str, ...] = ()
    ranks: int | None = None
    world_size: int | None = None
    missing: tuple[str, ...] = ()
    needed: bool = True


SHOWN = 3


def resume_check(checkpoint: Checkpoint) -> tuple[ResumeItem, ...]:
    """Return one verdict per row of `TABLE`, in its order; reads at most step counters."""
    tensors = _Tensors.of(checkpoint)
    names = _Names(checkpoint, tensors.others)
    out: list[ResumeItem] = []
    for row in TABLE:
        if row is WEIGHTS:
            item = _weights(tensors)
        elif row is MOMENTS:
            item = _moments(checkpoint, tensors)
        elif row is MASTERS:
            item = _masters(checkpoint, tensors)
        else:
            item = names.match(row)
            if row is STEP and item.presence is Presence.ABSENT and checkpoint.step is not None:
                # The trainer's own counter is elsewhere, often in the directory's name alone.
                reason = f"only the optimizer's own count shows a step: {checkpoint.step}"
                item = _item(STEP, Presence.CANNOT_TELL, reason)
            if row.key == "scaler" and item.presence is Presence.ABSENT:
                item = _unscaled(item, tensors.weights)
        out.append(item)
    return tuple(out)


def _item(
    row: StateRow,
    presence: Presence,
    reason: str,
    where: Sequence[str] = (),
    *,
    ranks: int | None = None,
    world_size: int | None = None,
    missing: Sequence[str] = (),
    needed: bool = True,
) -> ResumeItem:
    return ResumeItem(
        row.key, row.title, presence, reason, row.consequence, tuple(where[:SHOWN]), ranks,
        world_size, tuple(missing), needed,
    )  # fmt: skip


_RANK = re.compile(
    r"(?:^|[._/:@-])(?:dp_|dp|global_)?rank[_-]?(\d+)(?=[._/:@-]|$)"
    r"|(?:rng_state|random_states)_(\d+)(?=[./:]|$)"
)


def rank_in(name: str) -> str | None:
    """Return the rank in a name, `rng.rank_3`; None without one."""
    shown = _RANK.search(name)
    return next((group for group in shown.groups() if group is not None), None) if shown else None


_STATE_FILES = (".pt", ".pth", ".bin", ".pkl", ".json")
# torch's generators: c10's CPUGeneratorImplState has 5056 bytes, CUDA's seed and offset 16.
_GENERATORS = {5056: "torch_rng_state", 16: "cuda_rng_state"}


def spoken(key: str, tensor: TensorInfo) -> str:
    """Return the key of a tensor, and what its size shows if its name says only `rng.rank_0`."""
    blind = any(row.per_rank and row.hint and row.hint.search(key) for row in TABLE)
    state = _GENERATORS.get(tensor.nbytes) if blind and tensor.dtype.name == "uint8" else None
    return f"{key}.{state}" if state else key


class _Tensors(NamedTuple):
    """Tensors by their use in a restart, each list in the checkpoint's order.

    Attributes:
        weights: the model's parameters.
        optimizer: all of the optimizer's.
        masters: of any component.
        others: of neither model, optimizer nor a moving average.
    """

    weights: list[TensorInfo]
    optimizer: list[TensorInfo]
    masters: list[TensorInfo]
    others: list[TensorInfo]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Tensors:
        """Sort them, by runs of the same component and kind: there may be a million."""
        found = cls([], [], [], [])
        alike = attrgetter("component", "kind")
        for (component, kind), tensors in groupby(checkpoint.tensors.values(), key=alike):
            run = list(tensors)
            if component == "model":
                if kind is Kind.PARAM:
                    found.weights.extend(run)
            elif component == "optimizer":
                found.optimizer.extend(run)
            elif component != "ema":
                found.others.extend(run)
            if kind is Kind.MASTER:
                found.masters.extend(run)
        return found


class _Names:
    """All names of a checkpoint's non-tensor state and of its other tensors, and their owners."""

    def __init__(self, checkpoint: Checkpoint, tensors: Iterable[TensorInfo]) -> None:
        self.world_size = checkpoint.topology.world_size
        self.saving_ranks = checkpoint.saving_ranks
        self.objects = checkpoint.objects
        extra = (spoken(tensor.key, tensor) for tensor in tensors)
        # A file beside the tensors that the format does not open may also hold state.
        beside = (name for name in checkpoint.source.entries if name.endswith(_STATE_FILES))
        self.names = list(
            dict.fromkeys([*checkpoint.fields(), *checkpoint.objects, *extra, *beside])
        )
        # An object whose inside is known by name is judged by that inside.
        inner = {parent for name in self.names for parent in _parents(name)}
        rng = [row.known for row in TABLE if row.per_rank and row.known]
        self.closed = [
            name
            for name in self.names
            if name not in inner and not any(known.search(name) for known in rng)
        ]

    def match(self, row: StateRow) -> ResumeItem:
        assert row.known is not None
        assert row.hint is not None
        found = [name for name in self.names if row.known.search(name)]
        if found:
            ranks = self._ranks(found) if row.per_rank else None
            reason = f"found as {found[0]}"
            if ranks is not None and self.saving_ranks is not None and ranks < self.saving_ranks:
                reason += f", but only of {ranks} of {self.saving_ranks} ranks"
            return _item(row, Presence.PRESENT, reason, found, ranks=ranks,
                         world_size=self.world_size)  # fmt: skip
        # A name that says what else it is (`rng.random.0`) is not ambiguous.
        hints = [n for n in self.closed if row.hint.search(n)]
        if hints:
            return _item(row, Presence.CANNOT_TELL, f"{hints[0]} may hold it or stand in for it",
                         hints, ranks=self._ranks(hints) if row.per_rank else None,
                         world_size=self.world_size)  # fmt: skip
        return _item(row, Presence.ABSENT, "no name in the checkpoint shows it",
                     world_size=self.world_size)  # fmt: skip

    def _ranks(self, found: Iterable[str]) -> int | None:
        ranks = {rank for name in found for rank in self._owners(name)}
        return len(ranks) or None

    def _owners(self, name: str) -> Iterator[str]:
        if "/shard_" in name:  # Megatron keeps one a tensor and pipeline rank, for all of data's
            return
        for candidate in (name, *_parents(name)):
            info = self.objects.get(candidate)
            if info is not None and info.rank is not None:
                yield str(info.rank)
                return
        rank = rank_in(name)
        if rank is not None:
            yield rank


def _parents(name: str) -> Iterator[str]:
    for place, character in enumerate(name):
        if character in "./:" and place:
            yield name[:place]


def _weights(tensors: _Tensors) -> ResumeItem:
    weights = tensors.weights
    named = {t.name for t in weights} if tensors.masters else ()
    # A fully sharded trainer stores no weights and casts them from the masters.
    masters = [t.key for t in tensors.masters if t.name not in named]
    if weights or masters:
        beside = f", {len(masters)} as masters alone" if masters else ""
        reason = f"{len(weights) + len(masters)} tensors{beside}"
        return _item(WEIGHTS, Presence.PRESENT, reason, [*(t.key for t in weights[:1]), *masters])
    if tensors.others:
        return _item(WEIGHTS, Presence.CANNOT_TELL, "there are tensors, but none known as weights")
    return _item(WEIGHTS, Presence.ABSENT, "no tensor of the model is stored")


def _trainable(checkpoint: Checkpoint, weights: Sequence[TensorInfo]) -> list[TensorInfo]:
    # Integers have no gradient, and tied weights share the moments of their owner.
    tied = checkpoint.aliases
    return [
        t
        for t in weights
        if t.dtype.family in ("float", "complex") and not (tied and t.key in tied)
    ]


def _moments(checkpoint: Checkpoint, tensors: _Tensors) -> ResumeItem:
    optimizer = tensors.optimizer
    avg = {t.name for t in optimizer if t.kind is Kind.EXP_AVG}
    square = {t.name for t in optimizer if t.kind is Kind.EXP_AVG_SQ}
    other = {
        t.name.rpartition(".")[0]
        for t in optimizer
        if t.kind is Kind.OTHER and t.name.rpartition(".")[2] != "step"
    }
    first = [t.key for t in optimizer if t.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)][:2]
    # Adam has both, Lion the first alone, SGD and others name their own.
    kept = avg & square if square else avg or other
    if not kept:
        if square or optimizer:
            return _item(MOMENTS, Presence.CANNOT_TELL, "the optimizer's tensors name no moment",
                         [t.key for t in optimizer])  # fmt: skip
        return _item(MOMENTS, Presence.ABSENT, "no optimizer state is stored")
    trainable = _trainable(checkpoint, tensors.weights)
    missing = [t.name for t in trainable if t.name not in kept]
    if trainable and len(missing) == len(trainable):
        return _item(MOMENTS, Presence.CANNOT_TELL,
                     "the moments stand under names that no weight has", first)  # fmt: skip
    if missing:
        return _item(
            MOMENTS, Presence.CANNOT_TELL,
            f"{len(missing)} of {len(trainable)} parameters have no moments "
            f"({listed(missing, 3)}): frozen, buffers, or lost",
            first, missing=missing,
        )  # fmt: skip
    return _item(MOMENTS, Presence.PRESENT, f"for each of {len(kept)} parameters",
                 first or sorted(kept))  # fmt: skip


def _masters(checkpoint: Checkpoint, tensors: _Tensors) -> ResumeItem:
    masters = tensors.masters
    small = _trainable(checkpoint, [t for t in tensors.weights if t.dtype.bits < 32])
    if masters:
        names = {t.name for t in masters}
        missing = [t.name for t in small if t.name not in names]
        if not missing or len(missing) == len(small):
            return _item(MASTERS, Presence.PRESENT, f"{len(masters)} tensors",
                         [t.key for t in masters])  # fmt: skip
        return _item(
            MASTERS, Presence.CANNOT_TELL,
            f"{len(missing)} of {len(small)} 16-bit parameters have no master "
            f"({listed(missing, 3)})", missing=missing,
        )  # fmt: skip
    if not small:
        return _item(MASTERS, Presence.ABSENT, "no weight has fewer than 32 bits, so none is due",
                     needed=False)  # fmt: skip
    return _item(MASTERS, Presence.ABSENT, f"{len(small)} weights have fewer than 32 bits")


def _unscaled(item: ResumeItem, weights: Sequence[TensorInfo]) -> ResumeItem:
    types = {t.dtype.name for t in weights}
    needed = "float16" in types or "bfloat16" not in types
    reason = "no name shows it" if needed else "the weights are bfloat16, which needs none"
    return ResumeItem(
        item.key, item.title, item.presence, reason, item.consequence, needed=needed,
        world_size=item.world_size,
    )  # fmt: skip
