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
        step: by its content.
        error: why the headers could not be read.
        beside: whether a file beside it says the step, and not its content.
        unknown: whether its files are of no known layout, and may be a save in flight.

    An error may also say why the root has no newest one (`unordered`).
    """

    candidate: Candidate
    child: Child | None = None
    step: int | None = None
    error: FtckptError | None = None
    unknown: bool = False
    beside: bool = False

    @property
    def rank(self) -> float:
        """Its step for ordering.

        An unreadable candidate without a step in its name may be the newest of all; a readable one
        without any step comes last (`NO_STEP`).
        """
        known = self.candidate.step if self.step is None else self.step
        if known is not None:
            return known
        return NO_STEP if self.error is None else math.inf

    @property
    def known_step(self) -> int | None:
        """The step by content, else by name."""
        return self.candidate.step if self.step is None else self.step
