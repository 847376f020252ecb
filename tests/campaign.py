"""How many examples a property is tried with: few here, many at night (`--campaign full`).

For properties whose examples are whole jobs, of a second each; of others hundreds cost nothing.
"""

from __future__ import annotations

_is_full = False


def begin(*, full: bool) -> None:
    """Say which campaign this is, before the tests are imported."""
    global _is_full
    _is_full = full


def examples(short: int, full: int) -> int:
    """Return the number for the campaign that runs."""
    return full if _is_full else short
