"""An opened iteration of local checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ftckpt.errors import CorruptError, NewerWriterError, NotFoundError
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.walk import at
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.parse_files import read_stream


@dataclass(kw_only=True, repr=False)
class NvrxCheckpoint(RanksCheckpoint):
    """An opened iteration: rank files whose tensors say themselves where they lie."""

    format: ClassVar[str] = "nvrx-local"
    groups_number_states: ClassVar[bool] = False

    def load_object(self, name: str) -> Any:
        """Return one object as inert data; see `Checkpoint.load_object`."""
        info = self.objects.get(name)
        if info is None:
            raise NotFoundError(f"no object is called {name!r}", tensor=name)
        file = info.extent.file
        try:
            return at(fields_of(read_stream(self.source, file).tree, file), info.field)
        except (KeyError, IndexError, TypeError):
            raise CorruptError(
                f"{file} no longer holds {name}", kind="changed-file", tensor=name
            ) from None


def fields_of(tree: Any, file: str) -> dict[Any, Any]:
    """Return the fields of the one object that a file holds.

    Raises:
        CorruptError: it is hollow: its tensors were taken out.
        NewerWriterError: it is another object.
    """
    state = tree.state if isinstance(tree, Inert) else tree
    if not isinstance(state, dict) or not state.keys() & {"sharded_state_dict", "state_dict"}:
        raise NewerWriterError.of(
            file, expected="sharded_state_dict or state_dict", found=tree, file=file
        )
    if state.get("_is_hollow"):
        raise CorruptError(
            f"{file} is hollow: its tensors were not saved", kind="empty-weights", file=file
        )
    return state
