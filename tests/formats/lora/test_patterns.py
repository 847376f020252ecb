"""Patterns out of a file: as Python's `re` matches them, and never slow."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import UnsupportedError
from ftckpt.formats.lora.patterns import compiled, ends_with
from tests.campaign import examples

ATOMS = st.sampled_from(
    ["a", "b", "1", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9a.]", r"[\d_]", r"\b", "^", "$"]
)
REPEATS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, inner).map("{0[0]}|{0[1]}".format),
        st.tuples(inner, REPEATS).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=8,
)
NAMES = st.text("ab1._\n", max_size=8)


@settings(max_examples=examples(75, 1200), deadline=None)
@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=8))
def test_it_matches_what_re_matches(pattern: str, names: list[str]) -> None:
    ours, theirs = compiled(pattern), re.compile(pattern)
    for name in names:
        assert ours.matches(name) == bool(theirs.fullmatch(name)), name
        assert ours.matches(name, whole=False) == bool(theirs.match(name)), name
        # As PEFT looks a module up in rank_pattern and alpha_pattern.
        wanted = bool(re.match(rf"(.*\.)?({pattern})$", name))
        assert ends_with(pattern, name) == wanted, name


@given(st.text("ab1._", min_size=1, max_size=6), NAMES)
def test_plain_names_take_the_short_way_to_the_same_answer(pattern: str, name: str) -> None:
    if "\n" not in name:
        assert ends_with(pattern, name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


def test_a_hostile_pattern_is_not_slow() -> None:
    started = time.process_time()
    assert not compiled("(a+)+$").matches("a" * 2000 + "b")
    assert not compiled("(a|a)*(a|a)*b").matches("a" * 2000)
    assert time.process_time() - started < 2


def test_the_patterns_of_unsloth_are_understood() -> None:
    pattern = compiled(
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
    )
    assert pattern.matches("model.layers.11.self_attn.q_proj")
    assert not pattern.matches("model.layers.x.self_attn.q_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!vision).*", "(?<=a)b", "(?P<n>a)", r"(a)\1", "a++", "a**", "*a", "(a", "a)", "[a",
        "[b-a]", r"\Aa", "(?i)a", "a" * 1001, "(" * 60 + "a" + ")" * 60, "((a{99}){99}){99}",
        "a{2,1}", "\\",
    ],
)  # fmt: skip
def test_what_needs_going_back_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError):
        compiled(pattern)
