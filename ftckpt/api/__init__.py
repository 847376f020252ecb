"""The Python API: functions with the words of the verbs and the formats put in.

With `__main__` the one door of the core that looks up to `ftckpt.formats`. The arguments of a
function are the flags of its verb, with the same defaults; a size, rate or time is a number
(bytes, bytes a second, seconds) or the text that the flag takes, one string may stand for several
(`also="/disk2"`), and a `pathlib.Path` for a string. Every function takes `stores` (how to reach
object stores) and, where work can be long, a `counter` that is told of it. Nothing here prints, a
verdict is returned, and a failure is an error of `ftckpt.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cache, wraps
from importlib import import_module
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .in_memory import load

__all__ = [
    "load",
]

# The functions of each module of this package: a verb loads what it needs and no more.
_FUNCTIONS = {
    "in_memory": ("load",),
}
_HOMES = {name: home for home, names in _FUNCTIONS.items() for name in names}


# The flags that `**flags` may bring and that are sequences of strings.
_OF_FLAGS = frozenset(("also", "drop", "bases", "adapter", "spelling"))


@cache
def _function(home: str, name: str) -> Callable[..., Any]:
    """Return a function that takes paths as `pathlib` has them, and one string for a sequence.

    Python would take the string for a sequence of its letters, and no type checker objects.
    """
    function: Callable[..., Any] = getattr(import_module(f"ftckpt.api.{home}"), name)
    order = [one for one in function.__annotations__ if one != "return"]
    several = {
        k for k, said in function.__annotations__.items() if said.startswith("Sequence[str]")
    }
    if "flags" in function.__annotations__:
        several |= _OF_FLAGS

    def whole(name: str, given: Any) -> Any:
        given = _named(given)
        return [given] if isinstance(given, str) and name in several else given

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _require_known(function, kwargs.keys())
        ordered = [whole(k, v) for k, v in zip(order, args, strict=False)]
        return function(
            *ordered,
            *map(_named, args[len(order) :]),
            **{k: whole(k, v) for k, v in kwargs.items()},
        )

    return called


def _require_known(function: Callable[..., Any], words: Set[str]) -> None:
    """Raise TypeError for a word that is not of the function's `**flags: Unpack[SomeFlags]`.

    Python takes every word there, and a misspelt `dry_run` would write.
    """
    own = function.__annotations__
    more = [name for name, said in own.items() if said.startswith("Unpack[")]
    unknown = words - (own.keys() - more)
    if not unknown or not more:
        return  # without such flags Python itself asks
    name = own[more[0]][len("Unpack[") : -1]
    homes = (function.__module__, "ftckpt.operations.transferring")
    flags = next(found for home in homes if (found := getattr(import_module(home), name, None)))
    unknown -= flags.__annotations__.keys()
    if unknown:
        what = f"got an unexpected keyword argument {min(unknown)!r}"
        raise TypeError(f"{function.__name__}() {what}")


def _named(given: Any) -> Any:
    """Return paths as strings."""
    if isinstance(given, list | tuple) and any(isinstance(one, PathLike) for one in given):
        return [_named(one) for one in given]
    return fspath(given) if isinstance(given, PathLike) else given


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return _function(_HOMES[name], name)
    from ftckpt import operations

    if name in operations.HOMES:
        return getattr(import_module(f"ftckpt.operations.{operations.HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
