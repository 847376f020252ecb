"""The log of a run: JSON lines, one file per rank, one line per step.

    {"log": "ftckpt.replay/1", "rank": 0, "world_size": 1, ...}
    {"step": 11, "rank": 0, "events": {"loss": {"0": "float32 0x1.1p+1"}, ...}, "notes": [...]}

An event maps items to values: a tensor's name to its digest, a stream's name to its state
(`streams`), a place to a float (`floats`). A line that a killed process left half written is
allowed at the end of a file and damage anywhere else. A record marked `partial` holds the beginning
of a step that never finished: the state after the step before.

The events of a training step in causal order, and the component that each shows.

The order is the order of causes: state as the step begins, then the batch, the forward pass, the
gradients. So the first differing event is the origin, and later ones are consequences.

Floats in a record: their type and their bits in hexadecimal, never rounded decimals.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError, NotFoundError


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


SCHEMA = "ftckpt.replay/1"
# Facts about the process in a log's first line, beside rank and world size.
CONDITIONS = ("torch", "python", "threads", "deterministic", "cudnn_benchmark", "tf32")
# A line holds one digest per tensor: some ten megabytes for a hundred thousand tensors.
LONGEST_LINE = 256 << 20

# A note of the record that a process writes when it ends by itself.
ENDED = "the training ended"

Value = str | Mapping[str, Any] | None
Items = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank's record of one step.

    Attributes:
        step: its number; the first step of a training is 1.
        rank: of the process in its job.
        events: by `events.Event.key`, each a mapping of items to values.
        notes: other events before or in it: saves, seeds.
        partial: whether only its beginning was recorded.
    """

    step: int
    rank: int
    events: Mapping[str, Items]
    notes: tuple[str, ...] = ()
    partial: bool = False


