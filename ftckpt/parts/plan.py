"""Name what is divided: a digest that every machine computes, and that changes with the work.

Two digests make it: one of the request (verb, flags that matter, version), one of the listing (each
file with its size and the store's own mark of its content). So a record of another plan shows
whether somebody asked for something else, or the source has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError, RefusedError, UsageError
from ftckpt.manifest import Manifest
from ftckpt.own_files import is_own
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.several_places import GatheredStore
from ftckpt.storage.source import Source
from ftckpt.version import __version__

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
