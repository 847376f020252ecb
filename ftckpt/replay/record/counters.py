"""Step counters: a training's own count, compared with the steps that it made.

A counter shows in saved state (`torch.save({"step": 8, ...})`), in `ftckpt.hook.step(step=8)`, and
in the end of the training. A restart whose counter is off by one computes the same for a while;
then it saves, evaluates, decays or ends at another step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from .log import Log

# A counter by its name, anywhere in saved state except in an optimizer's own.
_COUNTER = re.compile(
    r"(?:(?:global|train|trainer|training|current|curr|num|total)_?)?(?:step|steps|iteration)$",
    re.IGNORECASE,
)
_NOT_THE_TRAINERS = re.compile(r"optim|sched|model|state_dict|scaler|args|config", re.IGNORECASE)
_DEEPEST = 3
# Number of objects searched for a tensor: a checkpoint begins with one.
_LOOKED_AT = 10_000


def holds_tensors(state: Any) -> bool:
    """Whether nested state holds a tensor, or something with a `state_dict`."""
    torch = sys.modules["torch"]
    todo, looked = [state], 0
    while todo and looked < _LOOKED_AT:
        value = todo.pop()
        looked += 1
        if isinstance(value, torch.Tensor) or hasattr(value, "state_dict"):
            return True
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
    return bool(todo)


def step_counters(state: Any) -> dict[str, int]:
    """Return the trainer's counters in saved state, by path."""
    return dict(_counters(state, "", 0))


def _counters(state: Any, path: str, depth: int) -> Iterator[tuple[str, int]]:
    if not isinstance(state, Mapping) or depth > _DEEPEST:
        return
    for key, value in state.items():
        if not isinstance(key, str) or _NOT_THE_TRAINERS.search(key):
            continue
        name = f"{path}.{key}" if path else key
        if type(value) is int and _COUNTER.match(key):
            yield name, value
        else:
            yield from _counters(value, name, depth + 1)


def miscounted(reference: Log, other: Log, last: int | None = None) -> tuple[int, str] | None:
    """Return the first step at which a restart's count is wrong, and how, in words.

    `reference` is the uninterrupted run, with the steps before the restart; `last` the last step
    that both should make, None if they need not end alike.
    """
    for found in _miscounts(reference, other):
        return found
    if last is None:
        return None
    ended, ours = other.ended_after(), reference.finished()
    if ended is not None and ended < last and ours and ours[-1] >= last:
        return ended, (
            f"the restart ended by itself after step {ended}, and the uninterrupted run made step "
            f"{ended + 1}: it counts {last - ended} too many, unless it ran out of data"
            if (reference.ended_after() or 0) == last
            else f"the restart ended by itself after step {ended}, and the uninterrupted run made "
            f"step {ended + 1}"
        )
    began = max((step for of in other.steps.values() for step in of), default=0)
    if reference.ended_after() == last and ended is None and began > last:
        return last + 1, (
            f"the uninterrupted run ended after step {last}, and the restart began step {last + 1}:"
            " it counts too few"
        )
    return None


def _miscounts(reference: Log, other: Log) -> Iterator[tuple[int, str]]:
    ours = _shown(reference)
    for name, counts in sorted(_shown(other).items()):
        shown = "the step that the training tells" if name == "told" else name
        for step, count in sorted(counts.items()):
            known = sorted(ours.get(name, {}).items())
            right = _expected(known, step)
            if right is not None and abs(count - right) >= 1:
                yield step, f"{shown} is {count} after step {step} instead of {int(right)}"
            elif right is None and known and step < known[-1][0]:
                there = [after for after, said in known if said == count]
                if there:
                    yield step, f"{shown} is {count} after step {step} instead of step {there[0]}"


def _expected(known: Sequence[tuple[int, int]], step: int) -> Fraction | None:
    """Return a counter's expected value after a step, from other steps; None if unknown.

    A training of several optimizers makes several optimizer steps, which are counted here, for each
    of its own; then the value between two of its own is a fraction.
    """
    for after, count in known:
        if after == step:
            return Fraction(count)
    if not known:
        return None
    if len(known) == 1:  # one save suffices only if its count equals the steps made
        return Fraction(step) if known[0][0] == known[0][1] else None
    (first, low), (last, high) = known[0], known[-1]
    slope = Fraction(high - low, last - first)
    if any(count != low + slope * (after - first) for after, count in known):
        return None
    return low + slope * (step - first)


def _shown(log: Log) -> dict[str, dict[int, int]]:
    """Return the values of counters, by name and by the steps that were made."""
    shown: dict[str, dict[int, int]] = {}
    for of in log.steps.values():
        for record in of.values():
            for name, text in record.events.get("counter", {}).items():
                count, _, after = str(text).partition(" ")
                if count.lstrip("-").isdecimal() and after.isdecimal():
                    shown.setdefault(name, {})[int(after)] = int(count)
    return shown