@dataclass(frozen=True)
class Log:
    """The log of one run, all ranks.

    Attributes:
        name: of the run, for answers.
        steps: by rank, then step.
        world_size: number of ranks of the job; None if unknown.
        limits: what the log cannot show, in words: rounded numbers, no state.
        conditions: versions, threads and settings, from its first rank.
        numbered: where the numbers of its steps come from: `given` by `replay run` or
            FTCKPT_REPLAY_AT, `told` by `ftckpt.hook.step`, or `counted` from 1, which is wrong
            for a restart; "" if the log does not say.
    """

    name: str
    steps: Mapping[int, Mapping[int, StepRecord]]
    world_size: int | None = None
    limits: tuple[str, ...] = field(default=())
    conditions: Mapping[str, object] = field(default_factory=dict)
    numbered: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that logged anything, ascending."""
        return tuple(sorted(self.steps))

    def ended_after(self) -> int | None:
        """Return the step after which the training ended by itself; None if unknown."""
        ends = [r.step - 1 for of in self.steps.values() for r in of.values() if ENDED in r.notes]
        return min(ends, default=None)

    def until(self, last: int) -> Log:
        """Return it without the steps after `last`."""
        steps = {
            rank: {s: r for s, r in of.items() if s <= last} for rank, of in self.steps.items()
        }
        return replace(self, steps=steps)

    def renumbered(self, by: int) -> Log:
        """Return the log with a number added to each step."""
        steps = {
            rank: {s + by: replace(r, step=s + by) for s, r in of.items() if s + by >= 0}
            for rank, of in self.steps.items()
        }
        return replace(self, steps=steps)

    def with_steps_of(self, other: Log, last: int) -> Log:
        """Return it with the steps of a fuller repetition up to `last`."""
        steps = {
            rank: {**of, **{s: r for s, r in other.steps.get(rank, {}).items() if s <= last}}
            for rank, of in self.steps.items()
        }
        return replace(self, steps=steps)

    def finished(self) -> tuple[int, ...]:
        """Return the steps that every rank has finished, ascending."""
        done = [{r.step for r in of.values() if not r.partial} for of in self.steps.values()]
        return tuple(sorted(set.intersection(*done))) if done else ()


def line(record: StepRecord) -> str:
    """Return a record as one line of a log, without its line end."""
    body: dict[str, Any] = {"step": record.step, "rank": record.rank, "events": record.events}
    if record.notes:
        body["notes"] = record.notes
    if record.partial:
        body["partial"] = True
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def read_log(path: Path, name: str = "") -> Log:
    """Read ftckpt's own log: a directory of `rank-*.jsonl`, or one such file.

    Raises:
        NotFoundError: the log does not exist.
        CorruptError: a line inside it is damaged, or two lines are of one step.
    """
    files = sorted(path.glob("rank-*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise NotFoundError(f"no log at {path}", hint="a run writes rank-0.jsonl, …")
    steps: dict[int, dict[int, StepRecord]] = {}
    world: set[int] = set()
    conditions: dict[str, object] = {}
    numbered = ""
    for file in files:
        for number, body in _lines(file):
            if "log" in body:
                world |= {body["world_size"]} if type(body.get("world_size")) is int else set()
                conditions = conditions or {k: body[k] for k in CONDITIONS if k in body}
                numbered = numbered or str(body.get("numbered", ""))
                continue
            record = _record(body, file, number)
            of = steps.setdefault(record.rank, {})
            if record.step in of and not of[record.step].partial:
                raise CorruptError(
                    f"step {record.step} of rank {record.rank} stands twice in {file.name}",
                    hint="a log is of one run: give each run a directory of its own",
                )
            of[record.step] = record
    size = max(world) if world else None
    return Log(name or path.name, steps, size, conditions=conditions, numbered=numbered)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as stream:
        number = 0
        while text := stream.readline(LONGEST_LINE):
            number += 1
            if not text.endswith(b"\n"):  # the process was killed while it wrote
                return
            try:
                body = json.loads(text)
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                raise CorruptError(f"line {number} of {file.name} is not a JSON object")
            yield number, body


def _record(body: dict[str, Any], file: Path, number: int) -> StepRecord:
    events, notes = body.get("events"), body.get("notes", [])
    numbers = (body.get("step"), body.get("rank"))
    if (
        not isinstance(events, dict)
        or not all(type(n) is int and n >= 0 for n in numbers)
        or not all(key in ORDER and _is_items(items) for key, items in events.items())
        or not isinstance(notes, list)
        or not all(isinstance(note, str) for note in notes)
    ):
        raise CorruptError(f"line {number} of {file.name} is not a record of a step")
    partial = body.get("partial") is True
    return StepRecord(body["step"], body["rank"], events, tuple(notes), partial)


def _is_items(items: object) -> bool:
    return isinstance(items, dict) and all(
        value is None or isinstance(value, (str, dict)) for value in items.values()
    )


def losses(record: StepRecord) -> Sequence[str]:
    """Return the losses of a step as written, one per backward pass."""
    return [value for value in record.events.get("loss", {}).values() if isinstance(value, str)]


# Types whose bits are the upper half of a float32 or a type that `struct` knows.
_FORMATS = {"float64": ("<d", "<q"), "float32": ("<f", "<i"), "float16": ("<e", "<h")}


def written(value: float, dtype: str = "float64") -> str:
    """Return a float as in a record: `float32 0x1.8000000000000p+1`."""
    return f"{dtype} {float(value).hex()}"


def value_of(text: str) -> float | None:
    """Return the float of a record, also one in decimals; None for other text."""
    _, _, digits = text.rpartition(" ")
    for read in (float, float.fromhex):
        try:
            return read(digits)
        except (ValueError, OverflowError):
            continue
    return None


def ulps(first: str, second: str) -> int | None:
    """Return the distance of two floats of one type in representable numbers; None if unknown."""
    dtype, _, _ = first.rpartition(" ")
    if dtype != second.rpartition(" ")[0]:
        return None
    a, b = value_of(first), value_of(second)
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    if dtype == "bfloat16":
        return abs(_ordinal(a, "float32") - _ordinal(b, "float32")) >> 16
    return abs(_ordinal(a, dtype) - _ordinal(b, dtype)) if dtype in _FORMATS else None


def _ordinal(value: float, dtype: str) -> int:
    """Return the rank of a float among all floats of its type, by value."""
    real, whole = _FORMATS[dtype]
    bits = int(struct.unpack(whole, struct.pack(real, value))[0])
    return bits if bits >= 0 else -(bits & ((1 << (8 * struct.calcsize(whole) - 1)) - 1))
