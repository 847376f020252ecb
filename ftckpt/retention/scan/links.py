"""Find what a kept entry needs of others: what its links lead into, and what an adapter is of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ftckpt.discovery.roots import Root
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.storage.store import Entry, EntryKind, Store, join
from ftckpt.strict_json import JsonError, decode

_ADAPTER, _MAX_BYTES = "adapter_config.json", 1 << 20


def trained_on(root: Root, own: str, files: Iterable[Entry]) -> tuple[str, ...]:
    """Return the checkpoint of the same root that a LoRA adapter of PEFT was trained on.

    It is told by its name: the path that was recorded is of the machine that trained.

    Args:
        root: of the entry.
        own: path of the entry.
        files: of the entry.

    Raises:
        UnavailableError, DeniedError: its configuration could not be read.
    """
    path = join(own, _ADAPTER)
    config = next((f for f in files if f.path == path and f.kind is EntryKind.FILE), None)
    if config is None or config.size > _MAX_BYTES:
        return ()
    base: object = None
    with suppress(NotFoundError, CorruptError, UnsafeError, JsonError, LookupError, TypeError):
        base = decode(root.store.read(path, 0, config.size))["base_model_name_or_path"]
    if not isinstance(base, str):
        return ()
    around, _, name = base.rstrip("/").rpartition("/")
    here = root.url.rstrip("/").rpartition("/")[2]
    if step_in_name(name) is None or around.rpartition("/")[2] not in ("", ".", here):
        return ()
    return (join(root.base, name),)


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
