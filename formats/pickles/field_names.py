"""Names of what is inside inert data: `train_state.step`, `rng.cuda.0`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .unpickle import Inert
from .walk import step_of

# Deep enough for `loops.fit_loop.epoch_loop.batch_progress.total.ready`, bounded for the rest.
DEPTH = 8
LIMIT = 4096


def field_names(value: Any) -> Iterator[str]:
    """Yield dotted names of the members of dicts, lists and records, breadth first.

    At most `LIMIT` names, `DEPTH` levels; a list of more than 64 entries counts as one value.
    """
    level: list[tuple[str, Any]] = [("", value)]
    given = 0
    for _ in range(DEPTH):
        below: list[tuple[str, Any]] = []
        for prefix, container in level:
            for name, member in _members(container):
                if given == LIMIT:
                    return
                given += 1
                path = f"{prefix}.{name}" if prefix else name
                yield path
                below.append((path, member))
        level = below


def _members(value: Any) -> Iterator[tuple[str, Any]]:
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
