"""Help on one screen, and all of it: made of the definitions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ftckpt.commands.cli import verbs
from ftckpt.commands.cli.derive import Verb, VerbOption
from ftckpt.commands.cli.overview import all_help, family_help
from ftckpt.commands.manual.contents import verb_help


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def short(verb: str) -> str:
    command = verbs.load(verb)
    with command.make_context(f"ftckpt {verb}", [], resilient_parsing=True) as its:
        return command.one_screen(its)


def every_option(command: Verb) -> Iterator[VerbOption]:
    return (one for one in command.params if isinstance(one, VerbOption))


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_help_of_a_verb_is_one_screen(verb: str) -> None:
    lines = short(verb).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"{verbs.VERBS[verb]}."
    assert lines[1].startswith(f"Usage: ftckpt {verb} ")
    command = verbs.load(verb)
    number = sum(not one.hidden for one in every_option(command)) + 2
    assert f"`--help` shows all {number} options" in "\n".join(lines[-2:])


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_options_of_every_day_exist_and_come_first(verb: str) -> None:
    command = verbs.load(verb)
    known = {name for one in every_option(command) for name in one.opts}
    assert not {*command.everyday} - known
    assert len({*command.everyday}) == len(command.everyday)
    text = short(verb)
    assert [name for name in command.everyday if name not in text] == []
    if not command.everyday:
        return
    sections = dict(verb_help(verb).sections)
    shown = [next(n for n in re.findall(r"--[a-z-]+", names) if n in command.everyday)
             for names, _ in sections["Options"]]  # fmt: skip
    assert shown == list(command.everyday)


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_what_few_people_need_comes_last(verb: str) -> None:
    names = [name.partition(" (")[0] for name, _ in verb_help(verb).sections]
    order = ("Arguments", "Options", "", "Further options", "How it is done", "Common options",
             "Many machines", "Alerts", "Storage options")  # fmt: skip
    places = [order.index(name if name in order else "") for name in names]
    # One verb may be told of alerts before it is told of machines.
    late = order.index("Common options")
    assert [p for p in places if p <= late] == sorted(p for p in places if p <= late)
    assert all(p > late for p in places[places.index(late) + 1 :])


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_three_examples_fit_on_the_screen(verb: str) -> None:
    shown = re.findall(r"(?m)^  (\S.*)\n {6}\S", short(verb).partition("Examples:\n")[2])
    known = [line for line, _ in verbs.load(verb).examples]
    assert len(shown) == 3
    assert [one for one in known if one in shown] == shown


def test_all_verbs_have_one_line_each() -> None:
    lines = all_help().splitlines()
    headings = [line for line in lines if line in verbs.HEADINGS]
    assert headings == ["Look", "Trust", "Change", "Keep", "Run", "Learn"]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    for verb, says in verbs.VERBS.items():
        first, _, second = verb.rpartition(" ")
        if first in verbs.FAMILIES or verb in verbs.FAMILIES:
            row = next(line for line in lines if line.split()[:1] == [first or verb])
            assert second in row
            assert f"{verb} " in family_help(first or verb)
        else:
            rows = [line for line in lines if line.split()[: len(verb.split())] == verb.split()]
            assert rows[0].endswith(f" {says}")
