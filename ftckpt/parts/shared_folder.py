"""The place of the records, which every part reaches.

    parts/PLAN/3-12.json           what part 3 of 12 did; created last, never replaced
    parts/PLAN/3-12.running.json   that it is running: written anew now and then, removed at the end
    parts/PLAN/finish-1.json       who finishes, where the last part does; created, never replaced
    parts/PLAN/finished.json       what the whole answered; the records are gone then

A place may hold the records of many plans. No clock decides anything but the age of a record.

Who reads back what whom has written: what part I wrote, part I+1 reads.

So no machine proves what its own page cache holds. A part waits for the one before it as long as
that one gets on, and also reads back what is left where the reader has ended already. What nobody
could read back is left to who finishes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.errors import (
    ExistsError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UsageError,
)
from ftckpt.own_files import FOLDER
from ftckpt.progress import Counter, count_file, expect_files
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.local.ownership import belongs_to, is_believed
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store
from ftckpt.strict_json import JsonError, decode

from . import MOST, WorkPart
from .plan import MAX_BYTES, ShareRecord, WorkPlan, parse_record

PARTS = "parts"
BEAT = 15.0  # seconds from one sign of life to the next
# Who asks which parts are missing counts up to the number in a name: see `MOST`.
_NAME = re.compile(r"([0-9]{1,7})-([0-9]{1,7})((?:\.[a-z]+)?)\.json")
_PLAN = re.compile(r"[0-9a-f]{32}")
_SMALL = 64 << 10


class ListedRecord(NamedTuple):
    """A file of a plan.

    Attributes:
        part: of which part.
        what: "" for a record, else `.running` or a stage's.
        entry: as listed.
    """

    part: WorkPart
    what: str
    entry: Entry


class PartsPlace:
    """The records of one plan.

    Args:
        store: of the place.
        base: path in it under which plans lie.
        plan: whose records.
    """

    def __init__(self, store: Store, base: str, plan: WorkPlan) -> None:
        self.store = store
        self.plan = plan
        self._base = base
        self._here = f"{base}/{plan.digest}" if base else plan.digest

    @property
    def url(self) -> str:
        """Where the plan's records lie, as a user would type it."""
        return self.store.describe(self._here)

    def path(self, part: WorkPart, what: str = "") -> str:
        """Return the path of a part's file."""
        return f"{self._here}/{part.number}-{part.of}{what}.json"

    def listed(self) -> list[ListedRecord]:
        """Return the files of the plan's parts, sorted by part."""
        return list_records(self.store, self._here)

    def find(self, part: WorkPart, what: str = "") -> ShareRecord | None:
        """Return the record of a part, or None.

        Raises:
            RefusedError: it is not whole, or of another part or plan.
        """
        try:
            size = self.store.stat(self.path(part, what)).size
        except NotFoundError:
            return None
        return self._read(part, what, size)

    def read(self, one: ListedRecord) -> ShareRecord:
        """Return a listed record.

        Raises:
            RefusedError: it is not whole, or of another part or plan.
        """
        return self._read(one.part, one.what, one.entry.size)

    def create(self, record: ShareRecord) -> ShareRecord:
        """Keep a record; return the one that stands, if the same part was done twice.

        Raises:
            RefusedError: the one that stands found something else.
        """
        what = f".{record.stage}" if record.stage else ""
        try:
            self.store.create(self.path(record.part, what), record.dump())
        except ExistsError:
            standing = self.find(record.part, what)
            if standing is None:
                raise
            other = standing.differs(record)
            if other:
                raise RefusedError(
                    f"part {record.part} was done twice, by {standing.host} and {record.host},"
                    f" with different results of {other!r}",
                    hint=f"remove {self.store.describe(self.path(record.part, what))}, and run the"
                    " part again",
                ) from None
            return standing
        return record

    def note(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small file, in place of an older one."""
        self.store.put(f"{self._here}/{name}.json", _line(value))

    def claim(self, name: str, value: Mapping[str, Any]) -> bool:
        """Create a small file; return whether it is ours."""
        try:
            self.store.create(f"{self._here}/{name}.json", _line(value))
        except ExistsError:
            return False
        return True

    def look(self, name: str) -> Mapping[str, Any] | None:
        """Return what a small file says; None without one, or if it cannot be read."""
        path = f"{self._here}/{name}.json"
        with suppress(NotFoundError, JsonError):
            size = self.store.stat(path).size
            found = decode(self.store.read(path, 0, min(size, _SMALL)))
            return found if isinstance(found, dict) else None
        return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove small files; one that stays does no harm."""
        with suppress(FtckptError):
            self.store.delete([f"{self._here}/{name}.json" for name in names])

    def forget(self, listed: Sequence[ListedRecord]) -> None:
        """Remove records that have spoken: what is read next is read anew.

        Raises:
            FtckptError: one could not be removed.
        """
        for error in self.store.delete([one.entry.path for one in listed]).values():
            if error is not None and not isinstance(error, NotFoundError):
                raise error

    def others(self, most: int = 16) -> list[tuple[ShareRecord, set[WorkPart]]]:
        """Return other plans of the same target and verb: a record, and the parts that have one."""
        found: list[tuple[ShareRecord, set[WorkPart]]] = []
        for entry in _children(self.store, self._base):
            name = entry.path.rpartition("/")[2]
            if not _PLAN.fullmatch(name) or name == self.plan.digest:
                continue
            done = [one for one in list_records(self.store, entry.path) if one.what != ".running"]
            for one in done[:1]:
                with suppress(RefusedError, NotFoundError):
                    data = self.store.read(one.entry.path, 0, min(one.entry.size, MAX_BYTES))
                    record = parse_record(data, one.entry.path)
                    if record.plan[:2] == self.plan[:2]:
                        found.append((record, {other.part for other in done}))
            if len(found) >= most:
                break
        return found

    def _read(self, part: WorkPart, what: str, size: int) -> ShareRecord:
        path = self.path(part, what)
        name = self.store.describe(path)
        if size > MAX_BYTES:
            raise RefusedError(f"{name} has {size} bytes, and {MAX_BYTES} is most of a record")
        self._require_believed(path)
        record = parse_record(self.store.read(path, 0, size), name)
        if record.plan != self.plan:
            raise RefusedError(
                f"{name} is the record of another plan", hint="somebody has moved it: remove it"
            )
        if record.part != WorkPart(part.number, part.of) or f".{record.stage}" != (what or "."):
            raise RefusedError(
                f"{name} is the record of part {record.part}",
                hint="somebody has moved it: remove it",
            )
        return record

    def _require_believed(self, path: str) -> None:
        """Refuse the record of a stranger, who need not be able to change the checkpoint."""
        local, home = self.store.local_path(path), self.store.local_path()
        if local is None or home is None or not os.path.lexists(local):
            return
        if not is_believed(local, home):
            raise RefusedError(
                f"{self.store.describe(path)} was not written by the owner of the folder, nor by"
                f" this user; {belongs_to(local)}",
                hint="remove it, and run that part again",
            )


def list_records(store: Store, path: str) -> list[ListedRecord]:
    """Return the files of the parts of one plan, sorted by part.

    Args:
        store: of the place.
        path: of the plan.
    """
    found = []
    for entry in _children(store, path):
        match = _NAME.fullmatch(entry.path.rpartition("/")[2])
        if match is None or entry.kind is not EntryKind.FILE:
            continue
        if int(match[1]) < int(match[2]) <= MOST:
            found.append(ListedRecord(WorkPart(int(match[1]), int(match[2])), match[3], entry))
    return sorted(found, key=lambda one: one[:2])


def _children(store: Store, path: str) -> list[Entry]:
    try:
        return store.children(path)
    except NotFoundError:
        return []


def parts_place(
    source: Source, plan: WorkPlan, elsewhere: str, options: StoreOptions
) -> PartsPlace:
    """Return the place of the records of what is read.

    Args:
        source: that is read.
        plan: what is divided.
        elsewhere: a directory or URL; "" for `.ftckpt/parts` beside the checkpoint.
        options: of stores.

    Raises:
        UnsafeError: `.ftckpt` is a link.
    """
    named = source.named or (next(iter(source.entries)) if source.single else "")
    path = source.path(named) if named else source.base
    local = source.store.local_path(path)
    # With several places, beside the first.
    url = source.store.parts()[0].describe(path) if local is None else os.path.realpath(local)
    return place_beside(url, plan, elsewhere, options)


def place_beside(url: str, plan: WorkPlan, elsewhere: str, options: StoreOptions) -> PartsPlace:
    """Return the place of the records of what is made: beside a path or URL, or elsewhere.

    Raises:
        UnsafeError: `.ftckpt` is a link.
        UsageError: the URL is a bucket, and nothing is beside it.
    """
    if elsewhere:
        return PartsPlace(open_store(elsewhere, options), PARTS, plan)
    parent, name = split(url.rstrip("/"))
    if not name or parent.endswith("://"):
        raise UsageError(f"nothing can lie beside {url}", hint="--parts PLACE names a place")
    store = open_store(parent, options)
    root = store.local_path()
    for one in (FOLDER, f"{FOLDER}/{PARTS}"):
        if root is not None and os.path.islink(os.path.join(root, one)):
            raise UnsafeError(f"{one} is a link: it was not made by ftckpt")
    return PartsPlace(store, f"{FOLDER}/{PARTS}", plan)


class Heartbeat:
    """A counter that says now and then, in the place of the records, that a part is running.

    It has no thread: a process with threads cannot be copied, and one that does not get on should
    not look alive.

    Args:
        place: of the records.
        part: that runs.
        counter: is told of the work.
    """

    def __init__(self, place: PartsPlace, part: WorkPart, counter: Counter) -> None:
        self._place = place
        self._name = f"{part.number}-{part.of}.running"
        self._counter = counter
        self._began = self._said = time.monotonic()
        self._beats = self._done = 0
        self._total: int | None = None
        self._guard = threading.Lock()

    def __enter__(self) -> Heartbeat:
        self._beat()
        return self

    def __exit__(self, *exc: object) -> None:
        self._place.remove([self._name])

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Begin a stage."""
        self._counter.start(label, total, unit)

    def add(self, amount: int) -> None:
        """Count work, and say that there is some where it was not said for a while."""
        self._counter.add(amount)
        with self._guard:
            self._done += amount
            if time.monotonic() - self._said < BEAT:
                return
            self._said = time.monotonic()
        self._beat()

    def files(self, total: int) -> None:
        """Say of how many files the current stage is."""
        expect_files(self._counter, total)

    def file_done(self) -> None:
        """Count one more file that is done."""
        count_file(self._counter)

    def _beat(self) -> None:
        self._beats += 1
        said = {
            "host": host(),
            "pid": os.getpid(),
            "beat": self._beats,
            "seconds": round(time.monotonic() - self._began, 1),
            "bytes": self._done,
        }
        # A part that cannot say that it lives still does its work.
        with suppress(FtckptError):
            self._place.note(self._name, said)


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


WRITE, PROOF = "write", "proof"
# A part that has not said that it lives for this long (seconds) is not waited for.
SILENT = 4 * BEAT


@dataclass
class Neighbours:
    """The other parts, seen by one that has written its own.

    Attributes:
        place: of the records.
        part: this one.
    """

    place: PartsPlace
    part: WorkPart
    _seen: dict[int, tuple[object, float]] = field(default_factory=dict)

    def next(self, absent: Set[int] = frozenset()) -> tuple[WorkPart | None, bool]:
        """Return a part to read back now, and whether to wait where there is none.

        Args:
            absent: numbers of parts of which something cannot be read.
        """
        listed = [one for one in self.place.listed() if one.part.of == self.part.of]
        written = {one.part.number for one in listed if one.what == f".{WRITE}"}
        proven = {one.part.number for one in listed if one.what == f".{PROOF}"}
        running = {one.part.number for one in listed if one.what == ".running"}
        mine, of = self.part.number, self.part.of
        before = (mine - 1) % of
        left = written - proven - absent
        if before in left:
            return WorkPart(before, of), False
        for number in sorted(left - {mine}):
            reader = (number + 1) % of
            if reader in written and reader not in running:
                return WorkPart(number, of), False
        return None, before not in written and before in running and self.lives(before)

    def unwritten(self) -> list[int]:
        """Return the numbers of the parts that have not written theirs."""
        written = {
            one.part.number
            for one in self.place.listed()
            if one.part.of == self.part.of and one.what == f".{WRITE}"
        }
        return sorted(set(range(self.part.of)) - written)

    def ended(self) -> bool:
        """Say whether all is written, and nobody is reading back what is left."""
        listed = [one for one in self.place.listed() if one.part.of == self.part.of]
        return is_ready(listed, self.part)

    def lives(self, number: int) -> bool:
        """Say whether a part has got on since it was seen first, by this machine's own clock."""
        said = self.place.look(f"{number}-{self.part.of}.running")
        beat = None if said is None else (said.get("host"), said.get("pid"), said.get("beat"))
        now = time.monotonic()
        last, since = self._seen.get(number, (object(), now))
        if beat != last:
            since = now
        self._seen[number] = beat, since
        return beat is not None and now - since < SILENT


def is_ready(listed: Sequence[ListedRecord], part: WorkPart) -> bool:
    """Say whether all parts are written, and none but `part` is still at work.

    Args:
        listed: files of the plan.
        part: the one that asks.
    """
    stages: Mapping[str, set[int]] = {
        what: {one.part.number for one in listed if one.what == what}
        for what in (f".{WRITE}", f".{PROOF}", ".running")
    }
    everyone = set(range(part.of))
    left = everyone - stages[f".{PROOF}"]
    readers = {(number + 1) % part.of for number in left} - {part.number}
    return stages[f".{WRITE}"] >= everyone and not readers & stages[".running"]
