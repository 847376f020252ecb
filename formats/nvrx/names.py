"""Parse the names of local checkpoints' files."""

from __future__ import annotations

import re
from typing import NamedTuple

# `\d{7}` is what the manager writes; it cannot write an iteration of more digits.
_FILE = re.compile(r"(?:(\d{1,7})/)?iter_(\d{7})_(\d{1,7})_local(\.dirty)?\.pt")


class LocalFile(NamedTuple):
    """One file.

    Attributes:
        path: relative to the session, or to the folder of one rank.
        iteration: of the save.
        rank: whose state it is.
        holder: the rank that saved it; None in the folder of one rank.
        dirty: whether it is still being written.
    """

    path: str
    iteration: int
    rank: int
    holder: int | None
    dirty: bool

    @property
    def name(self) -> str:
        """The path below the session of a finished file with these numbers."""
        return f"{self.holder}/iter_{self.iteration:07d}_{self.rank}_local.pt"


def local_file(path: str) -> LocalFile | None:
    """Return what a path says, or None if it is not a local checkpoint's."""
    match = _FILE.fullmatch(path)
    if match is None:
        return None
    holder = None if match[1] is None else int(match[1])
    return LocalFile(path, int(match[2]), int(match[3]), holder, match[4] is not None)
