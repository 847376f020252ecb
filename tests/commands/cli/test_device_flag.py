"""`--device` of what is not here: one code and one text in every verb that has the flag."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from ftckpt.commands.cli.verbs import VERBS, load
from tests.commands.golden import ftckpt

MISSING = "cuda:77"  # also where there are some


def with_flag() -> list[str]:
    return [verb for verb in VERBS if any("--device" in p.opts for p in load(verb).params)]


def example(verb: str) -> list[str]:
    """Return the words of the first example of a verb that has no device of its own."""
    module: Any = load(verb)
    line = next(line for line, _ in module.examples if "--device" not in line)
    words = shlex.split(line)
    assert words[0] == "ftckpt"
    return words[1:]


def test_there_are_such_verbs() -> None:
    assert {"reshard", "convert", "delta unpack"} <= set(with_flag())


@pytest.mark.parametrize("verb", with_flag())
def test_a_device_that_is_not_here(verb: str) -> None:
    done = ftckpt(*example(verb), "--device", MISSING)
    assert done.returncode == 12, done.stderr
    text = r"ftckpt: no cuda:77 here: torch sees \d+ CUDA devices?"
    assert re.search(text, done.stderr), done.stderr
    assert "hint: --device cpu does the same" in done.stderr


@pytest.mark.parametrize("verb", with_flag())
def test_no_name_of_a_device(verb: str) -> None:
    for name in ("tpu", "cuda:x", "cuda:"):
        done = ftckpt(*example(verb), "--device", name)
        assert done.returncode == 2, done.stderr
        assert f"ftckpt: {name!r} is not a device: cpu, cuda or cuda:N" in done.stderr


def test_every_verb_with_the_flag_has_the_code_in_its_help() -> None:
    for verb in with_flag():
        assert 12 in load(verb).codes
