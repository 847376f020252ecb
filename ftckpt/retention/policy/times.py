"""Infer when a checkpoint was saved from the modification times of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.discovery.recognise import Listing
from ftckpt.own_files import is_own
from ftckpt.storage.store import Entry

# Number of files of one directory that are read: a save ends within minutes of any of them, and ten
# thousand checkpoints of two thousand files would be twenty million calls.
_FILES = 16
_DIRECTORIES = 2
_DEPTH = 4


def time_of_files(files: Sequence[Entry], base: str) -> float | None:
    """Return the median modification time of the `files` below the path `base`.

    Files that are added later, such as a seal or evaluation results, do not make a save younger.
    """
    skip = len(base) + 1
    return _median([f.mtime for f in files if f.mtime is not None and not is_own(f.path[skip:])])


def time_of_listing(listing: Listing) -> float | None:
    """Return the same from a sample of files, evenly spread over the names.

    Of directories the first and the last of each level are read.
    """
    return _median(list(_times(listing, _DEPTH)))


def _median(times: Sequence[float]) -> float | None:
    """Return the median, the lower of two: one late file beside one data file does not count."""
    return sorted(times)[(len(times) - 1) // 2] if times else None


def _times(listing: Listing, depth: int) -> Iterator[float]:
    listing = listing.at_hand
    for name in _spread(list(listing.files), _FILES):
        mtime = None if is_own(name) else listing.files[name].mtime
        if mtime is not None:
            yield mtime
    if depth:
        for name in _spread(sorted(listing.directories), _DIRECTORIES):
            if not is_own(name):
                yield from _times(listing.inside(name), depth - 1)


def _spread(names: Sequence[str], most: int) -> Sequence[str]:
    if len(names) <= most:
        return names
    return [names[i * (len(names) - 1) // (most - 1)] for i in range(most)]
