"""Stage a result that is one object: it cannot be seen half-written.

    DIR/NAME.ftckpt.json      the manifest, created first: of two runs with other bytes one goes on
    DIR/NAME                  seen when its upload is finished, whose parts the service has summed

An object is visible before anybody can read it back, so a caller proves it afterwards. A killed run
leaves nothing that a listing shows, or the manifest alone; the next one begins the upload anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.errors import ExistsError, NotFoundError, RefusedError
from ftckpt.manifest.locate import read
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import SUFFIX
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store, Upload
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import BlockMade


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
