"""JSON that means one thing, and the values in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftckpt.strict_json import (
    DuplicateKeyError,
    JsonError,
    count,
    counts,
    decode,
    hexadecimal,
    items,
    members,
    optional_count,
    text,
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"b":2,"a":3}', "holds the key 'a' twice"),
        (b'[{"":1,"":1}]', "holds the key '' twice"),
        (b"[NaN]", "holds NaN, which is not JSON"),
        (b"-Infinity", "holds -Infinity, which is not JSON"),
        (b"[1e400]", "holds the number '1e400'"),
        (b"9" * 5000, "holds a number that cannot be"),
        (b'"\xff"', "is not UTF-8 text"),
        (b"[1,", "is not JSON from character 3 on"),
        (b"", "is not JSON"),
        (b"[" * 1_000_000, "is nested too deep"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_has_no_one_meaning_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        decode(data)
    assert str(caught.value).startswith(reason)
    assert isinstance(caught.value, DuplicateKeyError) == ("twice" in reason)


def test_values_come_as_they_are() -> None:
    said = decode('{"a": [1, -2.5, null, true, "ä"], "b": {"a": 1}}'.encode())
    assert said == {"a": [1, -2.5, None, True, "ä"], "b": {"a": 1}}
    assert decode("[1, 2]", naturals=True) == [1, 2]
    with pytest.raises(JsonError, match=r"holds the number '2\.0'"):
        decode("[2.0]", naturals=True)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (count, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None]),
        (optional_count, [None, 7], [-1, False, ""]),
        (counts, [[], [0, 3]], [[1, -1], [True], {}, "12"]),
        (items, [[], [None]], [{}, "", None]),
        (text, ["", "a"], [None, 1, ["a"]]),
        (hexadecimal, ["", "00ff"], ["0", "FF", "0 0", "zz", None]),
    ],
)
def test_a_value_is_what_it_must_be(
    check: Callable[[object, str], object], good: list[object], bad: list[object]
) -> None:
    for value in good:
        found = check(value, "it")
        assert (found.hex() if isinstance(found, bytes) else found) == value
    for value in bad:
        with pytest.raises(JsonError, match=r"it is not|of it is not"):
            check(value, "it")


def test_an_object_has_exactly_its_members() -> None:
    assert members({"a": 1, "b": 2}, ("b", "a"), "it") == {"a": 1, "b": 2}
    others: list[object] = [{"a": 1}, {"a": 1, "b": 2, "c": 3}, [], None]
    for value in others:
        with pytest.raises(JsonError, match=r"from it, or unknown|it is not an object"):
            members(value, ("a", "b"), "it")


def test_infinities_are_numbers_where_python_writes_them() -> None:
    assert decode(b"[Infinity, -Infinity]", infinities=True) == [float("inf"), -float("inf")]
    for number in (b"[NaN]", b"[1e999]"):
        with pytest.raises(JsonError):
            decode(number, infinities=True)
