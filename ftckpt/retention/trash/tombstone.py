"""Tombstones: records of dropped entries in an object store, with every key and its identity.

A tombstone is written before anything changes; undelete and purge touch only the keys in it. It
ends in a digest of itself, because a flipped bit in a key would name another object. The digest
needs no secret, so a planted tombstone has one too: every key must be the entry's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError, NewerWriterError, UnsafeError
from ftckpt.own_files import FOLDER, own_path
from ftckpt.storage.store import Entry
from ftckpt.strict_json import count, decode, text

SCHEMA = "ftckpt.tombstone/1"
# A hundred thousand keys with their versions, and a commit marker.
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Tombstone:
    """A dropped entry.

    Attributes:
        name: of the entry, relative to the run's root.
        directory: whether it is a prefix; else one key, and perhaps its manifest.
        time: seconds since the epoch, by the dropping machine's clock.
        files: every key, as listed then; paths are the store's.
        versions: every version of these keys, if the store keeps them.
        markers: the keys that committed it, with their bytes; removed first, and restored by
            undelete.
    """

    name: str
    directory: bool
    time: float
    actor: str
    reasons: tuple[str, ...]
    files: tuple[Entry, ...]
    versions: tuple[Entry, ...]
    markers: Mapping[str, bytes]

    def dump(self) -> bytes:
        """Return the bytes of the record."""
        body = {
            "schema": SCHEMA,
            "name": self.name,
            "directory": self.directory,
            "time": self.time,
            "actor": self.actor,
            "reasons": list(self.reasons),
            "files": [_row(file) for file in self.files],
            "versions": [_row(version) for version in self.versions],
            "markers": {k: base64.b64encode(v).decode() for k, v in self.markers.items()},
        }
        return json.dumps({**body, "digest": _digest(body)}).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes, path: str, entry: str) -> Tombstone:
        """Parse the bytes of a record.

        Args:
            data: its bytes.
            path: of the record, for messages.
            entry: path in the store of the entry that the record's own name is about.

        Raises:
            CorruptError: not a tombstone, or changed; it must not be used.
            NewerWriterError: of another version.
            UnsafeError: it names a key that is not of this entry, or is about ftckpt's own files.
        """
        try:
            body = decode(data)
            digest = body.pop("digest")
            if digest != _digest(body):
                raise ValueError("it was changed since it was written")
            if body["schema"] != SCHEMA:
                raise NewerWriterError.of(
                    f"the schema of {path}", expected=SCHEMA, found=str(body["schema"])[:80],
                    file=path,
                )  # fmt: skip
            name = text(body["name"], "name")
            if name.split("/")[0] == FOLDER:
                raise UnsafeError(
                    f"{path} is about {name}, where ftckpt keeps its records: nothing is touched",
                    hint="ftckpt did not write this; see who may write there, then remove it",
                    kind="unsafe-path",
                    file=path,
                )
            files = [_entry(row) for row in body["files"]]
            here = _Spelled.by(files, entry, path)
            found = cls(
                name=name,
                directory=body["directory"] is True,
                time=float(body["time"]),
                actor=text(body["actor"], "actor"),
                reasons=tuple(text(reason, "a reason") for reason in body["reasons"]),
                files=tuple(here.entry(file) for file in files),
                versions=tuple(here.entry(_entry(row)) for row in body["versions"]),
                markers={here.path(k): base64.b64decode(v) for k, v in body["markers"].items()},
            )
            keys = {file.path for file in found.files}
            if not keys >= {v.path for v in found.versions} | found.markers.keys():
                raise ValueError("a version or a marker in it is not among its keys")
            return found
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise CorruptError(
                f"{path} is damaged, so that nothing is done about what it names: {error}",
                hint="remove it by hand to have the checkpoint listed again",
                file=path,
            ) from error


class _Spelled(NamedTuple):
    """How a record spells its entry, and how it is spelled here.

    The store of a record may have been opened in a folder above, or below: `gc` of a directory of
    runs spells `run/step-50` what `gc purge` of the run spells `step-50`.
    """

    there: str
    here: str
    named_by: str

    @classmethod
    def by(cls, files: Sequence[Entry], here: str, named_by: str) -> _Spelled:
        """Return the spelling that the first file of a record shows."""
        first = files[0].path if files else here
        above = f"/{first}/".find(f"/{here}/")
        if above >= 0:
            return cls(first[: above + len(here)], here, named_by)
        there = here
        while there and not f"{first}/".startswith(f"{there}/"):
            there = there.partition("/")[2]
        return cls(there or here, here, named_by)

    def path(self, path: str) -> str:
        return self.here + own_path(path, self.there, named_by=self.named_by)[len(self.there) :]

    def entry(self, entry: Entry) -> Entry:
        return entry._replace(path=self.path(entry.path))


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def _row(entry: Entry) -> list[object]:
    return [entry.path, entry.size, entry.mtime, entry.etag, entry.version]


def _entry(row: list[Any]) -> Entry:
    path, size, mtime, etag, version = row
    for name in (etag, version):
        if name is not None:
            text(name, "an ETag or a version")
    return Entry(
        text(path, "a key"), count(size, "a size"), None if mtime is None else float(mtime),
        etag=etag, version=version,
    )  # fmt: skip
