"""Open the trash of a root in any store."""

from __future__ import annotations

from ftckpt.discovery.roots import Root
from ftckpt.retention.trash import Trash


def open_trash(root: Root) -> Trash:
    """Return the trash of a root; `lock` shows whether its store can keep one."""
    if root.store.traits.local:
        from .local import LocalTrash

        return LocalTrash(root)
    from .remote import RemoteTrash

    return RemoteTrash(root)
