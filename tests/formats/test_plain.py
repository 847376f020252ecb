"""Inert data for people: what a checkpoint's objects look like as JSON."""

from __future__ import annotations

import argparse
import collections
import enum
import json
import pathlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.formats.plain import plain
from ftckpt.formats.torch_table import TABLE
from ftckpt.formats.unpickle import load


def shown(obj: object, **limits: int) -> Any:
    value = plain(load(pickle.dumps(obj), file="x", table=TABLE).value, **limits)
    json.dumps(value, allow_nan=False)
    return value


class Mode(enum.Enum):
    FAST = "fast"


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, {"a": [1, 2.5, None, True, "x"]}),
        (argparse.Namespace(lr=0.1, tags=("a", "b")), {"lr": 0.1, "tags": ["a", "b"]}),
        (Mode.FAST, "fast"),
        (np.float32(1.5), 1.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.float64("nan"), "nan"),
        (float("inf"), "inf"),
        (b"abc", "<3 bytes>"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.deque([1, 2]), [1, 2]),
        (Slotted(), {"a": 1}),
        ({(1, 2): 3, None: 4, 5: 6}, {"(1, 2)": 3, "None": 4, "5": 6}),
        (1 << 70, "0x400000000000000000"),
        (np.arange(3), "<numpy._core.multiarray._reconstruct>"),
    ],
)
def test_values(obj: object, expected: object) -> None:
    got = shown(obj)
    if isinstance(expected, str) and "_reconstruct" in expected:
        assert "_reconstruct" in got
    else:
        assert got == expected


def test_long_things_are_abbreviated() -> None:
    assert shown(list(range(100)), items=3) == [0, 1, 2, "… 97 more"]
    assert shown({i: i for i in range(9)}, items=2) == {"0": 0, "1": 1, "…": "7 more"}
    assert shown("x" * 1000, text=5) == "xxxxx… (1000 characters)"
    assert shown([[[[1]]]], depth=2) == [["<list>"]]


def test_a_python_rng_state_is_short() -> None:
    assert len(json.dumps(shown(random.getstate()))) < 2000


def test_depth_and_sharing_do_not_explode() -> None:
    bomb: list[Any] = [1]
    for _ in range(40):
        bomb = [bomb] * 40
    assert len(json.dumps(shown(bomb))) < 1_000_000
    deep = b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."
    assert plain(load(deep, file="x", table=TABLE).value, depth=2) == [["<list>"]]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_any_data_becomes_json(obj: Any) -> None:
    shown(obj)
