"""The events of a training step in causal order, and the component that each shows.

The order is the order of causes: state as the step begins, then the batch, the forward pass, the
gradients. So the first differing event is the origin, and later ones are consequences.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """The part of a step that an event belongs to."""

    START = "as the step begins"
    BATCH = "when the batch is drawn"
    FORWARD = "in the forward pass"
    BACKWARD = "in the backward pass"
    TOLD = "as the training tells at its end"
    LOGGED = "in the logged numbers"


class Event(NamedTuple):
    """One kind of recorded event.

    Attributes:
        key: its name in a record.
        title: for people.
        phase: when it is recorded.
        component: the component of the training state that it shows, a key of
            `training_state.TABLE` if there is one; "" for a consequence of the state.
        heavy: whether it reads whole tensors, so that it may be recorded only every n steps.
        compared: whether its differences count for the training; otherwise `counters` checks it.
    """

    key: str
    title: str
    phase: Phase
    component: str = ""
    heavy: bool = False
    compared: bool = True


EVENTS: tuple[Event, ...] = (
    Event("masters", "master weights", Phase.START, "masters", heavy=True),
    Event("params", "model weights", Phase.START, "weights", heavy=True),
    Event("buffers", "buffers", Phase.START, "buffers", heavy=True),
    Event("optimizer", "optimizer state", Phase.START, "moments", heavy=True),
    Event("ema", "averaged weights", Phase.START, "ema", heavy=True),
    Event("grad_start", "accumulated gradients", Phase.START, "accumulated", heavy=True),
    Event("scheduler", "learning-rate schedule", Phase.START, "scheduler"),
    Event("lr", "learning rate", Phase.START, "scheduler"),
    Event("scaler", "loss scaler", Phase.START, "scaler"),
    Event("rng_start", "random streams", Phase.START),
    Event("batch", "batch", Phase.BATCH, "data"),
    Event("rng", "random streams before the forward pass", Phase.FORWARD),
    Event("input", "input of the model", Phase.FORWARD, "data"),
    Event("loss", "loss", Phase.FORWARD),
    Event("grad_local", "gradients before their reduction", Phase.BACKWARD, heavy=True),
    Event("grad", "gradients", Phase.BACKWARD, heavy=True),
    Event("told", "state that the training tells", Phase.TOLD),
    Event("metric", "logged numbers", Phase.LOGGED),
    Event("counter", "step counters", Phase.LOGGED, "step", compared=False),
)
ORDER: dict[str, int] = {event.key: place for place, event in enumerate(EVENTS)}
BY_KEY: dict[str, Event] = {event.key: event for event in EVENTS}
STATE: frozenset[str] = frozenset(e.key for e in EVENTS if e.phase is Phase.START)
RANDOM: frozenset[str] = frozenset({"rng_start", "rng"})

# Names of random streams in a record; devices are `cuda:0`, `cuda:1`, ….
STREAMS: dict[str, str] = {"python": "rng-python", "numpy": "rng-numpy", "torch": "rng-torch"}

# State from `ftckpt.hook.step`, and its component.
TOLD: dict[str, str] = {
    "params": "weights",
    "buffers": "buffers",
    "optimizer": "moments",
    "scheduler": "scheduler",
    "scaler": "scaler",
    "ema": "ema",
    "cursor": "data",
}


def component_of(event: str, item: str) -> str:
    """Return the component that a difference of `item` in `event` shows; "" for a consequence."""
    if event in RANDOM:
        return STREAMS.get(item, "rng-cuda")
    if event == "told":
        return TOLD.get(item.partition(".")[0], "")
    return BY_KEY[event].component
