"""Audit a restart without running it: presence, ranks, counters, a stale neighbour.

Presence is the resume check's (`ftckpt.inspection.resume`). The rest compares the checkpoint with
itself: how many ranks kept random streams, whether two ranks kept the same one, whether optimizer
and schedule count the checkpoint's steps, whether the loss scaler's counters are possible, which
settings make a training non-deterministic, and whether the next checkpoint differs. All of it is
circumstantial; a replay is the proof.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from ftckpt.checkpoint import Checkpoint, StepRole
from ftckpt.comparison.state import Field, about
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import FtckptError
from ftckpt.findings import counted
from ftckpt.inspection.resume import ResumeItem, resume_check
from ftckpt.inspection.training_state import Contents
from ftckpt.progress import NULL, Counter
from ftckpt.verification.values.scales import check_rng


class RemarkWeight(StrEnum):
    """The weight of a remark."""

    CONTRADICTION = "contradiction"
    RISK = "risk"


@dataclass(frozen=True, slots=True)
class Remark:
    """Evidence against an exact restart.

    Attributes:
        topic: stable name: `ranks`, `equal-rng`, `optimizer-step`, `scheduler-step`, `scaler`,
            `settings`, `unread`, `stale`, `environment`.
        weight: a contradiction, or a risk.
        message: one sentence.
    """

    topic: str
    weight: RemarkWeight
    message: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of one checkpoint.

    Attributes:
        resume: one verdict per component, as `ftckpt inspect` shows them.
        remarks: in the order of their weight.
    """

    resume: tuple[ResumeItem, ...]
    remarks: tuple[Remark, ...]


# Variables for deterministic runs, and the risk if they are not set.
ENVIRONMENT: dict[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS may choose another workspace, and so another order of sums",
    "NCCL_ALGO": "NCCL chooses the order of reductions by size and topology; Ring fixes it",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "Transformer Engine may add in any order; 0 forbids it",
    "PYTHONHASHSEED": "sets of text iterate in another order in each process",
}
# Variables that are a risk if they are set, and why.
_OVERRIDES: dict[str, str] = {
    "NVIDIA_TF32_OVERRIDE": "TF32 is on or off whatever the training says",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "TF32 is on or off whatever the training says",
}
# Settings in trainers' checkpoints, the risky value, and why.
_SETTINGS: dict[str, tuple[str, str]] = {
    "deterministic_mode": ("False", "kernels may add in any order"),
    "full_determinism": ("False", "kernels may add in any order"),
    "cudnn_benchmark": ("True", "cuDNN chooses kernels by how fast they ran"),
    "tf32": ("True", "the restart must have TF32 on too"),
    "allow_tf32": ("True", "the restart must have TF32 on too"),
}


def audit(
    checkpoint: Checkpoint,
    following: Checkpoint | None = None,
    environment: Mapping[str, str] | None = None,
    counter: Counter = NULL,
    fields: Iterable[Field | FtckptError] = (),
    contents: Contents | None = None,
) -> Audit:
    """Audit a checkpoint; reads only small tensors, and all of both with `following`.

    Args:
        checkpoint: the start of the restart.
        following: the next checkpoint of the same run, to find a stale save.
        environment: of the job; None: not checked.
        counter: counts bytes read.
        fields: the checkpoint's non-tensor state, to compare it with itself.
        contents: see `resume_check`.

    Raises:
        CorruptError, UnsafeError, UnavailableError: something cannot be read.
    """
    resume = resume_check(checkpoint, contents)
    remarks = [*_ranks(resume), *_clocks(checkpoint)]
    remarks += [Remark("equal-rng", RemarkWeight.RISK, f.message) for f in check_rng(checkpoint)]
    remarks += _state(fields, checkpoint.step)
    if following is not None:
        remarks += _stale(checkpoint, following, counter)
    if environment is not None:
        remarks += [
            Remark("environment", RemarkWeight.RISK, f"{name} is not set: {meaning}")
            for name, meaning in ENVIRONMENT.items()
            if name not in environment
        ]
        remarks += [
            Remark("environment", RemarkWeight.RISK, f"{name} is {environment[name]}: {meaning}")
            for name, meaning in _OVERRIDES.items()
            if name in environment
        ]
    remarks.sort(key=lambda remark: list(RemarkWeight).index(remark.weight))
    return Audit(resume, tuple(remarks))


def _ranks(resume: tuple[ResumeItem, ...]) -> Iterator[Remark]:
    for item in resume:
        known = item.ranks is not None and item.world_size is not None
        if known and (item.ranks or 0) < (item.world_size or 0):
            yield Remark(
                "ranks",
                RemarkWeight.RISK,  # a trainer may keep one for all ranks that share it
                f"{item.title}: {item.ranks} of {counted(item.world_size or 0, 'rank')} have one",
            )


