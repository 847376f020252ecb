"""Moments and masters are held to their weights, and what optimizers do on purpose is let be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.verification.moments import check_states

WEIGHT, FIRST, SECOND = Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ
NAMES = ("a", "b", "c")
One = tuple[str, Kind, tuple[int, ...]]


def told(*tensors: One, aliases: dict[str, str] | None = None) -> set[str]:
    """Return the kinds of what is said of these tensors."""
    infos = {}
    for name, kind, shape in tensors:
        component = "model" if kind is WEIGHT else "optimizer"
        dtype = DTYPES["float32"]
        piece = Piece(Box.whole(shape), Extent("f", 0, 4))
        info = TensorInfo(component, name, kind, shape, dtype, (piece,))
        infos[info.key] = info
    checkpoint = cast(Any, SimpleNamespace(tensors=infos, aliases=aliases or {}, objects={}))
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
    both = ("embed.weight", "lm_head.weight")
    layers = [*weights(*NAMES), *pairs(*NAMES)]
    assert told(*layers, *weights(*both, shape=(8, 6)), *pairs(*both, shape=(7, 6))) == set()
    # The padding is one, and all states of a parameter are without it.
    other = [*weights("wte", shape=(16, 6)), *pairs("wte", shape=(14, 6))]
    rest = [*weights("embed", shape=(8, 6)), *pairs("embed", shape=(7, 6))]
    assert told(*layers, *rest, *other) == {"state-unknown"}
    scalar = [*weights("embed", shape=()), *pairs("embed", shape=(5,))]
    assert told(*layers, *scalar) == {"shape-mismatch"}
    one = [("embed", FIRST, (7, 6)), ("embed", SECOND, (8, 6))]
    assert told(*layers, *weights("embed", shape=(8, 6)), *one) == {"shape-mismatch"}


@pytest.mark.parametrize("short", [("up",), ("embed",), ("up", "down", "embed")])
def test_moments_of_half_the_rows_are_no_padding(short: tuple[str, ...]) -> None:
    layers = [*weights(*NAMES), *pairs(*NAMES)]
    halves = [*weights(*short, shape=(8, 6)), *pairs(*short, shape=(4, 6))]
    assert told(*layers, *halves) == {"state-unknown"}
    if "embed" not in short:
        nearly = [*weights(*short, shape=(8, 6)), *pairs(*short, shape=(7, 6))]
        assert told(*layers, *nearly) == {"state-unknown"}


def test_moments_of_low_rank_are_a_warning() -> None:
    small = pairs("a", "b", shape=(4, 2))
    assert told(*weights(*NAMES), *small, *pairs("c")) == {"state-unknown"}
    # One parameter, of which one state alone is of low rank.
    lone = [("a", FIRST, (4, 2)), ("a", SECOND, (4, 6))]
    assert told(*weights(*NAMES), *lone, *pairs("b", "c")) == {"state-unknown"}


@pytest.mark.parametrize("names", ["abcdefghijkl", [f"0.{i}" for i in range(12)]])
def test_second_moments_may_be_means(names: str | list[str]) -> None:
    known = weights(*"abcdefghijkl", shape=(8, 6))
    first = [(name, FIRST, (8, 6)) for name in names]

    def second(*shapes: tuple[int, ...]) -> list[One]:
        every = (*shapes, *[(8, 6)] * (12 - len(shapes)))
        return [(n, SECOND, shape) for n, shape in zip(names, every, strict=True)]

    for mean in ((8, 1), (1, 6), (8,), (6,)):  # SlimAdam, with the axis and without
        assert told(*known, *first, *second(mean, mean, mean)) == {"state-unknown"}
    for number in ((), (1,), (1, 1)):  # NovoGrad and others
        assert told(*known, *first, *second(number, number, number)) == set()
    for mean in ((8, 1), (8,)):  # of one embedding alone
        assert told(*known, *first, *second(mean)) == {"state-unknown"}
    for damaged in ((7, 6), (9, 6), (8, 6, 2), (48,), (6, 8)):
        assert told(*known, *first, *second(damaged)) == {"shape-mismatch"}


def test_second_moments_may_be_numbers() -> None:
    single = [(name, SECOND, ()) for name in NAMES]
    assert told(*weights(*NAMES), *[(n, FIRST, (4, 6)) for n in NAMES], *single) == set()


def test_one_of_two_moments() -> None:
    assert told(*weights(*NAMES), *pairs("a", "b"), ("c", FIRST, (4, 6))) == {"state-unknown"}
    # Where no parameter has both, the optimizer keeps one.
    assert told(*weights(*NAMES), *[(n, FIRST, (4, 6)) for n in NAMES]) == set()


MATRICES = [f"layers.{n}.mlp.weight" for n in range(3)]
NORMS = [f"layers.{n}.norm.weight" for n in range(3)]


def test_a_mixed_optimizer_has_groups_with_one_moment() -> None:
    """Lion keeps the first moment alone, of a sort of parameters; Adam has both of the others."""
    lion = [(name, FIRST, (4, 6)) for name in MATRICES]
    rest = [*weights(*MATRICES, *NORMS, *NAMES), *pairs(*NORMS, "a")]
    assert told(*rest, *lion) == set()
    # Then one that has no layers may be of that group too.
    assert told(*rest, *lion, ("b", FIRST, (4, 6))) == set()
    # Where the others of a sort have both, one was lost; no optimizer keeps a second moment alone.
    lost = [*lion[:2], *pairs(MATRICES[2])]
    assert told(*rest, *lost) == {"state-unknown"}
    assert told(*rest, *[(name, SECOND, (4, 6)) for name in MATRICES]) == {"state-unknown"}


def test_numbers_say_the_group() -> None:
    first = [(f"0.{n}", FIRST, (4, 6)) for n in range(2)]
    assert told(*first, *pairs("1.0", "1.1")) == set()
    assert told(*first, *pairs("0.2", "1.0", "1.1")) == {"state-unknown"}
    # A number alone does not.
    assert told(("0", FIRST, (4,)), ("1", FIRST, (4,)), *pairs("2", "3")) == {"state-unknown"}


def test_a_factored_second_moment_has_other_names() -> None:
    factors: list[One] = [("c", FIRST, (4, 6))]
    rows = [(f"c.exp_avg_sq_{end}", Kind.OTHER, (4,)) for end in ("row", "col")]  # Adafactor
    residual = [(f"c.exp_avg_res_{end}", Kind.OTHER, (4,)) for end in ("row", "col")]  # CAME
    both = [*weights(*NAMES), *pairs("a", "b"), *factors]
    assert told(*both, *rows) == set()
    assert told(*both, *rows, *residual) == set()
    # What all have, and a counter, stand for nothing.
    steps = [(f"{name}.step", Kind.OTHER, ()) for name in NAMES]
    largest = [(f"{name}.max_exp_avg_sq", Kind.OTHER, (4, 6)) for name in NAMES]
    assert told(*both, *steps[2:]) == told(*both, *steps, *largest) == {"state-unknown"}


def test_a_moment_without_its_weight() -> None:
    assert told(*weights("a", "b"), *pairs(*NAMES)) == {"state-unknown"}
    # A tied weight is stored by one of its names.
    for tied in ({"c": "a"}, {"a": "c"}):
        assert told(*weights("a", "b"), *pairs(*NAMES), aliases=tied) == set()
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


def test_thousands_of_shapes_are_not_compared_in_pairs() -> None:
    known = [(f"w{i}", WEIGHT, (i + 1, 7)) for i in range(2000)]
    strange = [(f"0.{i}", FIRST, (i + 1, 11)) for i in range(2000)]
    assert told(*known[:50], *strange[:50]) == {"state-unknown"}
    assert told(*known, *strange) == set()
