"""Remember checkpoints that passed the structure check, so that cron checks each once.

`.ftckpt/passed.json` holds, for each entry that passed, the fingerprint that its files had then. As
long as no file has another size or time, the check would say the same; a listing is made, headers
are not read again. What depends on others is checked each time, because they may have gone. It
is a cache: damaged or absent it costs time and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.retention.records import own_folder
from ftckpt.strict_json import decode

from .entry import ScannedEntry

_NAME = "passed.json"
_MAX_BYTES = 64 << 20
SCHEMA = "ftckpt.passed/2"  # what passed before the manifest was looked at is looked at again


class Passed(NamedTuple):
    """A checkpoint that passed.

    Attributes:
        fingerprint: of its files (`Contents.fingerprint`).
        step: as its content showed it, or its name.
    """

    fingerprint: str
    step: int | None


def read_passed(root: Root) -> dict[str, Passed]:
    """Return what has passed in a root, by the name of the entry there; nothing where unknown.

    Raises:
        UnavailableError, DeniedError: it could not be read.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    path = f"{own_folder(root)}/{_NAME}"
    try:
        size = root.store.stat(path).size
        if size > _MAX_BYTES:
            return {}
        document = decode(root.store.read(path, 0, size))
        if document["schema"] != SCHEMA:
            return {}
        return {name: _row(row) for name, row in document["passed"].items()}
    except (NotFoundError, CorruptError, UnsafeError):
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):  # not as written
        return {}


def write_passed(root: Root, members: Iterable[ScannedEntry]) -> None:
    """Remember what has passed among the entries of a root; a file that says so is left alone.

    Raises:
        NoResourceError, DeniedError, UnavailableError: it could not be written.
    """
    passed = {
        f.child.candidate.path: Passed(f.entry.contents.fingerprint, f.entry.step)
        for f in members
        if f.child is not None and f.entry.checked and f.entry.contents is not None
    }
    if passed != read_passed(root):
        document: Mapping[str, object] = {"schema": SCHEMA, "passed": passed}
        text = json.dumps(document, sort_keys=True)
        root.store.put(f"{own_folder(root)}/{_NAME}", text.encode() + b"\n")


def _row(row: object) -> Passed:
    if not isinstance(row, list) or len(row) != 2:
        raise ValueError("no row")
    fingerprint, step = row
    if not isinstance(fingerprint, str) or not (step is None or type(step) is int):
        raise ValueError("no row")
    return Passed(fingerprint, step)
