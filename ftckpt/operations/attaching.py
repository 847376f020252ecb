"""Give what was opened the way to load itself: `ftckpt.open(path).state_dict()`.

The core's checkpoint knows neither formats nor requests; where it is opened by its path, what loads
it is put in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint

P = ParamSpec("P")


def loads_itself(opens: Callable[P, Checkpoint]) -> Callable[P, Checkpoint]:
    """Return a function that opens as `opens` does, and says what loads the result."""

    @wraps(opens)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Checkpoint:
        found = opens(*args, **kwargs)
        found.loads = _state_dict
        return found

    return opened


def _state_dict(checkpoint: Checkpoint, /, **flags: Any) -> dict[str, Any]:
    # By its name, as the package itself finds functions: what loads begins with what opens.
    made: dict[str, Any] = import_module("ftckpt.operations.loading").state_dict(
        checkpoint, **flags
    )
    return made
