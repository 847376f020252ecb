"""Parts of a checkpoint: what is kept, what is left out, and that it is said."""

from __future__ import annotations

import pytest

from ftckpt.errors import NotFoundError, UsageError
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.transfer.contents import content_of

TENSORS = {
    "embed.weight": ("model", "param", (7, 4), "float32"),
    "lm_head.weight": ("model", "param", (7, 4), "float32"),
    "norm.running_mean": ("model", "buffer", (4,), "float32"),
    "m": ("ema", "param", (7, 4), "float32"),
    "embed.weight ": ("optimizer", "exp_avg", (7, 4), "float32"),
    "embed.weight.step": ("optimizer", "other", (), "float32"),
}
OBJECTS = ("optimizer.param_groups", "rank_0.optimizer.lr", "optim.x", "optimizer_states.0",
           "optimism", "scheduler", "my_optimizers_friend")  # fmt: skip


def _content() -> Content:
    return content_of(TENSORS, OBJECTS, {"lm_head.weight": "embed.weight"})


def test_the_model_alone_has_weights_and_buffers() -> None:
    made = only(_content(), Only.MODEL)
    assert list(made.tensors) == ["embed.weight", "lm_head.weight", "norm.running_mean"]
    assert made.objects == {}
    assert made.aliases == {"lm_head.weight": "embed.weight"}
    assert made.dropped == (
        "1 tensor of ema, 112 B",
        "2 tensors of optimizer, 116 B",
        "non-tensor state: optimizer.param_groups, rank_0.optimizer.lr, optim.x and 4 more",
    )


def test_the_optimizer_alone_keeps_its_own_objects() -> None:
    made = only(_content(), Only.OPTIMIZER)
    assert list(made.tensors) == ["exp_avg:embed.weight ", "optimizer:embed.weight.step"]
    assert list(made.objects) == list(OBJECTS[:4])
    assert made.aliases == {}


def test_a_part_that_is_not_there_is_not_found() -> None:
    content = drop(_content(), ["exp_avg:*", "optimizer:*"])
    with pytest.raises(NotFoundError, match="no tensors of the optimizer") as caught:
        only(content, Only.OPTIMIZER)
    assert caught.value.hint == "it holds ema, model"


def test_what_is_dropped_is_gone_and_said() -> None:
    made = drop(_content(), ["ema:*", "sched*", "embed.weight"])
    assert "ema:m" not in made.tensors
    assert "scheduler" not in made.objects
    assert made.aliases == {}  # its owner is gone: it is stored of itself
    assert "lm_head.weight" in made.tensors
    assert made.dropped == (
        "1 tensor of model, 112 B", "1 tensor of ema, 112 B", "non-tensor state: scheduler",
    )  # fmt: skip
    again = drop(made, ["optimism"])
    assert again.dropped == (*made.dropped, "non-tensor state: optimism")


@pytest.mark.parametrize("pattern", ["nothing", "Embed*", "embed?weight", "scheduler.*"])
def test_what_drops_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(UsageError, match="matches no tensor and no object"):
        drop(_content(), ["scheduler", pattern])


def test_dropping_leaves_the_content_as_it_was() -> None:
    content = _content()
    drop(content, ["*"])
    assert list(content.tensors) == list(_content().tensors)
