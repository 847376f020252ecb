"""Layers that an adapter should have tensors of and has not.

PEFT saves tensors of every module that it adapts, and adapts each module of a name in all layers.
Where some of those have tensors and others not, a save has lost them: the other pipeline stage, the
other rank. That whole kinds of modules have none (a vision tower that was not loaded) is a note.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import RefusedError
from ftckpt.findings import counted, listed

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


def require_no_gaps(
    adapter: Checkpoint,
    lacking: Sequence[str],
    has: Collection[str],
    base_config: Mapping[str, Any],
) -> None:
    """Refuse an adapter that has tensors of some layers, and lacks those of others.

    Args:
        adapter: that is merged.
        lacking: modules that its configuration names and that it has no tensors of.
        has: modules that it has.
        base_config: of the base; layers beyond its number (for multi-token prediction) are loaded
            by no trainer, and count as untrained.

    Raises:
        RefusedError: with the modules.
    """
    kinds = {_NUMBER.sub("*", one) for one in has}
    text = base_config.get("text_config")
    layers = (text if isinstance(text, dict) else base_config).get("num_hidden_layers")
    gone = [
        one
        for one in lacking
        if _NUMBER.search(one)
        and _NUMBER.sub("*", one) in kinds
        and not (type(layers) is int and layer_of(one) >= layers)
    ]
    if gone:
        there = sum(_NUMBER.sub("*", one) in {_NUMBER.sub("*", g) for g in gone} for one in has)
        raise RefusedError(
            f"{adapter.source.url} holds tensors of {counted(there, 'module')}, and none of"
            f" {counted(len(gone), 'other')} that its configuration names alike: {listed(gone)}",
            hint="a save has lost them; if they were never trained, layers_to_transform in"
            " adapter_config.json or --allow-gaps says so",
        )


def layer_of(module: str) -> int:
    """Return the number of a module's layer, as PEFT finds it; -1 where it has none."""
    found = _LAYER.match(module)
    return -1 if found is None else int(found[1])
