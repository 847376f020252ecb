"""A candidate of a root whose headers were read."""

from __future__ import annotations

import math
from typing import NamedTuple

from ftckpt.errors import FtckptError

from .roots import Candidate, Child

# The rank of a readable candidate whose content and name show no step.
NO_STEP = -1


class Looked(NamedTuple):
    """A candidate whose headers were read.

    Attributes:
        child: as formats recognise it; None if none does.
        step: by the trainer's record in its content, else by a file beside it, or as its siblings
            show that its name says it (`siblings`); never an optimizer's own count.
        error: why the headers could not be read.
        beside: whether a file beside it says the step, and not its content.
        unknown: whether its files are of no known layout, and may be a save in flight.
        place: its rank among siblings that have a step, where nothing says its own.
        astray: whether siblings have a step, and neither it nor its name says where it stands.
        damaged: whether what says its step could not be read.

    An error may also say why the root has no newest one (`unordered`).
    """

    candidate: Candidate
    child: Child | None = None
    step: int | None = None
    error: FtckptError | None = None
    unknown: bool = False
    beside: bool = False
    place: float | None = None
    astray: bool = False
    damaged: bool = False

    @property
    def rank(self) -> float:
        """Its step for ordering.

        An unreadable candidate whose place nothing tells may be the newest of all; a readable one
        comes last (`NO_STEP`).
        """
        known = self.place if self.known_step is None else self.known_step
        if known is not None:
            return known
        return math.inf if self.damaged or self.error is not None else NO_STEP

    @property
    def known_step(self) -> int | None:
        """Its step, else the one that its name says; None if nothing says it."""
        return self.candidate.step if self.step is None else self.step
