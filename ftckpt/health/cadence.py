"""Measure a root's saves by listing alone: times, sizes, write durations.

Modification times are all that a listing tells. They are evidence only as long as nobody copied the
checkpoints without them; where they cannot be what a trainer left, nothing is concluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ftckpt.discovery.roots import Child, Root, concurrently
from ftckpt.errors import NotFoundError
from ftckpt.own_files import is_own
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind

# This many of the newest saves show how saving goes now; older ones are not listed.
NEWEST = 256

# No trainer saves that often.
_A_SAVE = 1.0
# At least four saves, each with no longer a pause before it than two of those between its files,
# are a copy's.
_SEVERAL, _ALIKE = 4, 2.0

# A step that took this much longer than the median one between the same two saves was not training.
_GAP = 1.5

# A file is none of a save if it came so long after the middle one, in seconds and in times that the
# first half took.
_LATER_S, _LATER = 3600.0, 10.0
# Such files may be written into a save by another than the trainer.
_NOTES = (".json", ".jsonl", ".txt", ".log", ".csv", ".md", ".html", ".png", ".yaml", ".parquet")


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint of a root, as a listing shows it.

    Attributes:
        path: its path or URL.
        step: by its name.
        nbytes: sum of its files' sizes.
        files: how many files; what ftckpt wrote beside them counts in neither.
        began: modification time of its first file in seconds since the epoch; None where the store
            keeps none.
        finished: modification time of its last file.
    """

    path: str
    step: int
    nbytes: int
    files: int
    began: float | None
    finished: float | None

    @property
    def write_s(self) -> float | None:
        """Seconds from the first file to the last: at least what the save took; None of one."""
        if self.began is None or self.finished is None or self.files < 2:
            return None
        return self.finished - self.began


@dataclass(frozen=True, slots=True)
class SaveGap:
    """Two neighbouring saves with more time between them than their steps take.

    Attributes:
        after: step of the earlier one.
        before: step of the later one.
        extra_s: seconds beyond what the steps take.
    """

    after: int
    before: int
    extra_s: float


@dataclass(frozen=True, slots=True)
class Cadence:
    """The saves of a root, and what follows from them; None where nothing does.

    Attributes:
        saves: by ascending step.
        nbytes: of the newest.
        every_steps: median of the steps between neighbours.
        every_s: median of the seconds between neighbours.
        step_s: median of the seconds a step, saving included.
        write_s: median of the seconds from the first to the last file of a save.
        span_s: seconds from the first save to the last.
        gaps: where the job did not train; each may be an interruption.
        reason: why times say nothing, where they do not.
    """

    saves: tuple[Save, ...]
    nbytes: int
    every_steps: float | None = None
    every_s: float | None = None
    step_s: float | None = None
    write_s: float | None = None
    span_s: float | None = None
    gaps: tuple[SaveGap, ...] = ()
    reason: str = ""


def measure(root: Root, *, newest: int = NEWEST, counter: Counter = NULL) -> Cadence:
    """List the newest checkpoints of a root and return how they were saved.

    No file is opened. Names without a step and saves that are not finished are left out.

    Raises:
        NotFoundError: the root holds no finished checkpoint with a step in its name.
        FtckptError: a listing failed; nothing is concluded from part of one.
    """
    children = [c for c in root.children() if c.candidate.step is not None][:newest]
    counter.start("listing", len(children), "checkpoints")

    def one(child: Child) -> Save | None:
        found = _save(root, child)
        counter.add(1)
        return found

    listed = concurrently(root.store, one, children)
    return cadence([save for save in listed if save is not None], root.url)


def cadence(saves: Sequence[Save], url: str) -> Cadence:
    """Return what follows from the times and steps of saves.

    Raises:
        NotFoundError: there are none.
    """
    ordered = tuple(sorted(saves, key=lambda save: save.step))
    if not ordered:
        raise NotFoundError(f"{url} holds no finished checkpoint with a step in its name")
    nbytes = ordered[-1].nbytes
    if len(ordered) < 2:
        return Cadence(ordered, nbytes, write_s=_write_s(ordered), reason="there is one save alone")
    steps = [b.step - a.step for a, b in pairwise(ordered)]
    every_steps = float(median(steps))
    times = [save.finished for save in ordered]
    known = [time for time in times if time is not None]
    if len(known) < len(times) or any(b <= a for a, b in pairwise(known)) or 0 in steps:
        reason = (
            "the modification times do not rise with the steps: a restart went back, or they are "
            "those of a copy"
        )
        return Cadence(ordered, nbytes, every_steps, reason=reason)
    seconds = [b - a for a, b in pairwise(known)]
    if is_of_a_copy(ordered, seconds):
        reason = "the saves were written one right after the other: such times are those of a copy"
        return Cadence(ordered, nbytes, every_steps, reason=reason)
    step_s = median(s / n for s, n in zip(seconds, steps, strict=True))
    return Cadence(
        ordered,
        nbytes,
        every_steps,
        median(seconds),
        step_s,
        _write_s(ordered),
        known[-1] - known[0],
        tuple(_gaps(ordered, seconds, step_s)),
    )


def is_of_a_copy(saves: Sequence[Save], seconds: Sequence[float]) -> bool:
    """Whether times can be no trainer's: between saves passes no more than within one.

    A copy writes file after file, whichever save they are of; a trainer trains between saves.

    Args:
        saves: by ascending step, with times.
        seconds: between neighbours.
    """
    if median(seconds) < _A_SAVE:
        return True
    if len(saves) < _SEVERAL:
        return False
    for before, after in pairwise(saves):
        if before.finished is None or after.began is None or not after.write_s:
            return False
        if after.began - before.finished > _ALIKE * after.write_s / (after.files - 1):
            return False
    return True


def _save(root: Root, child: Child) -> Save | None:
    """Return one save; None where it was removed meanwhile."""
    entry, step = child.candidate.entry, child.candidate.step
    assert step is not None
    try:
        if entry.kind is EntryKind.FILE:
            source = Source.file(root.store, entry)
        else:
            source = Source.directory(root.store, entry.path)
    except NotFoundError:
        return None
    files = [e for name, e in source.entries.items() if not is_own(name)]
    known = [(e.path, e.mtime) for e in files if e.mtime is not None]
    whole = bool(known) and len(known) == len(files)
    times = while_saved(known)
    return Save(
        root.url_of(child.candidate),
        step,
        sum(e.size for e in files),
        len(files),
        min(times) if whole else None,
        max(times) if whole else None,
    )


def while_saved(files: Iterable[tuple[str, float]]) -> list[float]:
    """Return the times of a save's files, by name, without notes that came long after the others.

    An evaluation that writes into an old save would make a trainer that has stopped look alive.
    Weights always count: most files of a save may be older copies (a tokenizer, frozen shards).
    """
    known = list(files)
    if not known:
        return []
    ordered = sorted(time for _, time in known)
    first, middle = ordered[0], ordered[(len(ordered) - 1) // 2]
    end = middle + max(_LATER_S, _LATER * (middle - first))
    return [time for name, time in known if time <= end or not name.endswith(_NOTES)]


def _write_s(saves: Sequence[Save]) -> float | None:
    known = [save.write_s for save in saves if save.write_s]
    return median(known) if known else None


def _gaps(saves: Sequence[Save], seconds: Sequence[float], step_s: float) -> Iterator[SaveGap]:
    """Yield where more time passed than the steps take at the median pace."""
    for (a, b), passed in zip(pairwise(saves), seconds, strict=True):
        usual = (b.step - a.step) * step_s
        if passed > _GAP * usual:
            yield SaveGap(a.step, b.step, passed - usual)
