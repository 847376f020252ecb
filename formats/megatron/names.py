"""The names of the directories of a legacy Megatron checkpoint (see `rank_files.grid`)."""

from __future__ import annotations

import re

# More digits than any cluster has ranks would only be somebody's joke on int().
_DIRECTORY = re.compile(r"mp_rank_(\d{1,7})(?:_(\d{1,7}))?(?:_(\d{1,7}))?")


def directory_ranks(name: str) -> tuple[int, ...] | None:
    """Return the one to three numbers in a directory's name, or None where it is not a rank's."""
    match = _DIRECTORY.fullmatch(name)
    return tuple(int(n) for n in match.groups() if n is not None) if match else None
