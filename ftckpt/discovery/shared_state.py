"""State of the newest step that a trainer keeps once, beside its steps.

    epoch_0/, epoch_1/ ...            torchtune: weights in Hugging Face's layout
    recipe_state/recipe_state.pt      the optimizer, the counters and the data's position
    lora_000000250.safetensors ...    ai-toolkit: one file of weights a save
    optimizer.pt

It is written anew with each step, so it is neither a checkpoint nor a leftover: it goes with the
newest step, and without it a run begins its optimizer anew.

Sources: torchtune/training/checkpointing/_checkpointer.py (`save_checkpoint`); ostris/ai-toolkit
jobs/process/BaseSDTrainProcess.py (`save`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.storage import open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.state_files import may_hold_tensors
from ftckpt.storage.store import Entry, EntryKind, join

FOLDER, FILE = "recipe_state", "recipe_state.pt"
_STEP = re.compile(r"(?:epoch|step)_\d+")
# A file that holds no weights, and belongs to whichever save was the last.
_STATE = re.compile(
    r"(?:optimi[sz]ers?|optim|opt|(?:lr_?)?(?:scheduler|sched)s?|(?:grad_?)?scaler"
    r"|rng|random)(?:[-_]states?)?(?:[-_]dict)?\.(?:pt|pth|bin|ckpt|pkl|safetensors)"
)


def is_shared_state(name: str, entries: Mapping[str, Entry]) -> bool:
    """Say whether a name of a root holds the newest step's state: steps lie beside it."""
    if _STATE.fullmatch(name):
        return any(
            may_hold_tensors(other) and not _STATE.fullmatch(other)
            if entry.kind is EntryKind.FILE
            else _STEP.fullmatch(other)
            for other, entry in entries.items()
        )
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
