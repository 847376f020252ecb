"""Find random streams that are never seeded and never used.

A script that seeds torch alone also has a Python and a NumPy generator. The operating system seeds
both anew in every process, so they differ between any two runs and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ftckpt.replay.record.events import RANDOM
from ftckpt.replay.record.log import Log, StepRecord


def idle_streams(repetitions: Sequence[Log], others: Sequence[Log]) -> tuple[str, ...]:
    """Return the names of streams that differ between runs without consequence.

    A seeded stream counts even if nothing draws from it in these steps, because later draws, at the
    end of an epoch, depend on it. So only a stream is left out that already differs between two
    runs that began alike (`repetitions`), and that no rank of any run has moved. `others` are the
    runs to compare with them.
    """
    began: dict[tuple[int, str], set[str]] = {}
    moved: set[str] = set()
    for number, log in enumerate((*repetitions, *others)):
        for place, states in _states(log).items():
            if len(states) > 1:
                moved.add(place[1])
            if number < len(repetitions):
                began.setdefault(place, set()).update(states)
    unlike = {name for (_, name), states in began.items() if len(states) > 1}
    return tuple(sorted(unlike - moved))


def _states(log: Log) -> Mapping[tuple[int, str], set[str]]:
    """Return the digests of every state in a log, by rank and stream."""
    found: dict[tuple[int, str], set[str]] = {}
    for rank, of in log.steps.items():
        for record in of.values():
            for name, digest in _streams(record):
                found.setdefault((rank, name), set()).add(digest)
    return found


def _streams(record: StepRecord) -> Iterator[tuple[str, str]]:
    for event in RANDOM:
        for name, value in record.events.get(event, {}).items():
            if isinstance(value, dict) and isinstance(value.get("digest"), str):
                yield name, value["digest"]
