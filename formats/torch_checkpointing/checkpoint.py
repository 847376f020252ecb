"""An opened save of torch_checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.formats.pickles.walk import at
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.names import Role

from .items import ItemFiles


@dataclass(kw_only=True, repr=False)
class TorchCheckpointingCheckpoint(RanksCheckpoint):
    """An opened save: files of ranks, whose tensors the metadata place.

    Attributes:
        item_files: which file holds what, and how it is written.
    """

    format: ClassVar[str] = "torch-checkpointing"
    shares_what_is_alike: ClassVar[bool] = True
    keeps_places: ClassVar[bool] = True

    item_files: ItemFiles

    def role_of(self, file: str) -> Role:
        """Return what a file holds, by its item."""
        return self.item_files.roles[self.item_files.files[file].item]

    def tree_of(self, file: str) -> Any:
        """Return what a file holds, as a tree."""
        return self.item_files.tree(file)

    def load_object(self, name: str) -> Any:
        """Return one object as inert data; see `Checkpoint.load_object`."""
        info = self.objects.get(name)
        if info is None:
            raise NotFoundError(f"no object is called {name!r}", tensor=name)
        if name in self.coded:
            return self.coded[name].tensor.record
        file = info.extent.file
        try:
            return at(self.item_files.tree(file), tuple(info.field))
        except KeyError:
            raise CorruptError(
                f"{file} no longer holds {name}", kind="changed-file", tensor=name
            ) from None
