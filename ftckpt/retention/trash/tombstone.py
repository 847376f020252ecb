"""Tombstones: records of dropped entries in an object store, with every key and its identity.

A tombstone is written before anything changes; undelete and purge touch only the keys in it. It
ends in a digest of itself, because a flipped bit in a key would name another object.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftckpt.errors import CorruptError, NewerWriterError
from ftckpt.storage.store import Entry
from ftckpt.strict_json import decode

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
    def parse(cls, data: bytes, path: str) -> Tombstone:
        """Parse the bytes of a record.

        Raises:
            CorruptError: not a tombstone, or changed; it must not be used.
            NewerWriterError: of another version.
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
            return cls(
                name=body["name"],
                directory=body["directory"],
                time=body["time"],
                actor=body["actor"],
                reasons=tuple(body["reasons"]),
                files=tuple(_entry(row) for row in body["files"]),
                versions=tuple(_entry(row) for row in body["versions"]),
                markers={k: base64.b64decode(v) for k, v in body["markers"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptError(
                f"{path} is damaged, so that nothing is done about what it names: {error}",
                hint="remove it by hand to have the checkpoint listed again",
                file=path,
            ) from error


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _row(entry: Entry) -> list[object]:
    return [entry.path, entry.size, entry.mtime, entry.etag, entry.version]


def _entry(row: list[Any]) -> Entry:
    path, size, mtime, etag, version = row
    return Entry(path, size, mtime, etag=etag, version=version)
