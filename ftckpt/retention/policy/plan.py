"""Retention plans: for every entry of a root, keep or drop, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.errors import RefusedError
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entries import RootEntry


class Reason(NamedTuple):
    """Why an entry is kept or dropped.

    Attributes:
        rule: a word that scripts may match: `keep-last`, `pinned`, `newest`, `expired`.
        detail: the same in words, for this entry.
    """

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}" if self.detail else self.rule


class Decision(NamedTuple):
    """The decision on one entry.

    Attributes:
        reasons: never empty.
        frees: bytes freed by dropping it after those before it; None if it stays or its files were
            not listed.
        thin: whether it keeps its weights alone; it stays then.
    """

    entry: RootEntry
    keep: bool
    reasons: tuple[Reason, ...]
    frees: int | None = None
    thin: bool = False

    @property
    def wins(self) -> int:
        """Return the bytes that thinning it frees in the end; 0 if that is not known."""
        contents, weights = self.entry.contents, self.entry.weights
        if not self.thin or contents is None or weights is None:
            return 0
        return max(0, contents.unshared - weights)


class BrokenFloor(NamedTuple):
    """A limit that the plan would break; such a plan cannot be carried out.

    Attributes:
        floor: `--min-survivors`, `--max-delete` or `--keep-…`.
        message: one sentence.
        hint: the exact flag that would allow it, or "".
    """

    floor: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The decisions on a root, and the facts behind them.

    Attributes:
        url: the place that `RootEntry.name` is relative to, as the user would type it.
        now: the time of the decision, in seconds since the epoch.
        decisions: one per entry: by group, the newest first.
        order: names of dropped entries in drop order: a delta before its base, else the oldest
            first.
        broken: the floors that it breaks.
        notes: for the reader of the plan.
    """

    url: str
    now: float
    policy: Policy
    decisions: tuple[Decision, ...]
    order: tuple[str, ...] = ()
    broken: tuple[BrokenFloor, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def keep(self) -> tuple[Decision, ...]:
        """Return the decisions that keep."""
        return tuple(d for d in self.decisions if d.keep)

    @property
    def drop(self) -> tuple[Decision, ...]:
        """Return the decisions that drop, in the order of `order`."""
        by_name = {d.entry.name: d for d in self.decisions if not d.keep}
        return tuple(by_name[name] for name in self.order)

    @property
    def thin(self) -> tuple[Decision, ...]:
        """Return the decisions that keep the weights alone, the oldest first."""
        return tuple(sorted((d for d in self.decisions if d.thin), key=lambda d: d.entry.age_order))

    @property
    def wins(self) -> int:
        """Return the bytes that thinning frees in the end."""
        return sum(d.wins for d in self.decisions)

    @property
    def frees(self) -> int:
        """Return the bytes that the whole plan frees."""
        return sum(d.frees or 0 for d in self.decisions)

    @property
    def refusal(self) -> RefusedError | None:
        """Say which floor it breaks first; the hint is the flag that would allow it."""
        if not self.broken:
            return None
        first = self.broken[0]
        more = f" (and {len(self.broken) - 1} more)" if len(self.broken) > 1 else ""
        return RefusedError(f"{first.message}{more}", hint=first.hint)

    def require(self) -> None:
        """Refuse a plan that breaks a floor.

        Raises:
            RefusedError: see `refusal`.
        """
        if self.refusal is not None:
            raise self.refusal
