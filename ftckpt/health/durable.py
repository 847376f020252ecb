"""Find which saves of one tier a second tier holds too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ftckpt.reports import UNSAID, said_as
from ftckpt.retention.scan.entries import EntryClass

from .survey import Survey, SurveyedEntry


@dataclass(frozen=True, slots=True)
class Durable:
    """What a second tier holds of a run.

    Attributes:
        url: of the second tier.
        newest: the newest committed save of the first tier whose step is committed on the second;
            None where there is none.
        missing: committed saves of the first tier that are not on the second, by ascending step.
        unfinished: of those, the ones that the second tier holds a part of.
    """

    SAID: ClassVar = {"missing": "missing_names", "unfinished": "unfinished_names"}

    url: str = field(metadata=said_as("root"))
    newest: SurveyedEntry | None
    missing: tuple[SurveyedEntry, ...] = field(metadata=UNSAID)
    unfinished: tuple[SurveyedEntry, ...] = field(metadata=UNSAID)

    @property
    def missing_names(self) -> list[str]:
        """Return the names of those that are missing."""
        return [held.entry.name for held in self.missing]

    @property
    def unfinished_names(self) -> list[str]:
        """Return the names of those that are there in part."""
        return [held.entry.name for held in self.unfinished]


def durable(first: Survey, second: Survey) -> Durable:
    """Compare two tiers by step; a step that the second has dropped on purpose is missing too.

    What both hold may be of another format or size on each, so only that it is committed there is
    asked: `ftckpt verify --against` compares content.
    """
    there = {h.entry.step for h in second.of(EntryClass.COMMITTED) if h.entry.step is not None}
    begun = {h.entry.step for h in second.of(EntryClass.STAGING, EntryClass.ABANDONED)}
    saves = [h for h in first.of(EntryClass.COMMITTED) if h.entry.step is not None]
    saves.sort(key=lambda h: h.entry.age_order)
    held = [h for h in saves if h.entry.step in there]
    missing = tuple(h for h in saves if h.entry.step not in there)
    partly = tuple(h for h in missing if h.entry.step in begun)
    return Durable(second.url, held[-1] if held else None, missing, partly)
