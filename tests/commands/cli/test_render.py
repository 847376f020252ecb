"""Text on a terminal that is too narrow for it."""

from __future__ import annotations

import pytest

from ftckpt.commands.cli import render
from ftckpt.commands.cli.render import block, pairs, table


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "terminal_width", lambda: 40)


def test_words_go_on_below_themselves() -> None:
    rows = [(10, "newest: the highest step; pinned: by bob"), (9, "x" * 40), (8, "")]
    assert table(("step>", "why"), rows).split("\n") == [
        "step  why",
        "----  ----------------------------------",
        "  10  newest: the highest step; pinned:",
        "      by bob",
        f"   9  {'x' * 40}",
        "   8",
    ]
    assert pairs(
        [("bytes", block("param 967.2 KiB, exp_avg 967.1 KiB", "all")), ("step", 3)]
    ).split("\n") == [
        "bytes  param 967.2 KiB, exp_avg 967.1",
        "       KiB",
        "       all",
        "step   3",
    ]


def test_columns_that_do_not_fit_stand_on_lines_of_their_own() -> None:
    rows = [("n" * 30, 123456, "one two three four five six seven eight"), ("m", 7, "")]
    assert table(("name", "bytes>", "why"), rows).split("\n") == [
        "name                             bytes",
        "  why",
        "------------------------------  ------",
        "  --------------------------------------",
        f"{'n' * 30}  123456",
        "  one two three four five six seven",
        "  eight",
        "m                                    7",
        "",
    ]


def test_nothing_is_cut() -> None:
    for heading in ("bytes>", "why"):
        (*_, above, below) = table(("name", heading), [("n" * 45, "12 3456")]).split("\n")
        assert (above, below) == ("n" * 45, "  12 3456")
