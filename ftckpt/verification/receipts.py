"""Receipts: records of content checks, so that a restart need not read a checkpoint again.

`.ftckpt/receipts/NAME.json` beside the checkpoint, or a file in a directory that the user names. A
receipt is bound to the checked files: every file's name and size, its ETag or its inode,
modification time and change time, and the bytes of the manifest. A receipt that is cut, of another
place, dated in the future, or whose files have changed does not count, and the caller gets the
reason. It detects accidents, not attackers: who can write the receipt can also write the
checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest.locate import beside
from ftckpt.own_files import FOLDER, MANIFEST
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.strict_json import decode
from ftckpt.version import __version__

SCHEMA = "ftckpt.receipt/1"
_MAX_BYTES = 64 << 10
# Clocks of two machines differ; a receipt dated later than this is invalid.
_CLOCK = 60.0
# Each level includes the ones before it.
_LEVELS = ("content", "values")


@dataclass(frozen=True, slots=True)
class Receipt:
    """A passed check.

    Attributes:
        place: absolute path or URL of the checkpoint.
        level: `content` or `values`.
        evidence: `manifest`, `crc32`, `digests` or `replica`.
        message: the verdict in a sentence.
        nbytes: bytes read by the check.
        checked: end of the check, in seconds since the epoch.
        fingerprint: of the files (see `fingerprint`), 32 hex digits.
        manifest: XXH3-128 of the manifest's bytes; "" without one.
        tool: the program that checked.
    """

    place: str
    level: str
    evidence: str
    message: str
    nbytes: int
    checked: float
    fingerprint: str
    manifest: str
    tool: str = f"ftckpt {__version__}"

    def dump(self) -> bytes:
        """Return the file's bytes; the last field is a digest of the others."""
        body: dict[str, Any] = {"schema": SCHEMA} | asdict(self)
        return json.dumps(body | {"digest": _digest(_canonical(body))}).encode() + b"\n"


def parse(data: bytes) -> Receipt:
    """Parse a receipt's bytes.

    Raises:
        ValueError: it is cut, edited, or of another schema.
    """
    try:
        body = decode(data)
        digest = body.pop("digest")
        if body.get("schema") != SCHEMA or digest != _digest(_canonical(body)):
            raise ValueError("its digest does not match")
        del body["schema"]
        found = Receipt(**body)
        if found.level not in _LEVELS or not isinstance(found.checked, (int, float)):
            raise ValueError("it has a field that is none")
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is not a receipt") from error


class Book:
    """The place of one checkpoint's receipt.

    `folder` is a directory or URL for receipts; "" for `.ftckpt/receipts` beside the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, options: StoreOptions, folder: str = "") -> None:
        self.source = checkpoint.source
        self.place = _absolute(self.source)
        # A delta's bases lie elsewhere, and may change alone.
        self.bound = not checkpoint.decoding.bases()
        parent, _, name = self.place.rpartition("/")
        self._store = open_store(folder or parent or "/", options)
        name = quote(name, safe="@=+,", errors="surrogateescape").replace(".", "%2E")
        own = _digest(os.fsencode(self.place))
        self._path = f"{own}.json" if folder else f"{FOLDER}/receipts/{name}.json"
        self._beside = not folder

    @property
    def url(self) -> str:
        """The receipt's path or URL, as a user would type it."""
        return self._store.describe(self._path)

    def find(self, level: str, max_age: float) -> tuple[Receipt | None, str]:
        """Return a valid receipt, or None and why an existing one is invalid.

        `level` is `content` or `values` (a deeper check counts, too); `max_age` is in seconds.
        """
        if not self.bound:
            return None, "a delta has no receipt: its base may change alone"
        try:
            self._require_own()
            size = self._store.stat(self._path).size
            data = self._store.read(self._path, 0, min(size, _MAX_BYTES))
            found = parse(data)
            fingerprint_now = fingerprint(self.source)
            manifest_now = manifest_digest(self.source)
        except NotFoundError:
            return None, ""
        except (FtckptError, ValueError) as error:
            return None, f"{self.url} is ignored: {error}"
        age = time.time() - found.checked
        ignored = {
            f"it is of {found.place}": found.place != self.place,
            "it is dated in the future": age < -_CLOCK,
            f"it is older than asked for ({_hours(age)})": age > max_age,
            f"only its {found.level} was checked": _LEVELS.index(found.level)
            < _LEVELS.index(level),
            "files have changed since": found.fingerprint != fingerprint_now,
            "the manifest has changed since": found.manifest != manifest_now,
        }
        for reason, holds in ignored.items():
            if holds:
                return None, f"{self.url} is ignored: {reason}"
        return found, ""

    def write(self, receipt: Receipt) -> None:
        """Keep a receipt, replacing an older one atomically.

        Raises:
            UnsafeError: `.ftckpt` is a link.
            DeniedError, NoResourceError, UnavailableError: it could not be written.
        """
        self._require_own()
        self._store.put(self._path, receipt.dump())

    def _require_own(self) -> None:
        root = self._store.local_path() if self._beside else None
        for name in (FOLDER, f"{FOLDER}/receipts"):
            if root is not None and os.path.islink(os.path.join(root, name)):
                raise UnsafeError(f"{name} is a link: it was not made by ftckpt")


def fingerprint(source: Source) -> str:
    """Return a digest of the identity of every file of a checkpoint, as the store shows it now.

    That is name, size, and the ETag, or for local files inode, modification and change time.

    Raises:
        UnsupportedError: the store shows nothing that changes with the content.
        NotFoundError, UnavailableError, DeniedError: a file cannot be looked up.
    """
    return _digest(_canonical(list(_identities(source))))


def _identities(source: Source) -> Iterator[list[object]]:
    # Listed anew: a file that was added since the checkpoint was opened counts.
    now = source if source.single else Source.directory(source.store, source.base)
    for name, entry in sorted(now.entries.items()):
        if name.split("/")[0] == FOLDER:
            continue
        local = source.store.local_path(source.path(name))
        if local is not None:
            try:
                stat = os.stat(local)
            except FileNotFoundError as error:
                raise NotFoundError(f"{local} does not exist") from error
            except OSError as error:
                raise UnsupportedError(f"{local} cannot be asked about: {error}") from error
            yield [name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            continue
        if source.single:
            entry = source.store.stat(source.path(name))
        if entry.etag is None:
            raise UnsupportedError(f"{source.url} lies in a store that shows no ETag")
        yield [name, entry.size, entry.etag]


def manifest_digest(source: Source) -> str:
    """Return the XXH3-128 of the bytes of the manifest beside a checkpoint; "" for none.

    Raises:
        UnavailableError, DeniedError: it cannot be read.
    """
    if not source.single and MANIFEST not in source.entries:
        return ""
    try:
        return _digest(_whole(source.store, beside(source)))
    except NotFoundError:
        return ""


def _whole(store: Store, path: str) -> bytes:
    return store.read(path, 0, store.stat(path).size)


def _absolute(source: Source) -> str:
    single = source.path(next(iter(source.entries))) if source.single else source.base
    local = source.store.local_path(single)
    return os.path.realpath(local) if local is not None else source.url.rstrip("/")


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data))


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"
