"""The state of a training beside its tensors: its fields, paths and records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.errors import FtckptError
    from ftckpt.inspection.training_state import StateValue


def state_contents(
    checkpoint: Checkpoint, names: Collection[str]
) -> Iterator[StateValue | FtckptError]:
    """Yield what the values of some objects plainly are; see `fields.state_contents`.

    What reads them is imported when they are asked for: most commands ask for none.
    """
    if not names:
        return iter(())
    from .fields import state_contents as read

    return read(checkpoint, names)
