"""Open the stores of a trainer's step, and what it saved beside them (see `nested`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from ftckpt.checkpoint import Scalar, StepRole
from ftckpt.checkpoint.steps import counters_in
from ftckpt.errors import CorruptError, IncompleteError, UnsafeError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.huggingface.config import parsed_json
from ftckpt.formats.torchsave.reader import TorchSaveCheckpoint, open_files
from ftckpt.storage.source import Source

from .checkpoint import OpenedPart
from .nested import Nest

_SHOWN = 64
# More ranks than this are not named one by one.
_MOST = 10_000
# Of each rank; what the first data rank of an optimizer has gathered ends otherwise.
_OF_RANK = re.compile(r"[_/]rank_?\d{1,6}\.pt$", re.ASCII)
_NUMBER = re.compile(r"\d+(?=\.\w+$)")
_OF_RLINF = r"data/data\.pt|.*/(?:model_state_dict/full_weights|checkpoint_rank_\d+)\.pt"
Opens = Callable[[str], OpenedPart]


class OpenedNest(NamedTuple):
    """The parts of a step, the trained model's store first.

    Attributes:
        parts: see above.
        wrong: what is lost.
        notes: what may be lost.
        numbers: the step, as the file says that is written last.
    """

    parts: Sequence[OpenedPart]
    wrong: Sequence[Finding]
    notes: Sequence[Finding]
    numbers: Sequence[Scalar]


def open_nest(source: Source, nest: Nest, opens: Opens) -> OpenedNest:
    """Open a step.

    Args:
        source: the step's directory.
        nest: how it is laid out.
        opens: opens the store in a folder.

    Raises:
        IncompleteError: the file that is written last is not there.
    """
    if nest.last and nest.last not in source.entries:
        raise IncompleteError(
            f"{nest.last} is not there: {nest.trainer} writes it last, so the save did not finish",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=nest.last,
        )
    parts: list[OpenedPart] = []
    inside: set[str] = set()
    for store in nest.stores:
        if not any(name.startswith(f"{store.place}/") for name in source.entries):
            continue
        part = opens(store.place)._replace(model=store.model)
        parts.append(part)
        inside |= {part.prefix + name for name in part.checkpoint.members()}
        parts += _copies(source, nest, store.beside, store.model)
    parts += _models(source, nest)
    for name in source.entries:
        if re.fullmatch(nest.state, name) and name not in inside:
            parts.append(_state(source, name))
    numbers, unread = _numbers(source, nest)
    return OpenedNest(
        parts, [*unread, *_lost(source, nest, parts)], [*_unsaved(source, nest)], numbers
    )


def _alone(source: Source, name: str) -> Source:
    return replace(source, entries={name: source.entries[name]}, single=False)


def _copies(source: Source, nest: Nest, beside: str, model: str) -> Iterator[OpenedPart]:
    """Open the weights of a store that were written a second time."""
    for name in source.entries:
        if (
            re.fullmatch(nest.copies, name)
            and name.rpartition("/")[0] == f"{beside}model_state_dict"
        ):
            copy = open_files(_alone(source, name), [name], role="model")
            yield OpenedPart("", copy, model=model, again=bool(model))


def _models(source: Source, nest: Nest) -> Iterator[OpenedPart]:
    """Open further models; of those that every rank saved, all but the first are copies."""
    seen: dict[str, int] = {}
    for name in sorted(source.entries):
        match = re.fullmatch(nest.models, name)
        if match is None:
            continue
        word = next(value for value in match.groupdict().values() if value)
        opened = open_files(_alone(source, name), [name], role="model")
        seen[word] = seen.get(word, -1) + 1
        yield OpenedPart("", opened, model=word, copy=seen[word])


def _state(source: Source, name: str) -> OpenedPart:
    label = name.rpartition("/")[2].partition(".")[0]
    opened = open_files(_alone(source, name), [name], role="state", label=label)
    return OpenedPart("", opened)


def _numbers(source: Source, nest: Nest) -> tuple[list[Scalar], list[Finding]]:
    """Return the step that the last file says, and that it cannot be read."""
    if not nest.last:
        return [], []
    try:
        said = parsed_json(source, nest.last)
    except (CorruptError, UnsafeError) as error:
        return [], [from_error(error)]
    found = counters_in(said)
    return [Scalar(nest.last, key, float(n), StepRole.ITERATION) for key, n in found], []


def _lost(source: Source, nest: Nest, parts: Sequence[OpenedPart]) -> Iterator[Finding]:
    """Yield the stores that must be there, and the ranks' files between those that are."""
    first = nest.stores[0]
    if first.model and nest.trainer == "RLinf":
        what = f"the actor's store is missing: RLinf saves it before that of {first.model}"
        # A folder called `dcp_checkpoint` is anybody's; the rest of the layout is not.
        shown = any(re.fullmatch(_OF_RLINF, name) for name in source.entries)
        yield finding("missing-file" if shown else "state-unknown", what)
    if not any(name.startswith(f"{first.place}/") for name in source.entries):
        other = nest.stores[1].place if len(nest.stores) > 1 else nest.last
        what = f"{first.place} is missing: {nest.trainer} saves it with {other}"
        yield finding("missing-file", what, file=first.place)
    if nest.trainer == "OLMo-core" and not any(
        re.fullmatch(nest.state, name) for name in source.entries
    ):
        what = f"train/rank0.pt is missing: {nest.trainer} saves it before {first.place}"
        yield finding("missing-rank", what, file="train/rank0.pt", rank=0)
    series: dict[str, set[int]] = {}
    for name in source.entries:
        number = _NUMBER.search(name)
        if (
            number
            and _OF_RANK.search(name)
            and (re.fullmatch(nest.state, name) or re.fullmatch(nest.models, name))
        ):
            series.setdefault(name[: number.start()], set()).add(int(number[0]))
    worlds = [part.checkpoint.topology.world_size or 1 for part in parts]
    worlds += _recorded_worlds(parts)
    most = max([*(max(held) for held in series.values()), *(world - 1 for world in worlds)])
    for head, held in sorted(series.items()):
        for rank in islice((rank for rank in range(most + 1) if rank not in held), _SHOWN):
            name = f"{head}{rank}.pt"
            what = f"{name} is missing: ranks up to {most} have files"
            yield finding("missing-rank", what, file=name, rank=rank)
        if (more := most + 1 - len(held) - _SHOWN) > 0:
            yield finding("missing-rank", f"{more} more ranks have no file like {head}0.pt")


def _recorded_worlds(parts: Sequence[OpenedPart]) -> Iterator[int]:
    """Yield the numbers of ranks that the ranks' files record: OLMo-core's do, each at its top."""
    for part in parts:
        found = part.checkpoint
        for stream in found.streams.values() if isinstance(found, TorchSaveCheckpoint) else ():
            world = stream.tree.get("world_size") if isinstance(stream.tree, dict) else None
            if type(world) is int and 0 < world <= _MOST:
                yield world


def _unsaved(source: Source, nest: Nest) -> Iterator[Finding]:
    """Yield a warning of a schedule without its optimizer: miles saves both or none."""
    places = {store.place for store in nest.stores}
    held = {p for p in places if any(name.startswith(f"{p}/") for name in source.entries)}
    if {"optimizer", "lr_scheduler"} <= places and len(held & {"optimizer", "lr_scheduler"}) == 1:
        (lost,) = {"optimizer", "lr_scheduler"} - held
        what = f"{lost} is not there: {nest.trainer} saves the optimizer and its schedule together"
        yield finding("state-unknown", what, file=lost)
