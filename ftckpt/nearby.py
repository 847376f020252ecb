"""What stands near a path or name that is not there: a way out for whoever has mistyped it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

# More names than these are not read for a hint, and of those that are near so many are named.
_READ = 10_000
_NAMED = 3
# One letter tells no name: it is in most of them.
_LETTERS = 2
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?=[^/])")


def hint_for_absent(path: str) -> str:
    """Return what to do about a local path that does not exist; "" where nothing can be said.

    Args:
        path: as typed; of a URL nothing is asked, because that costs requests.
    """
    scheme = _SCHEME.match(path)
    if scheme:
        return f"a URL has two slashes: {scheme[1]}://{path[scheme.end() :]}"
    if "://" in path:
        return ""
    there, missing = _parts(path)
    try:
        with os.scandir(there or ".") as entries:
            names = [entry.name for entry in islice(entries, _READ)]
    except OSError:
        return ""
    near = [os.path.join(there, name) for name in get_close_matches(missing, names)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not there:
        return f"it was looked for in {os.getcwd()}"
    return f"{there} is there, and holds no {missing}"


def hint_for_name(asked: str, names: Iterable[str]) -> str:
    """Return which of the names that are there may be meant; "" where none is near.

    Args:
        asked: a name or pattern that nothing has.
        names: of what is there.
    """
    word = asked.strip("*.")
    several = dict.fromkeys(islice(names, _READ))
    # A part of a name, or a name behind a wrapper's prefix, is nearer than any other spelling.
    near = [name for name in several if word in name or (name and asked.endswith("." + name))]
    if len(word) < _LETTERS or not near:
        near = get_close_matches(asked, several)
    return f"did you mean {' or '.join(near[:_NAMED])}?" if near else ""


def _parts(path: str) -> tuple[str, str]:
    """Return the part of a path that exists, and the first name below it that does not."""
    there, missing = path.rstrip("/"), ""
    while there and not os.path.exists(there):
        there, missing = os.path.split(there)
    return there, missing
