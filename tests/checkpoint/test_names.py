"""Names without what wrappers add."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint.names import unwrapped

NAMES = ["embed.weight", "layers.0.attn.bias", "head"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: n,
        lambda n: "module." + n,
        lambda n: "_orig_mod." + n,
        lambda n: "module._orig_mod." + n,
        lambda n: "_orig_mod.module." + n,
        lambda n: n.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
        lambda n: "_fsdp_wrapped_module." + n.replace("layers.0.", "layers.0._orig_mod."),
    ],
)
def test_wrappers_come_off(wrap: object) -> None:
    assert callable(wrap)
    stored = [wrap(n) for n in NAMES]
    assert unwrapped(stored) == dict(zip(stored, NAMES, strict=True))


def test_module_stays_where_one_name_lacks_it() -> None:
    names = ["module.a", "module.b", "step"]
    assert unwrapped(names) == {n: n for n in names}


def test_nothing_comes_off_where_two_names_would_meet() -> None:
    names = ["_orig_mod.a", "a"]
    assert unwrapped(names) == {n: n for n in names}


def test_a_leaf_is_never_taken_off() -> None:
    assert unwrapped(["module.module", "a._orig_mod"])["a._orig_mod"] == "a._orig_mod"
    assert unwrapped(["module."]) == {"module.": "module."}


def test_torch_wrappers_give_the_same_names() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    expected = list(plain.state_dict())
    wrapped = torch.compile(plain, backend="eager")
    assert isinstance(wrapped, torch.nn.Module)
    assert list(wrapped.state_dict()) != expected
    assert list(unwrapped(wrapped.state_dict()).values()) == expected


@given(st.lists(st.text("abm_.", min_size=1, max_size=12)))
def test_names_stay_apart_and_in_order(names: list[str]) -> None:
    result = unwrapped(names)
    assert list(result) == list(dict.fromkeys(names))
    assert len(set(result.values())) == len(result)
