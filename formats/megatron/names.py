"""The names of directories and files of a legacy Megatron checkpoint (see `rank_files.grid`)."""

from __future__ import annotations

import re

# More digits than any cluster has ranks would only be somebody's joke on int().
_DIRECTORY = re.compile(r"mp_rank_(\d{1,7})(?:_(\d{1,7}))?(?:_(\d{1,7}))?")
# How browsers and file managers call a copy that they put beside a file: `NAME (1).pt`.
_COPY = re.compile(r".+?(?: ?\(\d+\)| ?- Copy(?: \(\d+\))?| copy(?: \d+)?)\.pt")


def directory_ranks(name: str) -> tuple[int, ...] | None:
    """Return the one to three numbers in a directory's name, or None where it is not a rank's."""
    match = _DIRECTORY.fullmatch(name)
    return tuple(int(n) for n in match.groups() if n is not None) if match else None


def is_copy(path: str) -> bool:
    """Say whether a person's program gave a file its name, beside the one that it copied."""
    return _COPY.fullmatch(path.rpartition("/")[2]) is not None
