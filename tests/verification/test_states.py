"""Moments and masters are held to their weights, and what optimizers do on purpose is let be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.verification.states import check_states

WEIGHT, FIRST, SECOND = Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ
NAMES = ("a", "b", "c")
One = tuple[str, Kind, tuple[int, ...]]


def told(*tensors: One) -> set[str]:
    """Return the kinds of what is said of these tensors."""
    infos = {}
    for name, kind, shape in tensors:
        component = "model" if kind is WEIGHT else "optimizer"
        dtype = DTYPES["float32"]
        piece = Piece(Box.whole(shape), Extent("f", 0, 4))
        info = TensorInfo(component, name, kind, shape, dtype, (piece,))
        infos[info.key] = info
    checkpoint = cast(Any, SimpleNamespace(tensors=infos))
    return {found.kind for found in check_states(checkpoint)}


def pairs(*names: str, shape: tuple[int, ...] = (4, 6)) -> list[One]:
    return [(name, kind, shape) for name in names for kind in (FIRST, SECOND)]


def weights(*names: str, shape: tuple[int, ...] = (4, 6)) -> list[One]:
    return [(name, WEIGHT, shape) for name in names]


def test_what_fits_says_nothing() -> None:
    assert told(*weights(*NAMES), *pairs(*NAMES)) == set()
    assert told(*weights(*NAMES, "frozen"), *pairs(*NAMES)) == set()
    assert told(*weights(*NAMES), *pairs("0.0", "0.1", "0.2")) == set()


@pytest.mark.parametrize("shape", [(6, 4), (24,), (5, 6), (4, 7), (3, 6)])
def test_a_moment_of_another_shape_is_damage(shape: tuple[int, ...]) -> None:
    first = ("a", FIRST, shape)
    rest = pairs("b", "c", "d")
    assert "shape-mismatch" in told(*weights(*NAMES, "d"), first, ("a", SECOND, (4, 6)), *rest)


def test_a_padded_vocabulary_is_longer_than_its_moments() -> None:
    assert told(*weights("a", shape=(8, 6)), *pairs("a", shape=(7, 6))) == set()


def test_moments_of_low_rank_are_a_warning() -> None:
    small = pairs("a", "b", shape=(4, 2))
    assert told(*weights(*NAMES), *small, *pairs("c")) == {"state-unknown"}


def test_second_moments_may_be_numbers() -> None:
    single = [(name, SECOND, ()) for name in NAMES]
    assert told(*weights(*NAMES), *[(n, FIRST, (4, 6)) for n in NAMES], *single) == set()


def test_one_of_two_moments() -> None:
    assert told(*weights(*NAMES), *pairs("a", "b"), ("c", FIRST, (4, 6))) == {"state-unknown"}
    # Where no parameter has both, the optimizer keeps one.
    assert told(*weights(*NAMES), *[(n, FIRST, (4, 6)) for n in NAMES]) == set()


def test_a_factored_second_moment_has_other_names() -> None:
    factors: list[One] = [("c", Kind.OTHER, (4,)), ("c", FIRST, (4, 6))]
    assert told(*weights(*NAMES), *pairs("a", "b"), *factors) == set()


def test_a_moment_without_its_weight() -> None:
    assert told(*weights("a", "b"), *pairs(*NAMES)) == {"state-unknown"}
    # A master is the weight.
    assert told(*weights("a", "b"), *pairs(*NAMES), ("c", Kind.MASTER, (4, 6))) == set()


def test_moments_without_names_are_of_some_weight() -> None:
    assert told(*weights(*NAMES), *pairs("0.0", "0.1"), *pairs("0.2", shape=(5, 6))) == {
        "state-unknown"
    }
    # Experts that are fused in memory, and one each in the file.
    fused = pairs("0.0", shape=(3, 4, 6))
    assert told(*weights(*NAMES), *fused) == set()
    assert told(*weights("a", "b"), *fused) == {"state-unknown"}
