"""What the states of optimizers are, by name and shape."""

from __future__ import annotations

import pytest

from ftckpt.checkpoint.optimizer_states import named_state, parameter_shapes


@pytest.mark.parametrize(
    ("name", "parameter", "slot", "title"),
    [
        ("l.0.weight.step", "l.0.weight", "step", "counter"),
        ("l.0.weight.momentum_buffer", "l.0.weight", "momentum_buffer", "momentum"),
        ("l.0.weight.row_var", "l.0.weight", "variance", "second moment: rows"),
        ("l.w.__bnb_optimizer_quant_state__.absmax1", "l.w", "state1", "scales of state1"),
        ("l.w.exp_avg.codes", "l.w", "exp_avg", "first moment"),
        ("l.w.Q.0", "l.w", "Q", "eigenvectors"),
        ("l.w.pre_cond_1", "l.w", "pre_cond", "preconditioner"),
        ("l.w.pre_cond.1", "l.w", "pre_cond", "preconditioner"),
        ("momentum_buffer", "", "momentum_buffer", "momentum"),
    ],
)
def test_a_name_says_the_state(name: str, parameter: str, slot: str, title: str) -> None:
    named = named_state(name)
    assert (named.parameter, named.slot) == (parameter, slot)
    assert named.state is not None
    assert named.state.title == title


def test_a_state_that_nobody_knows_is_the_last_word_of_its_name() -> None:
    named = named_state("l.weight.wobble")
    assert (named.parameter, named.leaf, named.state) == ("l.weight", "wobble", None)


def test_a_known_parameter_decides_before_the_table() -> None:
    # A module may have the name of a state.
    named = named_state("blocks.momentum.weight.own.part", {"blocks.momentum.weight"})
    assert (named.parameter, named.leaf) == ("blocks.momentum.weight", "own.part")


@pytest.mark.parametrize(
    ("states", "shapes"),
    [
        ({"momentum_buffer": (3, 4), "step": ()}, [(3, 4)]),
        ({"row_var": (3, 1), "col_var": (1, 4)}, [(3, 4)]),
        ({"exp_avg_sq_row": (2, 3), "exp_avg_sq_col": (2, 4)}, [(2, 3, 4)]),
        ({"row_var": (3, 1)}, []),  # one factor tells half of it
        ({"row_var": (3, 1), "col_var": (4,)}, []),
        ({"exp_avg_sq_row": (2, 3), "exp_avg_sq_col": (5, 4)}, []),
        ({"pre_cond_0": (4, 4), "pre_cond_1": (3, 3)}, []),
        ({"exp_avg.codes": (3, 4), "exp_avg.scale": (1,), "exp_avg.qmap": (256,)}, [(3, 4)]),
        ({"wobble": (3, 4)}, []),
    ],
)
def test_states_tell_the_shape_of_their_parameter(
    states: dict[str, tuple[int, ...]], shapes: list[tuple[int, ...]]
) -> None:
    assert list(parameter_shapes(states)) == shapes
