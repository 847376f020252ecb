"""JSON from a file that nobody vouches for: one meaning, bounded depth, bounded memory.

Python's own reader keeps the last of two equal keys, takes NaN and 1e400, and recurses as deep as
the text says. Two readers would then see two contents, so all of that is refused here, before the
text is turned into objects: the strings are cut out, and what is left is only punctuation and
numbers, which can be counted at the speed of the processor.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from ftckpt.errors import CorruptError, UnsafeError

_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_TEXT, re.DOTALL)
# Taking out all strings at once would keep a small object for each: gigabytes for 100 MB of `""`.
_STRINGS = re.compile(rb'(?:[^"]*+' + _TEXT + rb"){1,10000}+", re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_LONG_NUMBER = re.compile(rb"\d{21}")  # 2**64 has 20 digits


class JsonLimits(NamedTuple):
    """How much a JSON text may hold.

    Attributes:
        depth: nested arrays and objects.
        objects: number of objects.
        keys: number of keys in all objects together.
        items: number of commas, which bounds the items of all arrays.
        naturals: whether every number must be an integer from 0 up.
    """

    depth: int
    objects: int
    keys: int
    items: int
    naturals: bool


class _Duplicate(Exception):
    """Two equal keys in one object."""


def shown(value: object) -> str:
    """Return `value` for a message: its repr, cut where somebody made it very long."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 90 else text[:87] + "..."


def parse(raw: bytes, limits: JsonLimits, *, file: str, what: str, bad: str, unsafe: str) -> Any:
    """Return the value of a JSON text.

    Args:
        raw: UTF-8 text.
        limits: what it may hold.
        file: where it comes from, for the error.
        what: what it is called in the message ("header", "index").
        bad: finding kind of damage.
        unsafe: finding kind of abuse and ambiguity.

    Raises:
        CorruptError: it is not JSON, or holds a number of a kind that is not allowed.
        UnsafeError: equal keys, too deep, too much, or an integer beyond 64 bits.
    """

    def refuse(reason: str) -> NoReturn:
        raise UnsafeError(f"the {what} of {file} {reason}", kind=unsafe, file=file)

    def damaged(reason: str) -> NoReturn:
        raise CorruptError(f"the {what} of {file} {reason}", kind=bad, file=file)

    bare = _without_strings(raw)
    _count(bare, limits, refuse)
    if limits.naturals and b"-" in bare:  # "-0" would pass as an integer
        damaged("holds a negative number")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            for key, _ in items:
                if key not in made:
                    raise _Duplicate(key)
                del made[key]
        return made

    def constant(text: str) -> NoReturn:
        raise ValueError(f"holds {text}, which is not JSON")

    def real(text: str) -> float:
        number = float(text)
        if limits.naturals or number - number != 0:
            raise ValueError(f"holds the number {shown(text)}")
        return number

    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_constant=constant,
            parse_float=real,
        )
        if b"\\u" in raw:  # half of a surrogate pair is not text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Duplicate as error:
        refuse(f"holds the key {shown(error.args[0])} twice")
    except UnicodeError:
        damaged("is not UTF-8 text")
    except json.JSONDecodeError as error:
        damaged(f"is not JSON: {error.msg} at character {error.pos}")
    except ValueError as error:
        damaged(str(error))
    return value


def _without_strings(raw: bytes) -> bytes:
    """Return the text outside strings; what follows a quote that is never closed is left out."""
    bare = bytearray()
    at = 0
    while (match := _STRINGS.match(raw, at)) is not None:
        bare += _STRING.sub(b"", match[0])
        at = match.end()
    return bytes(bare + raw[at:].partition(b'"')[0])


def _count(bare: bytes, limits: JsonLimits, refuse: Any) -> None:
    """Refuse what would cost too much to build, from the text without its strings."""
    if bare.count(b"{") > limits.objects:
        refuse(f"holds more than {limits.objects} objects")
    if bare.count(b":") > limits.keys:
        refuse(f"holds more than {limits.keys} keys")
    if bare.count(b",") > limits.items:
        refuse(f"holds more than {limits.items} items")
    if _LONG_NUMBER.search(bare):
        refuse("holds an integer beyond 64 bits")
    # One kind of bracket, so that each round takes off exactly one level; whether they match is for
    # the JSON reader. Brackets that never close stay; a text that was cut off has only a few.
    brackets = bare.translate(_SQUARE, _NO_BRACKETS)
    for _ in range(limits.depth):
        brackets = brackets.replace(b"[]", b"")
    if b"[]" in brackets or brackets.count(b"[") > limits.depth:
        refuse(f"is nested deeper than {limits.depth}")
