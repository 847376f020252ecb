"""Suggest similar paths and names for a typo."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice
from shlex import quote

from .remotes import named

# A hint reads at most the first number of names, and shows at most the second.
_READ = 10_000
_NAMED = 3
# Of more names than this only the likeliest are compared letter by letter, a tenth of a millisecond
# for each.
_COMPARED = 256
# Names with a lower ratio are not similar (`difflib`'s own number).
_NEAR = 0.6
_WORD = r"[^._/-]+"
# One letter identifies no name: most names contain it.
_LETTERS = 2
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*):/(?=[^/])"


def hint_for_absent(path: str) -> str:
    """Return a hint for a local path that does not exist; "" without one.

    URLs get none, because looking would cost requests.
    """
    found = named(path)
    if found is not None:
        path = found[0].place(found[1])
    slip = _one_slash(path)
    if slip or "://" in path:
        return slip
    there, missing = _parts(path)
    try:
        with os.scandir(there or ".") as entries:
            names = [entry.name for entry in islice(entries, _READ)]
    except OSError:
        return ""
    numbers = nearest_numbers(missing, names)
    if numbers:
        return f"the nearest by number: {' and '.join(os.path.join(there, n) for n in numbers)}"
    near = [os.path.join(there, name) for name in _closest(missing, names)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not there:
        return f"it was looked for in {os.getcwd()}"
    return f"{there} is there, and holds no {missing}"


def hint_for_place(path: str) -> str:
    """Return a hint for a new local path in a directory that does not exist."""
    folder = os.path.dirname(path)
    there = existing(folder)
    if not os.path.isdir(there):
        return ""
    return _one_slash(os.path.relpath(path, there)) or f"mkdir -p {quote(folder)}"


def hint_for_slip(path: str) -> str:
    """Return the URL that a new local path may stand for; "" if it does not look like one."""
    return _one_slash(os.path.relpath(path, existing(os.path.dirname(path))))


def existing(path: str) -> str:
    """Return the longest existing part of a local path, even a dangling link."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path or "."


def nearest_numbers(asked: str, names: Iterable[str]) -> list[str]:
    """Return the names that differ in their last number alone: the next lower, the next higher.

    The same number in another spelling (`step1500`, `step-0001500`) is the only one that is meant.
    """
    begin, number, end = _around_number(asked)
    if number is None:
        return []
    alike = [
        (its, name)
        for name in names
        for before, its, after in (_around_number(name),)
        if its is not None and (before, after) == (begin, end)
    ]
    same = [name for its, name in alike if its == number]
    if same:
        return same[:1]
    lower = max((one for one in alike if one[0] < number), default=None)
    higher = min((one for one in alike if one[0] > number), default=None)
    return [one[1] for one in (lower, higher) if one is not None]


def _around_number(name: str) -> tuple[str, int | None, str]:
    """Return what stands before a name's last number, without separators, it, and what follows."""
    found = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", name, re.DOTALL | re.ASCII)
    if found is None:
        return name, None, ""
    return re.sub(r"[-_.]", "", found[1]).lower(), int(found[2]), found[3].lower()


def hint_for_name(asked: str, names: Iterable[str]) -> str:
    """Return a hint with existing names similar to a missing name or pattern; "" if none is."""
    word = asked.strip("*.")
    several = dict.fromkeys(islice(names, _READ))
    # A part of a name, or a name behind a wrapper's prefix, is nearer than any other spelling.
    near = [name for name in several if word in name or (name and asked.endswith("." + name))]
    if len(word) < _LETTERS or not near:
        near = _closest(asked, list(several))
    return f"did you mean {' or '.join(near[:_NAMED])}?" if near else ""


def _one_slash(path: str) -> str:
    """Return the URL that a path may stand for; "" if it does not look like one."""
    scheme = re.match(_SCHEME, path)
    if scheme is None:
        return ""
    # A file URL's path begins with a third slash.
    end = scheme.end() - (scheme[1].lower() == "file")
    return f"a URL has two slashes: {scheme[1]}://{path[end:]}"


def _closest(asked: str, names: Sequence[str]) -> list[str]:
    """Return the names with the most similar spelling, at most `_NAMED`, the nearest first."""
    if len(names) > _COMPARED:
        size, words, backwards = len(asked), set(re.findall(_WORD, asked)), asked[::-1]

        def likeness(name: str) -> tuple[int, int]:
            """Return the number of shared words, and of shared letters at both ends."""
            ends = _alike(asked, name) + _alike(backwards, name[::-1])
            return len(words.intersection(re.findall(_WORD, name))), ends

        possible = (n for n in names if _NEAR * (len(n) + size) <= 2 * min(len(n), size))
        names = nlargest(_COMPARED, possible, key=likeness)
    return get_close_matches(asked, names, _NAMED, _NEAR)


def _alike(one: str, other: str) -> int:
    """Return the length of the common prefix of two names."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _parts(path: str) -> tuple[str, str]:
    """Return the existing part of a path, and the first missing name below it."""
    there, missing = path.rstrip("/"), ""
    while there and not os.path.exists(there):
        there, missing = os.path.split(there)
    return there, missing
