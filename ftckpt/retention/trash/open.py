"""The trash of a root, whatever store the root lies in."""

from __future__ import annotations

from ftckpt.discovery.roots import Root
from ftckpt.retention.trash import Trash


def open_trash(root: Root) -> Trash:
    """Return the trash of a root; whether its store can keep one shows when it is locked."""
    if root.store.traits.local:
        from .local import LocalTrash

        return LocalTrash(root)
    from .remote import RemoteTrash

    return RemoteTrash(root)
