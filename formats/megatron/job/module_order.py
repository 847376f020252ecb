"""In what order each stage of a legacy Megatron model keeps its tensors, and how stages are cut.

Optimizers number parameters in this order and store no names, so a writer must keep it. It is read
off the files of the source: what comes before the layers, each layer, what comes after them. Cut
anew, layers keep their order, what comes before goes to the first stage and the rest to the last.
A run of experts is one place in the order: how many a rank holds depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.rank_files.grid import Coordinate
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import (
    chunk_keys,
    expert_of,
    head_of,
    is_embedding,
    layer_of,
    local_name,
    tied_to,
    with_expert,
)
from ftckpt.formats.pickles.walk import Path, dotted, leaves
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef

from .stages import Counts, Stage, offsets

_TENSORS = (TensorRef, SubclassRef, Composite)


class ModuleEntry(NamedTuple):
    """What stands at one place of a model chunk."""

    name: str  # in the whole model, with `%` for the number of an expert where it is one of a run
    # how many words of the name each key on the way to it has (one key, but for models of before
    # megatron-core)
    words: tuple[int, ...]
    # what stands there in place of a tensor, where it is nothing (None, an empty dict)
    empty: Any = None
    full: bool = True  # whether a tensor stands there, or a state that is more than nothing
    copy: bool = False  # whether it is the last stage's copy of the embedding


class Experts(NamedTuple):
    """A run of experts: all of a rank's stand here."""

    members: tuple[ModuleEntry, ...]  # of each expert
    by_number: bool  # whether an expert's members stand together, or each member's experts


Slot = ModuleEntry | Experts
Order = Mapping[Stage, Sequence[Slot]]


class RankFileItem(NamedTuple):
    """One place in a rank's file."""

    path: Path  # the keys that lead to it in its model chunk
    name: str  # the same, joined by dots
    weight: str  # the name in the whole model of what stands there
    entry: ModuleEntry  # what it was made from


def order_of(ranks: FirstRanks) -> dict[Stage, list[Slot]]:
    """Return the order on every stage of the source.

    Raises:
        CorruptError, UnsafeError: a file is missing, damaged or hostile.
        UnsupportedError: keys of a model that are no texts.
    """
    found: dict[Stage, list[Slot]] = {}
    for at in ranks.coordinates():
        tree = ranks.stream(at).tree
        for chunk, key in chunk_keys(tree).items():
            stage = Stage(at.pp, chunk)
            if stage not in found:  # the files of other expert ranks have the same order
                entries = [_entry(ranks, at, chunk, *leaf) for leaf in leaves(tree[key]) if leaf[0]]
                found[stage] = _with_runs(entries)
    return found


def order_of_names(names: Iterable[str]) -> list[Slot]:
    """Return the order of a whole model whose tensors stand in this order, each under one key."""
    return _with_runs(ModuleEntry(name, (name.count(".") + 1,)) for name in names)


def _entry(ranks: FirstRanks, at: Coordinate, chunk: int, path: Path, value: Any) -> ModuleEntry:
    name = dotted(path)
    if not all(type(step) is str for step in path):
        raise UnsupportedError(f"{name} has a key that is not text", tensor=name)
    name, copy = ranks.weight(at, chunk, name)
    words = tuple(str(step).count(".") + 1 for step in path)
    full = isinstance(value, _TENSORS) or not (value is None or value == {})
    return ModuleEntry(name, words, None if full else value, full, copy and full)


def _with_runs(entries: Iterable[ModuleEntry]) -> list[Slot]:
    """Put each run of experts into one slot."""
    slots: list[Slot] = []
    for in_run, group in groupby(entries, key=lambda entry: expert_of(entry.name) is not None):
        run = list(group)
        slots += [_run(run)] if in_run else run
    return slots


def _run(entries: Sequence[ModuleEntry]) -> Experts:
    known = [found for entry in entries if (found := expert_of(entry.name))]
    members = {
        pattern: entry._replace(name=pattern)
        for (pattern, _), entry in zip(known, entries, strict=True)
    }
    several = len({number for _, number in known}) > 1
    # One expert a rank does not show the order; a module each stands together.
    by_number = (
        known[0][0] != known[1][0]
        if several and len(members) > 1
        else ".local_experts." in known[0][0]
    )
    return Experts(tuple(members.values()), by_number)


