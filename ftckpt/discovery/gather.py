"""Several places that hold the files of one checkpoint, or of one root."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.errors import NotFoundError, UsageError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.several_places import GatheredStore
from ftckpt.storage.store import EntryKind, Store

from .step_names import worded_step


def gather(url: str, store: Store, also: Sequence[str], options: StoreOptions) -> Store:
    """Return a store whose files lie in further directories as well, under the same names.

    Args:
        url: the first place as typed: a checkpoint or a root; a file is refused.
        store: opened there.
        also: paths or URLs of the same directory on other disks.
        options: how to reach object stores.

    Raises:
        NotFoundError: one of them does not exist.
        UsageError: a file; a place given twice or inside another; directories whose names say
            different steps; a checkpoint together with a root that holds it.
    """
    places = [(url, store), *((other, open_store(other, options)) for other in also)]
    for other, opened in places:
        if opened.stat("").kind is not EntryKind.DIRECTORY:
            raise UsageError(f"{other} is one file", hint="--also gathers directories")
    _require_one_step([other for other, _ in places])
    for one, _ in places:
        for other, opened in places:
            _require_no_root(one, other, opened)
    return GatheredStore([opened for _, opened in places])


def _require_one_step(urls: Sequence[str]) -> None:
    named: dict[int, str] = {}
    for url in urls:
        step = worded_step(_name(url))
        if step is not None:
            named[step] = url
    if len(named) > 1:
        told = ", ".join(f"{url} is step {step}" for step, url in sorted(named.items()))
        raise UsageError(f"files of several steps are never mixed: {told}")


def _require_no_root(url: str, other: str, store: Store) -> None:
    """Refuse `run/step-10 --also other/run`: step-10 would lie beside the root's steps."""
    name = _name(url)
    if not name or name == _name(other) or worded_step(name) is None:
        return
    try:
        inside = store.stat(name)
    except NotFoundError:
        return
    if inside.kind is EntryKind.DIRECTORY:
        raise UsageError(
            f"{url} is one checkpoint, and {other} holds several",
            hint=f"name {store.describe(name)}",
        )


def _name(url: str) -> str:
    return split(url.rstrip("/"))[1]
