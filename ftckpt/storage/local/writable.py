"""Whether a file that an option names can be written."""

from __future__ import annotations

import os

from ftckpt.errors import UsageError


def check_file(option: str, path: str) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Missing directories above it are made when it is written, as `copy` and `convert` make
    those above a destination.

    Args:
        option: that names it, with its dashes.
        path: as typed.

    Raises:
        UsageError: it is a URL, or looks like one, or leads through a file.
    """
    if "://" in path:
        raise UsageError(f"{option} {path}: it is written on this machine", hint="name a path")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        from ftckpt.storage.suggestions import existing, hint_for_slip

        there = existing(folder)
        slip = hint_for_slip(path)
        if slip or not os.path.isdir(there):
            wrong = folder if slip else there
            raise UsageError(
                f"{wrong} is not a directory, and {option} {path} goes there", hint=slip
            )
