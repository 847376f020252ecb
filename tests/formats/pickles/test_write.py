from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import types
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.inert import Inert, Ordered
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.pickles.write import Call, Global, Persistent, Scoped, dumps
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.torch_files.write_tree import names_of
from tests.campaign import examples


def parse(data: bytes, persistent: Any = None) -> Any:
    return load(data, file="test", table=TABLE, persistent=persistent).value


def again(value: Any, protocol: int = 2) -> Any:
    """Pickle with Python, read inert, write inert, load with Python."""
    return pickle.loads(dumps(parse(pickle.dumps(value, protocol)), names_of))


class Outer:
    """A class with a nested one, which protocol 2 can only reach by getattr."""

    class Nested:
        def __init__(self, value: int) -> None:
            self.value = value

    class Slotted:
        __slots__ = ("a", "b")

    class Grown(list[int]):
        pass


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(bytearray, st.binary())
    | st.frozensets(st.integers() | st.text()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
    ),
    max_leaves=30,
)


@given(plain)
@settings(deadline=None, max_examples=examples(50, 600))
def test_plain_data_comes_back(value: Any) -> None:
    tree = parse(pickle.dumps(value, 2))
    written = dumps(tree)
    back = pickle.loads(written)
    assert back == value
    assert type(back) is type(value)
    assert parse(written) == tree
    assert dumps(parse(written)) == written


OBJECTS = [
    argparse.Namespace(lr=0.1, names=["a"], deep=argparse.Namespace(x=None)),
    types.SimpleNamespace(a=1),
    datetime.timedelta(days=3, seconds=1),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    decimal.Decimal("1.50"),
    uuid.UUID(int=7),
    pathlib.PurePosixPath("/a/b"),
    signal.Signals.SIGTERM,
    collections.defaultdict(list, {"a": [1]}),
    collections.deque([1, (2, 3)], maxlen=4),
    collections.Counter("aab"),
    slice(1, None, 2),
    range(3, 9),
    np.float64(1.5),
    np.dtype("float32"),
    {1, "a", (2, 3)},
    {frozenset({"x", "y"}), frozenset({1})},
    [1] * 2500,
    {i: str(i) for i in range(2500)},
    -(1 << 31),
    1 << 31,
    (1 << 2050) - 1,
    "\udcff",
    float("inf"),
    b"",
    (1, 2, 3, 4),
    list,
    Outer,
    Outer.Nested,
]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_objects_come_back(value: Any, protocol: int) -> None:
    if value is Outer.Nested:
        protocol = max(protocol, 4)  # protocol 2 names it by getattr, which is refused
    assert again(value, protocol) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_and_random_states_come_back(protocol: int) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    np.testing.assert_array_equal(again(array, protocol), array)
    state = np.random.default_rng(3).bit_generator.state
    assert again(state, protocol) == state
    kind, keys, *rest = np.random.RandomState(4).get_state(legacy=True)
    back = again((kind, keys, *rest), protocol)
    assert back[0] == kind
    assert back[2:] == tuple(rest)
    np.testing.assert_array_equal(back[1], keys)


def test_nested_and_slotted_classes_come_back() -> None:
    assert again(Outer.Nested(5), 4).value == 5
    slotted: Any = Outer.Slotted()
    slotted.a, slotted.b = 1, [2]
    back = again(slotted, 4)
    assert (back.a, back.b) == (1, [2])
    assert again(Outer.Grown([4, 5]), 4) == [4, 5]


def test_an_object_may_hold_itself_through_its_state_or_a_list() -> None:
    loop: Any = types.SimpleNamespace(me=None, all=[])
    loop.me = loop
    loop.all.append(loop.all)
    back = again(loop)
    assert back.me is back
    assert back.all[0] is back.all


def test_a_tuple_that_holds_itself_is_refused() -> None:
    inside: list[Any] = []
    loop = (inside,)
    inside.append(loop)
    with pytest.raises(UnsupportedError, match="holds itself"):
        dumps(loop)


def test_what_is_shared_stays_shared() -> None:
    one = [1]
    back = again({"a": one, "b": (one, one)})
    assert back["a"] is back["b"][0] is back["b"][1]


def test_depth_costs_no_stack() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    written = dumps(deep)
    assert dumps(parse(written)) == written
    # Only its own sets are found by recursion, and that has an end.
    nest: Any = frozenset()
    for _ in range(100):
        nest = frozenset({nest})
    with pytest.raises(UnsupportedError, match="sets inside sets"):
        dumps(nest)


def test_many_values_use_the_long_memo() -> None:
    value = [[f"{i}"] for i in range(700)] * 2
    assert again(value) == value


def test_sets_have_one_order_whatever_the_hashes() -> None:
    program = (
        "from ftckpt.formats.pickles.write import dumps\n"
        "print(dumps([{'a', 'b', 'c', 'd'}, {1, 'b', (2, 'c'), frozenset({'x', 'y'})}]))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


def test_calls_globals_and_persistent_ids() -> None:
    shared = Call(Global("builtins", "complex"), (1.0, 2.0))
    tree = [shared, shared, Persistent(("storage", 1)), Global("collections", "OrderedDict")]
    loader = pickle.Unpickler(io.BytesIO(dumps(tree)))
    loader.persistent_load = lambda pid: pid  # type: ignore[method-assign]
    back = loader.load()
    assert back == [1 + 2j, 1 + 2j, ("storage", 1), collections.OrderedDict]
    made = Call(Global("argparse", "Namespace"), state={"x": 1}, new=True)
    assert pickle.loads(dumps(made)) == argparse.Namespace(x=1)


class _Leaf:
    """What only a `replace` knows."""


def test_scopes_replace_their_own_leaves() -> None:
    leaf, other = _Leaf(), _Leaf()
    tree = [leaf, Scoped([other, 1], lambda value: "inner"), Scoped(_Leaf(), _name), _Leaf()]
    back = pickle.loads(dumps(tree, lambda value: "outer"))
    assert back == ["outer", ["inner", 1], "_Leaf", "outer"]


def _name(value: Any) -> str:
    return type(value).__name__


def test_what_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="_Leaf"):
        dumps([_Leaf()])


def test_inert_records_equal_after_a_second_reading() -> None:
    value = parse(pickle.dumps(argparse.Namespace(a=[1], b={"c": ()}), 2))
    back = parse(dumps(value))
    assert isinstance(back, Inert)
    assert isinstance(value, Inert)
    assert (back.qualname, back.args, back.state) == (value.qualname, value.args, value.state)
    assert not back.called


def test_an_ordered_dict_stays_one() -> None:
    back = again(collections.OrderedDict(b=1, a=2))
    assert type(back) is collections.OrderedDict
    assert list(back) == ["b", "a"]
    assert type(parse(dumps(Ordered(a=1)))) is Ordered
