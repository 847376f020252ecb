"""Walk inert data without recursion and without end: a file decides how deep and wide it is.

Refuse values that unfold to far more than their pickle holds.

A list may hold another one twice, sixty levels deep, in a few hundred bytes. A program that walks
it as a tree, to look for tensors or to print it, never ends. Here every container is visited once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ftckpt.errors import UnsafeError

from .inert import Inert, Ordered

# A hundred thousand tensors with three states each are real; a list that holds itself is not.
MAX_LEAVES = 1_000_000
MAX_DEPTH = 64

# Deep enough for `loops.fit_loop.epoch_loop.batch_progress.total.ready`, bounded for the rest.
_NAME_DEPTH = 8
MOST_NAMES = 4096

Path = tuple[str | int, ...]


def leaves(tree: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of everything in dicts and lists that is itself neither, in order.

    Empty containers are values, and so are lists of numbers and texts alone: a dataset's order has
    millions. So are tuples of such and of records, because torch keeps shapes, RNG states and other
    single things in them; a tuple that holds a tensor or a container is gone through like a list.

    Raises:
        UnsafeError: deeper than `MAX_DEPTH` or more than `MAX_LEAVES`: shared references that
            unfold to far more than the file holds.
    """
    stack: list[Iterator[tuple[Path, Any]]] = [iter([(prefix, tree)])]
    given = 0
    plain: dict[int, bool] = {}  # a long list may be shared a million times, so it is judged once
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        path, value = step
        given += 1
        if given > MAX_LEAVES or len(stack) > MAX_DEPTH:
            raise UnsafeError(
                "a pickle unfolds to far more state than a checkpoint has", kind="unsafe-pickle"
            )
        if isinstance(value, dict) and value:
            stack.append(_of_dict(path, value))
        elif type(value) in (list, tuple) and _is_open(value, plain):
            stack.append(_of_list(path, value))
        else:
            yield path, value


def _is_open(value: Any, plain: dict[int, bool]) -> bool:
    """Say whether a list or a tuple is gone through; `plain` is of the lists that were judged."""
    if type(value) is tuple:
        return _opens(value)
    return not plain.setdefault(id(value), _is_plain(value, plain))


def _opens(value: tuple[Any, ...], depth: int = 0) -> bool:
    """Say whether a tuple holds a tensor or a container: then it is more than one thing."""
    if depth > _TUPLES:
        return False
    for member in value:
        if type(member) is tuple:
            if _opens(member, depth + 1):
                return True
        elif isinstance(member, list):
            if not _is_plain(member, {}):
                return True
        elif type(member) not in _PLAIN and not isinstance(member, Inert) and member != {}:
            return True
    return False


_TUPLES = 8  # levels of tuples in tuples that are looked into
_PLAIN = {int, float, str, bool, bytes, complex, type(None)}


def _is_plain(value: list[Any], known: dict[int, bool]) -> bool:
    found = known.get(id(value))
    return set(map(type, value)) <= _PLAIN if found is None else found


def _of_dict(path: Path, value: dict[Any, Any]) -> Iterator[tuple[Path, Any]]:
    for key, member in value.items():
        yield (*path, step_of(key)), member


def _of_list(path: Path, value: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    for index, member in enumerate(value):
        yield (*path, index), member


def dotted(path: Path) -> str:
    """Return a path as one name."""
    return ".".join(map(str, path))


def step_of(key: Any) -> str | int:
    """Return the step of a path that a dict key stands for; never fails, whatever the key is."""
    if type(key) is int:
        return key if -(1 << 63) <= key < 1 << 64 else hex(key)[:40]  # str() has a digit limit
    if type(key) is str:
        return key
    if key is None or type(key) in (bool, float):
        return repr(key)
    if type(key) is tuple and len(key) <= 8 and all(type(k) in (str, int) for k in key):
        return "(" + ", ".join(str(step_of(k))[:80] for k in key) + ")"
    return f"<{type(key).__name__}>"  # repr() recurses as deep as the file says


def at(tree: Any, path: Path) -> Any:
    """Return what stands at a path of `leaves` or above it.

    Raises:
        KeyError: nothing stands there.
    """
    for step in path:
        if isinstance(tree, dict):
            if step in tree:
                tree = tree[step]
                continue
            tree = next((v for k, v in tree.items() if step_of(k) == step), KeyError)
        elif isinstance(tree, (list, tuple)) and type(step) is int and step < len(tree):
            tree = tree[step]
            continue
        else:
            tree = KeyError
        if tree is KeyError:
            raise KeyError(step)
    return tree


def field_names(value: Any) -> Iterator[str]:
    """Yield dotted names of the members of dicts, lists and records, breadth first.

    At most `MOST_NAMES` names, `_NAME_DEPTH` levels; a list of more than 64 entries counts as
    one value.
    """
    level: list[tuple[str, Any]] = [("", value)]
    given = 0
    for _ in range(_NAME_DEPTH):
        below: list[tuple[str, Any]] = []
        for prefix, container in level:
            for name, member in _named_members(container):
                if given == MOST_NAMES:
                    return
                given += 1
                path = f"{prefix}.{name}" if prefix else name
                yield path
                below.append((path, member))
        level = below


def _named_members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Inert):
        value = value.state
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
            value = value[1]
    if isinstance(value, dict):
        for name, member in value.items():
            if isinstance(name, (str, int)):
                yield str(step_of(name)), member
    elif type(value) in (list, tuple) and len(value) <= 64:
        for index, member in enumerate(value):
            if isinstance(member, (dict, list, Inert)):
                yield str(index), member


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
