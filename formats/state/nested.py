"""Put tensors and objects together into one nested state, path by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftckpt.formats.pickles.walk import Path

IsList = Callable[[Path], bool]


class _Inner(dict[str | int, Any]):
    """A container of the state, told from a dict that is a value in it."""


class NestedState:
    """A tree of containers with values at its leaves."""

    def __init__(self) -> None:
        self._root = _Inner()

    def put(self, path: Path, value: Any) -> bool:
        """Put a value at a path; False where something stands there or on the way."""
        inner = self._root
        for step in path[:-1]:
            found = inner.setdefault(step, _Inner())
            if type(found) is not _Inner:
                return False
            inner = found
        if path[-1] in inner:
            return False
        inner[path[-1]] = value
        return True

    def below(self, path: Path) -> set[str | int]:
        """Return the steps that lead on from a path; none where nothing stands there."""
        inner: Any = self._root
        for step in path:
            inner = inner.get(step) if type(inner) is _Inner else None
        return set(inner) if type(inner) is _Inner else set()

    def settled(self, is_list: IsList, is_tuple: IsList | None = None) -> Any:
        """Return the state as plain dicts, and lists or tuples where these say so of a path.

        The whole is a dict unless both are given. What has gaps stays a dict: a place may be any
        number, and nothing says what filled it.
        """
        if is_tuple is None:
            return _settled(self._root, (), lambda path: bool(path) and is_list(path), _never)
        return _settled(self._root, (), is_list, is_tuple)


def _never(_: Path) -> bool:
    return False


def _settled(value: Any, path: Path, is_list: IsList, is_tuple: IsList) -> Any:
    """Recursion goes as deep as a path is long, which its readers bound."""
    if type(value) is not _Inner:
        return value
    made = {
        step: _settled(member, (*path, step), is_list, is_tuple) for step, member in value.items()
    }
    if set(made) != set(range(len(made))):
        return made
    if is_tuple(path):
        return tuple(made[i] for i in range(len(made)))
    return [made[i] for i in range(len(made))] if is_list(path) else made
