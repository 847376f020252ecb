"""Open a recognised directory or file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ftckpt.checkpoint import Checkpoint, Commit, CommitState
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import GO_ON, MANIFEST, TRANSFER, under_way
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store

from .listing import listing_of_directory, listing_of_file
from .marks import FINISHED, UNFINISHED
from .recognise import Format, UnopenedPart, added_error, recognise
from .step_names import unfinished_marker


def recognise_at(store: Store, entry: Entry, formats: Sequence[Format]) -> UnopenedPart | None:
    """Return the first format that knows one directory or file; None if none does."""
    if entry.kind is EntryKind.SPECIAL:
        return None
    is_file = entry.kind is EntryKind.FILE
    listing = listing_of_file(store, entry) if is_file else listing_of_directory(store, entry.path)
    found = recognise(formats, listing)
    return None if found is None else UnopenedPart(entry, *found)


def open_part(store: Store, part: UnopenedPart) -> Checkpoint:
    """Open a recognised checkpoint: list it whole, parse headers and metadata.

    Raises:
        UnsupportedError: recognised by name, but not readable by this version.
        IncompleteError, CorruptError, UnsafeError: see `Format.open`. A sealed checkpoint without
            one of its sealed files is corrupt: its save did finish.
    """
    source = files_of(store, part.entry)
    try:
        return _finished(_opened(part.format, source))
    except IncompleteError as error:
        lost = _lost_since_sealed(source)
        if not lost:
            raise
        raise CorruptError(
            f"{lost} of {source.url} is missing: it was there when the checkpoint was sealed",
            hint="`ftckpt repair` restores it from a replica",
            kind="missing-file",
            file=lost,
        ) from error
    except (CorruptError, UnsafeError, NotFoundError) as first:
        # A bit that flipped in transit is right the second time; changes since then distinguish a
        # save in flight from damage.
        single = part.entry.kind is EntryKind.FILE
        again = files_of(store, store.stat(part.entry.path) if single else part.entry)
        try:
            return _finished(_opened(part.format, again))
        except (CorruptError, UnsafeError, NotFoundError) as second:
            from ftckpt.manifest.altered import as_damage  # only after a failure

            why = as_damage(second, again)
            moved = again.changed(source.entries)
            moved += [
                n for n, e in source.entries.items() if not e.same_version(again.entries.get(n))
            ]
            if moved and not isinstance(why, UnsafeError):
                raise IncompleteError(
                    f"{moved[0]} of {again.url} changed while it was being read",
                    hint="it is still being written, or being removed: try again",
                    kind="changed-file",
                    file=moved[0],
                ) from second
            raise why from first


def _opened(of: Format, source: Source) -> Checkpoint:
    try:
        return of.open(source)
    except Exception as error:
        other = added_error(of, error)
        if other is None:
            raise
        raise other from error


def _lost_since_sealed(source: Source) -> str:
    """Return the first missing file of a seal, or "".

    Also "" if another file has another size than its seal says: a trainer may be saving again into
    the sealed directory.
    """
    from ftckpt.manifest.locate import find  # only after a failure

    try:
        manifest = find(source)
    except (CorruptError, UnsafeError, UnsupportedError):
        return ""  # it proves nothing
    if manifest is None or any(
        file.path in source.entries and source.entries[file.path].size != file.size
        for file in manifest.files
    ):
        return ""
    return next((f.path for f in manifest.files if f.path not in source.entries), "")


def files_of(store: Store, entry: Entry) -> Source:
    """List the files of one directory or file.

    Raises:
        IncompleteError: a transfer to it is running, or was killed; or its trainer marked it so.
    """
    marker = _mark_beside(store, entry)
    if marker:
        raise IncompleteError(
            f"{marker} lies beside {store.describe(entry.path)}: its trainer has not finished"
            " saving it, or removing it, and does not load it",
            hint="an earlier checkpoint may be complete",
            kind="uncommitted",
            file=marker,
        )
    if entry.kind is EntryKind.FILE:
        return Source.file(store, entry)
    source = Source.directory(store, entry.path)
    if TRANSFER in source.entries and MANIFEST not in source.entries:
        raise IncompleteError(
            under_way(source.url),
            hint=GO_ON,
            file=TRANSFER,
        )
    if UNFINISHED in source.entries:
        raise IncompleteError(
            f"{source.url} has {UNFINISHED}: its trainer has not finished it, and does not load it",
            hint="an earlier checkpoint may be complete",
            kind="uncommitted",
            file=UNFINISHED,
        )
    return source


def _mark_beside(store: Store, entry: Entry) -> str:
    """Return the name of the mark beside a save that says it is unfinished; "" if there is none.

    It is looked for where a look costs nothing, and beside the files of NeMo, which writes it.
    """
    if not (store.traits.local or entry.path.endswith(".ckpt")):
        return ""
    return unfinished_marker(split(store.describe(entry.path))[1], _Beside(store, entry.path))


class _Beside:
    """The names in the directory of an entry: each is asked for by itself."""

    def __init__(self, store: Store, path: str) -> None:
        here = store.local_path(path)
        self._store, self._folder = store, path.rpartition("/")[0]
        self._local = os.path.dirname(os.path.abspath(here)) if here is not None else None

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if self._local is not None:
            return os.path.lexists(os.path.join(self._local, name))
        try:
            self._store.stat(f"{self._folder}/{name}".lstrip("/"))
        except NotFoundError:
            return False
        return True


def _finished(checkpoint: Checkpoint) -> Checkpoint:
    """Take a trainer's own mark for the commit marker of a format that has none."""
    if checkpoint.commit.state is CommitState.NO_MARKER and FINISHED in checkpoint.source.entries:
        checkpoint.commit = Commit(CommitState.COMMITTED, FINISHED)
    return checkpoint
