"""The names of options: one for one thing, and no more than a person can know."""

from __future__ import annotations

import pytest

from ftckpt.commands.cli.derive import SET
from ftckpt.commands.cli.verbs import VERBS, load
from tests.commands.saves import answer

# Another one takes the place of one of these, or is an assumption (`--set NAME=VALUE`).
MOST = 200
PLAN = ("plan", "--mtbf", "3h", "--save", "60s", "--params", "7B")


def names() -> set[str]:
    """Return the names that helps show, `--set` once."""
    found = set()
    for verb in VERBS:
        for param in load(verb).params:
            if param.param_type_name == "option" and not getattr(param, "hidden", False):
                found |= {name.split()[0] for name in param.opts if name.startswith("--")}
    return found


def test_there_are_not_more_of_them() -> None:
    assert len(names()) <= MOST


@pytest.mark.parametrize("gone", ["verify", "world-size", "require-content", "concurrency", "afr"])
def test_one_thing_has_one_spelling(gone: str) -> None:
    assert f"--{gone}" not in names()


def test_an_assumption_is_set_by_its_name() -> None:
    wanted = answer(*PLAN, SET, "weights-between=2")["weights"]
    assert wanted["between"] == 2
    assert answer(*PLAN, f"{SET}=weights-between=2")["weights"] == wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([SET], "--set needs a NAME=VALUE"),
        ([SET, "weights-betwen=2"], "did you mean weights-between"),
        ([SET, "weights-between=some"], "--set weights-between takes a whole number"),
        (["--weights-between", "2"], "no option --weights-between"),
    ],
)
def test_an_assumption_that_is_none(words: list[str], says: str) -> None:
    result = answer(*PLAN, *words)["result"]
    assert result["code"] == 2
    assert says in result["message"]
