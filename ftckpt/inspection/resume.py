"""Predict what a resume would miss, by names and by content.

Names first: those of a checkpoint's non-tensor state (`Checkpoint.fields`) and of its tensors,
matched against one table of the names that the common trainers use. Then content
(`state_content`): it shows what has a name of its own (`sched`), and that a known name stands for
nothing (`scaler` of None). It reads no tensor, and decodes an optimizer's groups alone, where a
parameter lacks a moment.

The answer has three values. *Absent* is said only where all of the state was read and understood;
else it is *cannot tell*. Weights, moments and masters are *cannot tell* too while a tensor has a
name that nobody knows, and so are generators while one holds bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from ftckpt.checkpoint import Checkpoint, Kind, StepRole, TensorInfo
from ftckpt.checkpoint.names import record_names
from ftckpt.checkpoint.optimizer_states import NamedState, StateShape, named_state
from ftckpt.findings import counted, listed

from .training_state import (
    GENERATORS,
    HELD_BY_A_NUMBER,
    HELD_BY_TENSORS,
    MASTERS,
    MOMENTS,
    STEP,
    TABLE,
    WEIGHTS,
    Contents,
    Found,
    StateRow,
    is_setting,
    look,
)


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


def resume_check(
    checkpoint: Checkpoint, contents: Contents | None = None
) -> tuple[ResumeItem, ...]:
    """Return one verdict per row of `TABLE`, in its order.

    Args:
        checkpoint: opened.
        contents: reads its non-tensor state. None: by names alone, for who knows that its names are
            those of the table; then *absent* means "without a known name".
    """
    found = Found() if contents is None else look(checkpoint, contents)
    shown = {name for names in found.shown.values() for name in names}
    tensors = _Tensors.of(checkpoint, shown)
    names = _Names(checkpoint, tensors.others, found)
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
            if row.per_rank and item.presence is Presence.ABSENT:
                item = _unknown_bytes(row, item, tensors)
            if row is STEP and item.presence is Presence.ABSENT:
                item = _counted(checkpoint, item, names.counts)
            if row.key == "scaler" and item.presence is Presence.ABSENT and item.needed:
                item = _unscaled(item, tensors.weights, told=checkpoint.unscaled)
        if item.presence is Presence.ABSENT and item.needed:
            item = _perhaps(item, found)
        out.append(item)
    return tuple(out)


def _perhaps(item: ResumeItem, found: Found) -> ResumeItem:
    """Doubt that something is absent while content is not understood, or was not read."""
    may = [*found.unknown, *(found.numbers if item.key in HELD_BY_A_NUMBER else ())]
    may += found.texts if item.key not in HELD_BY_TENSORS else ()
    if not may:
        return item
    reason = f"nothing shows it, and what is not understood may hold it: {listed(may, SHOWN)}"
    return replace(item, presence=Presence.CANNOT_TELL, where=tuple(may[:SHOWN]), reason=reason)


def _counted(checkpoint: Checkpoint, absent: ResumeItem, counts: Set[str]) -> ResumeItem:
    """Return the verdict on a step that no name of the state shows.

    `counts` are names under which an optimizer counts its updates.
    """
    own = [one for one in checkpoint.step_scalars if one.role is StepRole.ITERATION]
    if own:  # in a small file of the trainer's beside the state
        where = list(dict.fromkeys(f"{one.file}:{one.name}" for one in own))
        return _item(STEP, Presence.PRESENT, f"found as {listed(where, SHOWN)}", where)
    count: int | str | None = checkpoint.optimizer_count
    if count is None:
        count = min(counts, default=None)
    if count is None:
        return absent
    # The trainer's own counter is elsewhere, often in the directory's name alone.
    reason = f"only the optimizer's own count shows a step: {count}"
    return _item(STEP, Presence.CANNOT_TELL, reason)


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
_GENERATORS = {"rng-torch": "torch_rng_state", "rng-cuda": "cuda_rng_state"}


def spoken(key: str, tensor: TensorInfo) -> str:
    """Return the key of a tensor, and what its size shows if its name says only `rng.rank_0`."""
    blind = any(row.per_rank and row.hint and row.hint.search(key) for row in TABLE)
    bytes_ = blind and tensor.dtype.name == "uint8"
    state = _GENERATORS.get(GENERATORS.get(tensor.nbytes, "")) if bytes_ else None
    return f"{key}.{state}" if state else key


@dataclass(frozen=True)
class _Tensors:
    """Tensors by their use in a restart, each list in the checkpoint's order.

    Attributes:
        weights: the model's parameters.
        optimizer: all of the optimizer's.
        masters: of any component.
        others: of neither model, optimizer nor a moving average.
        shown: keys of those of which the content shows what they are.

    `unexplained` are the others of which no row of the table knows the name.
    """

    weights: list[TensorInfo]
    optimizer: list[TensorInfo]
    masters: list[TensorInfo]
    others: list[TensorInfo]
    shown: Set[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, shown: Set[str]) -> _Tensors:
        """Sort them, by runs of the same component and kind: there may be a million."""
        found = cls([], [], [], [], shown)
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

    def parameters(self) -> list[TensorInfo]:
        """Return the weights, and the masters that stand for weights that are not stored."""
        if not self.masters:
            return self.weights
        named = {t.name for t in self.weights}
        return [*self.weights, *(t for t in self.masters if t.name not in named)]

    @cached_property
    def unexplained(self) -> list[TensorInfo]:
        known = [p for row in TABLE for p in (row.known, row.hint) if p is not None]
        return [
            t
            for t in self.others
            if t.key not in self.shown and not any(p.search(spoken(t.key, t)) for p in known)
        ]

    def absent(self, row: StateRow, reason: str, *, needed: bool = True) -> ResumeItem:
        """Return that something is absent; cannot tell while an unknown tensor may hold it."""
        keys = [t.key for t in self.unexplained]
        if not keys:
            return _item(row, Presence.ABSENT, reason, needed=needed)
        what = f"{reason}, but {counted(len(keys), 'tensor')} may hold it: {listed(keys, SHOWN)}"
        return _item(row, Presence.CANNOT_TELL, what, keys, needed=needed)


class _Names:
    """All names of a checkpoint's non-tensor state and of its other tensors, and their owners."""

    def __init__(
        self, checkpoint: Checkpoint, tensors: Iterable[TensorInfo], content: Found
    ) -> None:
        self.world_size = checkpoint.topology.world_size
        self.saving_ranks = checkpoint.saving_ranks
        self.objects = checkpoint.objects
        self._content = content
        tensors = list(tensors)
        extra = (spoken(tensor.key, tensor) for tensor in tensors)
        # A file beside the tensors that the format does not open may also hold state.
        members = set(checkpoint.members())
        entries = (name for name in checkpoint.source.entries if name not in members)
        beside = (name for name in entries if name.endswith(_STATE_FILES))
        self.names = list(
            dict.fromkeys(
                [*checkpoint.fields(), *checkpoint.objects, *extra, *beside, *content.names]
            )
        )
        # An optimizer of a name that nobody knows keeps a count beside each parameter's moments.
        owners = (named_state(_dotted(tensor.key)) for tensor in tensors)
        moved = {one.parameter for one in owners if one.state is not None and one.state.moment}
        self.counts = frozenset(
            name for name in self.names if _is_count(named_state(_dotted(name)), moved)
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
        counts = self.counts if row is STEP else frozenset[str]()
        known = [
            name
            for name in self.names
            if row.known.search(name) and _says(row, name) and name not in counts
        ]
        found = [name for name in known if not self._content.hollow(name)]
        # A name that says what else it is (`rng.random.0`) is not ambiguous, and neither is what
        # was read: only a number may stand in for another.
        hints = [
            n
            for n in self.closed
            if row.hint.search(n)
            and not self._content.hollow(n)
            and not (n in self._content.read and row.key not in HELD_BY_A_NUMBER)
            and not self._content.of(n)
        ]
        shown = self._content.shown.get(row.key, ())
        by_name = bool(found)
        found = found or list(shown)
        if found:
            # Of many files of ranks not all are opened: these may hold it too.
            ranks = self._ranks([*found, *hints]) if row.per_rank else None
            reason = (
                f"found as {found[0]}" if by_name else f"{found[0]} holds it, as its content shows"
            )
            if ranks is not None and self.saving_ranks is not None and ranks < self.saving_ranks:
                reason += f", but only of {ranks} of {self.saving_ranks} ranks"
            return _item(row, Presence.PRESENT, reason, found, ranks=ranks,
                         world_size=self.world_size)  # fmt: skip
        if hints:
            return _item(row, Presence.CANNOT_TELL, f"{hints[0]} may hold it or stand in for it",
                         hints, ranks=self._ranks(hints) if row.per_rank else None,
                         world_size=self.world_size)  # fmt: skip
        if known:
            # torch's GradScaler has an empty state where it scales no loss.
            return _item(row, Presence.ABSENT, f"{known[0]} is empty", world_size=self.world_size,
                         needed=row.key != "scaler")  # fmt: skip
        reason = "no name in the checkpoint shows it"
        if self._content.read:
            reason = "neither a name nor the content shows it"
        return _item(row, Presence.ABSENT, reason, world_size=self.world_size)

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


def _dotted(key: str) -> str:
    """Return a key as its path in the state that was saved: `extra:adam:weight.step`."""
    return key.removeprefix("extra:").replace(":", ".")


def _is_count(named: NamedState, parameters: Set[str]) -> bool:
    """Whether a name is the count that an optimizer keeps of a parameter."""
    state = named.state
    counts = state is not None and state.shape is StateShape.SCALAR and not state.moment
    return counts and named.parameter in parameters


def _says(row: StateRow, name: str) -> bool:
    """Whether a known name is the trainer's state, and not a setting or the optimizer's counter.

    Megatron counts samples in its arguments.
    """
    if row is STEP and _OPTIMIZER_STATE.search(name):
        return False
    return row.key in HELD_BY_A_NUMBER or not is_setting(name)


_OPTIMIZER_STATE = re.compile(r"(?i)(?:^|[./:])(?:\w*optim\w*|opt)[./:](?:.*[./:])?state[./:]")


def _parents(name: str) -> Iterator[str]:
    for place, character in enumerate(name):
        if character in "./:" and place:
            yield name[:place]


def _weights(tensors: _Tensors) -> ResumeItem:
    weights = tensors.weights
    # A fully sharded trainer stores no weights and casts them from the masters.
    masters = [t.key for t in tensors.parameters()[len(weights) :]]
    if weights or masters:
        beside = f", {len(masters)} as masters alone" if masters else ""
        reason = f"{len(weights) + len(masters)} tensors{beside}"
        return _item(WEIGHTS, Presence.PRESENT, reason, [*(t.key for t in weights[:1]), *masters])
    return tensors.absent(WEIGHTS, "no tensor is known as a weight of the model")


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
    states = _States(optimizer, {t.name for t in tensors.parameters()})
    first = states.keys[:2]
    kept = states.whole(checkpoint)
    if not kept:
        if optimizer:
            return _item(MOMENTS, Presence.CANNOT_TELL, "the optimizer's tensors name no moment",
                         [t.key for t in optimizer])  # fmt: skip
        return tensors.absent(MOMENTS, "no tensor is known as optimizer state")
    trainable = _trainable(checkpoint, tensors.parameters())
    missing = [t.name for t in trainable if t.name not in kept]
    if missing:  # a parameter that is a tensor subclass has the moments of what lies inside
        records = record_names(checkpoint.objects)
        owners = {name: name.rpartition(".")[0] for name in missing}
        missing = [n for n, owner in owners.items() if owner not in kept or owner not in records]
    if trainable and len(missing) == len(trainable):
        return _item(MOMENTS, Presence.CANNOT_TELL,
                     "the moments stand under names that no weight has", first)  # fmt: skip
    if missing:
        if _has_all_given(checkpoint, len(kept)):
            what = (
                f"for each of {len(kept)} parameters that the optimizer has; {len(missing)} more"
                f" tensors are none of them ({listed(missing, 3)}): buffers, or frozen"
            )
            return _item(MOMENTS, Presence.PRESENT, what, first)
        return _item(
            MOMENTS, Presence.CANNOT_TELL,
            f"{len(missing)} of {len(trainable)} parameters have no moments "
            f"({listed(missing, 3)}): frozen, buffers, or lost",
            first, missing=missing,
        )  # fmt: skip
    return _item(MOMENTS, Presence.PRESENT, f"for each of {len(kept)} parameters",
                 first)  # fmt: skip


def _has_all_given(checkpoint: Checkpoint, kept: int) -> bool:
    """Whether an optimizer has moments of as many parameters as it was given: none are lost."""
    from ftckpt.checkpoint.optimizer_groups import given

    return given(checkpoint) == kept


class _States:
    """What the optimizer keeps of each parameter, counters and masters left out.

    Attributes:
        keys: of these tensors, those of kinds of their own first.
    """

    def __init__(self, optimizer: Iterable[TensorInfo], weights: Set[str]) -> None:
        """Sort the optimizer's tensors by parameter; `weights` are the names of the model's."""
        self._slots: dict[str, set[str]] = defaultdict(set)
        self._rows: dict[str, set[str]] = defaultdict(set)
        told, others = [], []
        for info in optimizer:
            if info.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                self._slots[info.name].add(info.kind)
                told.append(info.key)
            elif info.kind is Kind.OTHER:
                named = named_state(info.name, weights)
                state = named.state
                if not named.parameter or (state is not None and not state.moment):
                    continue
                if state is None and info.numel == 1:  # a counter of a name that nobody knows
                    continue
                slots = self._slots[named.parameter]
                if state is None or not state.matrices:
                    slots.add(named.slot)
                if state is not None and state.shape in (StateShape.ROWS, StateShape.COLUMNS):
                    self._rows[named.parameter].add(f"{named.slot} {state.shape}")
                others.append(info.key)
        self.keys = told + others

    def whole(self, checkpoint: Checkpoint) -> set[str]:
        """Return the parameters of which nothing is missing that others of the same kind have.

        Adam has two moments, Lion and SGD one, schedule-free and Adafactor others; an optimizer
        may treat matrices as Muon does and the rest as Adam. So a parameter lacks something where
        another has all that it has and more, unless its whole group does, and where it has one of
        two factors.
        """
        kinds = {frozenset(slots) for slots in self._slots.values()}
        second = frozenset({str(Kind.EXP_AVG_SQ)})
        factored = any(
            row.startswith(Kind.EXP_AVG_SQ) for rows in self._rows.values() for row in rows
        )
        lacking = {one for one in kinds if any(one < other for other in kinds)}
        if not factored:
            lacking.add(second)  # no optimizer keeps a plain second moment alone
        even = {name for name in self._slots if len(self._rows.get(name, ())) % 2 == 0}
        more = {name for name in even if frozenset(self._slots[name]) not in lacking}
        less = {name for name in even - more if self._slots[name] != second}
        if not less:
            return more
        from ftckpt.checkpoint.optimizer_groups import of_other_groups

        return more | of_other_groups(less, more, checkpoint)


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
    if not tensors.weights:
        return tensors.absent(MASTERS, "no weight is known", needed=False)
    if not small:
        return _item(MASTERS, Presence.ABSENT, "no weight has fewer than 32 bits, so none is due",
                     needed=False)  # fmt: skip
    return tensors.absent(MASTERS, f"{len(small)} weights have fewer than 32 bits")


def _unknown_bytes(row: StateRow, item: ResumeItem, tensors: _Tensors) -> ResumeItem:
    """Doubt that a generator's state is absent: torch has it as bytes in a tensor of one axis."""
    keys = [t.key for t in tensors.unexplained if t.dtype.name == "uint8" and len(t.shape) == 1]
    if not keys:
        return item
    reason = f"{counted(len(keys), 'tensor')} of bytes may hold it: {listed(keys, SHOWN)}"
    return _item(row, Presence.CANNOT_TELL, reason, keys, world_size=item.world_size)


def _unscaled(item: ResumeItem, weights: Sequence[TensorInfo], *, told: bool) -> ResumeItem:
    types = {t.dtype.name for t in weights}
    needed = not told and ("float16" in types or "bfloat16" not in types)
    why = "the job's arguments name none" if told else "the weights are bfloat16, which needs none"
    reason = "no name shows it" if needed else why
    return ResumeItem(
        item.key, item.title, item.presence, reason, item.consequence, needed=needed,
        world_size=item.world_size,
    )  # fmt: skip
