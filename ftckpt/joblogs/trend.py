"""Whether a quantity rises or falls over time: Theil and Sen's slope, with Sen's limits.

The slope is the median of the slopes of all pairs of points: a quarter of the points may be wild
without changing it much. Its confidence limits come from the distribution of Kendall's rank
statistic (P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63,
1968): they hold for any distribution of the errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, median
from typing import NamedTuple

_FEWEST = 5  # below it the limits are infinite, or the normal approximation is none
_MOST = 1000  # points; the newest are taken


class Trend(NamedTuple):
    """A slope.

    Attributes:
        per_day: its value, in units of the quantity a day.
        low: lower confidence limit.
        high: upper.
        points: that it was made of.
    """

    per_day: float
    low: float
    high: float
    points: int

    @property
    def clear(self) -> bool:
        """Whether both limits lie on one side of zero."""
        return self.low > 0 or self.high < 0


def trend_of(points: Sequence[tuple[float, float]], confidence: float = 0.95) -> Trend | None:
    """Return the trend of (time in seconds, value) points; None for too few to say."""
    points = sorted(points)[-_MOST:]
    n = len(points)
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) * 86400.0
        for place, a in enumerate(points)
        for b in points[place + 1 :]
        if b[0] > a[0]
    )
    if n < _FEWEST or not slopes:
        return None
    ties = sum(
        t * (t - 1) * (2 * t + 5)
        for values in (Counter(p[0] for p in points), Counter(p[1] for p in points))
        for t in values.values()
    )
    variance = max(0.0, (n * (n - 1) * (2 * n + 5) - ties) / 18)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance)
    low = math.floor((len(slopes) - reach) / 2) - 1
    high = math.ceil((len(slopes) + reach) / 2)
    return Trend(
        median(slopes),
        slopes[low] if low >= 0 else -math.inf,
        slopes[high] if high < len(slopes) else math.inf,
        n,
    )
