"""Nodes of a tree that is written as a pickle: names, calls, references.

A writer builds its trees of these; `formats.pickling` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A name: `module` and the dotted name in it."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Call:
    """An object that is made by a call.

    Attributes:
        function: what is called: a `Global`, or what stands for one.
        args: its arguments.
        state: what BUILD gives the object afterwards; None gives nothing.
        new: whether only `__new__` is called, as protocol 2 does for plain classes.
        once: whether it stands in the tree only once: then nothing of it is remembered, neither
            here nor by the program that loads it.
    """

    function: Any
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False
    once: bool = False


class Persistent(NamedTuple):
    """An object that lies outside the pickle, by its id."""

    pid: Any


class Pairs(NamedTuple):
    """A dict whose members are made while it is written; it stands in the tree only once."""

    members: Iterable[tuple[Any, Any]]


class Scoped(NamedTuple):
    """A value whose own leaves are replaced by `replace` instead of the pickler's."""

    value: Any
    replace: Replace


# Returns what to write in place of a value that this module does not know: plain data, `Global`,
# `Call`, `Persistent` or `Scoped`.
Replace = Callable[[Any], Any]
