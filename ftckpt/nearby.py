"""What stands near a path that is not there: a way out for whoever has mistyped it."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from itertools import islice

# More names than these are not read for a hint.
_READ = 10_000
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


def _parts(path: str) -> tuple[str, str]:
    """Return the part of a path that exists, and the first name below it that does not."""
    there, missing = path.rstrip("/"), ""
    while there and not os.path.exists(there):
        there, missing = os.path.split(there)
    return there, missing
