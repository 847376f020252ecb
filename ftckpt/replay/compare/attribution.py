"""Attribute a difference to a component of the training state.

Only the first step that differs counts, and in it the first event in causal order. Each component
that differs as the step begins is a cause: it was not restored, or not completely. If the state is
equal and the batch differs, the cause is the position in the data; if only computed values differ,
it is the computation, or state that was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ftckpt.replay.record.log import BY_KEY, RANDOM, STATE, Items, Log, component_of
from ftckpt.reports import UNSAID

from .differences import Difference, ItemDifference
from .logs import Comparison

TITLES: dict[str, str] = {
    "weights": "model weights",
    "buffers": "buffers (BatchNorm statistics and the like)",
    "masters": "master weights",
    "moments": "optimizer state",
    "accumulated": "accumulated gradients",
    "ema": "averaged weights",
    "scheduler": "learning-rate schedule",
    "scaler": "loss scaler",
    "data": "dataloader position",
    "step": "step counter",
    "rng-python": "Python RNG",
    "rng-numpy": "NumPy RNG",
    "rng-torch": "torch RNG",
    "rng-cuda": "device RNG",
    "rng-draw": "extra random draws",
    "checkpoint": "the checkpoint itself",
    "collective": "the reduction over ranks",
    "computation": "the computation, or state that was not recorded",
}
# A restart makes up to this many draws itself, such as a data loader's seed; more mean another
# position.
_FEW = 64


@dataclass(frozen=True, slots=True)
class ReplayCause:
    """One component that explains why a restart differs.

    Attributes:
        component: key of `TITLES`.
        step: the first step that shows it.
        event: the event that shows it.
        ranks: those that show it, ascending.
        reason: how it differs, as words that follow the component's title.
        held: the step whose state the checkpoint holds, if it is another one's.
        seen: False if only numbers and random streams show it, and no tensor was read there.
    """

    SAID = ("title", "consequence")

    component: str
    step: int
    event: str
    ranks: tuple[int, ...]
    reason: str
    held: int | None = field(default=None, metadata=UNSAID)
    seen: bool = field(default=True, metadata=UNSAID)

    @property
    def title(self) -> str:
        """Return the component's title."""
        return TITLES[self.component]

    @property
    def consequence(self) -> str:
        """Return what goes wrong without it; "" where the table does not know."""
        from ftckpt.inspection.training_state import TABLE

        return next((row.consequence for row in TABLE if row.key == self.component), "")

    @property
    def missing(self) -> bool:
        """Whether nothing of it was restored."""
        return self.reason.startswith("not restored")


def causes(comparison: Comparison, reference: Log) -> tuple[ReplayCause, ...]:
    """Return the causes of a restart's first difference, the strongest first.

    `comparison` is of the uninterrupted run with the restart; `reference` is the uninterrupted
    run's log, including the steps before the restart.
    """
    here = comparison.at_first_step
    if not here:
        return ()
    state = [d for d in here if d.event in STATE]
    if not state:
        return (_computed(here, reference),)
    if here[0].step == comparison.first:
        whole = _whole_checkpoint(comparison, reference, state)
        if whole is not None:
            return (whole,)
    loading = here[0].step == comparison.first
    found = tuple(_restored(state, here, reference, loading=loading))
    data = _position(here, found, reference)
    if data is None:
        return found
    # A position explains the draws before it; no draw explains a batch seen before.
    return (data, *found) if "batch of step" in data.reason else (*found, data)


def _position(
    here: Sequence[Difference], found: Sequence[ReplayCause], reference: Log
) -> ReplayCause | None:
    """Return the position in the data as a cause beside differing random streams.

    The batch shows it if it is another step's, or if the uninterrupted run drew nothing for it from
    the differing streams.
    """
    batch = next((d for d in here if d.event in ("batch", "input")), None)
    if batch is None:
        return None
    # A module's input may come from another module with differing weights.
    if batch.event == "input" and any(cause.event not in RANDOM for cause in found):
        return None
    cause = _computed([batch], reference)
    drawn = any(
        _was_drawn_from(item.name, d, reference)
        for d in here if d.event in RANDOM for item in d.items
    )  # fmt: skip
    return cause if "batch of step" in cause.reason or not drawn else None


def _was_drawn_from(stream: str, difference: Difference, reference: Log) -> bool:
    """Whether the uninterrupted run drew from a stream for the batch of a step."""
    events = reference.steps[difference.rank][difference.step].events
    before, after = (events.get(event, {}).get(stream) for event in ("rng_start", "rng"))
    return before is None or after is None or _digest(before) != _digest(after)


def _restored(
    state: Sequence[Difference], here: Sequence[Difference], reference: Log, *, loading: bool
) -> Iterator[ReplayCause]:
    """Yield one cause for each component that differs as the step begins."""
    seen: dict[str, list[tuple[Difference, ItemDifference]]] = {}
    for difference in state:
        for item in difference.items:
            component = component_of(difference.event, item.name)
            seen.setdefault(component, []).append((difference, item))
    moments = "moments" in seen
    for component, shown in seen.items():
        # The optimizer's state carries the rate, so without it the rate is a consequence.
        if component == "scheduler" and moments and all(d.event == "lr" for d, _ in shown):
            continue
        difference, item = shown[0]
        ranks = tuple(sorted({d.rank for d, _ in shown}))
        name = component
        if difference.event in RANDOM:
            name, reason = _random(component, item.words)
            later = next((i for d in here if (d.rank, d.event) == (difference.rank, "rng")
                          for i in d.items if i.name == item.name), None)  # fmt: skip
            if later is not None and name == component:
                # Some trainers restore it after drawing the batch: then the later difference
                # counts.
                drawn, words = _random(component, later.words)
                name, reason = (drawn, words) if drawn == "rng-draw" else (name, reason)
        elif loading:
            reason = _found_elsewhere(difference, reference) or difference.detail
        else:
            reason = f"{difference.detail}; the step before changed it otherwise"
        yield ReplayCause(name, difference.step, difference.event, ranks, reason)


