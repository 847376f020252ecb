"""Find a checkpoint's step from the counters in its content.

A name (`step-1000`) is a hint, and a modification time is not even that, because copies reset it.
Counters in the content are evidence. There are three clocks, and only equal clocks are compared:
the trainer's iteration, the optimizer's own step count, the scheduler's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from ftckpt.findings import Finding, finding, listed


class StepRole(StrEnum):
    """The clock of a step-like scalar; only equal clocks are compared."""

    ITERATION = "iteration"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"


class Scalar(NamedTuple):
    """A step-like number found in a file: evidence of which save wrote that file."""

    file: str
    name: str
    value: float
    role: StepRole


# Counters read per file: enough for two to be independent, few enough to be cheap.
SCALARS_A_FILE = 8


class Allowance:
    """Limits the counters that are read of each file."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    def take(self, file: str) -> bool:
        """Count one of a file; return False if its share is used up."""
        self._taken[file] += 1
        return self._taken[file] <= self._limit


_ITERATION = re.compile(
    r"(?:^|[./:])(?:global_steps?|iteration|iter_num|current_step|num_updates)$"
    r"|(?:^|[./:])(?:train_state|trainer_state|train_status|state|progress)[./:]step$"
    r"|^(?:step|global_step|iteration)$"
)
_OPTIMIZER = re.compile(r"(?:^|[./:])(?:step|common_step)$")
_SCHEDULER = re.compile(r"(?:sched|^scheduler).*[./:]last_epoch$")


def role_of(name: str, *, optimizer: bool = False) -> StepRole | None:
    """Return the clock of a scalar with this name, or None if it is not a step counter.

    `name` is a dotted path in the trainer's state; `optimizer` says that it lies in the
    optimizer's.
    """
    if optimizer:
        return StepRole.OPTIMIZER if _OPTIMIZER.search(name) else None
    if _SCHEDULER.search(name):
        return StepRole.SCHEDULER
    if _ITERATION.search(name):
        return StepRole.ITERATION
    return None


def is_counter(value: Any) -> bool:
    """Whether a stored value can be a count of steps.

    NaN and numbers beyond any training are damage or hostile, and would break arithmetic.
    """
    return type(value) in (int, float) and 0 <= value < 1 << 53


def step_of(scalars: Iterable[Scalar]) -> int | None:
    """Return the step that most counters show: the trainer's own, else the optimizer's."""
    values: dict[StepRole, Counter[float]] = defaultdict(Counter)
    for scalar in scalars:
        values[scalar.role][scalar.value] += 1
    for role in (StepRole.ITERATION, StepRole.OPTIMIZER):
        if values[role]:
            best, _ = max(values[role].items(), key=lambda item: (item[1], item[0]))
            return int(best)
    return None


def mixed_steps(scalars: Iterable[Scalar], files: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each file whose counters disagree with the other files.

    Two independent counters of one file with one value, and no counter of the same clock that
    agrees with the rest, are a verdict (`mixed-steps`). Less is a note (`step-disagrees`):
    parameters that were frozen for a while and unused experts have counts of their own. Files
    (`files` are all data files) without a counter share one note.
    """
    by_file: dict[str, list[Scalar]] = defaultdict(list)
    for scalar in scalars:
        by_file[scalar.file].append(scalar)
    # One vote per file and clock, so that a file with many counters cannot outvote the rest.
    votes: dict[StepRole, Counter[float]] = defaultdict(Counter)
    for own in by_file.values():
        for role, value in {(s.role, s.value) for s in own}:
            votes[role][value] += 1
    for file, own in sorted(by_file.items()):
        odd = [s for s in own if _outvoted(s, own, votes[s.role])]
        if not odd:
            continue
        first = odd[0]
        majority = _majority(votes[first.role])
        said = f"{file} holds {first.name} = {first.value:g}, the other files say {majority:g}"
        if _is_verdict(odd, own):
            yield finding(
                "mixed-steps",
                f"{said}; {len(odd)} counters agree: the file is of another save",
                file=file,
                tensor=first.name,
            )
        else:
            yield finding(
                "step-disagrees",
                f"{said}; one counter alone is not a verdict",
                file=file,
                tensor=first.name,
            )
    silent = sorted(set(files) - set(by_file))
    if silent:
        yield finding(
            "step-unknown",
            f"cannot tell which step {listed(silent, 3)} {'are' if silent[1:] else 'is'} of: "
            "no step counter inside",
            file=silent[0] if len(silent) == 1 else None,
        )


def _is_verdict(odd: list[Scalar], own: list[Scalar]) -> bool:
    """Whether the disagreeing counters of one file can only come from another save."""
    if len({s.name for s in odd}) < 2:
        return False
    for role in {s.role for s in odd}:
        if len({s.value for s in odd if s.role is role}) > 1:
            return False
        if any(s.role is role and s not in odd for s in own):
            return False
    return True


def _majority(votes: Counter[float]) -> float:
    return max(votes.items(), key=lambda item: (item[1], item[0]))[0]


def _outvoted(scalar: Scalar, own: Iterable[Scalar], votes: Counter[float]) -> bool:
    """Whether the other files with this clock mostly show another value."""
    elsewhere = votes.copy()
    for value in {s.value for s in own if s.role is scalar.role}:
        elsewhere[value] -= 1
    others = +elsewhere
    if not others:
        return False
    best = _majority(others)
    return best != scalar.value and others[best] > others[scalar.value]
