"""Other state, field by field."""

from __future__ import annotations

import pytest

from ftckpt.comparison.state import DiffStatus, Field, about, compare_fields


def field(name: str, value: object, rank: int | None = None) -> Field:
    return Field(name, rank, repr(value), repr(value).encode())


def found(ours: list[Field], theirs: list[Field]) -> set[tuple[object, ...]]:
    return {(d.name, d.rank, d.status, d.a, d.b) for d in compare_fields(ours, theirs)}


def test_fields_that_differ_and_that_one_lacks() -> None:
    ours = [field("step", 3), field("lr", 0.1), field("gone", 1)]
    theirs = [field("step", 4), field("lr", 0.1), field("new", 2)]
    assert found(ours, theirs) == {
        ("step", None, DiffStatus.DIFFERENT, "3", "4"),
        ("gone", None, DiffStatus.MISSING, "1", None),
        ("new", None, DiffStatus.ADDED, None, "2"),
    }


def test_the_number_of_ranks_is_no_difference_where_all_have_the_same() -> None:
    two = [field("iteration", 3, rank) for rank in range(2)]
    assert found(two, [field("iteration", 3, rank) for rank in range(4)]) == set()
    assert found(two, [field("iteration", 3)]) == set()
    assert found(two, [field("iteration", 4, 7)]) == {("iteration", None, "different", "3", "4")}


def test_what_each_rank_has_of_its_own_is_compared_by_rank() -> None:
    two = [field("rng", f"seed{rank}", rank) for rank in range(2)]
    assert found(two, two) == set()
    other = [two[0], field("rng", "other", 1), field("rng", "seed2", 2)]
    assert found(two, other) == {
        ("rng", 1, DiffStatus.DIFFERENT, "'seed1'", "'other'"),
        ("rng", 2, DiffStatus.ADDED, None, "'seed2'"),
    }
    # One value for all ranks stands for each of them.
    assert found(two, [field("rng", "seed0")]) == {
        ("rng", 1, DiffStatus.DIFFERENT, "'seed1'", "'seed0'")
    }


def test_values_that_look_alike_are_told_apart() -> None:
    (one,) = compare_fields(
        [Field("x", None, "long...", b"\1\2")], [Field("x", None, "long...", b"\3")]
    )
    assert (one.a, one.b) == ("long... #0102", "long... #03")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train_state.step", "step"),
        ("optimizer:gain.step", "step"),
        ("iteration", "step"),
        ("optimizer.param_groups.0.lr", "learning-rate"),
        ("lr_scheduler._last_lr", "learning-rate"),
        ("opt_param_scheduler.max_lr", "learning-rate"),
        ("lr_scheduler.last_epoch", "scheduler"),
        ("extra:rng:rank_0.torch_rng_state", "rng-torch"),
        ("rng_state.0.random_rng_state", "rng-python"),
        ("rng_state.0.np_rng_state", "rng-numpy"),
        ("dataloader.dp_rank_0._num_yielded", "data"),
        ("optimizer.param_groups.0.weight_decay", "settings"),
        ("args.iteration", "settings"),
        ("args.lr", "learning-rate"),
        ("run_name", "other"),
    ],
)
def test_a_field_is_known_by_its_name(name: str, key: str) -> None:
    assert about(name)[0] == key
