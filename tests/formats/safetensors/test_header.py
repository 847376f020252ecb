"""The header parser against the reference reader: never laxer, and never another content."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import prod
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.dtypes import BY_SAFETENSORS
from ftckpt.errors import CorruptError, FtckptError, TruncatedError, UnsafeError
from ftckpt.formats.safetensors import header
from ftckpt.formats.safetensors.header import Header, header_length, parse_header
from ftckpt.strict_json import JsonLimits, parse
from tests.campaign import examples

CODES = sorted(BY_SAFETENSORS)
# Prints the most bytes that Python holds at once while the header on standard input is refused.
PEAK = """
import sys, tracemalloc
from ftckpt.errors import FtckptError
from ftckpt.formats.safetensors import header
from ftckpt.formats.safetensors.header import parse_header
raw = sys.stdin.buffer.read()
if sys.argv[1:]:  # four million keys take six seconds
    header._LIMITS = header._LIMITS._replace(keys=int(sys.argv[1]))
tracemalloc.start()
try:
    parse_header(raw, len(raw), "f")
except FtckptError as error:
    print(tracemalloc.get_traced_memory()[1], type(error).__name__, error)
"""
Entries = dict[str, Any]


def parsed(raw: bytes) -> Header:
    end = header_length(raw[:8], len(raw), "f")
    return parse_header(raw[:end], len(raw), "f")


def built(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def agree(raw: bytes) -> bool:
    """Assert that we accept no more than the reference, with equal content; say whether we do."""
    import safetensors

    try:
        judged = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        judged = None
    try:
        header = parsed(raw)
    except FtckptError:
        return False
    assert judged is not None, "accepted what the reference rejects"
    assert {t.name for t in header.tensors} == set(judged)
    for name, dtype, shape, begin, end in header.tensors:
        expected = judged[name]
        assert dtype.safetensors == expected["dtype"]
        assert list(shape) == expected["shape"]
        assert raw[begin:end] == bytes(expected["data"])
    return True


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entries, bytes]:
    """Valid tensors in any order, and their bytes."""
    found: Entries = {}
    cursor = 0
    for name in draw(st.lists(st.text(max_size=6), max_size=5, unique=True)):
        code = draw(st.sampled_from(CODES))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        bits = prod(shape) * BY_SAFETENSORS[code].bits
        if bits % 8 or name == "__metadata__":
            continue
        found[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [cursor, cursor + bits // 8],
        }
        cursor += bits // 8
    names = draw(st.permutations(list(found)))
    header: Entries = {name: found[name] for name in names}
    metadata = draw(
        st.none()
        | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)
        | st.just("absent")
    )
    if metadata != "absent":
        header["__metadata__"] = metadata
    return header, draw(st.binary(min_size=cursor, max_size=cursor))


@given(entries())
@settings(max_examples=examples(50, 600), deadline=None)
def test_what_is_valid_is_read_as_the_reference_reads_it(made: tuple[Entries, bytes]) -> None:
    header, data = made
    raw = built(header, data)
    assert agree(raw)
    assert parsed(raw).metadata == (header.get("__metadata__") or {})
    assert agree(built(json.dumps(header, ensure_ascii=False).encode() + b"  \n", data))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(CODES),
    st.lists(st.integers(-1, 2**64), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
    st.recursive(st.just([]), lambda deeper: st.lists(deeper, max_size=2), max_leaves=6),
)


@given(entries(), st.data())
@settings(max_examples=examples(100, 1600), deadline=None)
def test_odd_values_are_never_accepted_beyond_the_reference(
    made: tuple[Entries, bytes], data: st.DataObject
) -> None:
    header, content = made
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*header, "", "new", "__metadata__"]))
        inside = header.get(name)
        if isinstance(inside, dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
            listed = inside.get(key)
            if isinstance(listed, list) and listed and data.draw(st.booleans()):
                at = data.draw(st.integers(0, len(listed) - 1))
                listed[at] = data.draw(ODD)
            else:
                inside[key] = data.draw(ODD)
        else:
            header[name] = data.draw(ODD)
    agree(built(header, content))


@given(
    entries(),
    st.integers(0, 400),
    st.sampled_from(["flip", "drop", "insert", "double", "cut"]),
    st.sampled_from(b'{}[]",:\\-.0123456789eEuaANtf\x00\xff \n' + b"x"),
    st.booleans(),
)
@example(({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"12"), 1, "cut", 0, False)
@settings(max_examples=examples(150, 2400), deadline=None)
def test_broken_bytes_are_never_accepted_beyond_the_reference(
    made: tuple[Entries, bytes], where: int, how: str, byte: int, keep_length: bool
) -> None:
    header, data = made
    text = bytearray(json.dumps(header).encode())
    length = len(text)
    where %= length
    if how == "flip":
        text[where] = byte
    elif how == "drop":
        del text[where]
    elif how == "insert":
        text.insert(where, byte)
    elif how == "double":
        text[where:where] = text[where // 2 : where]
    else:
        del text[where:]
    declared = length if keep_length else len(text)
    agree(declared.to_bytes(8, "little") + bytes(text) + data)


@given(st.binary(max_size=64))
@settings(max_examples=examples(50, 800), deadline=None)
def test_any_bytes_are_an_answer_and_never_a_crash(raw: bytes) -> None:
    agree(raw)
    agree(built(raw, b""))


def test_every_dtype_that_the_reference_writes_is_known() -> None:
    for code, dtype in BY_SAFETENSORS.items():
        raw = built(
            {"a": {"dtype": code, "shape": [8], "data_offsets": [0, dtype.bits]}},
            b"\0" * dtype.bits,
        )
        assert agree(raw), code


def test_extra_fields_and_null_metadata_are_read_over() -> None:
    entry = {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "note": ["x", None, True]}
    assert agree(built({"a": entry, "__metadata__": None}, b"\1"))


def test_places_of_damage_are_named() -> None:
    good = built(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        },
        b"\0" * 8,
    )
    with pytest.raises(TruncatedError) as short:
        parsed(good[:-1])
    assert (short.value.tensor, short.value.offset, short.value.length) == ("b", len(good) - 1, 1)
    with pytest.raises(CorruptError) as long:
        parsed(good + b"12")
    assert (long.value.kind, long.value.offset, long.value.length) == (
        "trailing-bytes",
        len(good),
        2,
    )


@pytest.mark.parametrize(
    ("unit", "count", "reason"),
    [
        (b'"a":{},', 1_000_003, "more than 1000002 objects"),
        (b'"":1,', 200_005, "more than 200004 keys"),  # one object, and no tensor
        (b"1,", 16_000_001, "more than 16000000 items"),
        (b"[],", 600_000, "is not JSON"),
        (b'"",', 600_000, "is not JSON"),
        (b"[", 600_000, "nested deeper"),
        (b"]", 600_000, "is not JSON"),
        (b'"a', 600_000, "is not JSON"),
    ],
)
def test_abuse_is_refused_before_it_is_built(unit: bytes, count: int, reason: str) -> None:
    raw = built(b"{" + unit * count, b"")
    # In a process of its own: a thread that an earlier test left behind allocates too.
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *re.findall(r"(\d+) keys", reason)],
        input=raw, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert header._LIMITS.keys == 4_200_000
    peak, kind, said = done.stdout.decode().split(maxsplit=2)
    assert kind in ("UnsafeError", "CorruptError")
    assert reason in said
    assert int(peak) < 5 * len(raw)


LIMITS = JsonLimits(depth=3, objects=4, keys=5, items=6, naturals=False)


def read(text: str) -> Any:
    return parse(
        text.encode(), LIMITS, file="f", what="text", bad="bad-index", unsafe="unsafe-index"
    )


@pytest.mark.parametrize(
    "text", ["[[[1]]]", '{"a":[{}]}', "{}", "-1.5", '"[[[[["', '{"]":"\\"[[[["}', "[[],[],[[]]]"]
)
def test_json_within_the_limits_is_read(text: str) -> None:
    assert read(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "[[[[1]]]]",
        '{"a":[{"b":[]}]}',
        "[[[[",
        '{"a":{"b":{"c":{}}}}',
        "[{},{},{},{},{}]",
        '{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}',
        "[1,1,1,1,1,1,1,1]",
        '{"a":1,"\\u0061":1}',
        "1" * 21,
    ],
)
def test_json_beyond_the_limits_is_unsafe(text: str) -> None:
    with pytest.raises(UnsafeError):
        read(text)


@pytest.mark.parametrize("text", ["[[[", "", "nul", "[NaN]", "[-Infinity]", "[1e999]", '"\\ud800"'])
def test_json_that_is_none_is_damage(text: str) -> None:
    with pytest.raises(CorruptError):
        read(text)
