"""See from the place of the records how far divided operations are, and who is slow or lost."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError, NotFoundError
from ftckpt.own_files import FOLDER
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.store import Store
from ftckpt.strict_json import JsonError, decode

from . import as_array
from .finish import MOST_AGE
from .proofs import PROOF, SILENT, WRITE
from .shared_folder import PARTS, ListedRecord, list_records

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
