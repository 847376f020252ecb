"""What a scrub has read of a run, and what has waited longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftckpt.errors import ExitCode
from ftckpt.verification.scrub import ScrubHistory, ScrubRecord


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far the scrub of a run has come.

    Attributes:
        state: the record's path or URL.
        saves: number of committed saves.
        read: number of them whose content was read as it is now, and held to evidence.
        longest: path or URL of the save that waits for longest; "" without a save.
        unread_s: seconds since it was read, or since it was written if it never was; None if the
            store keeps no times.
        bad: the saves that were found bad and are unchanged, with their checks.
        unproven: the saves whose content no evidence covers: a scrub can open them, and no more.
    """

    state: str
    saves: int
    read: int
    longest: str
    unread_s: float | None
    bad: tuple[tuple[str, ScrubRecord], ...]
    unproven: tuple[str, ...] = ()


def scrubbed(history: ScrubHistory, written: Mapping[str, float | None], now: float) -> Scrubbed:
    """Say how far a scrub has come; pure.

    Args:
        history: what it remembers.
        written: when each save was written, in seconds since the epoch, by its path or URL.
        now: seconds since the epoch.
    """
    waits: dict[str, float | None] = {}
    for url, check in history.checks.items():
        since = written.get(url) if check is None or not check.proven else check.checked
        waits[url] = None if since is None else max(0.0, now - since)
    # What nobody knows the age of may have waited for ever.
    longest = max(waits, key=lambda url: _or_ever(waits[url]), default="")
    bad = [(url, c) for url, c in history.checks.items() if c is not None and c.code != ExitCode.OK]
    read = sum(check is not None and check.proven for check in history.checks.values())
    blind = tuple(url for url, c in history.checks.items() if c is not None and not c.proven)
    return Scrubbed(
        history.state, len(history.checks), read, longest, waits.get(longest), tuple(bad), blind
    )


def _or_ever(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds
