"""Stage a result that is one object: it cannot be seen half-written.

    DIR/NAME.ftckpt.json      the manifest, created first: of two runs with other bytes one goes on
    DIR/NAME                  seen when its upload is finished, whose parts the service has summed

An object is visible before anybody can read it back, so a caller proves it afterwards. A killed run
leaves nothing that a listing shows, or the manifest alone; the next one begins the upload anew.

One object that several parts send together: its upload's name is published, its blocks noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
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
from ftckpt.manifest.locate import read
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import SUFFIX, TRANSFER
from ftckpt.storage.source import Source
from ftckpt.storage.store import JointUpload, Store, Unfinished, Upload
from ftckpt.strict_json import JsonError, decode
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import SCHEMA, BlockMade, read_plan


class ObjectStaging(Staging):
    """Builds one object.

    Args:
        store: opened at the prefix that the object will lie in.
        name: of the object, below that prefix.
    """

    shows_before_proof = True

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._upload: _Held | None = None

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Look whether the name is free; there is nothing to resume."""
        require_free(self._store, self._name)
        return False

    def open(self, file: OutputFile, *, at_most: bool = False) -> StagedFile:
        """Begin the upload."""
        self._upload = _Held(self._store.upload(self._name, file.size))
        return StagedFile(self._upload, {})

    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        """Say no: parts of an unfinished upload cannot be found again."""
        return False

    def add(self, made: BlockMade) -> None:
        """Do nothing: one object has no journal."""

    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        """Do nothing: the object is made whole when it may be seen."""

    def source(self, commit: Mapping[str, bytes]) -> Source:
        """Return the object, once it is published."""
        return Source.file(self._store, self._store.stat(self._name))

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Create the manifest, or find an equal one of a killed run; then finish the upload.

        Raises:
            RefusedError: a manifest of other bytes stands there.
        """
        assert self._upload is not None
        claim(self._store, self._name, manifest)
        self._upload.finish_now()

    def close(self) -> None:
        """Give up what was not finished."""
        if self._upload is not None:
            self._upload.abort()


def claim(store: Store, name: str, manifest: bytes) -> None:
    """Create the manifest of an object that is about to be shown, or find that of a killed run.

    Raises:
        RefusedError: a manifest of other bytes stands there.
        ExistsError: the object does.
    """
    beside = name + SUFFIX
    try:
        store.create(beside, manifest)
    except ExistsError as error:
        if not read(store, beside).same_content(parse_manifest(manifest)):
            raise RefusedError(
                f"{store.describe(beside)} describes other bytes than these",
                hint="another run is under way, or was killed: remove it, or choose a name",
            ) from error
    require_free(store, name)


def require_free(
    store: Store, name: str, hint: str = "nothing is overwritten: choose another name"
) -> None:
    """Refuse a name that is taken.

    Args:
        store: where.
        name: which.
        hint: the way out.

    Raises:
        ExistsError: it is.
    """
    try:
        store.stat(name)
    except NotFoundError:
        return
    raise ExistsError(f"{store.describe(name)} exists already", hint=hint)


class _Held(Upload):
    """An upload that is finished later than its bytes are written."""

    def __init__(self, inner: Upload) -> None:
        self._inner = inner
        self.unit = inner.unit

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes."""
        self._inner.write(offset, view)

    def finish(self, size: int | None = None) -> None:
        """Leave it for `finish_now`."""

    def close(self) -> None:
        """Leave it for `abort`: the loop that fills it lets go before it is published."""

    def finish_now(self) -> None:
        """Show the object."""
        self._inner.finish()

    def abort(self) -> None:
        """Give up what was not finished."""
        self._inner.close()


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
