"""Record a delta's base: by a relative path if both lie under one root.

A root is moved or mirrored as a whole, so what lies in it is named from the delta; what lies
elsewhere stays where it is, and is named by its whole path or URL.
"""

from __future__ import annotations

import posixpath
import re

# A delta and its base are under one root where it is the delta's parent, or the one around that.
_CLIMBS = 2
# Of a URL, or of a place on a named remote; a path that is recorded relative begins with "..".
_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*|[A-Za-z0-9][A-Za-z0-9_.-]*:(?!//)")


def recorded_path(base: str, delta: str) -> str:
    """Return how a delta names the place of its base.

    Args:
        base: absolute path or URL of the base.
        delta: absolute path or URL of the delta's directory.
    """
    (near, path), (far, target) = _split(delta), _split(base)
    if near != far:
        return base
    relative = posixpath.relpath(target, path)
    climbs = relative.split("/").count("..")
    shared = path.rstrip("/").count("/") - climbs
    if not 0 < climbs <= _CLIMBS or (not near and shared <= 0):
        return base
    return relative


def resolved(path: str, delta: str) -> str:
    """Return the absolute path or URL that a delta means by the place of its base.

    Args:
        path: as recorded.
        delta: absolute path or URL of the delta's directory, where it lies now.
    """
    authority, own = _split(delta)
    if path.startswith("/") or _AUTHORITY.match(path):
        return path
    return authority + posixpath.normpath(posixpath.join(own, path))


def _split(place: str) -> tuple[str, str]:
    """Return scheme and authority, which are "" for a path of this machine, and the path."""
    match = _AUTHORITY.match(place)
    authority = match[0] if match is not None else ""
    return authority, posixpath.normpath("/" + place[len(authority) :].lstrip("/"))
