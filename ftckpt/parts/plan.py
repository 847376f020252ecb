"""Name what is divided: a digest that every machine computes, and that changes with the work.

Two digests make it: one of the request (verb, flags that matter, version), one of the listing (each
file with its size and the store's own mark of its content). So a record of another plan shows
whether somebody asked for something else, or the source has changed.

The record of one part: which tasks it did, and what came of each.

One line of JSON a member, the results a line each, and last a digest of all before it, as in a
manifest. It detects accidents, and a record that was edited by hand; who can forge the digest too
can also change the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import WIDTH, file_digest
from ftckpt.errors import ExitCode, FtckptError, RefusedError, UsageError
from ftckpt.manifest import Manifest
from ftckpt.own_files import is_own
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.several_places import GatheredStore
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonError, count, decode, items, members, text
from ftckpt.version import __version__

from . import WorkPart

# Of how work is cut into tasks, what they are called, and what their results say. Two versions of
# ftckpt with one number may share a plan only if they also have one version; raise it with every
# change (`tests/parts/test_plan_format.py` sees one).
FORMAT = 7


class WorkPlan(NamedTuple):
    """What is divided.

    Attributes:
        verb: that does it.
        target: the source, as an absolute path or URL.
        request: digest of target, verb, flags and version.
        listing: digest of the files.
    """

    verb: str
    target: str
    request: str
    listing: str

    @property
    def digest(self) -> str:
        """The name of the plan: 32 hexadecimal digits."""
        return _digest([self.request, self.listing])


def plan_of(
    checkpoint: Checkpoint, verb: str, flags: Mapping[str, Any], *others: Checkpoint,
    sealed: Manifest | None = None,
) -> WorkPlan:  # fmt: skip
    """Return the plan of an operation on a checkpoint.

    Args:
        checkpoint: opened; with the bases that it is decoded from.
        verb: the operation.
        flags: that change what is done, as plain data.
        others: checkpoints that are read beside it.
        sealed: a manifest that decides what is read.
    """
    target = identity_of(checkpoint.source)
    places = [identity_of(other.source) for other in others]
    request = _digest([target, verb, flags, __version__, FORMAT, places])
    rows: list[Any] = [row_of(checkpoint.source, name) for name in names_of(checkpoint, sealed)]
    if sealed is not None:
        rows.append(["manifest", [[f.path, f.size, f.digest.hex()] for f in sealed.files]])
    for other in others:
        rows += [row_of(other.source, name) for name in names_of(other)]
    for one in (checkpoint, *others):
        with suppress(FtckptError):  # the operation itself reports a base that is not there
            for base in one.decoding.bases():
                rows.append(identity_of(base.source))
                rows += [row_of(base.source, name) for name in names_of(base)]
    return WorkPlan(verb, target, request, _digest(rows))


def plan_of_files(
    source: Source, verb: str, flags: Mapping[str, Any], sealed: Manifest, other: Source
) -> WorkPlan:
    """Return the plan of an operation on files that need not open as a checkpoint.

    Args:
        source: the files.
        verb: the operation.
        flags: that change what is done, as plain data.
        sealed: a manifest of what is read.
        other: what is read beside it.
    """
    target = identity_of(source)
    request = _digest([target, verb, flags, __version__, FORMAT, identity_of(other)])
    rows: list[Any] = [row_of(source, file.path) for file in sealed.files]
    rows.append([[file.path, file.size, file.digest.hex()] for file in sealed.files])
    return WorkPlan(verb, target, request, _digest(rows))


def names_of(checkpoint: Checkpoint, sealed: Manifest | None = None) -> list[str]:
    """Return the names of the files that are read: what lies beside them may come and go."""
    names = {name for name in checkpoint.members() if not is_own(name)}
    if sealed is not None:
        names |= sealed.by_path.keys()
    return sorted(names)


def identity_of(source: Source) -> str:
    """Return where a checkpoint lies, however its place was spelled."""
    named = source.named or (next(iter(source.entries)) if source.single else "")
    path = source.path(named) if named else source.base
    local = source.store.local_path(path)
    return source.store.identity(path) if local is None else os.path.realpath(local)


def row_of(source: Source, name: str) -> list[Any]:
    """Return a file with its size and all that changes with its content.

    A file of this machine has the time of its inode's last change too: `rsync -t` and `cp -p` give
    another file the size and the time of the one before.

    Raises:
        UsageError: the files are gathered from several places.
        RefusedError: the store shows nothing that changes with a file's content.
    """
    if isinstance(source.store, GatheredStore):
        raise UsageError("what several places hold (--also) is not divided", hint="run it whole")
    entry = source.entries.get(name)
    if entry is None:
        return [name]
    if entry.etag is None and entry.mtime is None:
        raise RefusedError(
            f"{source.store.describe(source.path(name))} shows neither a time nor a mark of its"
            " content: a change between two parts would not be seen",
            hint="run it whole",
        )
    changed = None
    local = source.store.local_path(source.path(name))
    if local is not None:
        try:
            changed = os.stat(local).st_ctime_ns
        except OSError as error:
            raise translate(error, local, "look at") from error
    return [name, entry.size, entry.etag, entry.mtime, changed]


def _digest(value: object) -> str:
    import xxhash

    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    digest: str = xxhash.xxh3_128_hexdigest(text.encode())
    return digest


SCHEMA = "ftckpt.part/1"
# A record holds a line for each task; the tasks of 10 TB in a million pieces fit into one.
MAX_BYTES = 512 << 20
_TAIL = len('"digest": ""\n}\n') + 2 * WIDTH
_PLAN = ("verb", "target", "request", "listing")
_MEMBERS = ("schema", "tool", *_PLAN, "stage", "part", "of", "host", "ended", "seconds", "bytes",
            "errors", "code", "raised", "units", "digest")  # fmt: skip

# What a process has measured of the values that it computed, beside the results of tasks.
MEASURED = "measured"


@dataclass(frozen=True)
class ShareRecord:
    """What one part did.

    Attributes:
        plan: of the operation.
        part: which share.
        stage: of the operation: "" for an operation of one stage.
        host: that did it.
        ended: UTC, by that host's clock: nothing depends on it.
        seconds: how long it took.
        nbytes: bytes that it read.
        errors: number of findings that are errors.
        code: the worst exit code of them, or of `raised`.
        raised: what ended the part, where that is a verdict; in JSON's types.
        units: result of each task, by the task's key.
    """

    plan: WorkPlan
    part: WorkPart
    units: Mapping[str, Any] = field(repr=False)
    stage: str = ""
    host: str = ""
    ended: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    errors: int = 0
    code: ExitCode = ExitCode.OK
    raised: Mapping[str, Any] | None = None
    tool: str = f"ftckpt {__version__}"
    # The digest of its bytes, where it was written or read: a million tasks take seconds to write.
    _stamps: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def dump(self) -> bytes:
        """Return the file's bytes."""
        head = {
            "schema": SCHEMA,
            "tool": self.tool,
            **{name: getattr(self.plan, name) for name in _PLAN},
            "stage": self.stage,
            "part": self.part.number,
            "of": self.part.of,
            "host": self.host,
            "ended": self.ended,
            "seconds": round(self.seconds, 3),
            "bytes": self.nbytes,
            "errors": self.errors,
            "code": int(self.code),
            "raised": self.raised,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
        rows = ",\n".join(json.dumps([key, self.units[key]]) for key in sorted(self.units))
        units = f"\n{rows}\n" if rows else ""
        data = ("{\n" + "".join(lines) + f'"units": [{units}],\n').encode()
        data += f'"digest": "{file_digest(data).hex()}"\n}}\n'.encode()
        self._stamps[:] = [file_digest(data).hex()]
        return data

    def stamp(self) -> str:
        """Return a digest of the whole record: what another process has made of it names it."""
        if not self._stamps:
            self.dump()
        return self._stamps[0]

    def differs(self, other: ShareRecord) -> str:
        """Return a task of which another record of the same part says something else; or "".

        What a process has measured is its own: one that goes on where it was killed measures less.
        """
        keys = sorted((self.units.keys() | other.units.keys()) - {MEASURED})
        lacking = object()
        return next(
            (k for k in keys if self.units.get(k, lacking) != other.units.get(k, lacking)), ""
        )


def parse_record(data: bytes, name: str) -> ShareRecord:
    """Return the record in a file's bytes.

    Raises:
        RefusedError: it is cut, was edited, or is something else.
    """
    try:
        record = _record(data)
        record._stamps.append(file_digest(data).hex())
        return record
    except JsonError as error:
        raise RefusedError(
            f"{name} is not a whole record of a part: {error}",
            hint="remove it, and run that part again",
        ) from None


def _record(data: bytes) -> ShareRecord:
    body, tail = data[:-_TAIL], data[-_TAIL:]
    if tail != f'"digest": "{file_digest(body).hex()}"\n}}\n'.encode():
        raise JsonError("its bytes do not match the digest at its end")
    found = members(decode(data), _MEMBERS, "the record")
    if found["schema"] != SCHEMA:
        raise JsonError(f"its schema is {found['schema']!r}, and {SCHEMA} is known")
    plan = WorkPlan(*(text(found[name], name) for name in _PLAN))
    number, of = count(found["part"], "part"), count(found["of"], "of")
    if number >= of:
        raise JsonError("its part is not one of them")
    seconds = found["seconds"]
    if type(seconds) not in (int, float):
        raise JsonError("seconds is not a number")
    code = found["code"]
    if code not in list(ExitCode):
        raise JsonError("code is none")
    raised = found["raised"]
    if raised is not None and not isinstance(raised, dict):
        raise JsonError("raised is not an error")
    return ShareRecord(
        plan=plan,
        part=WorkPart(number, of),
        units=dict(_units(found["units"])),
        stage=text(found["stage"], "stage"),
        host=text(found["host"], "host"),
        ended=text(found["ended"], "ended"),
        seconds=float(seconds),
        nbytes=count(found["bytes"], "bytes"),
        errors=count(found["errors"], "errors"),
        code=ExitCode(code),
        raised=raised,
        tool=text(found["tool"], "tool"),
    )


def _units(rows: Any) -> Iterator[tuple[str, Any]]:
    seen = ""
    for row in items(rows, "units"):
        pair = items(row, "a unit")
        if len(pair) != 2:
            raise JsonError("a unit is not a key and a result")
        key = text(pair[0], "a key")
        if key <= seen:
            raise JsonError("its units are not sorted, or one stands twice")
        seen = key
        yield key, pair[1]
