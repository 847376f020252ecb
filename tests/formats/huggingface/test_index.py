"""The index of a sharded folder against what the shards hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UnsafeError
from ftckpt.formats.huggingface.index import (
    MAX_INDEX,
    ShardFile,
    ShardIndex,
    check_index,
    check_index_size,
    check_shard_count,
    parse_index,
    shard_name,
)

ZERO, ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in range(4))
HELD = {ONE: {"a", "b"}, TWO: {"c"}, THREE: {"d"}}
MAP = {"a": ONE, "b": ONE, "c": TWO, "d": THREE}


def kinds(
    weight_map: dict[str, str], held: dict[str, set[str]], present: set[str] | None = None
) -> list[tuple[str, str | None, str | None]]:
    index = ShardIndex("i.json", weight_map, None)
    there = set(held) if present is None else present
    return [(f.kind, f.file, f.tensor) for f in check_index(index, held, there, 0)]


def test_an_index_that_agrees_has_no_findings() -> None:
    assert kinds(MAP, HELD) == []


def test_each_disagreement_has_its_own_kind() -> None:
    assert kinds(MAP, {ONE: HELD[ONE], TWO: HELD[TWO]}) == [("missing-file", THREE, None)]
    assert kinds(MAP, {**HELD, THREE: set()}) == [("missing-tensor", THREE, "d")]
    assert kinds({**MAP, "d": TWO}, {**HELD, THREE: {"d"}})[:1] == [("wrong-shard", TWO, "d")]
    assert kinds(MAP, {**HELD, TWO: {"c", "e"}}) == [("unindexed-tensor", TWO, "e")]
    assert kinds(MAP, {**HELD, TWO: {"c", "a"}}) == [("duplicate-tensor", TWO, "a")]
    assert kinds({"a": ONE, "b": ONE, "c": TWO}, {ONE: HELD[ONE], TWO: HELD[TWO]}) == [
        ("shard-count", "i.json", None)
    ]


def test_a_shard_that_could_not_be_read_gets_no_verdict_here() -> None:
    assert kinds(MAP, {ONE: HELD[ONE], TWO: HELD[TWO]}, {ONE, TWO, THREE}) == []


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([ONE, TWO, THREE])),
    st.dictionaries(st.sampled_from([ONE, TWO, THREE]), st.sets(st.sampled_from("abcdef"))),
)
def test_no_finding_means_that_map_and_shards_are_equal(
    weight_map: dict[str, str], held: dict[str, set[str]]
) -> None:
    equal = {(n, f) for f, names in held.items() for n in names} == set(weight_map.items())
    found = [k for k in kinds(weight_map, held) if k[0] != "shard-count"]
    assert (not found) is (equal and set(weight_map.values()) <= set(held))


def test_shard_names_say_number_and_total() -> None:
    assert shard_name("model.fp16-00002-of-00013.bin") == ShardFile("model.fp16", 2, 13, ".bin")
    assert shard_name("model.safetensors") is None
    assert shard_name("model-" + "9" * 5000 + "-of-2.bin") is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("m-00001-of-00003.bin", "m-00002-of-00003.bin"),
        ("m-100000-of-100001.bin", "m-000002-of-100001.bin"),
        ("m-1-of-61.bin", "m-2-of-61.bin"),
        ("m-61-of-61.bin", "m-2-of-61.bin"),
        ("m-00163-of-000163.bin", "m-00002-of-000163.bin"),
        ("m-07-of-12.bin", "m-02-of-12.bin"),
    ],
)
def test_a_sibling_is_spelled_as_the_name_that_is_known(name: str, other: str) -> None:
    found = shard_name(name)
    assert found is not None
    assert found.sibling(found.number) == name
    assert found.sibling(2) == other


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([ONE, TWO, THREE], 0),
        ([ONE, THREE], 1),
        ([ONE, TWO, THREE, "model-00004-of-00003.safetensors"], 1),
        (["model-00000-of-00001.safetensors"], 0),
        ([ZERO, ONE, TWO], 0),
        ([ZERO, ONE, TWO, THREE], 0),
        ([ZERO, TWO], 1),
        ([ZERO, ONE, THREE], 1),
        ([ZERO, ONE], 1),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors"], 0),
        ([ONE, TWO, THREE, "mtp-1-of-1.safetensors"], 0),
        ([ONE, "model-00001-of-00001.safetensors"], 1),
        (["model.safetensors"], 0),
    ],
)
def test_shard_count_is_checked_against_the_names(files: list[str], count: int) -> None:
    assert [f.kind for f in check_shard_count(files, "i")] == ["shard-count"] * count


def test_total_size_is_a_warning_and_may_be_absent() -> None:
    def kinds_of(size: bytes, nbytes: int) -> list[str]:
        index = parse_index(
            b'{"metadata":{"total_size":%s},"weight_map":{"a":"x.bin"}}' % size, "i"
        )
        return [f.kind for f in check_index(index, {"x.bin": {"a"}}, {"x.bin"}, nbytes)]

    assert kinds_of(b"8", 8) == []
    assert kinds_of(b"8.0", 8) == []
    assert kinds_of(b"9", 8) == ["total-size"]
    assert kinds_of(b'"8"', 9) == []
    assert kinds_of(b"true", 9) == []
    assert parse_index(b'{"weight_map":{}}', "i").total_size is None


def test_an_index_with_the_right_total_decides_which_numbers_there_are() -> None:
    fewer = {"a": ONE, "c": TWO}
    held = {ONE: {"a"}, TWO: {"c"}}
    for total, found in ((8, []), (9, ["total-size", "shard-count"]), (None, ["shard-count"])):
        index = ShardIndex("i", fewer, total)
        assert [f.kind for f in check_index(index, held, held, 8)] == found


def test_an_index_beyond_any_writer_is_refused_unread() -> None:
    check_index_size("i", MAX_INDEX)
    with pytest.raises(UnsafeError):
        check_index_size("i", MAX_INDEX + 1)
