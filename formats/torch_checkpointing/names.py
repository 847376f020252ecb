"""Names of the files of `torch_checkpointing` (0.1.1, `checkpoint_layout.py`)."""

from __future__ import annotations

import re
from typing import NamedTuple

METADATA = "metadata.pkl"
# An item of state whose keys cannot be names of items: it stands at the top, as its job had it.
REST = "extra_state"
# Items have such names (`checkpoint_base.py`, `CheckpointInfo`).
_DEFAULT = re.compile(r"(?P<item>[A-Za-z0-9_-]+?)_(?P<rank>\d{1,7})\.(?P<suffix>\w+)")


class ItemFile(NamedTuple):
    """The file of one item of one rank.

    Attributes:
        path: relative to the checkpoint.
        item: its name, `model`.
        rank: whose it is.
        kind: how it is written: a name of `SerializationFormat`; "" where nothing records it.
    """

    path: str
    item: str
    rank: int
    kind: str = ""


def item_file(path: str) -> ItemFile | None:
    """Return what the default name of a file says: `model_3.pt`."""
    match = _DEFAULT.fullmatch(path)
    return ItemFile(path, match["item"], int(match["rank"])) if match else None


def default_name(item: str, rank: int) -> str:
    """Return the name of an item's file where nothing else is recorded."""
    return f"{item}_{rank}.pt"
