"""Series among the names of siblings."""

import pytest

from ftckpt.discovery.series import are_saves


@pytest.mark.parametrize(
    ("names", "saves"),
    [
        (("model_100.pt", "model_200.pt", "optimizer_100.pt", "optimizer_200.pt"), True),
        (("epoch_1.pt", "epoch_2.pt"), True),
        (("model_0.pt", "model_1.pt"), False),
        (("model_1.pt", "model_2.pt", "optimizer_1.pt", "optimizer_2.pt"), False),
        (("model_8.pt", "optimizer_8.pt"), False),
        (("model_tp100.pt", "model_tp200.pt"), False),
    ],
)
def test_numbers_of_ranks_make_no_saves(names: tuple[str, ...], saves: bool) -> None:
    assert are_saves(names) == saves
