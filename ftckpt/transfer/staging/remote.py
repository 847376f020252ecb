"""Build a result in an object store under its own keys; it is a checkpoint only at the end.

    DST/.ftckpt/transfer.json        which transfer is under way; readers answer "incomplete" (5)
    DST/.ftckpt/transfer/<hash>      one small object a finished file: its block digests
    DST/.ftckpt/transfer/<hash>.upload   of a file that parts write together: its upload's name
    DST/…                            the files; then the format's own index; then the manifest

The manifest is the last PUT and the act that makes it visible; what is under `.ftckpt/` is removed
afterwards. Two runs of one transfer at once write the same bytes under the same keys.

A file that is much of a part's share is one upload, whose name the first part publishes. Each
part sends blocks and keeps in its record what the store said of them. Who sees that all are there
joins them; what the store does not have as a record says is sent again by who finishes.

Build and prove a one-object result under a key of its own, then copy it into place.

    DIR/.NAME.ftckpt-staging/   the object, as a prefix of one file is built (`remote_staging`)
    DIR/NAME.ftckpt.json        the manifest, created first: of two with other bytes one goes on
    DIR/NAME                    the store's own copy of what was proven: it makes it visible

What was staged is removed afterwards. Killed at any instant, the same call goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ftckpt.digests.blocks import WIDTH, block_count, hash_files
from ftckpt.errors import ExistsError, NotFoundError, RefusedError, UnavailableError
from ftckpt.extents import BLOCK
from ftckpt.manifest.locate import read
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX, TRANSFER, is_leftover
from ftckpt.storage.readonly import OverlayStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store, Upload
from ftckpt.strict_json import decode
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.places import staging_name
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import (
    SCHEMA,
    BlockMade,
    announced,
    header,
    line,
    read_announced,
    read_blocks,
    read_plan,
)
from ftckpt.workers.threads import run

from .object import (
    SENT,
    UPLOAD,
    NotedUpload,
    PublishedUploads,
    claim,
    digest_of,
    ended,
    is_sent_to,
    mark_of,
    require_free,
)

_RECEIPTS = f"{FOLDER}/transfer"
# Files of less than this part of a share are of one machine. A part may have one of them too many,
# so this bounds how much longer it takes than the others.
_WHOLE_FILES = 4


class RemoteStaging(Staging):
    """Builds one prefix of an object store.

    Args:
        store: opened at the destination.
    """

    joins = True

    def __init__(self, store: Store) -> None:
        self._store = store
        self._plan = ""
        self._touched = True
        self._joined = False
        self._entries: dict[str, Entry] = {}
        self._made: dict[str, str | None] = {}
        self._files: Mapping[str, int] = {}
        self._uploads = PublishedUploads(store, self._receipt)
        self._sent: dict[str, dict[int, BlockMade]] = {}  # by parts, by file and number
        self._kept: dict[str, set[int]] = {}

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Put the marker, or find our own; see `Staging.begin`."""
        self._plan, self._files = plan, files
        self._uploads.plan = plan
        marker = header(plan) + announced(files)
        try:
            self._entries = {e.path: e for e in self._store.walk("")}
        except NotFoundError:
            self._entries = {}
        if TRANSFER not in self._entries:
            # A run that was killed before it put the marker has left a probe at most.
            if not all(map(is_leftover, self._entries)):
                raise self._exists()
            self._require_absent([MANIFEST, *files])
            self._store.create(TRANSFER, marker)
            self._touched = False
            return False
        standing = self._store.read(TRANSFER)
        found = read_plan(standing)
        if found == plan:
            if MANIFEST in self._entries:  # killed between the last act and the sweeping up
                self._sweep()
                return True
            if not restart:
                return False
        elif MANIFEST in self._entries or not restart:
            raise RefusedError(
                f"{self._store.url} holds what another transfer has built so far",
                hint="run that one again to finish it, or --restart to forget it",
            )
        self._forget(standing)
        self._store.create(TRANSFER, marker)
        return False

    @property
    def built(self) -> Store:
        """Where the files lie that are being built."""
        return self._store

    def join(self, plan: str, files: Mapping[str, int], part: str) -> str:
        """Build some files beside other parts, under one marker; see `Staging.join`."""
        self._joined = True
        try:
            finished = self.begin(plan, files, restart=False)
        except ExistsError:
            # Another part has put the marker since the listing, and a file perhaps.
            finished = self.begin(plan, files, restart=False)
        if finished:
            raise self._exists()
        return plan  # receipts say of each object whether it is still the same

    def cuts(self, size: int, share: int) -> bool:
        """Say yes of a file that is much of a share, where the store can join parts."""
        joins = self._store.traits.joint_uploads
        return joins and size * _WHOLE_FILES > share and block_count(size) > 1

    def believe(self, blocks: Iterable[BlockMade], built: str) -> None:
        """Take in what parts have sent; what the store has of it is not sent again."""
        for made in blocks:
            if made.note.startswith(SENT):
                self._sent.setdefault(made.file, {})[made.number] = made

    def open_cut(self, file: OutputFile) -> StagedFile:
        """Join the upload of a file, unless it is whole."""
        blocks = self._whole(self._plan, file.path)
        if blocks is not None:
            return StagedFile(None, blocks)
        name = self._uploads.name(file.path)
        upload = self._store.join_upload(file.path, file.size, name, {})
        if upload.kept() is None:  # aborted, or finished by a run that died before it said so
            name = self._uploads.name(file.path, instead_of=name)
            upload = self._store.join_upload(file.path, file.size, name, {})
        return StagedFile(NotedUpload(upload, name, self._store), {})

    def noted(self, upload: Upload, made: BlockMade) -> BlockMade:
        """Note what the store has said of the part that the block is."""
        return upload.noted(made) if isinstance(upload, NotedUpload) else made

    def is_whole(self, plan: str, path: str) -> bool:
        """Say whether a receipt stands of the very object that stands there."""
        return self._whole(plan, path) is not None

    def open(self, file: OutputFile, *, at_most: bool = False) -> StagedFile:
        """Begin an upload, unless a receipt says that the very object is there."""
        self._touched = True
        receipt = self._receipt(file.path)
        entry = self._entries.get(file.path)
        fits = entry is not None and (at_most or entry.size == file.size)
        if receipt in self._entries and entry is not None and fits:
            try:
                data = self._store.read(receipt)
            except NotFoundError as error:
                raise ended(self._store) from error
            blocks = self._believed(data, entry, self._plan, least=at_most)
            if blocks is not None:
                self._made[file.path] = entry.etag
                return StagedFile(None, blocks)
        if file.path in self._sent:
            return self._go_on(file)
        return StagedFile(self._store.upload(file.path, file.size), {})

    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        """Say whether it is a block that a part has sent, and that the store still has."""
        return made.number in self._kept.get(file.path, ())

    def add(self, made: BlockMade) -> None:
        """Do nothing: a part of an unfinished upload cannot be found again."""

    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        """Put the receipt of a file."""
        etag = self._made[file.path] = self._store.stat(file.path).etag
        head = {"schema": SCHEMA, "transfer": self._plan, "etag": etag}
        rows = [json.dumps(head).encode() + b"\n", *(line(made) for made in blocks)]
        self._store.put(self._receipt(file.path), b"".join(rows))

    def source(self, commit: Mapping[str, bytes]) -> Source:
        """List the prefix, with the last small files over it."""
        whole = Source.directory(OverlayStore(self._store, commit))
        seen = {k: e for k, e in whole.entries.items() if not k.startswith(f"{FOLDER}/")}
        return Source(whole.store, "", seen)

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Put the small files in order, then the manifest, then remove the marker."""
        self._require_ours()
        for path, data in commit.items():
            self._store.put(path, data)
        try:
            self._store.create(MANIFEST, manifest)
        except ExistsError:
            standing = read(self._store, MANIFEST)
            if not standing.same_content(parse_manifest(manifest)):
                raise
        self._entries = {e.path: e for e in self._store.walk("")}
        self._sweep()

    def close(self) -> None:
        """Take the marker away where nothing has been built yet."""
        if not (self._touched or self._joined):
            self._store.delete([TRANSFER])

    def _require_absent(self, paths: Sequence[str]) -> None:
        """Ask for every name that is to be written: an empty listing may be a stale one.

        Raises:
            ExistsError: one of them is there.
        """
        for found in run(paths, self._is_there, jobs=self._store.traits.parallel):
            if found:
                raise self._exists()

    def _is_there(self, path: str) -> bool:
        try:
            return self._store.stat(path).kind is EntryKind.FILE
        except NotFoundError:
            return False

    def _require_ours(self) -> None:
        """Look whether what was proven still stands here, and nobody else is writing over it.

        Raises:
            RefusedError: another transfer has begun here since.
        """
        try:
            ours = read_plan(self._store.read(TRANSFER)) == self._plan
        except NotFoundError:
            if self._is_there(
                MANIFEST
            ):  # by another run of this transfer: the manifests are compared
                return
            ours = False
        standing = {entry.path: entry.etag for entry in self._store.walk("")}
        other = [path for path, etag in self._made.items() if standing.get(path) != etag]
        if not ours or not all(self._vouched(path, standing.get(path)) for path in other):
            raise RefusedError(
                f"another transfer has written to {self._store.url} meanwhile",
                hint="one at a time: run this one again when the other has ended",
            )

    def _vouched(self, path: str, etag: str | None) -> bool:
        """Say whether a run of this transfer has put a receipt for this version of a file."""
        try:
            data = self._store.read(self._receipt(path))
        except NotFoundError:
            return False
        return etag is not None and self._is_receipt(data, etag, self._plan)

    def _is_receipt(self, data: bytes, etag: str, plan: str) -> bool:
        if read_plan(data) != plan:
            return False
        return bool(decode(data.partition(b"\n")[0]).get("etag") == etag)

    def _whole(self, plan: str, path: str) -> dict[int, BlockMade] | None:
        """Return the blocks of a file as its receipt has them, if it is of the object now there."""
        try:
            data = self._store.read(self._receipt(path))
            entry = self._store.stat(path)
        except NotFoundError:
            return None
        return self._believed(data, entry, plan)

    def _believed(
        self, data: bytes, entry: Entry, plan: str, *, least: int = 0
    ) -> dict[int, BlockMade] | None:
        """Return the blocks of a receipt that is of this object and has each of its blocks once.

        A line that is torn counts for nothing, and a manifest without its block says nothing true.
        An empty file may have notes in one block (`least`).
        """
        if entry.etag is None or not self._is_receipt(data, entry.etag, plan):
            return None
        made = [block for block in read_blocks(data) if len(block.digest) == WIDTH]
        numbers = range(max(block_count(entry.size), least))
        whole = sorted(block.number for block in made) == [*numbers]
        return {block.number: block for block in made} if whole else None

    def _go_on(self, file: OutputFile) -> StagedFile:
        """Go on with a file of which parts have sent blocks: with those that the store has."""
        path, size, sent = file.path, file.size, self._sent[file.path]
        name = self._uploads.name(path)
        mine = {number: made for number, made in sent.items() if is_sent_to(name, made)}
        marks = {number * BLOCK: mark_of(made) for number, made in mine.items()}
        upload = self._store.join_upload(path, size, name, marks)
        kept = upload.kept()
        if kept is None:
            name = self._uploads.name(path, instead_of=name)
            upload, kept = self._store.join_upload(path, size, name, {}), ()
        self._kept[path] = {offset // BLOCK for offset in kept}
        return StagedFile(upload, {number: mine[number] for number in self._kept[path]})

    def _sweep(self) -> None:
        """Remove receipts, then the marker; a failure leaves a checkpoint that is whole."""
        receipts = [k for k in self._entries if k.startswith(f"{_RECEIPTS}/")]
        if any(key.endswith(UPLOAD) for key in receipts) and not self._uploads.abort(self._files):
            return  # by what stays the next run, or `gc`, knows whose the upload is
        if not any(self._store.delete(receipts).values()):
            self._store.delete([TRANSFER])

    def _forget(self, marker: bytes) -> None:
        """Remove what an unfinished transfer says that it was writing, its marker last.

        Raises:
            RefusedError: the marker does not say it, and nothing else may be removed.
            UnavailableError: an upload stays.
        """
        try:
            theirs = read_announced(marker)
        except ValueError as error:
            raise RefusedError(
                f"{self._store.describe(TRANSFER)} does not say what was being written",
                hint="remove what is under this prefix by hand, or choose another",
            ) from error
        rest = [k for k in self._entries if k in theirs or k.startswith(f"{_RECEIPTS}/")]
        if any(key.endswith(UPLOAD) for key in rest) and not self._uploads.abort(theirs):
            raise UnavailableError(
                f"what was being sent to {self._store.url} could not be aborted",
                hint="run this again: the marker stays until nothing is paid for",
            )
        for keys in (rest, [TRANSFER]):
            for outcome in self._store.delete(keys).values():
                if outcome is not None:
                    raise outcome
        self._entries = {}

    def _receipt(self, path: str) -> str:
        return f"{_RECEIPTS}/{digest_of(path)}"

    def _exists(self) -> ExistsError:
        return ExistsError(
            f"{self._store.url} exists already", hint="nothing is overwritten: choose another name"
        )


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
