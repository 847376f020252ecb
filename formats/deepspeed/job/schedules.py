"""Map a scheduler's state of each parameter group to a job that groups otherwise.

torch's schedulers have lists of one value a group (`base_lrs`), which no name ties to a group. In
another order each group would be given another's learning rate, without an error.

Source: `optim/lr_scheduler.py` of torch 2.13. DeepSpeed's own schedulers keep no such list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.formats.torch_files.write_tree import CopiedTree

SCHEDULER = "lr_scheduler"
_OF_GROUPS = frozenset({
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
})  # fmt: skip
_INNER = "_schedulers"


def regrouped(state: Any, origins: Sequence[int | None]) -> Any:
    """Return a scheduler's state for other parameter groups; the same object where nothing changes.

    Args:
        state: as it was saved.
        origins: for each group of the job, the number that it had in the source, where it is known.

    Raises:
        UnsupportedError: the groups had different values, and nothing says which were whose.
    """
    if isinstance(state, CopiedTree):
        made = regrouped(state.value, origins)
        return state if made is state.value else CopiedTree(made, state.storages)
    if not isinstance(state, dict):
        return state
    found = {key: _member(key, value, origins) for key, value in state.items()}
    same = all(found[key] is value for key, value in state.items())
    return state if same else type(state)(found)


def _member(key: Any, value: Any, origins: Sequence[int | None]) -> Any:
    if isinstance(value, CopiedTree):
        made = _member(key, value.value, origins)
        return value if made is value.value else CopiedTree(made, value.storages)
    if not isinstance(value, list):
        return value
    if key in _OF_GROUPS:
        return _dealt(key, value, origins)
    if key != _INNER:
        return value
    inner = [regrouped(one, origins) for one in value]
    return value if all(a is b for a, b in zip(inner, value, strict=True)) else inner


def _dealt(key: str, values: list[Any], origins: Sequence[int | None]) -> list[Any]:
    if not values or (len(values) == len(origins) and list(origins) == [*range(len(values))]):
        return values
    if all(value == values[0] for value in values):
        return values if len(values) == len(origins) else [values[0]] * len(origins)
    known = [origin for origin in origins if origin is not None and origin < len(values)]
    if len(known) < len(origins):
        raise UnsupportedError(
            f"{SCHEDULER} has other {key} for each parameter group of the source, and nothing says"
            " which of them the groups of the example had",
            hint=f"--drop {SCHEDULER}: load with load_lr_scheduler_states=False",
        )
    return [values[origin] for origin in known]
