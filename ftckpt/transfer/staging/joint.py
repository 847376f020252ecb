"""One object that several parts send together: its upload's name is published, its blocks noted."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from contextlib import suppress

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)
from ftckpt.extents import BLOCK
from ftckpt.own_files import TRANSFER
from ftckpt.storage.store import JointUpload, Store, Unfinished, Upload
from ftckpt.strict_json import JsonError, decode
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.transfer.write.journal import SCHEMA, read_plan

UPLOAD = ".upload"  # ends the key under which an upload is published
SENT = "sent "  # begins the note of a block that is a part of such an upload


class PublishedUploads:
    """The uploads of one transfer, published where all its parts look.

    Args:
        store: opened at the destination.
        key: returns the key of a file's receipt.

    Attributes:
        plan: fingerprint of the transfer.
    """

    def __init__(self, store: Store, key: Callable[[str], str]) -> None:
        self._store = store
        self._key = key
        self.plan = ""

    def name(self, path: str, *, instead_of: str = "") -> str:
        """Return the name of a file's upload, as it is published; begin one where none is.

        Args:
            path: of the file.
            instead_of: an upload that is gone.

        Raises:
            RefusedError: what is published is damaged, or the transfer has ended.
        """
        standing = self._published(path)
        if standing not in ("", instead_of):
            return standing
        if not self._is_under_way():
            raise ended(self._store)
        made = self._store.begin_joint_upload(path)
        head = {"schema": SCHEMA, "transfer": self.plan, "file": path, "upload": made}
        data = json.dumps(head).encode() + b"\n"
        if standing:
            self._store.put(self._key(path) + UPLOAD, data)
        else:
            with suppress(ExistsError):
                self._store.create(self._key(path) + UPLOAD, data)
        # Where a store lets two of them win, what stands counts.
        standing = self._published(path)
        if standing != made:
            self._store.abort([Unfinished(path, made, 0.0)])
        return standing

    def abort(self, files: Container[str]) -> bool:
        """Abort what is left of uploads to some files of this transfer; False where one may stay.

        `gc` has what stays, as long as the marker says whose it is.
        """
        try:
            left = [one for one in self._store.unfinished("") if one.path in files]
            return not any(self._store.abort(left))
        except (DeniedError, UnsupportedError):
            return True  # no later run can list them either
        except FtckptError:
            return False

    def _published(self, path: str) -> str:
        key = self._key(path) + UPLOAD
        try:
            data = self._store.read(key)
        except NotFoundError:
            return ""
        with suppress(JsonError, ValueError, AttributeError):
            said = decode(data)
            name = said.get("upload")
            if read_plan(data) == self.plan and said.get("file") == path and name:
                return str(name)
        raise RefusedError(
            f"{self._store.describe(key)} does not say how {path} is being written",
            hint="remove it and the records of the parts, and run them again",
        )

    def _is_under_way(self) -> bool:
        try:
            return read_plan(self._store.read(TRANSFER)) == self.plan
        except NotFoundError:
            return False


class NotedUpload(Upload):
    """A joint upload whose parts are noted with the blocks that they are.

    Args:
        inner: joined.
        name: of the upload.
        where: the store.
    """

    def __init__(self, inner: JointUpload, name: str, where: Store) -> None:
        self._inner = inner
        self._where = where
        self._name = name
        self.unit = inner.unit

    def write(self, offset: int, view: memoryview) -> None:
        """Send a part.

        Raises:
            RefusedError: the upload is gone: others have joined it, or it was aborted.
        """
        try:
            self._inner.write(offset, view)
        except NotFoundError as error:
            raise ended(self._where) from error

    def noted(self, made: BlockMade) -> BlockMade:
        """Return a block that was sent, with what shows later that the store has it."""
        mark = self._inner.mark(made.number * BLOCK)
        return made._replace(note=f"{SENT}{digest_of(self._name)} {mark}")

    def finish(self, size: int | None = None) -> None:
        """Leave it: other parts have other blocks."""

    def close(self) -> None:
        """Let go."""
        self._inner.close()


def is_sent_to(name: str, made: BlockMade) -> bool:
    """Say whether a block was sent to the upload of a name, by its note."""
    return made.note.startswith(f"{SENT}{digest_of(name)} ")


def mark_of(made: BlockMade) -> str:
    """Return what the store said of a block that was sent."""
    return made.note.removeprefix(SENT).partition(" ")[2]


def digest_of(text: str) -> str:
    """Return a short name of a text of any length."""
    import xxhash

    digest: str = xxhash.xxh3_128_hexdigest(text.encode())
    return digest


def ended(store: Store) -> RefusedError:
    """Return what a straggler is told."""
    return RefusedError(
        f"another run to {store.url} has ended meanwhile",
        hint="run this again: it finds what is there",
    )
