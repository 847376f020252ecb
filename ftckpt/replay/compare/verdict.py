"""The verdict on a restart, from the uninterrupted run, its repetition and the restarts.

    U against U'   A against B   U against A   verdict
    equal          equal         equal         exact, for the compared steps
    equal          equal         differ        state is missing or wrongly restored
    equal          differ        -             unseeded randomness, or a race while loading
    differ         -             -             the training is not deterministic

In the last case nothing else is attributed: every other difference may be the same noise. A run
that failed, or that logged less than it should, never passes.

Compare tensors that differ, element by element.

A log holds digests, which show that a tensor differs and not where. Once the first differing
tensors are known, both runs are repeated, and each keeps their bytes of that one step beside its
log (`journal.Journal.keep`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.comparison.arithmetic import bits_of, has_values, measure, values, wide_type
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.replay.processes import values_file
from ftckpt.replay.record.counters import miscounted
from ftckpt.replay.record.log import BY_KEY, RANDOM, STATE, Log, component_of, value_of, written
from ftckpt.reports import UNSAID

from .attribution import TITLES, ReplayCause, causes
from .logs import Comparison, compare


@dataclass(frozen=True, slots=True)
class Closeup:
    """The differing elements of one tensor of two runs.

    Attributes:
        step: of the training.
        rank: whose tensor it is.
        event: key of `events.EVENTS`.
        item: name of the tensor.
        dtype: torch's name of its type.
        shape: of the rank's part.
        index: of the first element that differs.
        reference: that element in the uninterrupted run, as `floats.written` or a number's digits.
        other: the same in the restart.
        ulps: distance of the two in units in the last place; None if not defined.
        changed: number of differing elements.
        compared: number of compared elements: all, or as many as `LIMIT` bytes hold.
        most: the largest such distance of two elements; None as for `ulps`.
    """

    step: int
    rank: int
    event: str
    item: str
    dtype: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    reference: str
    other: str
    ulps: int | None
    changed: int
    compared: int
    most: int | None

    @property
    def words(self) -> str:
        """Return it in words: `0.weight[3, 5] is 0.25 instead of 0.5, 3 ULP; …`."""
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        apart = "" if self.ulps is None else f", {self.ulps:,} ULP"
        far = f", the farthest by {self.most:,} ULP" if self.most and self.changed > 1 else ""
        return (
            f"{self.item}{place} is {_shown(self.other)} instead of {_shown(self.reference)}"
            f"{apart}; {self.changed:,} of {self.compared:,} elements differ{far}"
        )


def _shown(text: str) -> str:
    value = value_of(text) if " " in text else None
    return text if value is None else f"{value:.9g}"


def look(
    reference: Path, other: Path, step: int, rank: int, event: str, items: tuple[str, ...]
) -> tuple[Closeup, ...]:
    """Compare the values that two runs kept of the same tensors.

    Args:
        reference: directory of the uninterrupted run's log.
        other: of the restart's.
        step: at which they were kept.
        rank: whose tensors they are.
        event: that they belong to.
        items: their names, in the order of the request.

    Returns:
        One for each differing tensor that both kept in one type and shape.
    """
    found = []
    for number, item in enumerate(items):
        files = [values_file(log, rank, number) for log in (reference, other)]
        if not all(file.exists() for file in files):
            continue
        (head, ours), (head_too, theirs) = map(_kept, files)
        name, shape = head["dtype"], tuple(head["shape"])
        if head != head_too or not DTYPES[name].itemsize:
            continue
        first = _first_unlike(DTYPES[name], ours, theirs)
        if first is None:
            continue
        count = len(ours) // DTYPES[name].itemsize
        tally = measure((DTYPES[name], ours), (DTYPES[name], theirs), count, None)
        pair = [_element(DTYPES[name], data, first) for data in (ours, theirs)]
        texts = [_text(DTYPES[name], data) for data in pair]
        here = measure((DTYPES[name], pair[0]), (DTYPES[name], pair[1]), 1, None)
        finite = not (here.nan_ours or here.nan_theirs or here.inf_ours or here.inf_theirs)
        found.append(
            Closeup(
                step, rank, event, item, name, shape, _index(first, shape), texts[0], texts[1],
                here.max_ulp if finite else None, tally.changed, count, tally.max_ulp,
            )
        )  # fmt: skip
    return tuple(found)


def _kept(file: Path) -> tuple[dict[str, Any], bytes]:
    head, _, data = file.read_bytes().partition(b"\n")
    return json.loads(head), data


def _first_unlike(dtype: DType, ours: bytes, theirs: bytes) -> int | None:
    """Return the place of the first element whose bits differ."""
    import numpy as np

    other = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
    return int(other.argmax()) // dtype.itemsize if other.any() else None


def _element(dtype: DType, data: bytes, place: int) -> bytes:
    return data[place * dtype.itemsize : (place + 1) * dtype.itemsize]


def _text(dtype: DType, data: bytes) -> str:
    """Return an element as in a record; both parts of a complex number."""
    import numpy as np

    if not has_values(dtype):
        return data.hex()
    bits = bits_of(dtype, data)
    wide = np.empty(bits.size, wide_type(dtype))
    values(dtype, bits, wide)
    if dtype.family == "float":
        return written(float(wide[0]), dtype.name)
    if dtype.family == "complex":
        return repr(complex(*wide))
    return str(int(wide[0]))


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for axis in range(len(shape)):
        here, place = divmod(place, math.prod(shape[axis + 1 :]))
        index.append(here)
    return tuple(index)


# Conditions of a run that can change its result.
_DRIFT = (
    ("deterministic", False, "deterministic algorithms were not asked for:"
     " torch.use_deterministic_algorithms(True)"),
    ("cudnn_benchmark", True, "torch.backends.cudnn.benchmark was on: it chooses kernels by how"
     " fast they ran"),
)  # fmt: skip


class Verdict(StrEnum):
    """The combined result of the comparisons."""

    EXACT = "exact"
    STATE = "state missing or wrongly restored"
    UNSEEDED = "unseeded randomness"
    FRAMEWORK = "the training does not repeat itself"
    NOT_COMPARED = "not compared"


class ComparedSteps(NamedTuple):
    """The steps of a comparison."""

    first: int
    last: int


@dataclass(frozen=True)
class Judgement:
    """The verdict, and its grounds.

    Attributes:
        verdict: of the matrix.
        sentence: the verdict in one sentence, with steps, ranks and the first cause.
        first: the first step after the checkpoint.
        last: the last step that was compared.
        causes: components that explain it; () unless the verdict is STATE.
        comparisons: in the order of the matrix.
        notes: limits of the verdict: repetitions that were not run, limits of the logs.
        problems: reasons of a NOT_COMPARED verdict.
        closeups: the first differing tensors, element by element.
        idle: random streams that were left out (`unused_rng.idle_streams`).
    """

    SAID: ClassVar = {"verdict": "word", "compared": "compared"}

    verdict: Verdict = field(metadata=UNSAID)
    sentence: str = field(metadata=UNSAID)
    first: int = field(metadata=UNSAID)
    last: int = field(metadata=UNSAID)
    causes: tuple[ReplayCause, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    closeups: tuple[Closeup, ...] = ()
    idle: tuple[str, ...] = field(default=(), metadata=UNSAID)

    @property
    def word(self) -> str:
        """The verdict in one stable word."""
        return self.verdict.name.lower()

    @property
    def compared(self) -> ComparedSteps:
        """The steps that were compared."""
        return ComparedSteps(self.first, self.last)

    @property
    def code(self) -> ExitCode:
        """What the verdict causes."""
        codes = {Verdict.EXACT: ExitCode.OK, Verdict.NOT_COMPARED: ExitCode.UNVERIFIED}
        return codes.get(self.verdict, ExitCode.DIFFERENT)

    @property
    def message(self) -> str:
        """The verdict in one sentence."""
        return self.sentence


def judge(
    baselines: Sequence[Log],
    restarts: Sequence[Log],
    first: int,
    last: int,
    before: Sequence[Comparison] = (),
    idle: Sequence[str] = (),
    *,
    ends: bool = False,
) -> Judgement:
    """Compare runs and give the verdict.

    Args:
        baselines: the uninterrupted run, then its repetitions.
        restarts: those from the checkpoint.
        first: the first step after the checkpoint.
        last: the last step that every run was to log.
        before: comparisons of uninterrupted runs over the steps before the restart.
        idle: random streams to leave out (`unused_rng.idle_streams`).
        ends: whether the uninterrupted run and the restarts should end after the same step, because
            they ran one command.
    """
    u, a = baselines[0], restarts[0]
    repeats = [*before, *(compare(u, other, first, last, idle) for other in baselines[1:])]
    siblings = [compare(a, other, first, last, idle) for other in restarts[1:]]
    across = compare(u, a, first, last, idle)
    comparisons = (*repeats, *siblings, across)
    problems = tuple(dict.fromkeys(p for c in comparisons for p in c.problems))
    notes = (*_notes(len(baselines), len(restarts), (*baselines, *restarts), idle),
             *_passing_notes(across))  # fmt: skip

    def said(
        verdict: Verdict,
        sentence: str,
        found: tuple[ReplayCause, ...] = (),
        more: Sequence[str] = (),
    ) -> Judgement:
        said = (*notes, *more)
        return Judgement(
            verdict, sentence, first, last, found, comparisons, said, problems, idle=tuple(idle)
        )

    unlike = next((c for c in repeats if not c.equal), None)
    if unlike is not None:
        return said(
            Verdict.FRAMEWORK,
            "two uninterrupted runs differ, so nothing can be said of the restart: "
            f"{_first_words(unlike)}",
            more=[meaning for key, value, meaning in _DRIFT if u.conditions.get(key) is value],
        )
    unlike = next((c for c in siblings if not c.equal), None)
    if unlike is not None:
        return said(
            Verdict.UNSEEDED,
            f"two restarts from the same checkpoint differ: {_first_words(unlike)}",
        )
    found = causes(across, u)
    if not found or found[0].component != "checkpoint":  # its counters are those of its own step
        found += _miscounts(u, restarts, last, ends=ends)
    if found:
        return said(Verdict.STATE, _state_sentence(across, found, bool(siblings)), found)
    if problems:
        return said(Verdict.NOT_COMPARED, problems[0])
    ranks = counted(len(across.ranks), "rank")
    return said(
        Verdict.EXACT,
        f"the restart is exact for {counted(len(across.steps), 'step')} "
        f"({first} to {last}, {ranks})",
    )


def _miscounts(
    u: Log, restarts: Sequence[Log], last: int, *, ends: bool
) -> tuple[ReplayCause, ...]:
    """Return the step counter as a cause, if every restart shows the same wrong count."""
    shown = [miscounted(u, restart, last if ends else None) for restart in restarts]
    first = shown[0]
    if first is None or any(other != first for other in shown):
        return ()
    return (ReplayCause("step", first[0], "counter", restarts[0].ranks, first[1]),)


def _passing_notes(across: Comparison) -> Iterator[str]:
    """Yield notes on differences without effect."""
    streams: dict[str, int] = {}
    state: dict[str, int] = {}
    for difference in across.passing:
        if difference.event not in RANDOM:
            state.setdefault(BY_KEY[difference.event].title, difference.step)
            continue
        for item in difference.items:
            streams.setdefault(TITLES[component_of(difference.event, item.name)], difference.step)
    for title, step in streams.items():
        yield (f"{title}: differs as step {step} begins and never matters: it is as it should be "
               "before anything is drawn from it")  # fmt: skip
    for title, step in state.items():
        yield f"{title}: differs as step {step} begins and never matters: it is written over unused"


def _state_sentence(across: Comparison, found: Sequence[ReplayCause], siblings: bool) -> str:
    cause = found[0]
    start = "restart is deterministic but not exact" if siblings else "restart is not exact"
    when = f" {BY_KEY[cause.event].phase.value}" if BY_KEY[cause.event].compared else ""
    ranks = "" if len(across.ranks) == 1 else f" on rank {', '.join(map(str, cause.ranks))}"
    more = "" if len(found) == 1 else f" (and {', '.join(c.title for c in found[1:])})"
    return (
        f"{start}: {cause.title} {_joined(cause)}{more}, first seen at step {cause.step}{when}"
        f"{ranks}{_consequences(across)}"
    )


def _joined(cause: ReplayCause) -> str:
    return cause.reason if cause.missing else f"({cause.reason})"


def _consequences(across: Comparison) -> str:
    """Return in words the effect on the batch, or else on the model's input, and on the loss."""
    words = []
    if across.equal:
        return "; all that was compared is equal"
    step = across.differences[0].step
    drawn = any((s, e) == (step, "batch") for s, e, _ in across.grid)
    for event in ("batch" if drawn else "input", "loss"):
        at = [(s, equal) for (s, e, _), equal in across.grid.items() if e == event]
        here = [equal for s, equal in at if s == step]
        if here and all(here):
            words.append(f"{event} equal")
        elif here:
            shown = next(d for d in across.differences if (d.step, d.event) == (step, event))
            words.append(f"{event} differs by {shown.items[0].words}" if event == "loss"
                         and "ULP" in shown.items[0].words else f"{event} differs")  # fmt: skip
        later = next((s for s, equal in at if s > step and not equal), None)
        if event == "loss" and here and all(here):
            words.append("and never differs" if later is None else f"and differs from step {later}")
    return "; " + ", ".join(words).replace(", and", " and") if words else ""


