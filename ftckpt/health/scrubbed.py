"""What is remembered of the content of a run's saves, and what has waited longest to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.verification.scrub import ScrubHistory, failure, is_blind


class BadSave(NamedTuple):
    """A save that was found bad.

    Attributes:
        path: or URL.
        code: the exit code of the check.
        message: what is wrong, in a sentence.
    """

    path: str
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far the reading of a run has come.

    Attributes:
        ledger: path or URL of the verdicts.
        saves: number of committed saves.
        read: number of them whose content was read as it is now, and held to evidence.
        longest: path or URL of the save that waits for longest; "" without a save.
        unread_s: seconds since it was read, or since it was written if it never was; None if the
            store keeps no times.
        bad: the saves that were found bad and are unchanged.
        unproven: the saves whose content no evidence covers, or that hold what is not understood: a
            scrub can open them, and no more.
    """

    ledger: str
    saves: int
    read: int
    longest: str
    unread_s: float | None
    bad: tuple[BadSave, ...]
    unproven: tuple[str, ...] = ()


def scrubbed(history: ScrubHistory, written: Mapping[str, float | None], now: float) -> Scrubbed:
    """Say how far the reading of a run has come; pure.

    Args:
        history: what is remembered.
        written: when each save was written, in seconds since the epoch, by its path or URL.
        now: seconds since the epoch.
    """
    failed = {url: one for url, k in history.checks.items() if (one := failure(k)) is not None}
    blind = tuple(url for url, k in history.checks.items() if is_blind(k))
    waits: dict[str, float | None] = {}
    for url, known in history.checks.items():
        since = written.get(url)
        if known.last is not None and url not in blind:
            since = known.last.verdict.checked
        waits[url] = None if since is None else max(0.0, now - since)
    # What nobody knows the age of may have waited for ever.
    longest = max(waits, key=lambda url: _or_ever(waits[url]), default="")
    read = sum(known.last is not None and url not in blind for url, known in history.checks.items())
    bad = tuple(
        BadSave(url, one.verdict.code, one.verdict.reason)
        for url, one in failed.items()
        if url not in blind
    )
    return Scrubbed(
        history.ledger, len(history.checks), read, longest, waits.get(longest), bad, blind
    )


def _or_ever(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds
