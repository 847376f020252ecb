"""Layouts of the sixth round: whose count a number is."""

import pytest

from ftckpt.inspection.training_state import STEP


@pytest.mark.parametrize(
    "name",
    [
        "random_states_0.step",  # accelerate's calls in one process: 0 after sd-scripts' saves
        "ema.num_updates",  # NequIP: updates of the average
        "rank_0.random_states_0.step",
    ],
)
def test_the_count_of_an_average_or_a_generator_is_not_the_trainers(name: str) -> None:
    assert STEP.known is not None
    assert STEP.hint is not None
    assert not STEP.known.search(name)
    assert STEP.hint.search(name)  # it may stand in for it: cannot tell


@pytest.mark.parametrize(
    "name", ["num_updates", "step", "trainer_state.json:global_step", "state.iteration"]
)
def test_a_trainers_own_count_still_is_found(name: str) -> None:
    assert STEP.known is not None
    assert STEP.known.search(name)
