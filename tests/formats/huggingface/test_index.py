"""The index of a sharded folder against what the shards hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UnsafeError
from ftckpt.formats.huggingface.index import (
    MAX_INDEX,
    ShardIndex,
    check_index,
    check_index_size,
    check_shard_count,
    check_total_size,
    parse_index,
)
from ftckpt.formats.huggingface.names import ShardFile, shard_name

ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
HELD = {ONE: {"a", "b"}, TWO: {"c"}, THREE: {"d"}}
MAP = {"a": ONE, "b": ONE, "c": TWO, "d": THREE}


def kinds(
    weight_map: dict[str, str], held: dict[str, set[str]], present: set[str] | None = None
) -> list[tuple[str, str | None, str | None]]:
    index = ShardIndex("i.json", weight_map, None)
    there = set(held) if present is None else present
    return [(f.kind, f.file, f.tensor) for f in check_index(index, held, there)]


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
    assert shard_name("model-100000-of-100001.safetensors") == ShardFile(
        "model", 100000, 100001, ".safetensors"
    )
    assert shard_name("model-1-of-2.safetensors") is None
    assert shard_name("model.safetensors") is None
    assert ShardFile("m", 1, 3, ".bin").sibling(2) == "m-00002-of-00003.bin"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([ONE, TWO, THREE], 0),
        ([ONE, THREE], 1),
        ([ONE, TWO, THREE, "model-00004-of-00003.safetensors"], 1),
        (["model-00000-of-00001.safetensors"], 1),
        ([ONE, "model-00001-of-00001.safetensors"], 1),
        (["model.safetensors"], 0),
    ],
)
def test_shard_count_is_checked_against_the_names(files: list[str], count: int) -> None:
    assert [f.kind for f in check_shard_count(files, "i")] == ["shard-count"] * count


def test_total_size_is_a_warning_and_may_be_absent() -> None:
    text = b'{"metadata":{"total_size":%s},"weight_map":{"a":"x.bin"}}'
    assert [f.kind for f in check_total_size(parse_index(text % b"8", "i"), 8)] == []
    assert [f.kind for f in check_total_size(parse_index(text % b"8.0", "i"), 8)] == []
    assert [f.kind for f in check_total_size(parse_index(text % b"9", "i"), 8)] == ["total-size"]
    assert parse_index(text % b'"8"', "i").total_size is None
    assert parse_index(text % b"true", "i").total_size is None
    assert parse_index(b'{"weight_map":{}}', "i").total_size is None


def test_an_index_beyond_any_writer_is_refused_unread() -> None:
    check_index_size("i", MAX_INDEX)
    with pytest.raises(UnsafeError):
        check_index_size("i", MAX_INDEX + 1)
