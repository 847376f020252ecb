"""Keys of flat stores: the valid ones, and the directories that they imply."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.errors import UnsafeError

from .store import Entry, EntryKind


def safe_key(prefix: str, path: str) -> str:
    """Return the full key of `path` below `prefix` (neither with a slash at its ends).

    Raises:
        UnsafeError: `path` is absolute or climbs; a flat store would keep it as spelled.
    """
    if not path:
        return prefix
    if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise UnsafeError(f"{path!r} is not a key below {prefix!r}", kind="unsafe-path", file=path)
    return f"{prefix}/{path}" if prefix else path


def children_of(entries: Iterable[Entry], path: str) -> list[Entry]:
    """Return the entries directly below `path`, from all entries below it at any depth.

    A name that is both an object and a prefix of others comes twice, as FILE and as DIRECTORY.
    """
    skip = len(path) + 1 if path else 0
    files: list[Entry] = []
    directories: set[str] = set()
    for entry in entries:
        first, slash, _ = entry.path[skip:].partition("/")
        if slash:
            directories.add(entry.path[:skip] + first)
        else:
            files.append(entry)
    files += [Entry(name, 0, None, EntryKind.DIRECTORY) for name in directories]
    return sorted(files, key=lambda e: (e.path, e.kind))
