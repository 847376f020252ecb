"""Find the entries that links inside another one lead into: what is kept needs them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ftckpt.storage.store import Entry, Store


def led_to(store: Store, own: str, files: Iterable[Entry]) -> tuple[str, ...]:
    """Return the paths that symbolic links of an entry lead to, and those of all around them.

    A link may lead to another one, which lies in a third entry: both are needed.

    Args:
        store: where the entry lies; only local ones have links.
        own: path of the entry: what lies in it needs nothing else.
        files: of the entry.
    """
    top = store.local_path("")
    if top is None:
        return ()
    top = os.path.realpath(top).rstrip("/") + "/"
    found: dict[str, None] = {}
    for file in files:
        local = None if file.link is None else store.local_path(file.path)
        if local is None:
            continue
        folder = os.path.realpath(os.path.dirname(local))
        said = os.path.normpath(os.path.join(folder, file.link or ""))
        for place in (said, os.path.realpath(local)):
            if place.startswith(top):
                found.update(dict.fromkeys(_with_all_around(place.removeprefix(top))))
    return tuple(path for path in found if path != own and not path.startswith(own + "/"))


def _with_all_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]
