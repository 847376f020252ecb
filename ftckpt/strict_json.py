"""JSON from a file that nobody vouches for: one meaning, bounded depth, bounded memory.

Python's own reader keeps the last of two equal keys, takes NaN and 1e400, and recurses as deep as
the text says. Two readers would then see two contents, so `decode` refuses all of that. `parse`
also bounds what the text may hold, before it is turned into objects: it cuts the strings out, and
what is left is only punctuation and numbers, which can be counted at the speed of the processor.

`members`, `items`, `text`, `count` and `digest` check the values of a document one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

from ftckpt.errors import CorruptError, UnsafeError

_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_TEXT, re.DOTALL)
# Taking out all strings at once would keep a small object for each: gigabytes for 100 MB of `""`.
_STRINGS = re.compile(rb'(?:[^"]*+' + _TEXT + rb"){1,10000}+", re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_LONG_NUMBER = re.compile(rb"\d{21}")  # 2**64 has 20 digits
_MAX = 1 << 63


_LITERALS = ("true", "false", "null", "NaN", "-Infinity", "Infinity")


def is_cut(raw: bytes) -> bool:
    """Say whether a text is the beginning of one JSON object or array, and its end is not there.

    So is one that is all zeros: a crash leaves the size of a file. Any other text that is not JSON
    (comments, an object on each line) may be meant so.
    """
    if raw and not raw.strip(b"\0"):
        return True
    try:
        text = raw.rstrip(b"\0 \t\r\n").decode()
    except UnicodeDecodeError as error:
        text = raw[: error.start].decode()
        if error.end < len(raw):
            return False
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text, parse_int=str)
    except RecursionError:
        return False
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        return (
            error.msg.startswith("Unterminated string")
            or any(one.startswith(rest) for one in _LITERALS)
            or ("escape" in error.msg and len(rest) < len(r"\u0000"))
        )
    return raw.endswith(b"\0")


class JsonLimits(NamedTuple):
    """How much a JSON text may hold.

    Attributes:
        depth: nested arrays and objects.
        objects: number of objects.
        keys: number of keys in all objects together.
        items: number of commas, which bounds the items of all arrays.
        naturals: whether every number must be an integer from 0 up.
        infinities: whether Infinity and -Infinity are numbers, as Python writes them.
        more: keys beyond four for each object, which have texts of their own; None for `keys`.
    """

    depth: int
    objects: int
    keys: int
    items: int
    naturals: bool
    infinities: bool = False
    more: int | None = None


class JsonError(ValueError):
    """The text is not JSON of one meaning, or a value in it is not what it must be.

    The message is the end of a sentence: "holds NaN, which is not JSON", "step is not a count".
    """


class MembersError(JsonError):
    """An object has other members than it must have: perhaps those of a later version."""


class DuplicateKeyError(JsonError):
    """Two equal keys in one object."""


def shown(value: object) -> str:
    """Return `value` for a message: its repr, cut where somebody made it very long."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 90 else text[:87] + "..."


def decode(text: bytes | str, *, naturals: bool = False, infinities: bool = False) -> Any:
    """Return the value of a JSON text that has one meaning.

    Args:
        text: UTF-8 bytes, or text.
        naturals: whether every number must be an integer.
        infinities: whether Infinity and -Infinity are numbers, as Python writes them.

    Raises:
        DuplicateKeyError: an object holds a key twice.
        JsonError: it is not JSON, NaN and numbers beyond a float included.
    """

    def real(digits: str) -> float:
        number = float(digits)
        if naturals or number - number != 0:
            raise JsonError(f"holds the number {shown(digits)}")
        return number

    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_infinity if infinities else _constant,
            parse_float=real,
        )
    except JsonError:
        raise
    except UnicodeError:
        raise JsonError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"is not JSON from character {error.pos} on") from None
    except RecursionError:
        raise JsonError("is nested too deep") from None
    except ValueError as error:  # an integer of thousands of digits
        raise JsonError(f"holds a number that cannot be: {error}") from None


def parse(raw: bytes, limits: JsonLimits, *, file: str, what: str, bad: str, unsafe: str) -> Any:
    """Return the value of a JSON text that holds no more than the limits allow.

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

    def refuse(reason: object) -> NoReturn:
        raise UnsafeError(f"the {what} of {file} {reason}", kind=unsafe, file=file)

    def damaged(reason: object) -> NoReturn:
        raise CorruptError(f"the {what} of {file} {reason}", kind=bad, file=file)

    bare = _without_strings(raw)
    _count(bare, limits, refuse)
    if limits.naturals and b"-" in bare:  # "-0" would pass as an integer
        damaged("holds a negative number")
    try:
        value = decode(raw, naturals=limits.naturals, infinities=limits.infinities)
        if b"\\u" in raw:  # half of a surrogate pair is not text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DuplicateKeyError as error:
        refuse(error)
    except JsonError as error:
        damaged(error)
    except UnicodeError:
        damaged("is not UTF-8 text")
    return value


def members(value: object, names: Collection[str], what: str) -> dict[str, Any]:
    """Return an object that has exactly the members of these names.

    Raises:
        MembersError: it has others.
        JsonError: it is something else.
    """
    if not isinstance(value, dict):
        raise JsonError(f"{what} is not an object")
    if value.keys() != set(names):
        odd = sorted(value.keys() ^ set(names))
        raise MembersError(f"members are missing from {what}, or unknown: {', '.join(odd)[:200]}")
    return value


def items(value: object, what: str) -> list[Any]:
    """Return a list.

    Raises:
        JsonError: it is something else.
    """
    if not isinstance(value, list):
        raise JsonError(f"{what} is not a list")
    return value


def text(value: object, what: str) -> str:
    """Return a string.

    Raises:
        JsonError: it is something else.
    """
    if not isinstance(value, str):
        raise JsonError(f"{what} is not a string")
    return value


def count(value: object, what: str) -> int:
    """Return an integer from 0 up to 2**63 - 1.

    Raises:
        JsonError: it is something else.
    """
    if type(value) is not int or not 0 <= value < _MAX:
        raise JsonError(f"{what} is not a count")
    return value


def optional_count(value: object, what: str) -> int | None:
    """Return a count or None; see `count`."""
    return None if value is None else count(value, what)


def counts(value: object, what: str) -> list[int]:
    """Return a list of counts; see `count`."""
    return [count(item, f"a number of {what}") for item in items(value, what)]


def hexadecimal(value: object, what: str) -> bytes:
    """Return the bytes that lower-case hexadecimal digits say.

    Raises:
        JsonError: it is something else.
    """
    digits = text(value, what)
    try:
        found = bytes.fromhex(digits)
    except ValueError:
        found = b""
    if found.hex() != digits:
        raise JsonError(f"{what} is not in lower-case hexadecimal digits")
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        for key, _ in pairs:
            if key not in made:
                raise DuplicateKeyError(f"holds the key {shown(key)} twice")
            del made[key]
    return made


def _constant(name: str) -> NoReturn:
    raise JsonError(f"holds {name}, which is not JSON")


def _infinity(name: str) -> float:
    return _constant(name) if name == "NaN" else float(name)


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
    objects, keys = bare.count(b"{"), limits.keys
    if objects > limits.objects:
        refuse(f"holds more than {limits.objects} objects")
    if limits.more is not None:
        keys = min(keys, 4 * objects + limits.more)
    if bare.count(b":") > keys:
        refuse(f"holds more than {keys} keys")
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
