"""What is taken without typer is what typer makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import EnumType
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperOption

from ftckpt.commands.cli.parameters import Argument, VerbOption, lighten
from ftckpt.commands.cli.verbs import VERBS, load

COMMAND = load("pins")
WORDS = ("", "3", "0", "-1", "+3", "1_0", "3.0", " 3", "٣", "9" * 19, "content", "AUTO", "a b", "1")


def parameters() -> Iterator[tuple[str, Any]]:
    """Yield one parameter of each kind that the verbs have."""
    seen = set()
    for verb in VERBS:
        params: list[Any] = load(verb).params
        for one in params:
            described = getattr(one, "type_descriptor", None)
            if described is None:
                continue
            kind = (described.annotation, one.min, one.max, one.nargs, one.required)
            if (*map(str, kind), type(one.default)) not in seen:
                seen.add((*map(str, kind), type(one.default)))
                yield f"{verb} {one.name}", one


def made(parameter: Any, of: type[Any], ctx: Any, value: Any) -> tuple[object, str]:
    """Return the value that a class makes of a word, or its refusal."""
    try:
        found = of.process_value(parameter, ctx, value)
    except typer.BadParameter as error:
        return None, error.format_message()
    except Exception as error:
        return None, type(error).__name__
    return found, type(found).__name__


def test_all_kinds_of_parameters_become_what_typer_makes_of_them() -> None:
    count = 0
    for name, parameter in parameters():
        theirs = TyperOption if isinstance(parameter, TyperOption) else TyperArgument
        ours = VerbOption if theirs is TyperOption else Argument
        assert type(parameter) is ours
        several = parameter.multiple or parameter.nargs == -1
        words: list[Any] = [(w, "x") if several else w for w in WORDS]
        kind = parameter.type_descriptor.annotation
        choices = kind if isinstance(kind, EnumType) else ()
        with typer.Context(COMMAND) as ctx:
            for value in (None, parameter.default, *words, *map(str, choices)):
                count += 1
                assert made(parameter, ours, ctx, value) == made(parameter, theirs, ctx, value), (
                    name,
                    value,
                )
    assert count > 200


def test_what_is_none_of_these_stays_as_it_is() -> None:
    assert lighten(None) is None
    assert lighten(other := object()) is other


@pytest.mark.parametrize("verb", ["gc", "verify"])
def test_help_is_an_option_of_ours(verb: str) -> None:
    command = load(verb)
    with typer.Context(command) as ctx:
        assert type(command.get_help_option(ctx)) is VerbOption
