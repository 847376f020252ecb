"""What a step lacks and the steps beside it have: parts that its save did not reach, or lost.

A trainer saves the parts of a step one after the other, and the same ones every time. A part that
only one step has was put there by hand, as merged weights, so two neighbours must have it; or the
step that the trainer's own tracker calls the newest and the one before.

A run may change what it saves: what the next step lacks as well proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.findings import Finding, finding, listed
from ftckpt.manifest.locate import is_thinned
from ftckpt.storage.state_files import is_marker, may_hold_tensors, numbers_in, without_numbers
from ftckpt.storage.store import EntryKind

from .listing import files_of
from .series import LAST, newest_first, roles_in
from .small_files import lost_small_files

if TYPE_CHECKING:
    from .roots import Candidate, Child, Root

# Steps on each side that are asked until two of them show their parts.
_TRIED = 3


class StepsBeside(NamedTuple):
    """The steps beside one, the nearest first.

    Attributes:
        same: whether its trainer saves the same in it as in these; a best one may have less.
    """

    older: Sequence[Candidate]
    newer: Sequence[Candidate]
    same: bool = True


class Lacking(NamedTuple):
    """What a step lacks.

    Attributes:
        message: as a sentence.
        certain: whether enough says that its save was not finished, or lost it.
        doubt: the kind of the finding where it is not certain.
        small: whether it is a small file, and not a part.
        of_ranks: see `SmallFiles`.
    """

    message: str
    certain: bool
    doubt: str = "state-unknown"
    small: bool = False
    of_ranks: int = 0

    def of(self, checkpoint: Checkpoint) -> Lacking | None:
        """Return the same of an open checkpoint: it never lacks weights by habit.

        A job that shows as many ranks lacks a rank's file, and one of fewer has all of them.
        """
        world = checkpoint.topology.world_size
        if self.of_ranks and world is not None:
            what = f"{self.message.rpartition(':')[0]}: its save was not finished, or it was lost"
            return Lacking(what, certain=True) if world >= self.of_ranks else None
        if self.small:
            return self
        kinds = {info.kind for info in checkpoint.tensors.values()}
        return self if kinds & {Kind.PARAM, Kind.MASTER} else self._replace(certain=True)

    def noted_in(self, checkpoint: Checkpoint) -> None:
        """Add the finding to a checkpoint's notes, in place of a less exact one of its doubt."""
        exact = self.doubt if not self.certain and self.doubt == "count-unknown" else ""
        kept = (one for one in checkpoint.notes if one.kind != exact)
        checkpoint.notes = [*kept, self.finding]

    @property
    def finding(self) -> Finding:
        """The same as a finding."""
        return finding("missing-part" if self.certain else self.doubt, self.message)


def lacking(
    root: Root,
    child: Child,
    step: int | None,
    every: Sequence[Candidate],
    *,
    small: bool = True,
) -> Lacking | None:
    """Return what a step lacks although all in it is whole; None if nothing says so.

    Args:
        root: with the step.
        child: the step.
        step: by its content, else by its name.
        every: all candidates, where the root shows some of them alone.
        small: whether to look for small files, too, which costs a listing of each.

    Raises:
        FtckptError: a neighbour cannot be listed.
    """
    if child.part.entry.kind is not EntryKind.DIRECTORY:
        return None
    beside = series(root, child, step, every)
    part = _part(root, child, step, beside)
    if not small or (part is not None and part.certain):
        return part
    lost = lost_small_files(root, child, beside.older, beside.newer)
    if lost is None or (part is not None and not lost.certain) or _is_thinned(root, child):
        return part
    # What the trainer's own pointer calls finished may have been saved without it from then on.
    pointed = not beside.newer and _is_pointed_at(root, child.candidate, step)
    certain = lost.certain and beside.same and (lost.of_several or not pointed)
    return Lacking(lost.message, certain, small=True, of_ranks=lost.of_ranks)


def _part(
    root: Root,
    child: Child,
    step: int | None,
    beside: StepsBeside,
) -> Lacking | None:
    """Return what a step lacks of the parts that hold state, and of the markers."""
    mine = set(child.part.recognition.parts)
    if not mine:
        return None
    by_names = child.part.recognition.by_names
    before = _shown(root, beside.older, 2, by_names=by_names)
    if len(before) < (1 if beside.same else 2):
        return None
    first, theirs = before[0]
    lost, tracker = {one for one in theirs if not _is_held(one, mine)}, _tracker_of(root, first)
    if not lost:
        return None
    others = before[1:]
    after = _shown(root, beside.newer, 1, by_names=by_names)
    if others:
        lost &= others[0][1]
    still = {one for one in lost if not after or _is_held(one, after[0][1])}
    if not (others or tracker):
        others, lost = after, lost & after[0][1] if after else lost
    if not lost or _is_thinned(root, child):
        return None
    said = f", and {tracker}" if tracker else ""
    names = listed(sorted({_shown_as(one, mine) for one in still or lost}), 3)
    what = f"{root.url_of(child.candidate)} lacks {names}, which {first.path} has"
    # What the trainer's own pointer calls finished may have been saved without it from then on.
    pointed = _is_pointed_at(root, child.candidate, step)
    if still and (tracker or others) and beside.same and not pointed:
        return Lacking(f"{what}{said}: its save was not finished, or it was lost", certain=True)
    return Lacking(f"{what}: it was lost, or is not saved every time", certain=False)


