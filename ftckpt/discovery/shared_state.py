"""State of the newest step that a trainer keeps once, in a directory beside its steps.

    epoch_0/, epoch_1/ ...            torchtune: weights in Hugging Face's layout
    recipe_state/recipe_state.pt      the optimizer, the counters and the data's position

It is written anew with each step, so it is neither a checkpoint nor a leftover: it goes with the
newest step, and without it a run begins its optimizer anew.

Source: torchtune/training/checkpointing/_checkpointer.py (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.storage import open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, join

FOLDER, FILE = "recipe_state", "recipe_state.pt"
_STEP = re.compile(r"(?:epoch|step)_\d+")


def is_shared_state(name: str, entries: Mapping[str, Entry]) -> bool:
    """Say whether a directory of a root holds the newest step's state: steps lie beside it."""
    return (
        name == FOLDER
        and entries[name].kind is EntryKind.DIRECTORY
        and any(_STEP.fullmatch(other) for other in entries)
    )


def notes_of_shared_state(source: Source) -> list[Finding]:
    """Return a note on state that lies beside a step and does not belong to its own files."""
    if source.single or not _STEP.fullmatch(source.name):
        return []
    if source.base:
        store, folder = source.store, source.base.rpartition("/")[0]
    else:
        try:
            store, folder = open_store(split(source.url.rstrip("/"))[0], source.store.options), ""
        except FtckptError:
            return []
    path = join(folder, f"{FOLDER}/{FILE}")
    try:
        there = store.stat(path).kind is EntryKind.FILE
    except FtckptError:
        there = False
    if not there:
        return []
    what = (
        f"{store.describe(path)} does not lie in it: torchtune keeps the optimizer and the counters"
        " there, of its newest step alone"
    )
    return [finding("note", what)]
