"""Random streams that nobody seeds and nothing draws from.

A script that seeds torch alone has a Python and a NumPy generator too. Both are seeded anew by the
operating system in every process, so that no two runs agree on them, and they decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ftckpt.replay.record.events import RANDOM
from ftckpt.replay.record.log import Log, StepRecord


def idle_streams(repetitions: Sequence[Log], others: Sequence[Log]) -> tuple[str, ...]:
    """Return the names of streams that differ between runs and are of no consequence.

    A stream that was seeded counts even where nothing draws from it in these steps: what is drawn
    later, at the end of an epoch, depends on it. So only one that differs already between two runs
    that began alike is left out, and only where no rank of any run has moved it.

    Args:
        repetitions: runs that began alike.
        others: what they are compared with.
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
    """Return the digests of every state that a log shows, by rank and stream."""
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
