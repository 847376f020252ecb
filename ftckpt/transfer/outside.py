"""Nothing is written into a sealed checkpoint: what lies in one is in its manifest or a stray.

Only the manifest is asked. What else looks like a checkpoint by its names may be somebody's scratch
with a file of weights in it, or a step of which the other parts are still to be copied.
"""

from __future__ import annotations

import os

from ftckpt.errors import RefusedError
from ftckpt.manifest import NAME
from ftckpt.roots import step_in_name
from ftckpt.stores import StoreOptions, open_store

from .places import absolute

# So many directories above a destination are looked at: a universal checkpoint of DeepSpeed keeps
# its files two below.
_LEVELS = 3


def require_outside(destination: str, options: StoreOptions) -> None:
    """Refuse a destination of this machine inside a sealed checkpoint.

    A directory that holds steps too is a root, although a trainer saved its last weights there.
    An object store is not asked: it would answer a moment later, to a dry run as well.

    Args:
        destination: path or URL of what is to be written.
        options: how to reach object stores.

    Raises:
        RefusedError: a sealed checkpoint lies around it.
    """
    store = open_store(destination, options)
    if not store.traits.local:
        return
    above = absolute(store)
    for _ in range(_LEVELS):
        above = os.path.dirname(above.rstrip("/"))
        if os.path.lexists(os.path.join(above, NAME)) and not _holds_steps(above):
            raise RefusedError(
                f"{destination} lies inside the checkpoint {above}",
                hint="nothing is written into a sealed checkpoint: choose a place beside it",
            )


def _holds_steps(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(step_in_name(entry.name) is not None and entry.is_dir() for entry in entries)
    except OSError:  # whose names nobody may see; writing will say what it is
        return True
