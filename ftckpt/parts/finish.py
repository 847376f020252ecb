"""Gather the records of all parts, and say what keeps them from speaking for the whole.

Write the errors of tasks as JSON.

See from the place of the records how far divided operations are, and who is slow or lost.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftckpt import errors
from ftckpt.errors import FtckptError, IncompleteError, NotFoundError, RefusedError, worst
from ftckpt.findings import counted
from ftckpt.manifest.seal import utc_now
from ftckpt.own_files import FOLDER
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.store import Store
from ftckpt.strict_json import JsonError, decode

from . import WorkPart, as_array
from .plan import ShareRecord
from .shared_folder import PARTS, PROOF, SILENT, WRITE, ListedRecord, PartsPlace, host, list_records


def dump_error(error: FtckptError | None) -> Any:
    """Return an error in JSON's types."""
    if error is None:
        return None
    fields = ("message", "hint", "kind", "file", "tensor", "offset", "length")
    return {"error": type(error).__name__} | {name: getattr(error, name) for name in fields}


def load_error(value: Any) -> FtckptError | None:
    """Return an error from JSON's types.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    if value is None:
        return None
    fields = dict(value)
    kind = getattr(errors, fields.pop("error"))
    if not (isinstance(kind, type) and issubclass(kind, FtckptError)):
        raise ValueError("it is not an error")
    return kind(fields.pop("message"), **fields)


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


_HEAD = 4096  # bytes of a record that hold all but its units
_SMALL = 16 << 20  # bytes of what a part says while it runs, and of an answer
_MOST = 1e18  # of bytes and seconds: anybody may have written a record
_SLOW = 0.5  # of the median rate


class NodeShare(NamedTuple):
    """What one machine has done.

    Attributes:
        host: its name.
        parts: how many it has done.
        nbytes: bytes of them.
        seconds: that they took.
        slow: whether it is far slower than the others.
    """

    host: str
    parts: int
    nbytes: int
    seconds: float
    slow: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class RunningShare(NamedTuple):
    """A part that says that it runs, or said so.

    Attributes:
        number: which.
        host: where.
        nbytes: bytes so far.
        silent: seconds since it said so, by this machine's clock.
    """

    number: int
    host: str
    nbytes: int
    silent: float


class DividedState(NamedTuple):
    """How far one divided operation is.

    Attributes:
        plan: its digest.
        verb, target: what it does; "" where no record says it yet.
        of: number of parts; 0 where nobody knows.
        done: numbers of the parts that have their records.
        proven: of a copy, numbers of the parts that were read back by others.
        running: that get on.
        lost: that do not.
        waiting: numbers that are neither done nor running, as an array.
        nodes: by name.
        left: seconds until the end, roughly; None where nobody knows.
        finished: what the whole answered, where it did.
        dead: whether nothing was written for so long that its records speak for nothing any more.
    """

    plan: str
    verb: str
    target: str
    of: int
    done: Sequence[int]
    proven: Sequence[int]
    running: Sequence[RunningShare]
    lost: Sequence[RunningShare]
    waiting: str
    nodes: Sequence[NodeShare]
    left: float | None
    finished: Mapping[str, Any] | None
    dead: bool = False


def watch(url: str, options: StoreOptions) -> list[DividedState]:
    """Return the state of every divided operation in a place; those that are under way first.

    Args:
        url: what `--parts` named; or the directory around a checkpoint, or a copy.
        options: of stores.

    Raises:
        NotFoundError: no part has left anything there.
    """
    store = open_store(url, options)
    for base in (PARTS, f"{FOLDER}/{PARTS}", ""):
        with suppress(NotFoundError):
            plans = [e.path for e in store.children(base) if _is_plan(e.path)]
            found = [_state(store, path) for path in plans]
            if found:
                return sorted(found, key=lambda one: (one.finished is not None, one.plan))
    raise NotFoundError(
        f"no part has left a record in {url}",
        hint="name what --parts named, or the directory around the checkpoint or the copy",
    )


def _is_plan(path: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", path.rpartition("/")[2]) is not None


def _state(store: Store, path: str) -> DividedState:
    listed = list_records(store, path)
    done = [one for one in listed if one.what in ("", f".{WRITE}")]
    of = max((one.part.of for one in listed), default=0)
    heads = [head for one in done if (head := _head(store, one)) is not None]
    times = [one.entry.mtime or 0.0 for one in listed]
    now = max([time.time(), *times])
    said = [_running(store, one, now) for one in listed if one.what == ".running"]
    numbers = sorted({one.part.number for one in done if one.part.of == of})
    # A part that has written its own may still read back another's.
    alive = [one for one in said if one.silent < SILENT]
    lost = [one for one in said if one.silent >= SILENT and one.number not in numbers]
    left_over = sorted(set(range(of)) - set(numbers) - {one.number for one in alive})
    first = heads[0] if heads else {}
    return DividedState(
        plan=path.rpartition("/")[2],
        verb=str(first.get("verb", "")),
        target=str(first.get("target", "")),
        of=of,
        done=numbers,
        proven=sorted({one.part.number for one in listed if one.what == f".{PROOF}"}),
        running=alive,
        lost=lost,
        waiting=as_array(left_over),
        nodes=_nodes(heads),
        left=_left(heads, of, len(numbers), len(alive)),
        finished=_small(store, f"{path}/finished.json"),
        dead=bool(times) and now - max(times) > MOST_AGE,
    )


def _head(store: Store, one: ListedRecord) -> Mapping[str, Any] | None:
    """Return what a record says before its units; None where it cannot be read."""
    found: dict[str, Any] = {}
    try:
        text = store.read(one.entry.path, 0, min(one.entry.size, _HEAD)).decode()
        for line in _lines(text):
            found |= decode("{" + line + "}")
    except (FtckptError, JsonError, UnicodeError):
        return None
    numbers = (found.get("bytes"), found.get("seconds"))
    told = all(isinstance(n, (int, float)) and 0 <= n < _MOST for n in numbers)
    return found if told else None


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n")[1:]:
        if line.startswith('"units"'):
            return
        yield line.rstrip(",")


def _running(store: Store, one: ListedRecord, now: float) -> RunningShare:
    said = _small(store, one.entry.path) or {}
    told: object = said.get("bytes", 0)
    nbytes = told if type(told) is int and 0 <= told < _MOST else 0
    silent = now - (one.entry.mtime if one.entry.mtime is not None else now)
    return RunningShare(one.part.number, str(said.get("host", "")), nbytes, silent)


def _small(store: Store, path: str) -> Mapping[str, Any] | None:
    with suppress(FtckptError, JsonError):
        found = decode(store.read(path, 0, min(store.stat(path).size, _SMALL)))
        return found if isinstance(found, dict) else None
    return None


def _nodes(heads: Sequence[Mapping[str, Any]]) -> list[NodeShare]:
    hosts: dict[str, NodeShare] = {}
    for head in heads:
        host = str(head.get("host", ""))
        one = hosts.get(host, NodeShare(host, 0, 0, 0.0))
        hosts[host] = NodeShare(
            host, one.parts + 1, one.nbytes + int(head["bytes"]), one.seconds + head["seconds"]
        )
    rates = [one.rate for one in hosts.values()]
    usual = statistics.median(rates) if len(rates) > 2 else 0.0
    return [
        one._replace(slow=one.rate < _SLOW * usual)
        for one in sorted(hosts.values(), key=lambda one: one.rate)
    ]


def _left(heads: Sequence[Mapping[str, Any]], of: int, done: int, running: int) -> float | None:
    """Return the seconds until the rest is done by those who run."""
    if not heads or not running or done >= of:
        return None
    usual = statistics.fmean(float(head["seconds"]) for head in heads)
    return usual * -(-(of - done) // running)
