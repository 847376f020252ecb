"""The record of one part: which tasks it did, and what came of each.

One line of JSON a member, the results a line each, and last a digest of all before it, as in a
manifest. It detects accidents, and a record that was edited by hand; who can forge the digest too
can also change the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftckpt.digests.blocks import WIDTH, file_digest
from ftckpt.errors import ExitCode, RefusedError
from ftckpt.strict_json import JsonError, count, decode, items, members, text
from ftckpt.version import __version__

from . import WorkPart
from .plan import WorkPlan

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
