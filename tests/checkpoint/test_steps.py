"""Which step: the counters of the content, what they prove, and what they do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Scalar, StepRole
from ftckpt.checkpoint.steps import (
    counters_in,
    is_counter,
    mixed_steps,
    optimizer_count,
    role_of,
    step_of,
)

IT, OPT, SCHED = StepRole.ITERATION, StepRole.OPTIMIZER, StepRole.SCHEDULER


@pytest.mark.parametrize(
    ("name", "optimizer", "role"),
    [
        ("train_state.step", False, IT),
        ("train_state/step", False, IT),
        ("common_state/shard_0_1.0.iteration", False, IT),
        ("common.pt.iteration", False, IT),
        ("global_step", False, IT),
        ("state.global_steps", False, IT),
        ("iter_num", False, IT),
        ("step", False, IT),
        ("lr_scheduler.last_epoch", False, SCHED),
        ("scheduler.0.last_epoch", False, SCHED),
        ("state.layers.0.weight.step", True, OPT),
        ("state.common_step", True, OPT),
        ("lr_scheduler._step_count", False, None),
        ("model.step", False, None),
        ("warmup_steps", False, None),
        ("dataloader.step_size", False, None),
        ("state.layers.0.weight.exp_avg", True, None),
    ],
)
def test_names_that_show_a_clock(name: str, optimizer: bool, role: StepRole | None) -> None:
    assert role_of(name, optimizer=optimizer) is role


@pytest.mark.parametrize("value", [0, 1, 3.0, 1 << 40])
def test_counts(value: float) -> None:
    assert is_counter(value)


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), 10**400, 1e300, True, "3", None, [3]]
)
def test_what_is_no_count(value: object) -> None:
    assert not is_counter(value)


def at(file: str, name: str, value: float, role: StepRole = OPT) -> Scalar:
    return Scalar(file, name, value, role)


def kinds(scalars: list[Scalar], files: list[str] | None = None) -> dict[str | None, str]:
    names = files if files is not None else sorted({s.file for s in scalars})
    return {f.file: f.kind for f in mixed_steps(scalars, names)}


def good(files: int = 4, value: float = 3) -> list[Scalar]:
    return [at(f"f{i}", f"p{i}.{n}", value) for i in range(files) for n in "ab"]


def test_the_trainers_own_clock_wins() -> None:
    assert step_of([at("a", "x", 9), at("b", "y", 9), at("b", "it", 7, IT)]) == 7


def test_the_optimizers_clock_is_no_step_of_the_save() -> None:
    counted = [at("a", "x", 9), at("b", "y", 9), at("c", "z", 8)]
    assert step_of(counted) is None
    assert optimizer_count(counted) == 9


def test_counters_of_a_small_record_are_the_trainers_own() -> None:
    one_trainer = {"train_progress": {"epoch": 7, "global_step": 750}, "last": {"step": 3}}
    assert list(counters_in(one_trainer)) == [("train_progress.global_step", 750)]
    both = {"state": {"step": 2}, "step": 5, "max_steps": 9, "log": [{"step": 1}]}
    assert list(counters_in(both)) == [("step", 5), ("state.step", 2)]
    nothings: list[object] = [
        None, [], {"step": True}, {"step": -1}, {"step": "7"}, {"step": 1 << 60}
    ]  # fmt: skip
    for nothing in nothings:
        assert list(counters_in(nothing)) == []


def test_the_schedulers_clock_is_no_step() -> None:
    assert step_of([at("a", "x", 9, SCHED)]) is None
    assert step_of([]) is None


def test_equal_counters_are_no_finding() -> None:
    assert kinds(good()) == {}


def test_two_counters_of_one_file_against_the_rest_are_a_verdict() -> None:
    assert kinds([*good(), at("g", "p.a", 4), at("g", "p.b", 4)]) == {"g": "mixed-steps"}


def test_counters_of_two_clocks_are_independent() -> None:
    scalars = [*good(), *[at(f"f{i}", "it", 3, IT) for i in range(2)]]
    assert kinds([*scalars, at("g", "p.a", 4), at("g", "it", 4, IT)]) == {"g": "mixed-steps"}


def test_one_counter_is_a_note() -> None:
    assert kinds([*good(), at("g", "p.a", 4)]) == {"g": "step-disagrees"}


def test_one_name_twice_is_one_counter() -> None:
    assert kinds([*good(), at("g", "p.a", 4), at("g", "p.a", 4)]) == {"g": "step-disagrees"}


def test_parameters_with_a_history_of_their_own_are_no_verdict() -> None:
    # Frozen at first, or experts that no token reached: their counts are behind.
    assert kinds([*good(), at("g", "x.a", 1), at("g", "x.b", 2)]) == {"g": "step-disagrees"}
    both = [at("g", "x.a", 1), at("g", "x.b", 1), at("g", "p.c", 3)]
    assert kinds([*good(), *both]) == {"g": "step-disagrees"}


def test_different_clocks_are_no_verdict() -> None:
    scalars = [at("a", "it", 100, IT), at("b", "x", 50), at("c", "s", 25, SCHED)]
    assert kinds(scalars) == {"a": "step-disagrees"}  # a note
    assert kinds([scalars[0], scalars[2]]) == {}
    assert kinds([at("a", "it", 100, IT), at("a", "x", 50)]) == {}  # one file is of one save


@pytest.mark.parametrize("role", [IT, SCHED])
def test_what_all_ranks_count_is_one_number(role: StepRole) -> None:
    files = [f"extra_state_world_size_3_rank_{rank}.pt" for rank in range(3)]
    name = "iteration" if role is IT else "lr_scheduler.last_epoch"
    counted = [at(file, name, 7.0 + (file is files[1]), role) for file in files]
    assert kinds(counted) == {files[1]: "mixed-steps"}
    (found,) = mixed_steps(counted[:2], [])
    assert (found.kind, found.file) == ("mixed-steps", None)  # which one is of the other is open
    assert f"{files[0]} holds {name} = 7, {files[1]} says 8" in found.message
    other = [at(file.replace("rank", "part"), name, s.value, role) for file, s in zip(
        files, counted, strict=True)]  # fmt: skip
    assert set(kinds(other).values()) == {"step-disagrees"}  # perhaps two models' schedules


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("model_rank_{}.pt", "dataloader.progress.step"),
        ("model_rank_{}.pt", "replay.state.step"),
        ("model_rank_{}.pt", "env_scheduler.last_epoch"),
        ("model_rank_{}.pt", "agent.state.step"),
        ("sampler_rank_{}.pt", "step"),
        ("envs/rank_{}.pt", "global_step"),
    ],
)
def test_what_a_rank_counts_for_itself_is_no_verdict(file: str, name: str) -> None:
    role = role_of(name)
    assert role is not None
    found = kinds([at(file.format(rank), name, 100 + rank % 2, role) for rank in range(3)])
    assert set(found.values()) <= {"step-disagrees"}


def test_an_iteration_that_agrees_is_of_the_same_save() -> None:
    files = [f"model_rank_{rank}.pt" for rank in range(5)]
    odd = [at(file, "step", 7 + (file in files[:2]), IT) for file in files]
    same = [at(file, "iteration", 100, IT) for file in files]
    assert set(kinds([*odd, *same]).values()) <= {"step-disagrees"}
    other = [at(file, "iteration", 100 + (file in files[:2]), IT) for file in files]
    assert kinds([*odd, *other]) == dict.fromkeys(files[:2], "mixed-steps")


def test_a_note_says_what_the_other_files_say() -> None:
    found = list(mixed_steps([at("a", "x", 2), at("b", "y", 3)], []))
    assert [f.message.partition(";")[0] for f in found] == [
        "a holds x = 2, the other files say 3", "b holds y = 3, the other files say 2",
    ]  # fmt: skip


def test_a_file_with_many_counters_does_not_outvote_the_rest() -> None:
    many = [at("g", f"p{i}", 4) for i in range(50)]
    assert kinds([*good(3), *many]) == {"g": "mixed-steps"}


def test_files_without_a_counter_share_a_note() -> None:
    (found,) = mixed_steps(good(1), ["f0", "x", "y"])
    assert (found.kind, found.file) == ("step-unknown", None)
    assert "x, y" in found.message
    (found,) = mixed_steps([], [f"f{i}" for i in range(9)])
    assert "and 6 more" in found.message


@given(
    st.integers(3, 12),
    st.integers(1, 8),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_a_minority_of_another_save_is_named(
    files: int, counters: int, step: int, other: int
) -> None:
    odd = (files - 1) // 2
    scalars = [
        at(f"f{i:02}", f"p{i}.{n}", other if i < odd else step)
        for i in range(files)
        for n in range(counters)
    ]
    found = kinds(scalars)
    if step == other:
        assert found == {}
    else:
        kind = "mixed-steps" if counters > 1 else "step-disagrees"
        assert found == {f"f{i:02}": kind for i in range(odd)}
