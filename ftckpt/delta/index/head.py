"""Read a delta's base from the first bytes of its index, because a root may hold many.

Record a delta's base: by a relative path if both lie under one root.

A root is moved or mirrored as a whole, so what lies in it is named from the delta; what lies
elsewhere stays where it is, and is named by its whole path or URL.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

from ftckpt.delta.index import HEAD, MAGIC, MAX_BYTES, NAME, VERSION, BaseName
from ftckpt.storage.store import Store

from .parse import IndexParser

_FIRST = 4 << 10  # bytes; the base stands before what is long
_MEMBER = "base"


def read_base(store: Store, path: str) -> BaseName | None:
    """Return the base that an index names; None for a full delta.

    Reads as far as the name of the base. The digest at the index's end is not checked.

    Args:
        store: where it lies.
        path: of the delta's directory.

    Raises:
        NotFoundError: the index does not exist.
        CorruptError: it is damaged (`bad-delta`).
        UnsupportedError: it is of a version that this one does not know.
    """
    parser = IndexParser(NAME)
    place = f"{path}/{NAME}" if path else NAME
    entry = store.stat(place)
    with store.open(place) as reader:
        head = reader.read(0, min(HEAD.size, entry.size))
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            parser.bad("it does not begin as one")
        _, version, zero, size, _ = HEAD.unpack(head)
        if version != VERSION or zero:
            parser.unknown(f"version {version} of the format")
        if size > min(entry.size - HEAD.size, MAX_BYTES):
            parser.bad("its header ends behind it")
        length = _FIRST
        while True:
            length = min(length, size)
            text = reader.read(HEAD.size, length).decode("latin-1")
            try:
                found = _member(text)
            except (ValueError, IndexError, RecursionError) as error:
                if length == size:
                    parser.bad(str(error))
                length *= 4  # it was cut in the middle of what is looked for
                continue
            return None if found is None else parser.base(found)


def _member(text: str) -> Any:
    """Return the value of the object's member `base`, having read no further.

    Raises:
        ValueError, IndexError: the text ends before it, or is not JSON.
    """
    decoder = json.JSONDecoder()
    if text[0] != "{":
        raise ValueError("no object")
    at = 1
    while True:
        key, at = decoder.raw_decode(text, at)
        if text[at] != ":":
            raise ValueError("no value")
        value, at = decoder.raw_decode(text, at + 1)
        if text[at] not in ",}":
            raise ValueError("no end of a value")
        if key == _MEMBER:
            return value
        if text[at] == "}":
            raise ValueError(f"no member {_MEMBER}")
        at += 1


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