def cut_anew(order: Order, counts: Counts) -> dict[Stage, list[Slot]]:
    """Return the order on every stage of another number of stages.

    Args:
        order: of the source.
        counts: layers of each new stage.

    Raises:
        UnsupportedError: something stands where it would have to be told on which stage it belongs.
    """
    first, last = min(order, key=_place), max(order, key=_place)
    layers: dict[int, list[Slot]] = {}
    before: list[Slot] = []
    after: list[Slot] = []
    main = main_stack(order)
    for stage in sorted(order, key=_place):
        seen = stage != first and stage == last and not _has_layer(order[stage], main)
        for slot in order[stage]:
            place = layer_of(_name(slot))
            if place is not None and place[0] == main:
                layers.setdefault(place[1], []).append(slot)
                seen = True
            elif stage == last and seen:
                after.append(slot)
            elif stage == first and not seen:
                before.append(slot)
            else:
                name = _name(slot)
                what = f"which of other pipeline stages has {name} is not known"
                raise UnsupportedError(what, tensor=name)
    found: dict[Stage, list[Slot]] = {}
    for stage, begin in offsets(counts).items():
        numbers = range(begin, begin + counts[stage])
        found[stage] = [slot for number in numbers for slot in layers.get(number, ())]
    found[min(found, key=_place)][:0] = before
    found[max(found, key=_place)] += after
    return found


def with_copy(slots: Sequence[Slot], embedding: str, words: tuple[int, ...]) -> list[Slot]:
    """Return the last stage's order with a copy of the embedding in its place.

    Args:
        slots: of the last stage.
        embedding: its name.
        words: of the embedding's own entry.
    """
    if any(isinstance(slot, ModuleEntry) and slot.copy for slot in slots):
        return list(slots)
    head = head_of(embedding)
    module = head.removesuffix("weight")
    found = list(slots)
    at = next((n for n, s in enumerate(found) if _name(s).startswith(module)), len(found))
    count = head.count(".") + 1
    found.insert(at, ModuleEntry(head, (count,) if len(words) == 1 else (1,) * count, copy=True))
    return found


def without_copy(slots: Iterable[Slot]) -> list[Slot]:
    """Return an order without copies of the embedding."""
    return [slot for slot in slots if not (isinstance(slot, ModuleEntry) and slot.copy)]


def embedding_of(order: Order) -> ModuleEntry | None:
    """Return the word embedding's entry; None where the model has none."""
    for slots in order.values():
        for slot in slots:
            if isinstance(slot, ModuleEntry) and slot.full and is_embedding(slot.name):
                return slot
    return None


def items(
    slots: Iterable[Slot], firsts: Mapping[str, int], rank: int, experts: int
) -> Iterator[RankFileItem]:
    """Yield what a rank's file holds of one model chunk, in order.

    Args:
        slots: of the chunk.
        firsts: the number in the model of the first layer of each stack.
        rank: the expert-parallel rank.
        experts: how many experts it holds.
    """
    first = rank * experts
    for entry in _expanded(slots, range(first, first + experts)):
        name = local_name(entry.name, firsts, first)
        weight = (tied_to(entry.name) or entry.name) if entry.copy else entry.name
        yield RankFileItem(_path(name, entry.words), name, weight, entry)


def _expanded(slots: Iterable[Slot], numbers: range) -> Iterator[ModuleEntry]:
    for slot in slots:
        if isinstance(slot, ModuleEntry):
            yield slot
            continue
        pairs = (
            [(member, n) for n in numbers for member in slot.members]
            if slot.by_number
            else [(member, n) for member in slot.members for n in numbers]
        )
        for member, number in pairs:
            yield member._replace(name=with_expert(member.name, number))


def put(model: dict[str, Any], path: Path, value: Any) -> None:
    """Put a value at a path of a model chunk, whose dicts are made on the way."""
    for key in path[:-1]:
        model = model.setdefault(str(key), {})
    model[str(path[-1])] = value


def _path(name: str, words: tuple[int, ...]) -> Path:
    rest, path = name.split("."), []
    for count in words:
        path.append(".".join(rest[:count]))
        rest = rest[count:]
    return tuple(path)


def _name(slot: Slot) -> str:
    return slot.name if isinstance(slot, ModuleEntry) else slot.members[0].name


def _place(stage: Stage) -> tuple[int, int]:
    """Return what sorts stages as the model runs through them."""
    return stage.chunk, stage.pp


def main_stack(order: Order) -> str:
    """Return the stack with the most layers."""
    found: dict[str, set[int]] = {}
    for slots in order.values():
        for slot in slots:
            place = layer_of(_name(slot))
            if place is not None:
                found.setdefault(place[0], set()).add(place[1])
    return max(found, key=lambda stack: len(found[stack]), default="")


def _has_layer(slots: Iterable[Slot], stack: str) -> bool:
    places = (layer_of(_name(slot)) for slot in slots)
    return any(place is not None and place[0] == stack for place in places)
