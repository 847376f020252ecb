"""Names by a table: the first match of a whole name, and nothing lost or guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.transfer.request.renaming import parse_renames, rename
from tests.transfer.contents import content_of

TENSORS = {
    "layers.0.wq": ("model", "param", (3,), "float32"),
    "layers.11.wq": ("model", "param", (3,), "float32"),
    "head": ("model", "param", (3,), "float32"),
    "tied": ("model", "param", (3,), "float32"),
    "layers.0.wq ": ("ema", "param", (3,), "float32"),
}
STATE = {
    "layers.0.wq": ("optimizer", "exp_avg", (3,), "float32"),
    "layers.0.wq.step": ("optimizer", "other", (), "float32"),
    "head.step.count": ("optimizer", "other", (), "float32"),
    "scale": ("optimizer", "other", (), "float32"),
}
GLOB = '[[rename]]\nfrom = "layers.*.w*"\nto = "model.layers.*.self.*_proj"\n'


def _renamed(table: str, **tensors: tuple[str, str, tuple[int, ...], str]) -> list[str]:
    content = content_of(TENSORS | tensors)
    return list(rename(content, parse_renames(table, "names.toml")).tensors)


def test_stars_are_filled_in_order() -> None:
    assert _renamed(GLOB)[:3] == [
        "model.layers.0.self.q_proj",
        "model.layers.11.self.q_proj",
        "head",
    ]


def test_a_regex_is_of_the_whole_name() -> None:
    table = "[[rename]]\nregex = 'layers\\.(\\d+)\\.(?P<k>wq)'\nto = '\\g<k>-\\1'\n"
    assert _renamed(table)[:3] == ["wq-0", "wq-11", "head"]
    with pytest.raises(UsageError, match="matches no parameter"):
        _renamed("[[rename]]\nregex = 'ead'\nto = 'x'\n")


def test_the_first_match_decides() -> None:
    table = '[[rename]]\nfrom = "layers.0.*"\nto = "first.*"\n' + GLOB
    assert _renamed(table)[:2] == ["first.wq", "model.layers.11.self.q_proj"]


def test_optimizer_state_follows_its_parameter() -> None:
    content = content_of(STATE | {"head": ("model", "param", (3,), "float32")})
    made = rename(content, parse_renames('[[rename]]\nregex = "(.*)"\nto = "x.\\\\1"\n', "t"))
    assert list(made.tensors) == [
        "exp_avg:x.layers.0.wq", "optimizer:x.layers.0.wq.step", "optimizer:x.head.step.count",
        "optimizer:x.scale", "x.head",
    ]  # fmt: skip
    made = rename(content, parse_renames('[[rename]]\nfrom = "head"\nto = "h"\n', "t"))
    assert list(made.tensors) == [
        "exp_avg:layers.0.wq", "optimizer:layers.0.wq.step", "optimizer:h.step.count",
        "optimizer:scale", "h",
    ]  # fmt: skip


def test_ties_follow_their_names() -> None:
    content = content_of(TENSORS, (), {"tied": "head"})
    made = rename(content, parse_renames('[[rename]]\nfrom = "head"\nto = "lm"\n', "t"))
    assert made.aliases == {"tied": "lm"}


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"layers\.0\.wq and layers\.11\.wq would both be called q"
    ):
        _renamed('[[rename]]\nregex = "layers.*wq"\nto = "q"\n')
    with pytest.raises(UsageError, match="head and tied would both be called tied"):
        _renamed('[[rename]]\nfrom = "head"\nto = "tied"\n')


def test_names_may_be_exchanged() -> None:
    made = _renamed('[[rename]]\nfrom="head"\nto="tied"\n[[rename]]\nfrom="tied"\nto="head"\n')
    assert made[2:4] == ["tied", "head"]


def test_an_entry_that_matches_nothing_is_refused_unless_optional() -> None:
    table = GLOB + '[[rename]]\nfrom = "blocks.*"\nto = "b.*"\n'
    with pytest.raises(UsageError, match=r"rename 2 of names\.toml matches no parameter"):
        _renamed(table)
    assert _renamed(table + "optional = true\n")[0] == "model.layers.0.self.q_proj"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[[rename", "is not TOML"),
        ("", r"needs \[\[rename\]\] entries"),
        ("rename = []", r"needs \[\[rename\]\] entries"),
        ("rename = [1]", "rename 1 of names.toml is not a table"),
        (GLOB + "[[renames]]\n", "knows no 'renames'"),
        (GLOB + 'too = "x"\n', "unknown field 'too'"),
        ('[[rename]]\nfrom = "a"\n', "needs from"),
        ('[[rename]]\nto = "a"\n', "needs from"),
        ('[[rename]]\nfrom = "a"\nregex = "a"\nto = "b"\n', "needs from"),
        ('[[rename]]\nfrom = "a"\nto = ""\n', "needs from"),
        ('[[rename]]\nfrom = 1\nto = "b"\n', "needs from"),
        ('[[rename]]\nfrom = "a.*"\nto = "b"\n', "have not as many"),
        ('[[rename]]\nregex = "("\nto = "b"\n', "unterminated subpattern"),
        ('[[rename]]\nregex = "a"\nto = "\\\\1"\n', "invalid group reference"),
        ('[[rename]]\nregex = "a"\nto = "\\\\g<x>"\n', "unknown group name"),
        (GLOB + 'optional = "yes"\n', "optional is true or false"),
        ("[[rename]]\nregex = 'h(x?)ead'\nto = '\\1'\n", "leaves head without a name"),
    ],
)
def test_a_table_that_is_not_understood_is_refused(table: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _renamed(table)


@given(st.text(max_size=8), st.text("ab.*\\1g<>", min_size=1, max_size=8))
def test_a_glob_means_only_its_stars(name: str, new: str) -> None:
    """Backslashes and brackets of a new name are text."""
    (entry,) = parse_renames(f"[[rename]]\nfrom = 'n{'*' * new.count('*')}'\nto = '{new}'\n", "t")
    match = entry.pattern.fullmatch("n" + name if "*" in new else "n")
    assert match is not None
    first, star, rest = new.partition("*")
    expected = first + (name if star else "") + rest.replace("*", "")
    assert match.expand(entry.template) == expected
