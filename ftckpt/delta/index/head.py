"""Read a delta's base from the first bytes of its index, because a root may hold many."""

from __future__ import annotations

import json
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
