"""Refuse options that the writer of a layout does not support."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from ftckpt.errors import UsageError
from ftckpt.transfer.layout import LayoutRequest, Writer

RANKS = ("tp", "pp", "vp", "dp", "ep")
_ELSEWHERE = ("like",)  # `example` asks for writers that follow one


def flag(name: str) -> str:
    """Return the command line's spelling of a wish."""
    return f"--{name.replace('_', '-')}"


def require_granted(writer: Writer, request: LayoutRequest, used: Collection[str] = ()) -> None:
    """Refuse a wish that a writer has no use for.

    One rank along an axis is not a wish: what is not divided is of one.

    Args:
        writer: of the target format.
        request: what the user asks of the layout.
        used: names of options that something else uses (a reader, for rules).

    Raises:
        UsageError: the first of them.
    """
    for name in (field.name for field in fields(request)):
        wish = getattr(request, name)
        if wish is None or name in (*writer.supported_options, *used, *_ELSEWHERE):
            continue
        if name in RANKS and wish == 1:
            continue
        takes = ", ".join(map(flag, writer.supported_options))
        raise UsageError(
            f"{flag(name)} has no meaning for {writer.name} checkpoints, as they are written here",
            hint=f"leave it out; they are laid out by {takes}" if takes else "leave it out",
        )
