"""Integer parameter ids: named where there is one mapping, and only there."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.formats.state.param_ids import Shape, names_of_ids

A, B, C = (2, 3), (3,), (4, 4)


def test_one_group_in_order_of_the_model() -> None:
    weights = [("a", A), ("b", B), ("c", A)]
    assert names_of_ids([[0, 1, 2]], {0: A, 1: B, 2: A}, weights) == {0: "a", 1: "b", 2: "c"}


def test_a_buffer_of_its_own_shape_is_skipped() -> None:
    weights = [("a", A), ("mask", C), ("b", B)]
    assert names_of_ids([[0, 1]], {0: A, 1: B}, weights) == {0: "a", 1: "b"}


def test_a_buffer_of_a_parameters_shape_leaves_two_mappings() -> None:
    assert names_of_ids([[0]], {0: B}, [("bias", B), ("running_mean", B)]) is None


def test_an_id_without_state_matches_by_its_neighbours() -> None:
    weights = [("a", A), ("b", B), ("c", C)]
    assert names_of_ids([[0, 1, 2]], {0: A, 2: C}, weights) == {0: "a", 1: "b", 2: "c"}
    assert names_of_ids([[0, 1]], {0: A}, weights) is None


def test_two_groups_split_by_shape() -> None:
    weights = [("w0", A), ("b0", B), ("w1", A), ("b1", B)]
    shapes: dict[Hashable, Shape] = {0: A, 1: A, 2: B, 3: B}
    assert names_of_ids([[0, 1], [2, 3]], shapes, weights) == {0: "w0", 1: "w1", 2: "b0", 3: "b1"}


def test_two_groups_that_share_a_shape_prove_nothing() -> None:
    weights = [("a", B), ("b", B)]
    assert names_of_ids([[0], [1]], {0: B, 1: B}, weights) is None


def test_wrong_shapes_counts_and_ids_prove_nothing() -> None:
    assert names_of_ids([[0]], {0: C}, [("a", A)]) is None
    assert names_of_ids([[0, 1]], {0: A, 1: A}, [("a", A)]) is None
    assert names_of_ids([[0, 0]], {0: A}, [("a", A), ("b", A)]) is None
    assert names_of_ids([], {}, []) is None


@given(st.data())
def test_a_mapping_is_given_exactly_when_it_is_the_only_one(data: st.DataObject) -> None:
    shape = st.sampled_from([A, B, C])
    weights: list[tuple[str, Shape]] = [
        (f"w{n}", s) for n, s in enumerate(data.draw(st.lists(shape, max_size=6)))
    ]
    wanted = data.draw(st.lists(shape, min_size=1, max_size=4))
    shapes: dict[Hashable, Shape] = dict(enumerate(wanted))
    possible = [
        chosen for chosen in combinations(weights, len(wanted)) if [s for _, s in chosen] == wanted
    ]
    found = names_of_ids([list(shapes)], shapes, weights)
    if len(possible) == 1:
        assert found == {n: name for n, (name, _) in enumerate(possible[0])}
    else:
        assert found is None
