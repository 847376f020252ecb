"""Quantiles of any number of durations in bounded memory.

The first few thousand are kept as they are. From then on they are counted in buckets whose bounds
grow by 2 %, so that a quantile is right to 1 %: the sketch of Masson, Rim and Lee ("DDSketch", VLDB
2019) without its bound on the number of buckets, because a duration between a microsecond and a
year falls into one of 1,600.
"""

from __future__ import annotations

import math

_EXACT = 4096
_GROWTH = math.log(1.02)
_LEAST, _MOST = 1e-6, 1e9


class Durations:
    """Durations with their weights."""

    def __init__(self) -> None:
        self.count = 0.0
        self._exact: list[tuple[float, float]] | None = []
        self._buckets: dict[int, float] = {}

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """Count a duration; what is not above zero, or above 30 years, is none."""
        if not _LEAST <= seconds <= _MOST or not weight > 0:
            return
        self.count += weight
        if self._exact is not None:
            self._exact.append((seconds, weight))
            if len(self._exact) > _EXACT:
                exact, self._exact = self._exact, None
                for each, its in exact:
                    self._put(each, its)
            return
        self._put(seconds, weight)

    def _put(self, seconds: float, weight: float) -> None:
        place = math.floor(math.log(seconds) / _GROWTH)
        self._buckets[place] = self._buckets.get(place, 0.0) + weight

    def quantile(self, share: float) -> float | None:
        """Return the duration that a share of all does not exceed; None where there are none.

        Of few it lies between two neighbours, as a median does.
        """
        if not self.count:
            return None
        if self._exact is None:
            rows = [(math.exp((place + 0.5) * _GROWTH), n) for place, n in self._buckets.items()]
        else:
            rows = self._exact
        rows = sorted(rows)
        if self._exact is not None and all(weight == 1 for _, weight in rows):
            at = share * (len(rows) - 1)
            low = math.floor(at)
            high = min(low + 1, len(rows) - 1)
            return rows[low][0] + (at - low) * (rows[high][0] - rows[low][0])
        wanted, seen = share * self.count, 0.0
        for seconds, weight in rows:
            seen += weight
            if seen >= wanted * (1 - 1e-12):
                return seconds
        return rows[-1][0]

    @property
    def size(self) -> int:
        """Number of entries held."""
        return len(self._buckets) if self._exact is None else len(self._exact)


class Mean:
    """A mean of any number of values."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        """Count a value; None is none."""
        if value is not None:
            self._sum += value
            self._count += 1

    @property
    def value(self) -> float | None:
        """The mean; None without values."""
        return self._sum / self._count if self._count else None
