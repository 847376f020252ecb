"""Find manifests without data, which a killed `seal` can leave.

On an object store nothing ties the manifest's PUT to the data: a gc that drops the checkpoint at
that moment removes every key that it lists, and a seal that is killed before its last look leaves
its manifest behind. On a disk only manual removal of files leaves one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest.locate import read
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.storage.store import Entry, EntryKind, Store, join

from .dropped import is_record

HINT = (
    "its data were removed, perhaps by a gc while a seal was at work that was then killed; on an"
    " object store gc --apply removes what is left, a day later and after another save"
)

# A step may hold several checkpoints (`actor`, `critic`), each with its manifest.
_PARTS = 16
# Up to this many files of each manifest are looked up by name: a short listing proves nothing.
_ASKED_FOR = 16


def alone(store: Store, path: str) -> str:
    """Return a sentence if a directory holds manifests and none of their files; else "".

    Raises:
        NotFoundError: it is gone.
        UnavailableError, DeniedError: it could not be read.
    """
    files = store.children(path)
    parts = [entry for entry in files if entry.kind is EntryKind.DIRECTORY]
    if len(parts) <= _PARTS:
        files = [entry for entry in files if entry.kind is not EntryKind.DIRECTORY]
        if all(is_record(entry.path) for entry in files):
            for part in parts:
                files += store.children(part.path)
            return alone_of(store, files)
    return ""


def alone_of(store: Store, files: Sequence[Entry]) -> str:
    """Return a sentence if these files are manifests without any of their files; else "".

    `files` are all of a directory, or one manifest of one file.

    Raises:
        UnavailableError, DeniedError: they could not be read.
    """
    if not files or not all(_is_plain(file) for file in files):
        return ""
    described = 0
    for file in files:
        try:
            manifest = read(store, file.path)
        except (CorruptError, UnsafeError, UnsupportedError, NotFoundError):
            return ""  # unreadable, so its files are unknown
        base, _, name = file.path.rpartition("/")
        names = (
            [f.path for f in manifest.files] if name == MANIFEST else [name.removesuffix(SUFFIX)]
        )
        if any(_stands(store, join(base, one)) for one in names[:_ASKED_FOR]):
            return ""
        described += len(names)
    what = "a manifest stands" if len(files) == 1 else f"{len(files)} manifests stand"
    gone = f"the {described} files described there are gone"
    if described == 1:
        gone = "the file described there is gone"
    return f"{what} alone: {gone}" if described else ""


def _is_plain(file: Entry) -> bool:
    return file.kind is EntryKind.FILE and file.link is None and is_record(file.path)


def _stands(store: Store, path: str) -> bool:
    """Look up a name that a listing does not show."""
    try:
        store.stat(path)
    except (NotFoundError, UnsafeError, UnsupportedError):  # the last two: not a file's name
        return False
    return True
