"""Small records about the entries of a root, one object each: pins, tags, leases.

`.ftckpt/<kind>/<entry>/<label>.json` below the root. Each record is written whole by one put and
touches no other record, so two people who pin at once both succeed, even on a store without
conditional writes. The name alone identifies the entry: a record with damaged text still holds it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

from ftckpt.discovery.roots import Root, read_again, stands_now
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.own_files import FOLDER
from ftckpt.storage.store import EntryKind, join, relative
from ftckpt.strict_json import JsonError, decode

_MAX_BYTES = 64 << 10
_SUFFIX = ".json"
_SAFE = "@=+,"


class RetentionRecord(NamedTuple):
    """One record.

    Attributes:
        entry: name of the entry, relative to the root.
        label: distinguishes it from others of its kind: an owner, a tag, a reader.
        fields: its content; empty if its text is damaged.
        time: when it was written, by the store's clock; None if the store keeps none.
    """

    entry: str
    label: str
    fields: Mapping[str, object]
    time: float | None

    def text(self, field: str, default: str) -> str:
        """Return a text field, or `default`."""
        value = self.fields.get(field)
        return value if isinstance(value, str) else default

    def number(self, field: str) -> float | None:
        """Return a field that is a finite number, else None."""
        value = self.fields.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
            return None
        return float(value)


def own_folder(root: Root) -> str:
    """Return the store's path of the root's `.ftckpt`, which may not exist.

    Raises:
        UnsafeError: it is a link; its target is not the root's.
    """
    path = join(root.base, FOLDER)
    _require_own(root, path)
    return path


def _require_own(root: Root, path: str) -> None:
    """Refuse anything but a directory at a path of the root's own; it may be absent."""
    if not root.store.traits.links:
        return  # nothing there could be refused, and a look is two requests
    try:
        entry = root.store.stat(path)
    except NotFoundError:
        return
    # An object store has no directories, and a key of that name does no harm.
    wrong = EntryKind.SPECIAL, *((EntryKind.FILE,) if root.store.traits.local else ())
    if entry.link is not None or entry.kind in wrong:
        raise UnsafeError(
            f"{root.store.describe(path)} is a link or no directory: it was not made by ftckpt",
            kind="special-file",
            file=relative(root.base, path),
        )


def _folder(root: Root, kind: str, entry: str | None = None) -> str:
    """Return the path of the records of a kind or of one entry; never behind a link."""
    path = f"{own_folder(root)}/{kind}"
    for part in ("",) if entry is None else ("", f"/{_quoted(entry)}"):
        path += part
        if root.store.traits.local:
            _require_own(root, path)
    return path


def write(root: Root, kind: str, entry: str, label: str, fields: Mapping[str, object]) -> None:
    """Write one record, replacing the one of the same entry and label.

    A gc that drops the entry at this moment finds the record and restores the entry, or had dropped
    it before; a look afterwards detects that.

    Raises:
        NotFoundError: the root has no such entry, or it was dropped meanwhile.
        UnsafeError: the root's `.ftckpt`, or a directory in it, is a link.
    """
    if all(entry != candidate.path for candidate in root.candidates):
        raise NotFoundError(
            f"{root.url} has no checkpoint {entry}",
            hint=f"ftckpt inspect {shlex.quote(root.url)} lists them",
        )
    text = json.dumps({"schema": f"ftckpt.{kind}/1", "entry": entry, **fields}, sort_keys=True)
    root.store.put(_path(root, kind, entry, label), text.encode() + b"\n")
    if not _stands(root, entry):
        erase(root, [(kind, entry, label)])
        raise NotFoundError(
            f"{entry} of {root.url} was dropped",
            hint=f"ftckpt gc undelete {shlex.quote(root.url)} {shlex.quote(entry)} has it back",
        )


def _stands(root: Root, entry: str) -> bool:
    """Whether an entry exists at this moment and is not dropped."""
    # An entry dropped in place may have been freed, tombstone and all, between the look at the
    # names and the look at the tombstones.
    return stands_now(root, entry) and (
        root.store.traits.local or any(c.path == entry for c in read_again(root).candidates)
    )


def erase(root: Root, records: list[tuple[str, str, str]]) -> None:
    """Erase records, each given by kind, entry and label; missing ones are not errors.

    Raises:
        FtckptError: one could not be erased.
    """
    for error in root.store.delete([_path(root, *record) for record in records]).values():
        if error is not None:
            raise error


def read(root: Root, kind: str, entry: str | None = None) -> list[RetentionRecord]:
    """Return every record of a kind, of one entry or (None) of all, sorted by entry and label.

    Raises:
        UnavailableError, DeniedError: they could not be listed or read.
        UnsafeError: the root's `.ftckpt`, or a directory in it, is a link.
    """
    folder = _folder(root, kind)
    found = []
    try:
        listed = root.store.walk(folder if entry is None else _folder(root, kind, entry))
    except NotFoundError:
        return []
    for item in listed:
        holder, slash, label = item.path[len(folder) + 1 :].partition("/")
        if item.link is not None and not slash:
            _require_own(root, item.path)
        if not slash or "/" in label or not label.endswith(_SUFFIX):
            continue
        fields: object = {}
        if item.kind is EntryKind.FILE and item.size <= _MAX_BYTES:
            try:
                fields = decode(root.store.read(item.path, 0, item.size))
            except NotFoundError:
                continue  # erased since it was listed
            except (CorruptError, JsonError):
                fields = {}
        fields = fields if isinstance(fields, dict) else {}
        label = _unquoted(label.removesuffix(_SUFFIX))
        found.append(RetentionRecord(_unquoted(holder), label, fields, item.mtime))
    return sorted(found, key=lambda r: (r.entry, r.label))


def _path(root: Root, kind: str, entry: str, label: str) -> str:
    return f"{_folder(root, kind, entry)}/{_quoted(label)}{_SUFFIX}"


def _quoted(name: str) -> str:
    """Return a name as one path element that every store takes; its bytes as on disk."""
    return quote(name, safe=_SAFE, errors="surrogateescape").replace(".", "%2E")


def _unquoted(name: str) -> str:
    return unquote(name, errors="surrogateescape")
