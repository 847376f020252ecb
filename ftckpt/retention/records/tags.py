"""Tags: words on entries, for `--keep-tag`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ftckpt.discovery.roots import Root
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.retention import records

_KIND = "tags"


def tag(root: Root, entry: str, name: str, *, owner: str, now: float) -> None:
    """Tag an entry.

    Raises:
        NotFoundError: the root has no such entry.
        UsageError: an empty tag.
    """
    if not name.strip():
        raise UsageError("a tag is a word", hint="milestone")
    records.write(root, _KIND, entry, name, {"tag": name, "owner": owner, "time": now})


def untag(root: Root, entry: str, name: str) -> None:
    """Remove a tag from an entry.

    Raises:
        NotFoundError: it has no such tag.
    """
    if name not in tags(root).get(entry, ()):
        raise NotFoundError(f"{entry} of {root.url} is not tagged {name}")
    records.erase(root, [(_KIND, entry, name)])


def tags(root: Root, entry: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Return the sorted tags of one entry, or (None) of every tagged entry."""
    found: dict[str, list[str]] = defaultdict(list)
    for record in records.read(root, _KIND, entry):
        found[record.entry].append(record.label)
    return {entry: tuple(names) for entry, names in found.items()}
