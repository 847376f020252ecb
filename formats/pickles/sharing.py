"""Refuse values that unfold to far more than their pickle holds.

A list may hold another one twice, sixty levels deep, in a few hundred bytes. A program that walks
it as a tree, to look for tensors or to print it, never ends. Here every container is visited once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftckpt.errors import UnsafeError

from .inert import Ordered

# Real state shares a few tuples and settings; what it unfolds to is about what it holds.
_FEW, _TIMES = 1_000_000, 8
# No walk goes as deep as this; a list can be a million deep.
_DEEPEST = 1000
_CONTAINERS = frozenset({dict, list, tuple, Ordered})


def refuse_unfolding(value: Any) -> None:
    """Check how many values a walk of dicts, lists and tuples meets.

    A container that holds itself is not counted again: walks have a depth at which they stop.

    Raises:
        UnsafeError: far more than there are (`unsafe-pickle`).
    """
    if type(value) not in _CONTAINERS:
        return
    sizes: dict[int, int] = {id(value): 0}
    stack: list[list[Any]] = [[id(value), _members(value), 1]]
    distinct = 0
    while stack:
        frame = stack[-1]
        for member in frame[1]:
            if type(member) not in _CONTAINERS:
                frame[2] += 1
                distinct += 1
                continue
            known = sizes.get(id(member))
            if known is not None or len(stack) == _DEEPEST:
                frame[2] += known or 1
                continue
            sizes[id(member)] = 0
            stack.append([id(member), _members(member), 1])
            break
        else:
            stack.pop()
            distinct += 1
            sizes[frame[0]] = frame[2]
            if frame[2] > _FEW and frame[2] > _TIMES * distinct:
                raise UnsafeError(
                    "a pickle unfolds to far more state than it holds", kind="unsafe-pickle"
                )
            if stack:
                stack[-1][2] += frame[2]


def _members(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)
