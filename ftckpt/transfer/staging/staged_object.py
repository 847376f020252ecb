"""Build and prove a one-object result under a key of its own, then copy it into place.

    DIR/.NAME.ftckpt-staging/   the object, as a prefix of one file is built (`remote_staging`)
    DIR/NAME.ftckpt.json        the manifest, created first: of two with other bytes one goes on
    DIR/NAME                    the store's own copy of what was proven: it makes it visible

What was staged is removed afterwards. Killed at any instant, the same call goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.digests.files import hash_files
from ftckpt.errors import ExistsError, NotFoundError
from ftckpt.manifest.locate import read
from ftckpt.own_files import SUFFIX, TRANSFER
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, Store
from ftckpt.transfer.places import staging_name
from ftckpt.transfer.write.journal import read_blocks, read_plan

from .joint import UPLOAD
from .object import claim, require_free
from .remote import RemoteStaging

_RECORD_ALONE = (
    "the manifest alone is of another run, killed or under way: run that one again to finish it,"
    " or, where none is, remove the manifest and give --restart"
)


class StagedObject(RemoteStaging):
    """Builds one object.

    Args:
        store: opened at the prefix that the object will lie in.
        name: of the object, below that prefix.
        staged: opened at `staging_name(name)` below that prefix.
    """

    def __init__(self, store: Store, name: str, staged: Store) -> None:
        super().__init__(staged)
        self._beside = store
        self._name = name
        self._built: Entry | None = None

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Put the marker, or find our own; see `Staging.begin`."""
        ours = self._marked() == plan
        try:
            require_free(self._beside, self._name)
            if not ours:
                require_free(self._beside, self._name + SUFFIX, _RECORD_ALONE)
        except ExistsError:
            if restart or not ours or not self._is_shown():
                raise
            self._entries = {entry.path: entry for entry in self._store.walk("")}
            self._sweep()  # killed between the last act and the sweeping up
            return True
        return super().begin(plan, files, restart=restart)

    def source(self, commit: Mapping[str, bytes]) -> Source:
        """Return the object as it was built."""
        self._built = self._store.stat(self._name)
        return Source.file(self._store, self._built)

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Create the manifest, then have the object copied to its name, if it is what was read."""
        built = self._built or self._store.stat(self._name)  # nobody has read it: `--no-proof`
        self._require_ours()
        claim(self._beside, self._name, manifest)
        staged = f"{staging_name(self._name)}/{self._name}"
        self._beside.duplicate(built._replace(path=staged), self._name)
        self._sweep()

    def _marked(self) -> str | None:
        try:
            return read_plan(self._store.read(TRANSFER))
        except NotFoundError:
            return None

    def _is_shown(self) -> bool:
        """Say whether what stands there is what a run of ours has built, byte by byte.

        The manifest was created first: it says nothing of who wrote the object since.
        """
        try:
            built = self._store.read(self._receipt(self._name))
            file = read(self._beside, self._name + SUFFIX).by_path[self._name]
            entry = self._beside.stat(self._name)
        except (NotFoundError, KeyError):
            return False
        digests = {made.number: made.digest for made in read_blocks(built)}
        ours = b"".join(digests[number] for number in sorted(digests))
        if (entry.size, file.blocks) != (file.size, ours):
            return False
        shown = Source.file(self._beside, entry)
        return hash_files(shown, {self._name: file.size})[self._name] == ours

    def _sweep(self) -> None:
        """Remove what was staged; a failure leaves an object that is whole.

        The receipt and the marker stay as long as the bytes or an upload do, so that the next run,
        which knows by them that it has finished, tries again.
        """
        receipt = self._receipt(self._name)
        if receipt + UPLOAD in self._entries and not self._uploads.abort([self._name]):
            return
        if self._store.delete([self._name])[self._name] is None:
            # In one request: by a marker without its receipt the next run does not know its object.
            self._store.delete([receipt, receipt + UPLOAD, TRANSFER])
