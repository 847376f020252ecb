"""Swap two local names in one act: at every instant each stands for something whole."""

from __future__ import annotations

import os

from ftckpt.errors import UnsupportedError

from . import renaming

_HERE = -100  # AT_FDCWD: paths are used as they are


def exchange(one: str, other: str) -> None:
    """Swap two existing names.

    Raises:
        UnsupportedError: the system or the filesystem cannot do it in one act.
        OSError: the system refused.
    """
    code = renaming.renameat2(_HERE, one, _HERE, other, renaming.EXCHANGE)
    if code in renaming.CANNOT:
        raise UnsupportedError(f"the filesystem of {one} cannot swap two names in one act")
    if code:
        raise OSError(code, os.strerror(code), one)
