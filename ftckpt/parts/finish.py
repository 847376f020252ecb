"""Gather the records of all parts, and say what keeps them from speaking for the whole."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ftckpt.errors import FtckptError, IncompleteError, NotFoundError, RefusedError, worst
from ftckpt.findings import counted
from ftckpt.manifest.seal import utc_now

from . import WorkPart, as_array
from .error_records import load_error
from .record import ShareRecord
from .shared_folder import ListedRecord, PartsPlace, host

# What was read longer ago says too little of what is there now.
MOST_AGE = 7 * 24 * 3600
# A finisher that was elected may take so long before another may be, in seconds.
PATIENCE = 60.0


@dataclass(frozen=True)
class Gathered:
    """All parts of a plan.

    Attributes:
        records: in the order of the parts, of every stage.
        listed: their files.
    """

    records: Sequence[ShareRecord]
    listed: Sequence[ListedRecord]

    @property
    def results(self) -> Mapping[str, Any]:
        """The results of all tasks, by key."""
        merged: dict[str, Any] = {}
        for record in self.records:
            merged.update(record.units)
        return merged


def gather(place: PartsPlace, parts: int | None, stages: Sequence[str] = ("",)) -> Gathered:
    """Read the records of all parts.

    Args:
        place: of the records.
        parts: how many there must be; None: as many as they say.
        stages: of which each part has a record.

    Raises:
        IncompleteError: parts are missing, or the source has changed since some were done.
        RefusedError: there are records of another plan, or of two divisions, or one is not whole,
            or too old.
        FtckptError: what ended a part.
    """
    listed = place.listed()
    wanted = {f".{stage}" if stage else "" for stage in stages}
    done = [one for one in listed if one.what in wanted]
    number = _number(place, done, parts)
    mine = [one for one in done if one.part.of == number]
    for what in sorted(wanted):
        have = {one.part.number for one in mine if one.what == what}
        missing = sorted(set(range(number)) - have)
        if missing:
            raise _missing(place, number, missing, listed)
    _require_young(place, mine)
    records = [place.read(one) for one in mine]
    raised = [record for record in records if record.raised is not None]
    if raised:
        code = worst(record.code for record in raised)
        error = load_error(next(one.raised for one in raised if one.code is code))
        if error is not None:
            raise error
    return Gathered(records, mine)


def is_complete(place: PartsPlace, parts: int) -> bool:
    """Say whether every part has its record."""
    have = {one.part.number for one in place.listed() if one.part.of == parts and not one.what}
    return have >= set(range(parts))


def elected(place: PartsPlace, part: WorkPart, *, again: bool) -> bool:
    """Say whether this process is the one that finishes, of those that found all records.

    Args:
        place: of the records.
        part: that this process did.
        again: whether its record was there before: then a finisher that has died is replaced.
    """
    said = {"host": host(), "pid": os.getpid(), "part": str(part), "time": utc_now()}
    number = 1
    while not place.claim(f"finish-{number}", said):
        if not again or not _has_died(place, f"finish-{number}"):
            return False
        number += 1
    return True


def consume(place: PartsPlace, gathered: Gathered, answer: Mapping[str, Any]) -> None:
    """Let records speak only once: a later run reads the checkpoint anew.

    Raises:
        FtckptError: a record could not be removed.
    """
    said = {"host": host(), "time": utc_now(), "parts": gathered.records[0].part.of}
    place.note("finished", {**said, **answer})
    place.forget(gathered.listed)
    place.remove([f"finish-{number}" for number in range(1, 4)])


def _has_died(place: PartsPlace, name: str) -> bool:
    """Say whether a claim is old by the store's own clock, and nothing was finished since."""
    store = place.store
    folder = place.path(WorkPart(0, 1)).rpartition("/")[0]
    try:
        claimed = store.stat(f"{folder}/{name}.json").mtime
        place.note("now", {"pid": os.getpid()})
        now = store.stat(f"{folder}/now.json").mtime
    except NotFoundError:
        return False
    finally:
        place.remove(["now"])
    return claimed is not None and now is not None and now - claimed > PATIENCE


def _number(place: PartsPlace, done: Sequence[ListedRecord], parts: int | None) -> int:
    """Return the number of parts."""
    counts = sorted({one.part.of for one in done})
    if parts is not None:
        return parts
    if not counts:
        other = _other_plan(place)
        if other is not None:
            raise other
        finished = place.look("finished")
        if finished is not None:
            raise IncompleteError(
                f"the records of this plan were used up at {finished.get('time')} by"
                f" {finished.get('host')}: {finished.get('message')}",
                hint="run the parts again to read the checkpoint anew",
            )
        raise IncompleteError(f"no part has left a record in {place.url}", hint=_RUN)
    whole = [n for n in counts if sum(one.part.of == n for one in done) == n]
    if len(counts) > 1 and len(whole) != 1:
        said = " and ".join(map(str, counts))
        raise RefusedError(
            f"{place.url} holds records of divisions into {said} parts",
            hint="--part auto/N says which is meant",
        )
    return whole[0] if len(whole) == 1 else counts[0]


_RUN = "run every part first: the same line with --part I/N, or --part auto"


def _missing(
    place: PartsPlace, number: int, missing: list[int], listed: Sequence[ListedRecord]
) -> FtckptError:
    """Return the error that names the parts that are missing."""
    other = _other_plan(place, {WorkPart(one, number) for one in missing})
    if other is not None:
        return other
    running = {one.part.number for one in listed if one.what == ".running"} & set(missing)
    said = f"; {counted(len(running), 'of them is', 'of them are')} running" if running else ""
    array = as_array(missing)
    return IncompleteError(
        f"{len(missing)} of {counted(number, 'part')} have left no record: {array}{said}",
        hint=f"run them: --array={array}, with --part auto/{number}",
    )


def _other_plan(place: PartsPlace, missing: Set[WorkPart] = frozenset()) -> FtckptError | None:
    """Return what is wrong where another plan of the same work has the parts that are missing."""
    for record, parts in place.others():
        if not missing <= parts:
            continue
        if record.plan.request == place.plan.request:
            return IncompleteError(
                f"{record.plan.target} has changed since part {record.part} was done by"
                f" {record.host}: parts of two states make no whole",
                hint="when it is written no more, run every part again",
                kind="changed-file",
            )
        return RefusedError(
            f"{place.url.rpartition('/')[0]} holds the record of part {record.part} of another"
            f" plan, by {record.tool}: other flags, another version, or another number of places",
            hint="use the same line and the same version for every part and for --finish",
        )
    return None


def _require_young(place: PartsPlace, listed: Sequence[ListedRecord]) -> None:
    now = time.time()
    for one in listed:
        if one.entry.mtime is not None and abs(now - one.entry.mtime) > MOST_AGE:
            days = (now - one.entry.mtime) / 86400
            raise RefusedError(
                f"the record of part {one.part} is {days:.0f} days old: what it read then says too"
                " little of what is there now",
                hint=f"remove {place.store.describe(one.entry.path)}, and run the part again",
            )
