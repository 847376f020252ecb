"""One line of what a machine and a place can do."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"  # something that a user may want to know or to install
    UNKNOWN = "unknown"  # the system or the service does not say
    PROBLEM = "problem"  # a verb fails here, or a checkpoint may be lost


class Check(NamedTuple):
    """What was looked at.

    Attributes:
        area: `ftckpt`, `packages`, `processor`, `limits` or `place`.
        name: what was looked at.
        state: how it ended.
        found: the value, in a few words.
        means: what follows for ftckpt's verbs, as a sentence without a full stop.
        do: what the user can do; "" where nothing is to be done.
    """

    area: str
    name: str
    state: State
    found: str
    means: str
    do: str = ""