def _clocks(checkpoint: Checkpoint) -> Iterator[Remark]:
    """Yield contradictions between the steps of optimizer, schedule and trainer."""
    counts: dict[StepRole, set[float]] = {role: set() for role in StepRole}
    for scalar in checkpoint.step_scalars:
        counts[scalar.role].add(scalar.value)
    trainer = counts[StepRole.ITERATION]
    if not trainer:
        return
    step = max(trainer)
    optimizer, schedule = counts[StepRole.OPTIMIZER], counts[StepRole.SCHEDULER]
    # Parameters that were frozen for a while count fewer steps, never more.
    if optimizer and max(optimizer) != step:
        yield Remark(
            "optimizer-step",
            RemarkWeight.CONTRADICTION,
            f"the trainer counts {step:.0f} steps and the optimizer {max(optimizer):.0f}: "
            "a torn save, unless they count different things",
        )
    # A schedule that counts samples, or ranks times steps, shows a multiple.
    if schedule and step not in schedule and not (step and max(schedule) % step == 0):
        yield Remark(
            "scheduler-step",
            RemarkWeight.CONTRADICTION,
            f"the trainer counts {step:.0f} steps and the schedule {max(schedule):.0f}: off by "
            f"{abs(step - max(schedule)):.0f}, unless they count different things",
        )


def _state(fields: Iterable[Field | FtckptError], step: int | None) -> Iterator[Remark]:
    """Yield remarks on the non-tensor state: equal streams, risky settings, a scaler's counters."""
    streams: dict[tuple[str, bytes], list[int]] = {}
    scaler: dict[str, float] = {}
    settings: set[str] = set()
    for field in fields:
        if isinstance(field, FtckptError):
            yield Remark("unread", RemarkWeight.RISK, f"some of its state cannot be read: {field}")
            continue
        kind, _ = about(field.name)
        last = re.split(r"[./:]", field.name)[-1]
        if last in _SETTINGS and _SETTINGS[last][0] == field.shown:
            settings.add(last)
        if kind.startswith("rng") and field.rank is not None:
            streams.setdefault((field.name, field.digest), []).append(field.rank)
        elif kind == "scaler":
            with suppress(ValueError):
                scaler.setdefault(last, float(field.shown))
    for (name, _), ranks in streams.items():
        if len(ranks) > 1:
            shared = ", ".join(map(str, sorted(ranks)[:8]))
            yield Remark(
                "equal-rng", RemarkWeight.RISK,
                f"{len(ranks)} ranks share one state of {name} ({shared}): they draw the same",
            )  # fmt: skip
    for name in sorted(settings):
        value, meaning = _SETTINGS[name]
        yield Remark(
            "settings", RemarkWeight.RISK, f"{name} was {value} in the training: {meaning}"
        )
    yield from _scaler(scaler, step)


def _scaler(counters: Mapping[str, float], step: int | None) -> Iterator[Remark]:
    """Yield impossible counters of a loss scaler, under torch's and apex's names."""

    def said(message: str, weight: RemarkWeight = RemarkWeight.CONTRADICTION) -> Remark:
        return Remark("scaler", weight, f"the loss scaler {message}")

    scale = counters.get("scale", counters.get("cur_scale"))
    if scale is None:
        return
    if not (0 < scale < math.inf):
        yield said(f"has the scale {scale:g}, by which no gradient can be divided")
    good, interval = counters.get("_growth_tracker"), counters.get("growth_interval")
    if good is None and interval is not None:
        yield said(
            "has no count of steps since the last overflow: it begins again", RemarkWeight.RISK
        )
    elif good is not None and interval is not None and good >= max(interval, 1):
        yield said(f"counts {good:.0f} steps without overflow, and grows every {interval:.0f}")
    elif good is not None and step is not None and good > step:
        yield said(f"counts {good:.0f} steps without overflow, and the trainer {step} in all")
    now, overflow = counters.get("cur_iter"), counters.get("last_overflow_iter")
    if now is not None and overflow is not None and overflow > now:
        yield said(f"saw an overflow at step {overflow:.0f} and counts {now:.0f} in all")


def _stale(checkpoint: Checkpoint, following: Checkpoint, counter: Counter) -> Iterator[Remark]:
    """Yield components that the next checkpoint repeats bit for bit."""
    shared = [k for k, t in checkpoint.tensors.items()
              if k in following.tensors and t.dtype.family in ("float", "complex")]  # fmt: skip
    pairs = [(checkpoint.tensors[key], following.tensors[key]) for key in shared]
    counter.start("comparing", 2 * sum(info.nbytes for info, _ in pairs))
    equal: dict[str, list[bool]] = {}
    for info, other in pairs:
        same = digest_tensor(checkpoint, info) == digest_tensor(following, other)
        equal.setdefault(info.component, []).append(same)
        counter.add(2 * info.nbytes)
    for component, same_as in equal.items():
        if all(same_as):
            yield Remark(
                "stale",
                RemarkWeight.CONTRADICTION,
                f"all {counted(len(same_as), 'tensor')} of {component} are bit for bit those of "
                "the next checkpoint: one of the two saves kept an older state",
            )
    if not pairs:
        yield Remark("stale", RemarkWeight.RISK, "the two checkpoints have no tensor in common")
