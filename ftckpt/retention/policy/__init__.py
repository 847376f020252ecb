"""Retention policies: which checkpoints to keep, and how many may go at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from ftckpt.errors import UsageError

HOUR, DAY = 3600.0, 86400.0

# An unfinished save is abandoned after this many seconds without a write.
GRACE = DAY

# The default of `--max-delete`: the larger of this share of the entries and this number.
DEFAULT_SHARE, DEFAULT_NUMBER = 0.5, 50


class Metric(NamedTuple):
    """The metric of the best checkpoints.

    Attributes:
        name: as the trainer spells it.
        largest: whether larger values are better.
    """

    name: str
    largest: bool

    @classmethod
    def parse(cls, text: str) -> Metric:
        """Parse `min:eval_loss` or `max:accuracy`.

        Raises:
            UsageError: the direction is missing; it is never guessed from the name.
        """
        direction, _, name = text.partition(":")
        if direction not in ("min", "max") or not name:
            raise UsageError(
                f"--metric {text}: does the smallest or the largest value count as best?",
                hint="write min:eval_loss or max:accuracy",
            )
        return cls(name, direction == "max")

    def __str__(self) -> str:
        return f"{'max' if self.largest else 'min'}:{self.name}"


class DeleteLimit(NamedTuple):
    """The most that one plan may drop: a number of entries, or percent of all entries."""

    amount: int
    percent: bool = False

    @classmethod
    def parse(cls, text: str) -> DeleteLimit:
        """Parse `20` or `50%`.

        Raises:
            UsageError: not a whole number.
        """
        match = re.fullmatch(r"([0-9]{1,15})(%?)", text.strip())
        if match is None or (match[2] and int(match[1]) > 100):
            raise UsageError(f"--max-delete {text}: this is not a limit", hint="write 20 or 50%")
        return cls(int(match[1]), bool(match[2]))

    def __str__(self) -> str:
        return f"{self.amount}{'%' if self.percent else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to keep: an entry stays if one rule or one protection keeps it.

    Attributes:
        keep_last: the N newest of each run.
        keep_every: for each k, the step nearest to k times N.
        keep_hourly: the newest of each of the N newest hours (UTC) that hold one; daily, weekly
            (ISO) and monthly likewise.
        keep_within: seconds back from the newest.
        keep_best: the N best by `metric`.
        keep_tags: entries with one of these tags.
        min_survivors: a run that loses a checkpoint keeps at least this many good ones.
        max_delete: the most that one plan may drop; None: the larger of 50 % and 50 entries, not
            counting those saved since the last run.
        reclaim: stop dropping once this many bytes are freed; None: drop all that may go.
        delete_corrupt: whether damaged entries may go.
        any_name: whether entries that are of no series may go (`ftckpt.discovery.series`).
        check: whether one of the survivors must have passed a check of its content.
        thin_after: milestones that were saved this many seconds before the newest keep their
            weights alone; None for none.
        thin_beyond: those that are not among this number of the newest do; None for none.
        only: names of entries that a person wants gone; all others are kept. () for no such wish.

    Raises:
        UsageError: a number is not above zero, or `metric` and `keep_best` are not both given.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_within: float | None = None
    keep_best: int | None = None
    metric: Metric | None = None
    keep_tags: tuple[str, ...] = ()
    min_survivors: int = 2
    max_delete: DeleteLimit | None = None
    reclaim: int | None = None
    delete_corrupt: bool = False
    any_name: bool = False
    check: bool = True
    thin_after: float | None = None
    thin_beyond: int | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} {value}: it must be at least 1")
        for name in ("keep_within", "thin_after"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{flag(name)} {value}: this is not a length of time")
        if (self.keep_best is None) != (self.metric is None):
            raise UsageError(
                "--keep-best and --metric go together",
                hint="--keep-best 3 --metric min:eval_loss",
            )

    @property
    def thins(self) -> bool:
        """Whether milestones are thinned."""
        return self.thin_after is not None or self.thin_beyond is not None

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the flags of the keep rules that are set, in their own order."""
        names = [f.name for f in fields(self) if f.name.startswith("keep_")]
        return tuple(flag(n) for n in names if getattr(self, n) not in (None, ()))


_NUMBERS = (
    "keep_last",
    "keep_every",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_best",
    "min_survivors",
    "reclaim",
    "thin_beyond",
)


def flag(name: str) -> str:
    """Return the flag of a field of `Policy`: `--keep-last` of `keep_last`."""
    spelled = {"keep_tags": "keep_tag", "reclaim": "free", "thin_beyond": "thin_after"}
    return "--" + spelled.get(name, name).replace("_", "-")
