"""Down to the element: what two runs kept of a tensor, laid side by side."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.replay.compare.verdict import Closeup, look
from ftckpt.replay.processes import Settings
from ftckpt.replay.record import journal
from ftckpt.replay.record.journal import Journal
from ftckpt.replay.record.log import written
from tests.campaign import examples


def seen(folder: Path, first: torch.Tensor, second: torch.Tensor) -> tuple[Closeup, ...]:
    """Let two processes keep a tensor, and look at what they kept."""
    for name, tensor in (("u", first), ("a", second)):
        asked = Settings(log=str(folder / name), look_step=6, look_event="grad", look_items="w\nv")
        kept = Journal(asked)
        kept.keep(6, "grad", "v", tensor)
        kept.keep(5, "grad", "w", tensor)  # another step
        kept.keep(6, "params", "w", tensor)  # another event
        kept.keep(6, "grad", "x", tensor)  # another tensor
    return look(folder / "u", folder / "a", 6, 0, "grad", ("w", "v"))


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.data())
def test_the_first_element_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16,
                                       torch.bfloat16]))  # fmt: skip
    first = torch.linspace(1, 2, math.prod(shape)).reshape(shape).to(dtype)
    places = data.draw(st.sets(st.integers(0, first.numel() - 1), min_size=1))
    second = first.clone()
    for place in places:
        for _ in range(3):
            element = second.view(-1)[place]
            element.copy_(torch.nextafter(element, torch.tensor(9.0, dtype=dtype)))
    [found] = seen(tmp_path_factory.mktemp("seen"), first, second)
    assert found.shape == shape
    assert torch.arange(first.numel()).reshape(shape)[found.index] == min(places)
    assert (found.ulps, found.most) == (3, 3)
    assert (found.changed, found.compared) == (len(places), first.numel())
    name = str(dtype).removeprefix("torch.")
    assert found.reference == written(float(first[found.index]), name)
    assert found.other == written(float(second[found.index]), name)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, math.nan]]),
         "v[0, 1] is nan instead of 2; 1 of 2 elements differ"),
        (torch.tensor([3, 4]), torch.tensor([5, 9]),
         "v[0] is 5 instead of 3, 2 ULP; 2 of 2 elements differ, the farthest by 5 ULP"),
        (torch.tensor(0.0), torch.tensor(-0.0),
         "v is -0 instead of 0, 0 ULP; 1 of 1 elements differ"),
        (torch.tensor([1j]), torch.tensor([2j]),
         "v[0] is 2j instead of 1j, 8,388,608 ULP; 1 of 1 elements differ"),
        (torch.tensor([True]), torch.tensor([False]),
         "v[0] is 0 instead of 1, 1 ULP; 1 of 1 elements differ"),
    ],
)  # fmt: skip
def test_words(tmp_path: Path, first: torch.Tensor, second: torch.Tensor, words: str) -> None:
    [found] = seen(tmp_path, first, second)
    assert (found.step, found.rank, found.event, found.item) == (6, 0, "grad", "v")
    assert found.words == words


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(1, 3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(3), torch.zeros(3, device="meta")),
    ],
)
def test_nothing_is_said_of_what_cannot_be_laid_side_by_side(
    tmp_path: Path, first: torch.Tensor, second: torch.Tensor
) -> None:
    assert seen(tmp_path, first, second) == ()


def test_a_bound_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_KEPT", 40)
    second = torch.zeros(100)
    second[[9, 10]] = 1
    [found] = seen(tmp_path, torch.zeros(100), second)
    assert (found.index, found.changed, found.compared) == ((9,), 1, 10)
