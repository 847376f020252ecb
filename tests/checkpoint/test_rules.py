"""Tables of split rules: the first match decides, and what is unknown is refused."""

from __future__ import annotations

import pytest

from ftckpt.checkpoint.sharding import GATED, REPLICATED, Rules, Split, parse_rules
from ftckpt.errors import UnsupportedError, UsageError

TABLE = """
family = "mine"
[[rule]]
names = ["*.fc1.weight"]
split = 0
blocks = [1, 1]
when = "gated"
[[rule]]
names = ["*.fc1.weight"]
split = 0
[[rule]]
names = ["*.in_proj.weight"]
split = 0
blocks = ["inner", "inner", 4]
when = "inner"
[[rule]]
names = ["*norm*", "a.b"]
split = "replicated"
[[rule]]
names = ["embed.weight"]
split = 0
vocabulary = true
"""


def _rules(**values: int) -> Rules:
    return parse_rules(TABLE, "mine.toml", values)


def test_the_first_rule_that_matches_the_whole_name_decides() -> None:
    rules = _rules()
    assert rules.find("layers.0.fc1.weight").split == Split(0)
    assert rules.find("layers.0.norm.weight").split == REPLICATED
    assert rules.find("embed.weight").vocabulary
    assert rules.get("embed.weight.more") is None
    assert rules.get("aXb") is None  # a dot is a dot


def test_values_of_the_caller_choose_rules_and_sizes() -> None:
    rules = _rules(gated=1, inner=16)
    assert rules.find("layers.0.fc1.weight").split == GATED
    assert rules.find("layers.0.in_proj.weight").split == Split(0, (16, 16, 4))
    assert _rules(gated=0).get("layers.0.in_proj.weight") is None


def test_an_unknown_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        UnsupportedError, match=r"no rule of mine says how x\.y is divided"
    ) as caught:
        _rules().find("x.y")
    assert caught.value.tensor == "x.y"
    assert "--rules" in caught.value.hint


def test_a_users_table_is_asked_before_the_built_in_one() -> None:
    own = parse_rules('family="own"\n[[rule]]\nnames=["x.*"]\nsplit=1', "own.toml")
    both = own.before(_rules())
    assert both.find("x.fc1.weight").split == Split(1)
    assert both.find("y.fc1.weight").split == Split(0)
    with pytest.raises(UnsupportedError, match="own and mine"):
        both.find("z")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 1", "is not TOML"),
        ("x = 1", "knows no 'x'"),
        ("", "needs"),
        ("rule = [1]", "rule 1 of f.toml is not a table"),
        ('[[rule]]\nnames = "x"\nsplit = 0', "needs names"),
        ('[[rule]]\nnames = ["x"]', "needs split"),
        ('[[rule]]\nnames = ["x"]\nsplit = -1', "needs split"),
        ('[[rule]]\nnames = ["x"]\nsplit = true', "needs split"),
        ('[[rule]]\nnames = ["x"]\nsplit = "replicated"\nblocks = [1]', "needs split"),
        ('[[rule]]\nnames = ["x"]\nsplit = 0\nblocks = [0]', "0 in blocks"),
        ('[[rule]]\nnames = ["x"]\nsplit = 0\nblocks = ["q"]', "'q' in blocks"),
        ('[[rule]]\nnames = ["x"]\nsplit = 0\naxis = 1', "unknown field 'axis'"),
    ],
)
def test_a_table_that_is_wrong_says_where(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_rules(text, "f.toml")