def _random(component: str, words: str) -> tuple[str, str]:
    number, _, rest = words.partition(" ")
    few = number == "one" or (number.isdecimal() and int(number) <= _FEW)
    if few and rest.startswith("extra"):
        return "rng-draw", f"{TITLES[component]}: {words}"
    return component, f"not restored: {words}"


def _found_elsewhere(difference: Difference, reference: Log) -> str:
    """Return which step's state of the uninterrupted run it is, in words, if any."""
    same = _same_state(difference, reference)
    if same is None:
        return ""
    if same == min(reference.steps[difference.rank]):
        return "not restored: as at the start of training"
    return f"of another step: as it was after step {same - 1}"


def _same_state(difference: Difference, reference: Log) -> int | None:
    items: dict[str, object] = {i.name: i.other for i in difference.items if i.other is not None}
    absent = [i.name for i in difference.items if i.other is None]
    for step, record in sorted(reference.steps[difference.rank].items(), reverse=True):
        there: Items | None = record.events.get(difference.event)
        if there is None or any(name in there for name in absent):
            continue
        if all(_digest(there.get(name)) == _digest(value) for name, value in items.items()):
            return step
    return None


def _digest(value: object) -> object:
    return value.get("digest") if isinstance(value, dict) else value


def _whole_checkpoint(
    comparison: Comparison, reference: Log, state: Sequence[Difference]
) -> ReplayCause | None:
    """Return the cause if the checkpoint holds another step, all or in part."""
    heavy = [d for d in state if BY_KEY[d.event].heavy and d.event not in ("ema", "grad_start")]
    steps = {d.event: _same_state(d, reference) for d in heavy}
    start = min(reference.steps[state[0].rank])
    other = {step for step in steps.values() if step is not None and step != start}
    if heavy and set(steps.values()) == {None}:
        return _held_by_numbers(comparison, reference, state, heavy)
    if not other or None in steps.values():
        return None
    ranks = tuple(sorted({d.rank for d in state}))
    first = comparison.first
    compared = {event for (step, event, _), _ in comparison.grid.items() if step == first}
    right = [e for e in ("params", "optimizer") if e in compared and e not in steps]
    if right or len(other) > 1:
        parts = [f"{BY_KEY[e].title} of step {s - 1}" for e, s in steps.items() if s is not None]
        parts += [f"{BY_KEY[e].title} of step {first - 1}" for e in right]
        return ReplayCause("checkpoint", first, state[0].event, ranks, f"torn: {', '.join(parts)}")
    held = other.pop()
    reason = f"stale: it holds the state after step {held - 1} instead of {first - 1}"
    return ReplayCause("checkpoint", first, state[0].event, ranks, reason, held)


def _held_by_numbers(
    comparison: Comparison,
    reference: Log,
    state: Sequence[Difference],
    heavy: Sequence[Difference],
) -> ReplayCause | None:
    """Return a stale checkpoint's cause if only numbers and random streams show its step.

    Those of another step must all be of the same earlier one, whose tensors were not read.
    """
    first, start = comparison.first, min(reference.steps[state[0].rank])
    light: dict[str, int] = {}
    for difference in state:
        step = None if BY_KEY[difference.event].heavy else _same_state(difference, reference)
        # A stream in its start state is not restored yet: that says nothing about the checkpoint.
        not_yet = difference.event in RANDOM and step == start
        if step is not None and difference.event != "lr" and not not_yet:
            light.setdefault(BY_KEY[difference.event].title, step)
    if len(set(light.values())) != 1:
        return None
    held = next(iter(light.values()))
    ranks = tuple(sorted({d.rank for d in state}))
    there = [reference.steps[rank].get(held) for rank in ranks]
    if held >= first or held == start or any(
        record is None or d.event in record.events for record in there for d in heavy
    ):  # fmt: skip
        return None
    reason = (
        f"stale: it holds the state after step {held - 1} instead of {first - 1}, by its "
        f"{' and '.join(light)}"
    )
    return ReplayCause("checkpoint", first, state[0].event, ranks, reason, held, seen=False)


def _computed(here: Sequence[Difference], reference: Log) -> ReplayCause:
    """Return the cause if the state is equal and a value computed from it is not."""
    first = here[0]
    ranks = tuple(sorted({d.rank for d in here if d.event == first.event}))
    if first.event in ("batch", "input"):
        again = _same_state(first, reference)
        shown = "" if again is None else f": the batch of step {again}"
        return ReplayCause("data", first.step, first.event, ranks, f"another batch{shown}")
    if first.event in RANDOM:
        item = first.items[0]
        name, reason = _random(component_of(first.event, item.name), item.words)
        reason = reason.replace("not restored: ", "moved between batch and forward pass: ")
        return ReplayCause(name, first.step, first.event, ranks, reason)
    if first.event == "told":
        component = component_of(first.event, first.items[0].name)
        return ReplayCause(component, first.step, first.event, ranks, f"differs: {first.words}")
    if first.event == "grad":
        local = any(d.event == "grad_local" for d in here)
        recorded = any("grad_local" in r.events for r in reference.steps[first.rank].values())
        if recorded and not local:
            reason = "local gradients are equal, reduced ones are not"
            return ReplayCause("collective", first.step, first.event, ranks, reason)
    reason = f"state, batch and random streams are equal, {first.words} differs"
    return ReplayCause("computation", first.step, first.event, ranks, reason)