def _shown_as(lost: str, mine: set[str]) -> str:
    """Return the folder of a lost file if nothing of the folder is left, else the file."""
    folder = lost.rpartition("/")[0]
    if lost.endswith("/"):
        return folder
    return lost if any(one.startswith(f"{folder}/") for one in mine) else folder or lost


def series(root: Root, child: Child, step: int | None, every: Sequence[Candidate]) -> StepsBeside:
    """Return the candidates before and after one of their series, the nearest first.

    The step orders them; names without one are of a series if they differ in numbers alone. A name
    that is a word (`latest`) says no place, nor does a number where all others are words: the saves
    of the same format count as older.
    """
    candidate = child.candidate
    others = [c for c in every if not c.staging and c.path != candidate.path]
    placed: list[tuple[Candidate, tuple[int, ...]]]
    if candidate.step is not None and step is not None:
        placed = [(c, (c.step,)) for c in others if c.step is not None]
        own: tuple[int, ...] = (step,)
    else:
        shape = without_numbers(candidate.path)
        alike = [c for c in others if c.step is None and without_numbers(c.path) == shape]
        roles = roles_in(candidate.path)
        if not alike and (roles or child.part.recognition.by_names):
            named = others if roles else [c for c in others if roles_in(c.path)]
            return StepsBeside(_of_format(root, child, named), [], bool(roles & LAST))
        placed = [(c, numbers_in(c.path)) for c in alike]
        own = numbers_in(candidate.path)
    placed.sort(key=lambda one: one[1])
    older = [c for c, place in reversed(placed) if place < own]
    return StepsBeside(older, [c for c, place in placed if place > own])


def _of_format(root: Root, child: Child, others: Sequence[Candidate]) -> list[Candidate]:
    """Return some saves of a save's format, those with the highest step in the name first."""

    def order(other: Candidate) -> tuple[bool, int, bool, tuple[float, ...], str]:
        step, name = other.step, other.path
        return step is None, -(step or 0), bool(roles_in(name)), newest_first(name), name

    folders = [c for c in others if c.entry.kind is EntryKind.DIRECTORY]
    found: list[Candidate] = []
    for other in sorted(folders, key=order)[: 2 * _TRIED]:
        known = root.recognise(other)
        if known is not None and known.part.format.name == child.part.format.name:
            found.append(other)
    return found[:_TRIED]


def _shown(
    root: Root, candidates: Sequence[Candidate], most: int, *, by_names: bool
) -> list[tuple[Candidate, set[str]]]:
    """Return the parts of the first of these steps that a format knows.

    Names alone made one checkpoint of a step's parts (`by_names`): then they may say it of a step
    without the same parts too.
    """
    found: list[tuple[Candidate, set[str]]] = []
    for candidate in candidates[:_TRIED]:
        child = root.recognise(candidate)
        if child is None or candidate.entry.kind is not EntryKind.DIRECTORY:
            continue
        if parts := set(child.part.recognition.parts) or (by_names and _top(root, candidate)):
            found.append((candidate, parts))
        if len(found) == most:
            break
    return found


def _is_thinned(root: Root, child: Child) -> bool:
    """Whether all but the weights was dropped on purpose."""
    return is_thinned(files_of(root.store, child.part.entry))


def _top(root: Root, candidate: Candidate) -> set[str]:
    """Return what lies in a step that another format reads: a step that lacks a part may look so.

    Folders have a slash behind them, because what is in them is not known.
    """
    found = set()
    for entry in root.store.children(candidate.entry.path):
        name = entry.path.rpartition("/")[2]
        if entry.kind is EntryKind.DIRECTORY and not name.startswith((".", "__")):
            inside = root.store.children(entry.path)
            if any(may_hold_tensors(one.path) for one in inside):
                found.add(without_numbers(name) + "/")
        elif entry.kind is EntryKind.FILE and (may_hold_tensors(name) or is_marker(name)):
            found.add(without_numbers(name))
    return found


def _is_held(part: str, mine: set[str]) -> bool:
    return any(one.startswith(part) for one in mine) if part.endswith("/") else part in mine


def _is_pointed_at(root: Root, candidate: Candidate, step: int | None) -> bool:
    """Whether the trainer itself calls the step, or a later one, finished."""
    return any(
        p.target == candidate.path or (step is not None and p.means_step and (p.step or 0) >= step)
        for p in root.pointers
    )


def _tracker_of(root: Root, candidate: Candidate) -> str:
    """Return in words which tracker says that a step is the newest; "" for none."""
    own = (
        p
        for p in root.pointers
        if p.means_step and candidate.step is not None and p.step == candidate.step
    )
    return next((f"{p.name} says {p.says}" for p in own), "")
