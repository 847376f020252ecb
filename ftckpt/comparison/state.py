"""Non-tensor state of two checkpoints, field by field: which fields differ, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.errors import FtckptError
from ftckpt.inspection.resume import spoken
from ftckpt.inspection.training_state import about as about
from ftckpt.transfer.content import Content, TargetTensor

from .align import DiffStatus


class Field(NamedTuple):
    """One field of a checkpoint's non-tensor state.

    Attributes:
        name: path in the trainer's state, joined by dots, without the rank.
        rank: whose it is, where each rank has its own.
        shown: the value in a few words.
        digest: the same for equal values, and for no others.
    """

    name: str
    rank: int | None
    shown: str
    digest: bytes


Fields = Callable[[Checkpoint], Iterable[Field | FtckptError]]
"""Reads the non-tensor state of a checkpoint; what cannot be read is an answer too.

How state is stored is the formats' knowledge.
"""


class Follows(StrEnum):
    """How a field of other state hangs on the grid of ranks."""

    GRID = "grid"  # it says what the grid is, or which rank of it
    STORAGE = "storage"  # it says how the state is cut and stored, on any grid
    ACROSS = "across"  # it is another where the grid is another, and there alone


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A field that differs.

    Attributes:
        name: of the field.
        about: which part of the training state it is: a key of the table of the resume check, or
            `learning-rate`, `settings`, `other`.
        title: the same for a person.
        rank: whose it is; None where every rank has the same.
        status: different, missing or added.
        a: the first value in a few words, None where there is none.
        b: the second.
        layout: whether it must differ, because the two lie on other grids of ranks, or are stored
            in another way.
    """

    name: str
    about: str
    title: str
    rank: int | None
    status: DiffStatus
    a: str | None
    b: str | None
    layout: bool = False


Hangs = Callable[[StateDifference], "Follows | None"]
"""Says how a field that differs hangs on the grid; names are the formats' knowledge."""


def mark_layout(
    differences: Iterable[StateDifference], hangs: Hangs, *, other_grid: bool
) -> list[StateDifference]:
    """Return the differences, with those marked that must differ between the two layouts.

    Args:
        differences: of `compare_fields`.
        hangs: how each hangs on the grid.
        other_grid: whether the two are known to lie on other grids; a field that says what the
            grid is shows it too.
    """
    known = [(one, hangs(one)) for one in differences]
    other_grid = other_grid or any(follows is Follows.GRID for _, follows in known)
    always = (Follows.GRID, Follows.STORAGE)
    return [
        replace(one, layout=follows in always or (other_grid and follows is Follows.ACROSS))
        for one, follows in known
    ]


_SMALL = 1 << 20  # a generator's state has a few thousand bytes


def state_tensors(content: Content) -> dict[str, str]:
    """Return the tensors that are compared as fields: key -> name of the field.

    They are counters, and states of generators: of neither means a norm anything.
    """
    found = {}
    for key, wanted in content.tensors.items():
        if wanted.kind is not Kind.OTHER or wanted.component in ("model", "ema"):
            continue
        name = spoken(key, content.checkpoint.tensors[wanted.copies[0].key])
        generator = wanted.dtype.name == "uint8" and about(name)[0].startswith("rng")
        if wanted.nbytes <= _SMALL and (generator or all(n == 1 for n in wanted.shape)):
            found[key] = name
    return found


def field_of(name: str, wanted: TargetTensor, data: bytes) -> Field:
    """Return a small tensor as a field.

    Args:
        name: what it is called.
        wanted: what it is.
        data: its elements.
    """
    import xxhash

    form = f"{wanted.dtype.name}{list(wanted.shape)}"
    digest: bytes = xxhash.xxh3_128_digest(form.encode() + data)
    one = len(data) == wanted.dtype.itemsize
    if one and wanted.dtype.family in ("int", "uint", "bool"):
        shown = str(int.from_bytes(data, "little", signed=wanted.dtype.family == "int"))
    else:
        number = decode_scalar(wanted.dtype, data) if one else None
        shown = repr(number) if number is not None else f"{form} #{digest.hex()[:8]}"
    return Field(name, None, shown, digest)


def compare_fields(ours: Iterable[Field], theirs: Iterable[Field]) -> Iterator[StateDifference]:
    """Yield the fields that differ.

    A field that every rank has with the same value counts as one field: the number of ranks does
    not make states differ.
    """
    first, second = _by_name(ours), _by_name(theirs)
    for name in first | second:
        one, two = first.get(name, {}), second.get(name, {})
        for rank in sorted(one.keys() | two.keys(), key=lambda r: -1 if r is None else r):
            a = one.get(rank, one.get(None))
            b = two.get(rank, two.get(None))
            if rank is None and ((one and a is None) or (two and b is None)):
                continue  # the other side has a value for each rank: they are compared one by one
            if a is None or b is None or a.digest != b.digest:
                yield _difference(name, rank, a, b)


def _difference(name: str, rank: int | None, a: Field | None, b: Field | None) -> StateDifference:
    status = DiffStatus.DIFFERENT
    if a is None or b is None:
        status = DiffStatus.MISSING if b is None else DiffStatus.ADDED
    shown = [None if field is None else field.shown for field in (a, b)]
    if a is not None and b is not None and a.shown == b.shown:
        # What is alike in a few words is told apart by what it is compared by.
        shown = [f"{field.shown} #{field.digest.hex()[:8]}" for field in (a, b)]
    key, title = about(name)
    return StateDifference(name, key, title, rank, status, shown[0], shown[1])


def _by_name(fields: Iterable[Field]) -> dict[str, dict[int | None, Field]]:
    found: dict[str, dict[int | None, Field]] = {}
    for field in fields:
        found.setdefault(field.name, {})[field.rank] = field
    return {
        name: {None: next(iter(held.values()))}
        if len({field.digest for field in held.values()}) == 1
        else held
        for name, held in found.items()
    }
