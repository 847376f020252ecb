"""Examples of a Megatron job whose optimizer cannot be followed: refused, or counted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import UnsupportedError
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint
from tests.builders.megatron_files import opened, write
from tests.builders.megatron_model import Job
from tests.conformance.formats import Made
from tests.formats.megatron.test_like import WRITER, example_of, laid
from tests.formats.megatron.test_trained import DISTRIBUTED, MASTERS


@pytest.mark.parametrize(
    ("job", "group"), [(DISTRIBUTED, {}), (MASTERS, {"bias_correction": True})]
)
def test_an_example_that_counts_no_steps_is_refused(
    job: Job, group: dict[str, Any], tmp_path: Path
) -> None:
    """A fused Adam would take the source's moments for those of its first step."""
    import torch

    source = write(tmp_path / "source", job).path
    example = example_of(tmp_path / "example", job)
    file = example.path / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    inner = tree["optimizer"]["optimizer"]
    inner.get("state", {}).clear()
    for one in inner["param_groups"]:
        one.pop("step", None)
        one |= group
    torch.save(tree, file)
    with pytest.raises(UnsupportedError, match="does not show where it counts steps") as caught:
        WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(like=opened(example.path)))
    assert "after a step" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda key, held: {5: held}, "no state of its distributed optimizer"),
        (lambda key, held: {(*key, key[0]): held}, "no state of its distributed optimizer"),
        (lambda key, held: {key: [1]}, "no state of its distributed optimizer"),
        (lambda key, held: {key: held, key[::-1]: {}}, "is not of one type"),
        (lambda key, held: {key: held | {"more": {"x": held["param"]}}}, r"no distrib_optim\.more"),
        (lambda key, held: {key: held | {"more": held["param"]}}, r"no optimizer:.*\.more"),
        (lambda key, held: {key: _less(held, "param")}, "hold no master"),
        (lambda key, held: {key: _less(held, "exp_avg")}, "hold no exp_avg"),
        (
            lambda key, held: {key: held | {"exp_avg": held["exp_avg"].bfloat16()}},
            "float32 in the source and bfloat16 in the example",
        ),
    ],
)
def test_buffers_that_are_none_of_adams_are_refused(
    change: Callable[[Any, dict[str, Any]], dict[Any, Any]], says: str, tmp_path: Path
) -> None:
    import torch

    source = write(tmp_path / "source", replace(DISTRIBUTED, tp=2)).path
    example = example_of(tmp_path / "example", DISTRIBUTED)
    file = example.path / "mp_rank_00" / "distrib_optim.pt"
    tree = torch.load(file, weights_only=False)
    ((key, held),) = tree[0].items()
    torch.save(tree | {0: change(key, held)}, file)
    with pytest.raises(UnsupportedError, match=says):
        WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(like=opened(example.path)))


def _less(held: dict[str, Any], leaf: str) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key != leaf}


@pytest.mark.parametrize("step", ["1", [1], True])
def test_steps_that_are_no_numbers_are_refused(step: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "source", DISTRIBUTED).path
    example = _with_states(example_of(tmp_path / "example", MASTERS), {"step": step})
    with pytest.raises(UnsupportedError, match="no step of"):
        WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(like=opened(example)))


def test_steps_are_counted_for_an_example_that_has_made_none(tmp_path: Path) -> None:
    import torch

    source = write(tmp_path / "source", DISTRIBUTED).path
    example = _with_states(example_of(tmp_path / "example", MASTERS), None)
    laid(Content.of(open_checkpoint(source)), example, tmp_path / "made")
    made = torch.load(tmp_path / "made/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert {one["step"] for one in made["optimizer"]["optimizer"]["state"].values()} == {100.0}


def _with_states(example: Made, more: dict[str, Any] | None) -> Path:
    """Change what an example in torch's form keeps of each parameter; None for nothing."""
    import torch

    file = example.path / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    state = tree["optimizer"]["optimizer"]["state"]
    made = {} if more is None else {number: one | more for number, one in state.items()}
    tree["optimizer"]["optimizer"]["state"] = made
    torch.save(tree, file)
    return example.path


def test_a_source_without_a_schedule_is_refused(tmp_path: Path) -> None:
    """Megatron stops where it loads an optimizer and finds no schedule."""
    import torch

    source = write(tmp_path / "source", MASTERS).path
    file = source / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    torch.save(_less(tree, "opt_param_scheduler"), file)
    example = opened(example_of(tmp_path / "example", MASTERS).path)
    with pytest.raises(UnsupportedError, match="no opt_param_scheduler"):
        WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(like=example))
