"""Fewer states are those of a group where the optimizer's own groups say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ftckpt
from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.optimizer_groups import of_other_groups
from ftckpt.errors import CorruptError
from ftckpt.inspection.resume import resume_check
from ftckpt.inspection.training_state import MOMENTS

ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
LION = {"lr": 1e-4, "betas": (0.95, 0.98), "eps": 1e-8}
LESS = ["layers.0.mlp.weight", "layers.1.mlp.weight"]
MORE = ["layers.0.norm.weight", "layers.1.norm.weight", "head.weight"]


def apart(
    objects: Mapping[str, Any], stored: Mapping[str, str] | None = None, more: list[str] = MORE
) -> set[str]:
    """Return what is of another group in a checkpoint of these objects.

    Args:
        objects: by name; an error is raised.
        stored: the `stored_name` of the first moment by its parameter.
        more: the parameters with all states.
    """

    def load(name: str) -> Any:
        if isinstance(objects[name], Exception):
            raise objects[name]
        return objects[name]

    tensors = {
        name: SimpleNamespace(
            name=name, stored_name=there, component="optimizer", kind=Kind.EXP_AVG
        )
        for name, there in (stored or {}).items()
    }
    held = SimpleNamespace(objects=objects, tensors=tensors, load_object=load)
    return of_other_groups(LESS, more, cast(Any, held))


def listed(less: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return {"optimizer.param_groups": [{**less, "params": LESS}, {**more, "params": MORE}]}


def test_groups_decide_and_not_names() -> None:
    assert apart({}) == {*LESS}
    assert apart({"optimizer.param_groups": [{**ADAM, "params": [*LESS, *MORE]}]}) == set()
    assert apart(listed(ADAM, ADAM)) == set()
    # Rates and decay differ within one algorithm.
    assert apart(listed(ADAM, {**ADAM, "lr": 1.0, "eps": 1e-6})) == set()


@pytest.mark.parametrize(
    "other", [LION, {"lr": 1e-3}, {**ADAM, "algorithm": "lion"}, {**ADAM, "use_muon": True}]
)
def test_a_whole_group_of_other_settings(other: dict[str, Any]) -> None:
    assert apart(listed(other, ADAM)) == {*LESS}
    # One of that group has all.
    mixed = [{**other, "params": [*LESS, MORE[0]]}, {**ADAM, "params": MORE[1:]}]
    assert apart({"optimizer.param_groups": mixed}) == set()


def test_groups_that_are_flattened() -> None:
    def by_number(*groups: Mapping[str, Any]) -> dict[str, Any]:
        held = zip(groups, (LESS, MORE), strict=True)
        return {
            f"app.optim.param_groups.{number}.{field}": value
            for number, (group, params) in enumerate(held)
            for field, value in {**group, "params": params}.items()
        }

    def by_name(less: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"optimizer.param_groups.{name}.{field}": value
            for name in [*LESS, *MORE]
            for field, value in (less if name in LESS else more).items()
        }

    for form in (by_number, by_name):
        assert apart(form(LION, ADAM)) == {*LESS}
        assert apart(form(ADAM, ADAM)) == set()
        assert apart(form({**ADAM, "lr": 1.0}, ADAM)) == set()


def test_numbers_are_those_of_the_file() -> None:
    groups = {"optimizer.param_groups": [{**LION, "params": [3, 4]}, {**ADAM, "params": [0, 1, 2]}]}
    calls = {name: f"optimizer.state.{n}.exp_avg" for n, name in enumerate([*MORE, *LESS])}
    assert apart(groups, calls) == {*LESS}
    other = {name: f"optimizer.state.{n}.exp_avg" for n, name in enumerate([*LESS, *MORE])}
    assert apart(groups, other) == set()
    # The group of one with all is not known: it may be that of the others.
    del calls[MORE[0]]
    assert apart(groups, calls) == set()


def test_an_optimizer_is_known_by_its_path() -> None:
    groups = {
        "a.param_groups": [{**LION, "params": [0, 1]}],
        "b.param_groups": [{**ADAM, "params": [0, 1, 2]}],
    }
    calls = {name: f"a.state.{n}.exp_avg" for n, name in enumerate(LESS)}
    calls |= {name: f"b.state.{n}.exp_avg" for n, name in enumerate(MORE)}
    assert apart(groups, calls) == {*LESS}


@pytest.mark.parametrize("odd", [None, 3, "text", [], [None], {"0": 1}, CorruptError("damaged")])
def test_groups_that_say_nothing_leave_it_to_names(odd: object) -> None:
    assert apart({"optimizer.param_groups": odd}) == {*LESS}


@pytest.mark.parametrize("numbered", [False, True])
def test_a_moment_that_is_lost_of_a_whole_sort(tmp_path: Path, *, numbered: bool) -> None:
    """Adam with the same settings for all: no group of it has one moment."""
    import torch

    names = [f"layers.{n}.{one}.weight" for one in "qkv" for n in range(2)]
    known: list[Any] = [*range(6)] if numbered else names
    state = {one: {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)} for one in known}
    for one in known[:2]:
        del state[one]["exp_avg_sq"]
    groups = [{**ADAM, "params": known[:2]}, {**ADAM, "params": known[2:]}]
    model = {name: torch.ones(4, 4) for name in names}
    optimizer: dict[str, Any] = {"state": state, "param_groups": groups}

    def told() -> tuple[list[str], str]:
        path = str(tmp_path / "a.pt")
        torch.save({"model": model, "optimizer": optimizer, "step": 3}, path)
        items = {item.key: item for item in resume_check(ftckpt.open_checkpoint(path))}
        kinds = [one.kind for one in ftckpt.verify(path, level="structure").findings]
        return [one for one in kinds if one == "state-unknown"], items[MOMENTS.key].reason

    kinds, reason = told()
    assert kinds == ["state-unknown"]
    assert "for each of 6" not in reason
    groups[0]["betas"] = LION["betas"]
    assert told()[0] == []
