"""Declare the options and arguments of verbs, and take their values.

`option`, `switch` and `argument` spell most of them on one line, so that a list reads as a table.

typer converts every value by pydantic, defaults included, and to import that takes longer than most
verbs do. Text, whole numbers and names of choices are what a command line has; they are taken here.
All else is left to typer, and so is every refusal with its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import typer
from typer.core import TyperArgument, TyperOption


class OneOf(NamedTuple):
    """The words that an option takes, where a verb itself says what is wrong with another.

    Beside `typer.Option` in an annotation: completions offer them.
    """

    words: tuple[str, ...]


def option(
    metavar: str,
    help: str,  # noqa: A002
    *names: str,
    min: int | None = None,  # noqa: A002
    max: int | None = None,  # noqa: A002
) -> Any:
    """Return an option with a value.

    Args:
        metavar: what stands for the value.
        help: one sentence.
        names: where it is not called like its parameter.
        min: the least number that is taken.
        max: the largest one.
    """
    return typer.Option(*names, metavar=metavar, help=help, min=min, max=max)


def argument(metavar: str, help: str) -> Any:  # noqa: A002
    """Return an argument: what stands for it, and one sentence."""
    return typer.Argument(metavar=metavar, help=help)


def switch(name: str, help: str) -> Any:  # noqa: A002
    """Return an option that is on where it is given; named, so that it has no opposite."""
    return typer.Option(name, help=help)


_WHOLE = re.compile(r"[0-9]{1,18}")
_LEFT = object()  # to typer


class Argument(TyperArgument):
    """An argument of a verb."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value of the parameter's type, after its callback if it has one."""
        return _process(self, ctx, value, super().process_value)


class VerbOption(TyperOption):
    """An option of a verb."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value of the parameter's type, after its callback if it has one."""
        return _process(self, ctx, value, super().process_value)


def lighten(parameter: Any) -> Any:
    """Make one of these of a parameter that typer has made: it cannot be told the class."""
    if type(parameter) is TyperArgument:
        parameter.__class__ = Argument
    elif type(parameter) is TyperOption:
        parameter.__class__ = VerbOption
    return parameter


def _process(parameter: Any, ctx: Any, value: Any, by_typer: Callable[[Any, Any], Any]) -> Any:
    # Releases of typer without this attribute convert without pydantic.
    described = getattr(parameter, "type_descriptor", None)
    taken = _LEFT if described is None else _taken(parameter, described.annotation, value)
    if taken is _LEFT:
        return by_typer(ctx, value)
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)


def _taken(parameter: Any, kind: Any, value: Any) -> Any:
    """Return what typer would make of a value, or `_LEFT` where it has to be asked."""
    if value is None and not parameter.required:
        return () if parameter.multiple or parameter.nargs == -1 else None
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    if kind is int and isinstance(value, str) and _WHOLE.fullmatch(value):
        low, number, high = parameter.min, int(value), parameter.max
        inside = (low is None or low <= number) and (high is None or number <= high)
        return number if inside else _LEFT
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value in list(kind):
        return kind(value)
    if kind == list[str] and isinstance(value, (list, tuple)) and value:
        return list(value) if all(isinstance(one, str) for one in value) else _LEFT
    return _LEFT
