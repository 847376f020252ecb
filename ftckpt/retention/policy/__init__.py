"""A retention policy: which checkpoints to keep, and how much may go at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from ftckpt.errors import UsageError

HOUR, DAY = 3600.0, 86400.0

# A save that is not finished and has been silent for so long is abandoned.
GRACE = DAY

# `--max-delete` where it is not given: the larger of this share of the entries and this many.
DEFAULT_SHARE, DEFAULT_NUMBER = 0.5, 50


class Metric(NamedTuple):
    """What the best checkpoints are best in.

    Attributes:
        name: as the trainer spells it.
        largest: whether the largest value is the best.
    """

    name: str
    largest: bool

    @classmethod
    def parse(cls, text: str) -> Metric:
        """Return the metric of `min:eval_loss` or `max:accuracy`.

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
    """How much one plan may drop.

    Attributes:
        amount: entries, or percent of all entries.
        percent: whether `amount` is percent.
    """

    amount: int
    percent: bool = False

    @classmethod
    def parse(cls, text: str) -> DeleteLimit:
        """Return the limit of `20` or `50%`.

        Raises:
            UsageError: it is not a whole number.
        """
        match = re.fullmatch(r"([0-9]{1,15})(%?)", text.strip())
        if match is None or (match[2] and int(match[1]) > 100):
            raise UsageError(f"--max-delete {text}: this is not a limit", hint="write 20 or 50%")
        return cls(int(match[1]), bool(match[2]))

    def __str__(self) -> str:
        return f"{self.amount}{'%' if self.percent else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to keep: an entry stays as soon as one rule or one protection says so.

    Attributes:
        keep_last: the N newest of each run.
        keep_every: for each k, the one nearest to k times N steps.
        keep_hourly: the newest of each of the N newest hours (UTC) that hold one.
        keep_daily: days likewise.
        keep_weekly: ISO weeks likewise.
        keep_monthly: months likewise.
        keep_within: seconds back from the newest.
        keep_best: the N best by `metric`.
        metric: see `Metric`.
        keep_tags: those that carry one of these tags.
        min_survivors: a run that loses a checkpoint keeps at least this many good ones.
        max_delete: how much one plan may drop; None is the larger of 50 % and 50 entries, not
            counting those that were saved since the last run.
        reclaim: stop dropping once this many bytes are reclaimed; None drops all that may go.
        delete_corrupt: whether damaged entries may go.

    Raises:
        UsageError: a number that is not above zero, or a metric without `keep_best` or the
            other way round.
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

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} {value}: it must be at least 1")
        if self.keep_within is not None and not 0 <= self.keep_within < float("inf"):
            raise UsageError(f"--keep-within {self.keep_within}: this is not a length of time")
        if (self.keep_best is None) != (self.metric is None):
            raise UsageError(
                "--keep-best and --metric go together",
                hint="--keep-best 3 --metric min:eval_loss",
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Flags of the keep rules that are set, in their own order."""
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
)


def flag(name: str) -> str:
    """Return the flag of a field of `Policy`: `--keep-last` of `keep_last`."""
    return "--" + {"keep_tags": "keep_tag", "reclaim": "free"}.get(name, name).replace("_", "-")
