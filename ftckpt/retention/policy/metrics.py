"""Read a checkpoint's metric: its name, `metrics.json` or `trainer_state.json`.

Sources: Lightning's `ModelCheckpoint` puts metrics into names (`epoch=3-val_loss=0.25.ckpt`);
transformers' `Trainer` keeps `log_history`, a list of records each with its `step`, in
`trainer_state.json`; `metrics.json` is a flat object that any evaluation script can write.

Infer when a checkpoint was saved from the modification times of its files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

from ftckpt.discovery.listing import open_part
from ftckpt.discovery.recognise import Listing, UnopenedPart
from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import is_own
from ftckpt.storage.store import Entry, EntryKind, join

_MAX_BYTES = 64 << 20
# Lightning's keys, and how deep below a key of the checkpoint they lie.
_BEST, _DEEPEST = ("best_model_path", "last_model_path"), 3
_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


def metric_of(root: Root, entry: Entry, name: str, step: int | None) -> float | None:
    """Return the value of a metric of one checkpoint; None if nothing shows it.

    Args:
        root: its root.
        entry: its directory or file.
        name: as the trainer spells it; in `trainer_state.json` also `eval_NAME`.
        step: of the checkpoint, because a history goes back beyond it.

    Raises:
        UnavailableError, DeniedError: the storage does not answer; that is not absence.
    """
    own = entry.path.rpartition("/")[2]
    said = re.search(rf"(?:^|-){re.escape(name)}=({_NUMBER})(?=$|-|\.[a-z])", own)
    if said is not None:
        return _number(float(said[1]))
    if entry.kind is not EntryKind.DIRECTORY:
        return None
    flat = _json(root, f"{entry.path}/metrics.json")
    value = _number(flat.get(name)) if isinstance(flat, dict) else None
    if value is not None:
        return value
    state = _json(root, f"{entry.path}/trainer_state.json")
    history = state.get("log_history") if isinstance(state, dict) else None
    for row in reversed(history if isinstance(history, list) else []):
        if isinstance(row, dict) and (step is None or row.get("step") == step):
            for key in (name, f"eval_{name}"):
                value = _number(row.get(key))
                if value is not None:
                    return value
    return None


def best_of(root: Root, folder: str) -> tuple[str, ...]:
    """Return the name of the checkpoint that the `trainer_state.json` in a folder calls the best.

    transformers' `Trainer` never rotates it away, and loads it when the training has ended.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    state = _json(root, join(folder, "trainer_state.json"))
    return tuple(_names_in(state, ("best_model_checkpoint",), 0))


def best_in(root: Root, part: UnopenedPart) -> tuple[str, ...]:
    """Return the names of the checkpoints that another one calls the best, or its last.

    Lightning's `ModelCheckpoint` keeps them in its state, and loads them by
    `trainer.test(ckpt_path="best")`.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    found: dict[str, None] = {}
    try:
        checkpoint = open_part(root.store, part)
        told = [f for f in checkpoint.fields() if f.rpartition(".")[2] in _BEST]
        for name in checkpoint.objects:
            if any(field == name or field.startswith(name + ".") for field in told):
                state = checkpoint.load_object(name)
                if name.rpartition(".")[2] in _BEST:
                    state = {name.rpartition(".")[2]: state}
                found |= dict.fromkeys(_names_in(state, _BEST, _DEEPEST))
    except (CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError):
        return ()  # the check of what is kept reports it
    return tuple(found)


def _names_in(state: object, keys: Sequence[str], deeper: int) -> Iterator[str]:
    """Yield the last names of the paths under some keys of nested dicts."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key in keys and isinstance(value, str) and value:
            yield value.rstrip("/").rpartition("/")[2]
        elif deeper:
            yield from _names_in(value, keys, deeper - 1)


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _json(root: Root, path: str) -> object:
    try:
        found = root.store.stat(path)
        if found.kind is not EntryKind.FILE or found.size > _MAX_BYTES:
            return None
        return json.loads(root.store.read(path, 0, found.size))
    except (NotFoundError, CorruptError, UnsafeError, ValueError, RecursionError):
        return None


# Number of files of one directory that are read: a save ends within minutes of any of them, and ten
# thousand checkpoints of two thousand files would be twenty million calls.
_FILES = 16
_DIRECTORIES = 2
_DEPTH = 4


def time_of_files(files: Sequence[Entry], base: str) -> float | None:
    """Return the median modification time of the `files` below the path `base`.

    Files that are added later, such as a seal or evaluation results, do not make a save younger.
    """
    skip = len(base) + 1
    return _median([f.mtime for f in files if f.mtime is not None and not is_own(f.path[skip:])])


def time_of_listing(listing: Listing) -> float | None:
    """Return the same from a sample of files, evenly spread over the names.

    Of directories the first and the last of each level are read.
    """
    return _median(list(_times(listing, _DEPTH)))


def _median(times: Sequence[float]) -> float | None:
    """Return the median, the lower of two: one late file beside one data file does not count."""
    return sorted(times)[(len(times) - 1) // 2] if times else None


def _times(listing: Listing, depth: int) -> Iterator[float]:
    listing = listing.at_hand
    for name in _spread(list(listing.files), _FILES):
        mtime = None if is_own(name) else listing.files[name].mtime
        if mtime is not None:
            yield mtime
    if depth:
        for name in _spread(sorted(listing.directories), _DIRECTORIES):
            if not is_own(name):
                yield from _times(listing.inside(name), depth - 1)


def _spread(names: Sequence[str], most: int) -> Sequence[str]:
    if len(names) <= most:
        return names
    return [names[i * (len(names) - 1) // (most - 1)] for i in range(most)]
