"""What a step lacks of files whose number nothing in it records, by the steps beside it.

Where the highest number in a name is all that says how many ranks saved, a set that lost the file
of its last rank looks whole. The steps beside it show how many there were. A job may go on with
other ranks, too: then the same state is cut anew, and its bytes in all stay as they were.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import islice
from operator import and_
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, ImpliedCount
from ftckpt.errors import FtckptError, IncompleteError
from ftckpt.findings import Finding, counted, finding, listed
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.state_files import numbers_in, without_numbers
from ftckpt.storage.store import EntryKind

from .listing import files_of, open_part, recognise_at
from .neighbours import Lacking, StepsBeside, lacking, series
from .recognise import Format, UnopenedPart
from .series import roles_in
from .small_files import may_lack_some

if TYPE_CHECKING:
    from .roots import Candidate, Child, Root

# Steps on each side that are asked.
_ASKED = 2
# Of what the missing files would hold: every rank keeps small tensors and pads its part of a large
# one, so the same state that is cut anew differs a little.
_SMALL = 0.25
# Of what all ranks hold alike: a rank may have small state of its own besides.
_COPIES = 0.02
_COUNT = "count-unknown"
# Words in the names of what a rank saves of its own; and of shards, whose number is recorded or
# implied (`Checkpoint.implied`).
_OF_STATE = frozenset(
    {
        "rng", "random", "state", "states", "dataloader", "loader", "sampler", "trainer",
        "training", "train", "extra", "client",
    }
)  # fmt: skip
_OF_SHARDS = frozenset(
    {"model", "optim", "optimizer", "weights", "zero", "mp", "tp", "pp", "ep", "shard", "layer"}
)


class _Beside(NamedTuple):
    """A step beside, and how many files of a kind it has."""

    candidate: Candidate
    files: int


def open_child(root: Root, child: Child) -> Checkpoint:
    """Open a checkpoint of a root; a note says which parts or files it lacks.

    Raises:
        FtckptError: see `open_part`; or a neighbour cannot be listed.
    """
    checkpoint = open_part(root.store, child.part)
    step = child.candidate.step
    look = lacking_when_open if child.part.recognition.by_names else lacking_files
    lost = look(root, child, step, root.candidates, checkpoint)
    if lost is not None:
        lost.noted_in(checkpoint)
    return checkpoint


def lacking_when_open(
    root: Root,
    child: Child,
    step: int | None,
    every: Sequence[Candidate],
    checkpoint: Checkpoint,
) -> Lacking | None:
    """Return what an open step lacks, parts (see `neighbours.lacking`) or files of a kind.

    Raises:
        FtckptError: a neighbour cannot be listed.
    """
    parts = lacking(root, child, step, every)
    parts = parts and parts.of(checkpoint)
    if parts is not None and parts.certain:
        return parts
    return lacking_files(root, child, step, every, checkpoint) or parts


def lacking_alone(
    url: str,
    part: UnopenedPart,
    checkpoint: Checkpoint,
    formats: Sequence[Format],
    options: StoreOptions,
) -> Lacking | None:
    """Return what an open step that was named alone lacks, by the directory around it.

    Args:
        url: as the user named it.
        part: the step; its entry is one of the checkpoint's store.
        checkpoint: the same, opened.
        formats: what may lie around it.
        options: how the directory around it is reached.
    """
    here = checkpoint.source.store.local_path(part.entry.path)
    linked = here is not None and os.path.islink(here)
    above, name = split(os.path.realpath(here) if linked and here else url.rstrip("/"))
    if not (re.search(r"\d", name) or roles_in(name)):
        return None
    if not (part.recognition.parts or checkpoint.implied):
        folder = part.entry.kind is EntryKind.DIRECTORY
        if not folder or not may_lack_some(url, options):
            return None
    from .roots import Child, read_root  # most steps lack nothing

    named = {name}
    if part.entry.kind is EntryKind.FILE:  # another file of the step may stand for it
        named |= set(checkpoint.source.entries)
    try:
        store = open_store(above, options)
        root = read_root(store, partial(recognise_at, store, formats=formats))
        mine = next((c for c in root.candidates if c.path in named), None)
        return mine and lacking_when_open(
            root, Child(mine, part), mine.step, root.candidates, checkpoint
        )
    except FtckptError:
        return None  # the step itself is there, and nobody asked for more


def lacking_files(
    root: Root,
    child: Child,
    step: int | None,
    every: Sequence[Candidate],
    checkpoint: Checkpoint,
) -> Lacking | None:
    """Return which files a step probably lost, although nothing in it records their number.

    Args:
        root: with the step.
        child: the step.
        step: by its content, else by its name.
        every: all candidates, where the root shows some of them alone.
        checkpoint: the same, opened.

    Raises:
        FtckptError: a neighbour cannot be listed.
    """
    doubt: Lacking | None = None  # of several kinds, the first
    names = _kinds_of_ranks(checkpoint.source.entries)
    if not (checkpoint.implied or any(map(_is_of_state, names))):
        return None
    beside = series(root, child, step, every)
    for implied in _of_each_kind(checkpoint.implied):
        held = max(_numbers(implied, checkpoint.source.entries).values(), default=0)
        before, after = (_beside(root, side, implied) for side in beside[:2])
        more = [one for one in (*before, *after) if one.files > held]
        if not held or not more:
            continue
        shown = _shown_by(root, checkpoint, implied, held, more)
        if shown.cut_anew:  # the job went on with fewer ranks
            return None
        found = _judged(root, child, checkpoint, implied, held, before, after, shown)
        if found.certain and beside.same:
            return found
        doubt = doubt or found._replace(certain=False)
    return doubt or _state_of_ranks(root, child, beside, names)


def _state_of_ranks(
    root: Root, child: Child, beside: StepsBeside, mine: Mapping[str, int]
) -> Lacking | None:
    """Return the small files of state that a step has of fewer ranks than the steps beside it.

    Each rank of a job saves its own. Files of another kind in the step may show how many ranks
    there are; else a step on each side does. The job may have gone on with other ranks.
    """
    sides = [_first_kinds(root, side) for side in beside[:2]]
    shown = [one for one in sides if one is not None]
    for kind, held in sorted(mine.items()):
        more = [(one, kinds[kind]) for one, kinds in shown if kinds.get(kind, 0) > held]
        if not more or not _is_of_state(kind):
            continue
        other, ranks = more[0]
        what = (
            f"{root.url_of(child.candidate)} has {counted(held, 'file')} {kind.replace('#', 'R')},"
            f" and {other.path} has {ranks}"
        )
        same_ranks = any(count == ranks for name, count in mine.items() if name != kind)
        if beside.same and (same_ranks or len(more) == len(sides)):
            return Lacking(
                f"{what}: its save was not finished, or it lost the others", True, _COUNT
            )
        what = (
            f"{what}: the job had fewer ranks, or the others were lost, and nothing records which"
        )
        return Lacking(what, certain=False, doubt=_COUNT)
    return None


def _is_of_state(kind: str) -> bool:
    """Whether a kind of file holds the state of a rank, and no shard of what all have together."""
    words = frozenset(re.findall(r"[a-z]+", kind.rpartition("/")[2].lower()))
    return bool(words & _OF_STATE) and not words & _OF_SHARDS


def _first_kinds(
    root: Root, candidates: Sequence[Candidate]
) -> tuple[Candidate, Mapping[str, int]] | None:
    """Return the files of ranks in the first of these steps that can be listed."""
    for one in candidates[:_ASKED]:
        if one.entry.kind is EntryKind.DIRECTORY:
            with suppress(IncompleteError):  # one that is being written shows nothing
                return one, _kinds_of_ranks(files_of(root.store, one.entry).entries)
    return None


def _kinds_of_ranks(names: Iterable[str]) -> dict[str, int]:
    """Return how many files there are of each kind that is numbered from 0 without a gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        folder, slash, own = name.rpartition("/")
        found = numbers_in(own)
        if len(found) == 1:
            numbers[f"{folder}{slash}{without_numbers(own)}"].add(found[0])
    return {kind: len(own) for kind, own in numbers.items() if own == set(range(len(own)))}


