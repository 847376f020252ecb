"""The step of a checkpoint that was named alone, as the directory around it tells it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ftckpt.errors import FtckptError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.state_files import without_numbers

from .candidates import BATCH, steps_of
from .listing import recognise_at
from .recognise import Format
from .roots import read_root


def step_around(url: str, formats: Sequence[Format], options: StoreOptions) -> int | None:
    """Return the step that `latest` and `ls` would give a checkpoint in its root; None for none.

    Only siblings are read whose names differ in numbers alone, and no more than a few dozen.
    """
    above, name = split(url.rstrip("/"))
    if not re.search(r"\d", name):
        return None
    try:
        store = open_store(above, options)
        root = read_root(store, partial(recognise_at, store, formats=formats))
        shape = without_numbers(name)
        alike = [c for c in root.candidates if without_numbers(c.path) == shape]
        if len(alike) > BATCH or not any(c.path == name for c in alike):
            return None
        children = [child for c in alike if (child := root.recognise(c)) is not None]
        return steps_of(root, children).get(name)
    except FtckptError:
        return None  # the checkpoint itself is there, and nobody asked for more
