"""How an operation says what it takes, in the annotations of its parameters.

    match: Annotated[str, option("GLOB", "Only tensors of this name, `*` any text.")] = ""

The command line, help, completions, man pages and settings are derived from it. Nothing is imported
here: the help of a verb is shown without the core.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter, cleandoc, signature, unwrap
from itertools import zip_longest
from os import PathLike, fspath
from types import GenericAlias
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ftckpt.errors import ExitCode


class Opt(NamedTuple):
    """What the command line has for one parameter.

    Attributes:
        metavar: what stands for the value; "" for the words that it may be.
        help: one sentence.
        names: of the option where it is not called like its parameter, its first long one counts.
        min: the least number that is taken.
        max: the largest one.
        argument: whether it has its place on the line, and no name.
        hidden: whether no help names it.
        words: that it takes, where the operation itself says what is wrong with another;
            completions offer them.
        bare: the value where it is given without one; such a value is joined by `=`.
        default: of a keyword of a `TypedDict`, which cannot say it itself.
        under: the heading of the help that it stands under; "" for the verb's own options.
        assumed: whether it is typed as `--set NAME=VALUE`: a number that few people know, of many.
    """

    metavar: str
    help: str
    names: tuple[str, ...] = ()
    min: int | None = None
    max: int | None = None
    argument: bool = False
    hidden: bool = False
    words: tuple[str, ...] = ()
    bare: str = ""
    default: Any = None
    under: str = ""
    assumed: bool = False


def option(
    metavar: str,
    help: str,  # noqa: A002
    *names: str,
    min: int | None = None,  # noqa: A002
    max: int | None = None,  # noqa: A002
    hidden: bool = False,
    words: tuple[str, ...] = (),
    bare: str = "",
    default: Any = None,
    under: str = "",
    assumed: bool = False,
) -> Opt:
    """Return an option with a value; see `Opt`."""
    return Opt(metavar, help, names, min, max, False, hidden, words, bare, default, under, assumed)


def assumption(
    metavar: str,
    help: str,  # noqa: A002
    *,
    min: int | None = None,  # noqa: A002
    under: str = "",
) -> Opt:
    """Return what `--set NAME=VALUE` sets; see `Opt`."""
    return option(metavar, help, min=min, under=under, assumed=True)


def argument(metavar: str, help: str) -> Opt:  # noqa: A002
    """Return an argument: what stands for it, and one sentence."""
    return Opt(metavar, help, argument=True)


def switch(name: str, help: str, *names: str, under: str = "") -> Opt:  # noqa: A002
    """Return an option that is on where it is given."""
    return Opt("", help, (name, *names), default=False, under=under)


class Taken(NamedTuple):
    """A parameter that the command line has.

    Attributes:
        name: of the parameter.
        kind: the type that its annotation says.
        default: `Parameter.empty` where there is none.
        opt: what the command line has for it.
    """

    name: str
    kind: Any
    default: Any
    opt: Opt


def taken(of: Callable[..., Any]) -> Iterator[Taken]:
    """Yield the parameters of a function, or the fields of a dataclass, that say an `Opt`.

    Keywords of `**flags: Unpack[SomeTypedDict]` are parameters like any other, and `*places` is one
    that takes several. Annotations of other parameters may name what is imported for type checkers
    alone.
    """
    if is_dataclass(of):
        hints = get_type_hints(of, include_extras=True)
        for field in fields(of):
            default = Parameter.empty if field.default is MISSING else field.default
            yield from _said(field.name, hints[field.name], default)
        return
    for name, parameter in signature(of).parameters.items():
        hint = _evaluated(parameter.annotation, of)
        if parameter.kind is Parameter.VAR_KEYWORD:
            flags = get_args(hint)[0]
            for flag, kind in flags.__annotations__.items():
                home = sys.modules[kind.__forward_module__ or flags.__module__]
                yield from _said(flag, eval(kind.__forward_arg__, vars(home)), None)
        else:
            for one in _said(name, hint, parameter.default):
                several = parameter.kind is Parameter.VAR_POSITIONAL
                yield one._replace(kind=GenericAlias(Sequence, one.kind)) if several else one


def groups(of: Callable[..., Any]) -> dict[str, type[Any]]:
    """Return the parameters of a function whose fields are options, with their dataclasses."""
    found = {}
    for name, parameter in signature(of).parameters.items():
        hint = _evaluated(parameter.annotation, of)
        if is_dataclass(hint) and isinstance(hint, type) and hasattr(hint, "TITLE"):
            found[name] = hint
    return found


def _said(name: str, hint: Any, default: Any) -> Iterator[Taken]:
    if get_origin(hint) is Annotated:
        kind, *said = get_args(hint)
        for one in said:
            if isinstance(one, Opt):
                yield Taken(name, kind, one.default if default is None else default, one)


def _evaluated(hint: Any, of: Any) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, unwrap(of).__globals__)
    except NameError:
        if "Annotated[" in hint:
            raise
        return None  # of type checkers alone


P = ParamSpec("P")
R = TypeVar("R")


class Definition(NamedTuple):
    """What is said of an operation beside its parameters.

    Attributes:
        function: the operation.
        examples: command lines, and what each does; the short help shows the first three that fit.
        codes: the exit codes that it can end with, each with a sentence ("" takes the general one).
        everyday: the options that the short help (`-h`) shows, in its order; () for all of its own.
    """

    function: Callable[..., Any]
    examples: Sequence[tuple[str, str]]
    codes: Mapping[ExitCode, str]
    everyday: Sequence[str] = ()

    @property
    def help(self) -> str:
        """What the operation does, without the sections for callers in Python."""
        return re.split(r"\n+(?:Args|Raises|Returns):\n", cleandoc(self.function.__doc__ or ""))[0]


def operation(
    *,
    examples: Sequence[tuple[str, str]],
    codes: Mapping[ExitCode, str],
    everyday: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define an operation: a function that the shell and Python call alike.

    A caller may give a `pathlib.Path` for a string, and one string for a sequence of them, which
    Python would take for a sequence of letters. While it runs, `max_memory` holds.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        default = signature(function).parameters.get("max_memory")
        taking = lenient(function)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if default is None:
                return taking(*args, **kwargs)
            from ftckpt.workers.budget import bounded

            with bounded(cast("int | str", kwargs.get("max_memory", default.default))):
                return taking(*args, **kwargs)

        vars(called)["definition"] = Definition(called, examples, codes, everyday)
        return called

    return define


def lenient(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take a `pathlib.Path` for a string, and one string for a sequence of them."""
    shape = signature(function).parameters
    order = [name for name, one in shape.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @cache
    def read() -> tuple[frozenset[str], frozenset[str]]:
        """Return which parameters take several texts, and all that there are."""
        kinds = {one.name: one.kind for one in taken(function)}
        several = {name for name, kind in kinds.items() if get_origin(kind) is Sequence}
        flags = _of_flags(function)
        hints = (*function.__annotations__.items(), *flags.items())
        several.update(name for name, hint in hints if str(hint).startswith("Sequence["))
        return frozenset(several), frozenset((*kinds, *shape, *flags))

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        several, known = read()
        unknown = kwargs.keys() - known
        if unknown:  # Python would hand it on in `**flags`, and a misspelt `dry_run` would write
            what = f"got an unexpected keyword argument {min(unknown)!r}"
            raise TypeError(f"{function.__name__}() {what}")
        return function(
            *(_whole(one, name in several) for name, one in zip_longest(order[: len(args)], args)),
            **{name: _whole(one, name in several) for name, one in kwargs.items()},
        )

    return called


def _of_flags(function: Callable[..., Any]) -> dict[str, str]:
    """Return the keywords of `**flags: Unpack[SomeTypedDict]`, and what each is said to be."""
    for parameter in signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            flags = get_args(_evaluated(parameter.annotation, function))[0]
            return {name: kind.__forward_arg__ for name, kind in flags.__annotations__.items()}
    return {}


def call(function: Callable[..., R], given: Mapping[str, Any]) -> R:
    """Call a function with values by the names of its parameters, also of `*several`."""
    values = dict(given)
    kinds = signature(function).parameters.items()
    several = [values.pop(name) for name, one in kinds if one.kind is one.VAR_POSITIONAL]
    return function(*(one for values_of in several for one in values_of), **values)


def definition_of(function: Callable[..., Any]) -> Definition:
    """Return the definition of an operation."""
    found = vars(function)["definition"]
    assert isinstance(found, Definition)
    return found


def _whole(value: Any, several: bool) -> Any:
    """Return paths as strings, and one string as a sequence where there may be several."""
    if isinstance(value, PathLike):
        value = fspath(value)
    elif isinstance(value, (list, tuple)) and any(isinstance(one, PathLike) for one in value):
        value = [_whole(one, False) for one in value]
    return [value] if several and isinstance(value, str) else value