def _beside(root: Root, candidates: Sequence[Candidate], implied: ImpliedCount) -> list[_Beside]:
    """Return the nearest steps on one side that have such files."""
    counts = (_Beside(one, _files_in(root, one, implied)) for one in candidates[: 2 * _ASKED])
    return list(islice((one for one in counts if one.files), _ASKED))


def warned(checkpoint: Checkpoint) -> list[Finding]:
    """Return the warnings that the number of files of an open checkpoint is not recorded."""
    said = [one for one in checkpoint.notes if one.kind == _COUNT]
    if said or not checkpoint.implied:
        return said
    kinds = listed([_shown(one) for one in _of_each_kind(checkpoint.implied)], 3)
    what = f"nothing records how many files {kinds} there are: what is there implies it"
    return [finding(_COUNT, what)]


def _judged(
    root: Root,
    child: Child,
    checkpoint: Checkpoint,
    implied: ImpliedCount,
    held: int,
    before: Sequence[_Beside],
    after: Sequence[_Beside],
    shown: _Shown,
) -> Lacking:
    """Say what it means that steps beside one have more files of a kind.

    The file is lost if the steps on both sides have it, or the nearest two where it is the first
    or the last. If one beside it has as few, or all files hold the same, the job may have changed
    its number of ranks.
    """
    nearest = [*before[:1], *after[:1]]
    if len(nearest) == 1:
        nearest = [*before, *after]
    more = next(one for one in (*before, *after) if one.files > held)
    what = (
        f"{root.url_of(child.candidate)} has {counted(held, 'file')} {_shown(implied)}, and"
        f" {more.candidate.path} has {more.files}"
    )
    # Another part of the step is of as many ranks as those beside it have files.
    several = (checkpoint.topology.world_size or 0) >= more.files
    if (several or not shown.replicas) and all(one.files > held for one in nearest):
        what = f"{what}: its save was not finished, or it lost the others"
        return Lacking(what, certain=True, doubt=_COUNT)
    what = f"{what}: the job had fewer ranks, or the others were lost, and nothing records which"
    return Lacking(what, certain=False, doubt=_COUNT)


