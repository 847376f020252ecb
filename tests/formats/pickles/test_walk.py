"""Walking inert data: order, values, and files that try to be endless."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.errors import UnsafeError
from ftckpt.formats.pickles.walk import MAX_DEPTH, Path, at, leaves, step_of


def test_leaves_come_in_order_with_their_paths() -> None:
    tree = {"a": [{"x": 1}, (2, [3])], 7: {}, "lrs": [0.1, 0.2], "e": [], None: "n"}
    found = list(leaves(tree))
    assert found == [
        (("a", 0, "x"), 1),
        (("a", 1), (2, [3])),
        ((7,), {}),
        (("lrs",), [0.1, 0.2]),
        (("e",), []),
        (("None",), "n"),
    ]
    assert all(at(tree, path) == value for path, value in found)


def test_a_single_value_is_a_leaf() -> None:
    assert list(leaves(5, ("here",))) == [(("here",), 5)]


@pytest.mark.parametrize("path", [("b",), ("a", 3), ("a", 0, "x", "deeper")])
def test_a_path_that_is_not_there(path: Path) -> None:
    with pytest.raises(KeyError):
        at({"a": [{"x": 1}]}, path)


def test_keys_of_any_kind_become_short_steps() -> None:
    deep: Any = ()
    for _ in range(100_000):
        deep = (deep,)
    assert step_of(deep) == "<tuple>"
    assert step_of(10**5000) == hex(10**5000)[:40]
    assert [step_of(k) for k in ("a", 3, True, 1.5, b"x")] == ["a", 3, "True", "1.5", "<bytes>"]


@pytest.mark.parametrize(("levels", "safe"), [(MAX_DEPTH - 2, True), (MAX_DEPTH + 1, False)])
def test_nesting_has_an_end(levels: int, safe: bool) -> None:
    tree: Any = {"w": 1}
    for _ in range(levels):
        tree = [tree]
    if safe:
        assert len(list(leaves(tree))) == 1
    else:
        with pytest.raises(UnsafeError):
            list(leaves(tree))