def _first_words(comparison: Comparison) -> str:
    first = comparison.differences[0]
    event = BY_KEY[first.event]
    when = "" if first.event not in STATE else f" {event.phase.value}"
    return f"first at step {first.step}{when}, rank {first.rank}: {first.words}"


def _notes(baselines: int, restarts: int, logs: Sequence[Log], idle: Collection[str]) -> list[str]:
    notes = []
    if idle:
        streams = " and ".join(TITLES[component_of("rng", name)] for name in idle)
        notes.append(f"{streams}: seeded by nobody, and nothing drew from it: left out")
    if baselines < 2:
        notes.append(
            "the uninterrupted run was not repeated: that the training repeats itself is not shown"
        )
    if restarts < 2:
        notes.append("one restart alone: that restarts agree with each other is not shown")
    for log in logs:
        notes += [f"{log.name}: {limit}" for limit in log.limits]
    return [*notes, *_conditions(logs)]


def _conditions(logs: Sequence[Log]) -> Iterator[str]:
    """Yield each condition that two runs did not share."""
    first = logs[0]
    for key, value in first.conditions.items():
        for log in logs[1:]:
            if log.conditions.get(key, value) != value:
                yield f"{key}: {value} in {first.name}, {log.conditions[key]} in {log.name}"
                break