class _Shown(NamedTuple):
    """What the content of the steps beside says of files that one has fewer of.

    Attributes:
        cut_anew: whether its fewer files hold as many bytes of tensors: nothing is lost.
        replicas: whether the files hold the same tensors: one more is a copy.
    """

    cut_anew: bool
    replicas: bool


def _shown_by(
    root: Root, checkpoint: Checkpoint, implied: ImpliedCount, held: int, more: Sequence[_Beside]
) -> _Shown:
    alike, copies = list[bool](), list[bool]()
    for one in more:
        child = root.recognise(one.candidate)
        if child is None:
            continue
        try:
            other = open_part(root.store, child.part)
        except FtckptError:
            continue  # one that cannot be read shows nothing
        every = _shared_bytes(other, implied)  # another rank keeps these once more
        theirs = _tensor_bytes(other, implied, every) - every * one.files
        mine = _tensor_bytes(checkpoint, implied, every) - every * held
        lost = theirs * (1 - held / one.files)
        copies.append(theirs <= _COPIES * every)
        alike.append(lost > 0 and abs(theirs - mine) <= _SMALL * lost)
    copied = bool(copies) and all(copies)
    return _Shown(not copied and bool(alike) and all(alike), copied)


def _shared_bytes(checkpoint: Checkpoint, implied: ImpliedCount) -> int:
    """Return the bytes of tensors that all files of a kind hold alike, by their CRC-32."""
    pattern, held = _pattern(implied), defaultdict[str, Counter[tuple[int, int]]](Counter)
    for record in checkpoint.records():
        if record.crc32 is None or record.owner not in checkpoint.tensors:
            continue
        if pattern.fullmatch(record.extent.file):
            held[record.extent.file][record.crc32, record.extent.length] += 1
    if len(held) < 2:
        return 0
    shared = reduce(and_, held.values())
    return sum(length * count for (_, length), count in shared.items())


def _tensor_bytes(checkpoint: Checkpoint, implied: ImpliedCount, shared: int) -> int:
    """Return the bytes that tensors take in files of a kind.

    Known replicas count once, unless `shared` bytes were found alike: those are taken off later.
    """
    pattern = _pattern(implied)
    return sum(
        piece.extent.length
        for info in checkpoint.tensors.values()
        for piece in info.pieces
        if (shared or piece.replica == 0) and pattern.fullmatch(piece.extent.file)
    )


def _files_in(root: Root, candidate: Candidate, implied: ImpliedCount) -> int:
    """Return how many files of a kind a step has."""
    if candidate.entry.kind is EntryKind.DIRECTORY:
        try:
            names = files_of(root.store, candidate.entry).entries
        except IncompleteError:
            return 0  # one that is being written shows nothing
        return max(_numbers(implied, names).values(), default=0)
    # Files of steps that share a directory: the other numbers in a name say which step.
    beside = root.memo.get(_COUNT)
    if beside is None:
        skip = len(root.base) + 1 if root.base else 0
        beside = [entry.path[skip:] for entry in root.store.children(root.base)]
        root.memo[_COUNT] = beside
    match = _pattern(implied).fullmatch(candidate.path)
    own = _others(match) if match else tuple(re.findall(r"\d+", candidate.path))
    return _numbers(implied, beside).get(own, 0)


def _numbers(implied: ImpliedCount, names: Iterable[str]) -> dict[tuple[str, ...], int]:
    """Return how many files there are: by the numbers in their names that do not count them."""
    pattern = _pattern(implied)
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in names:
        if match := pattern.fullmatch(name):
            found[_others(match)].add(match["number"])
    return {key: len(held) for key, held in found.items()}


def _others(match: re.Match[str]) -> tuple[str, ...]:
    own = match.re.groupindex["number"] - 1
    return tuple(text for place, text in enumerate(match.groups()) if place != own)


def _pattern(implied: ImpliedCount) -> re.Pattern[str]:
    before, after = (
        r"(\d+)".join(re.escape(text) for text in re.split(r"\d+", part))
        for part in (implied.before, implied.after)
    )
    return re.compile(rf"{before}(?P<number>\d+){after}")


def _of_each_kind(every: Iterable[ImpliedCount]) -> list[ImpliedCount]:
    return list({_pattern(one).pattern: one for one in every}.values())


def _shown(implied: ImpliedCount) -> str:
    return f"{without_numbers(implied.before)}R{without_numbers(implied.after)}"
