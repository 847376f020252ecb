"""Files that an option names: written at the end, so looked at before anything is computed."""

from __future__ import annotations

import os

from ftckpt.discovery.suggestions import existing, hint_for_place
from ftckpt.errors import UsageError


def require_folder(option: str, path: str) -> None:
    """Refuse a file in a directory that is not there: a typing error would make a tree.

    Args:
        option: that names it, with its dashes.
        path: as typed.

    Raises:
        UsageError: there is no such directory, or it is a URL.
    """
    if "://" in path:
        raise UsageError(f"{option} {path}: it is written on this machine", hint="name a path")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        blocked = not os.path.isdir(there := existing(folder))
        raise UsageError(
            f"{there if blocked else folder} is no directory, and {option} {path} goes there",
            hint=hint_for_place(path),
        )
