"""What was dropped, reclaimed and had back, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, printable
from ftckpt.errors import ExitCode, worst

if TYPE_CHECKING:
    from ftckpt.retention.apply.outcome import Applied, ApplyOutcome, Purged, Thinned


def applied_text(applied: Applied) -> str:
    """Return in one sentence what was dropped, and what became of its bytes."""
    gone = f", {len(applied.absent)} had gone already" if applied.absent else ""
    failed = f", {len(applied.failed)} not" if applied.failed else ""
    if not applied.dropped:
        return f"dropped nothing{failed}{gone}"
    parts = []
    if applied.waiting:
        parts.append(f"{human_bytes(applied.waiting)} to be freed when the trash is purged")
    if applied.freed or not parts:
        parts.append(f"{human_bytes(applied.freed)} freed")
    return f"dropped {len(applied.dropped)}{failed}{gone}: {', '.join(parts)}"


def thinned_text(thinned: Thinned) -> str:
    """Return in one clause what was thinned, and what it wins."""
    failed = f", {len(thinned.failed)} not" if thinned.failed else ""
    if not thinned.thinned:
        return f"thinned nothing{failed}"
    won = human_bytes(thinned.won)
    when = "" if not thinned.waiting else " when the trash is purged"
    return f"thinned {len(thinned.thinned)}{failed}: wins {won}{when}"


def thinned_lines(thinned: Thinned) -> Iterator[str]:
    """Yield what was thinned, one line each, and what it comes to; nothing for nothing."""
    for one in thinned.thinned:
        size, won = human_bytes(one.nbytes), human_bytes(one.won)
        yield printable(
            f"thinned {one.decision.entry.name}: {one.name} holds its weights, {size}; wins {won}"
        )
    if thinned.thinned or thinned.failed:
        yield thinned_text(thinned)


def purged_lines(purged: Purged | None) -> Iterator[str]:
    """Yield what was reclaimed of the trash, and what of it was held; nothing for nothing."""
    if purged is None:
        return
    if purged.erased:
        freed = human_bytes(purged.freed)
        yield f"purged {len(purged.erased)} from the trash: {freed} freed"
    for path, why in purged.held.items():
        yield printable(f"held in the trash: {path}: {why}")


def ended(invocation: Invocation, message: str, *outcomes: ApplyOutcome) -> Result:
    """Say what failed and what is to be known, and return how the verb ends.

    Args:
        invocation: told of it.
        message: what was done, in one sentence.
        outcomes: of all that was done.
    """
    for outcome in outcomes:
        for note in outcome.notes:
            invocation.say(f"note: {note}")
        for name, error in outcome.failed.items():
            invocation.warn(f"failed: {name}: {error.message}")
    code = worst(outcome.code for outcome in outcomes)
    if code is ExitCode.OK:
        return Result(code, message)
    failed = [error for outcome in outcomes for error in outcome.failed.values()]
    return invocation.fail(code, message, next((e.hint for e in failed if e.hint), ""))
