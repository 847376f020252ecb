"""Find the file that commits a checkpoint; without it the format ignores the rest.

Tries the format on a listing that lacks one name, so no second list of names is needed. A marker is
a small file, and among those that were written last.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.open_part import recognise_at
from ftckpt.discovery.recognise import UnopenedPart
from ftckpt.errors import NotFoundError
from ftckpt.storage.listed import ListedStore
from ftckpt.storage.store import Entry, EntryKind, Store

# The metadata of a checkpoint of a hundred thousand tensors.
LARGEST = 64 << 20
# Number of last written files to try.
_TRIES = 32
# If a checkpoint lies beside a trainer's other files, its marker is one level deeper.
_DEPTH = 2


def marker_of(store: Store, part: UnopenedPart, files: Sequence[Entry]) -> Entry | None:
    """Return the file that commits a checkpoint; None if no single small file does.

    `files` holds at least all files of the checkpoint.

    Raises:
        UnavailableError, DeniedError: a header could not be read.
    """
    if (
        part.entry.kind is not EntryKind.DIRECTORY
        or part.recognition.commit is not CommitState.COMMITTED
    ):
        return None
    inside = [file for file in files if file.path.startswith(part.entry.path + "/")]
    return next((f for f in _likely(part, inside) if _commits(store, part, f, inside)), None)


def _likely(part: UnopenedPart, inside: Sequence[Entry]) -> list[Entry]:
    skip = len(part.entry.path) + 1
    near = [f for f in inside if f.size <= LARGEST and f.path[skip:].count("/") < _DEPTH]
    return sorted(near, key=lambda f: (-(f.mtime or 0.0), f.size, f.path))[:_TRIES]


def _commits(store: Store, part: UnopenedPart, file: Entry, inside: Sequence[Entry]) -> bool:
    rest = ListedStore(store, [other for other in inside if other.path != file.path])
    try:
        left = recognise_at(rest, part.entry, [part.format])
    except NotFoundError:  # nothing else lies there
        return True
    return left is None or left.recognition.commit is CommitState.UNCOMMITTED
