"""A world of ranks: how many are to load a result, and what they cannot share."""

from __future__ import annotations

from ftckpt.errors import UsageError
from ftckpt.findings import Finding, counted, finding
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest

from .fields import state_contents

_OF_RANKS = ("rng-python", "rng-numpy", "rng-torch", "rng-cuda", "data")


def world_of(content: Content, request: LayoutRequest) -> int:
    """Return the world size of a format that divides over ranks and knows no other group.

    Raises:
        UsageError: a wish for no rank at all.
    """
    world = request.dp or content.topology.world_size or 1
    if world < 1:
        raise UsageError(f"a world of {world} ranks")
    return world


def world_notes(content: Content, world: int) -> list[Finding]:
    """Return what the user must know where `world` ranks shall load what others saved.

    Random streams and the position in the data belong to the ranks that saved them.
    """
    before = content.topology.world_size
    if before in (None, world):
        return []
    kept = [
        item
        for item in resume_check(content.checkpoint, state_contents)
        if item.key in _OF_RANKS and item.presence is Presence.PRESENT
    ]
    return [
        finding(
            "note",
            f"{item.title}: kept as {counted(before, 'rank')} saved it, for {world} the trainer "
            "must seed or divide it anew",
            tensor=item.where[0] if item.where else None,
        )
        for item in kept
    ]
