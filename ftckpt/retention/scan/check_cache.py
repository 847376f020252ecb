"""Remember checkpoints that passed the structure check, so that cron checks each once.

`.ftckpt/passed.json` holds the fingerprint of each passed entry's files. While no file has another
size or time, the check would give the same result; files are listed, but headers are not read
again. Entries with bases are checked each time, because the bases may have gone. It is a cache: if
it is damaged or absent, only time is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.retention.records import own_folder
from ftckpt.storage.local.ownership import is_believed
from ftckpt.strict_json import decode

from .entry import ScannedEntry

_NAME = "passed.json"
_MAX_BYTES = 64 << 20
# /1 passed checkpoints without looking at their manifests, /2 did not say which are thinned, and /3
# took an optimizer's own count for a step.
SCHEMA = "ftckpt.passed/4"


class Passed(NamedTuple):
    """A checkpoint that passed.

    Attributes:
        fingerprint: of its files (`Contents.fingerprint`).
        step: by its content, or by its name.
        thinned: as `RootEntry.thinned`.
    """

    fingerprint: str
    step: int | None
    thinned: str = ""


def read_passed(root: Root) -> dict[str, Passed]:
    """Return the passed entries of a root by name; empty if unknown.

    Raises:
        UnavailableError, DeniedError: it could not be read.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    path = f"{own_folder(root)}/{_NAME}"
    local = root.store.local_path(path)
    if local is not None and not is_believed(local, root.store.local_path(root.base) or local):
        return {}
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
    except (ValueError, TypeError, KeyError, AttributeError):  # not written by ftckpt
        return {}


def write_passed(root: Root, members: Iterable[ScannedEntry]) -> None:
    """Record the passed entries of a root; an unchanged file is not rewritten.

    Raises:
        NoResourceError, DeniedError, UnavailableError: it could not be written.
    """
    passed = {
        f.child.candidate.path: Passed(f.entry.contents.fingerprint, f.entry.step, f.entry.thinned)
        for f in members
        if f.child is not None and f.entry.checked and f.entry.contents is not None
    }
    if passed != read_passed(root):
        document: Mapping[str, object] = {"schema": SCHEMA, "passed": passed}
        text = json.dumps(document, sort_keys=True)
        root.store.put(f"{own_folder(root)}/{_NAME}", text.encode() + b"\n")


def _row(row: object) -> Passed:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError("no row")
    fingerprint, step, thinned = row
    if not isinstance(fingerprint, str) or not (step is None or type(step) is int):
        raise ValueError("no row")
    if not isinstance(thinned, str):
        raise ValueError("no row")
    return Passed(fingerprint, step, thinned)
