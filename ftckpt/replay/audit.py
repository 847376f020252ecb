"""What can be said of a restart without running it: presence, ranks, clocks, a stale neighbour.

Presence is the resume check's (`ftckpt.resume`), which matches names against one table. The rest
compares what the checkpoint itself holds: how many ranks kept random streams, whether two ranks
kept the same one, whether optimizer and schedule count the steps that the checkpoint counts, and
whether the next checkpoint is any different. All of it is circumstantial; a replay is the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ftckpt.checkpoint import Checkpoint, StepRole
from ftckpt.findings import counted
from ftckpt.progress import NULL, Counter
from ftckpt.resume import ResumeItem, resume_check
from ftckpt.steps import SCALARS_A_FILE
from ftckpt.tensor_digest import digest_tensor
from ftckpt.verification.values import check_rng


class Weight(StrEnum):
    """How much a remark weighs."""

    CONTRADICTION = "contradiction"
    RISK = "risk"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that speaks against an exact restart.

    Attributes:
        topic: stable name: `ranks`, `equal-rng`, `optimizer-step`, `scheduler-step`, `stale`,
            `environment`.
        weight: whether the checkpoint contradicts itself, or might.
        message: one sentence.
    """

    topic: str
    weight: Weight
    message: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of one checkpoint.

    Attributes:
        resume: one verdict a component, as `ftckpt inspect` shows them.
        remarks: in the order of their weight.
    """

    resume: tuple[ResumeItem, ...]
    remarks: tuple[Remark, ...]


# Set for whole jobs by people who need runs that repeat themselves; what it means where it is not.
ENVIRONMENT: dict[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS may choose another workspace, and so another order of sums",
    "NCCL_ALGO": "NCCL chooses the order of reductions by size and topology; Ring fixes it",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "Transformer Engine may add in any order; 0 forbids it",
    "PYTHONHASHSEED": "sets and dictionaries of text iterate in another order in each process",
}


def audit(
    checkpoint: Checkpoint,
    following: Checkpoint | None = None,
    environment: Mapping[str, str] | None = None,
    counter: Counter = NULL,
) -> Audit:
    """Audit a checkpoint; reads no tensors but small ones, and all of both against `following`.

    Args:
        checkpoint: that a restart would begin from.
        following: the next checkpoint of the same run, to see whether its save was stale.
        environment: of the job; None says nothing of it.
        counter: counts bytes read.

    Raises:
        CorruptError, UnsafeError, UnavailableError: something cannot be read.
    """
    resume = resume_check(checkpoint)
    remarks = [*_ranks(resume), *_clocks(checkpoint)]
    remarks += [Remark("equal-rng", Weight.RISK, f.message) for f in check_rng(checkpoint)]
    if following is not None:
        remarks += _stale(checkpoint, following, counter)
    if environment is not None:
        remarks += [
            Remark("environment", Weight.RISK, f"{name} is not set: {meaning}")
            for name, meaning in ENVIRONMENT.items()
            if name not in environment
        ]
    remarks.sort(key=lambda remark: list(Weight).index(remark.weight))
    return Audit(resume, tuple(remarks))


def _ranks(resume: tuple[ResumeItem, ...]) -> Iterator[Remark]:
    for item in resume:
        known = item.ranks is not None and item.world_size is not None
        if known and (item.ranks or 0) < (item.world_size or 0):
            yield Remark(
                "ranks",
                Weight.RISK,  # a trainer may keep one for all ranks that share it
                f"{item.title}: {item.ranks} of {counted(item.world_size or 0, 'rank')} have one",
            )


def _clocks(checkpoint: Checkpoint) -> Iterator[Remark]:
    """Yield where optimizer and schedule count other steps than the trainer."""
    counts: dict[StepRole, set[float]] = {role: set() for role in StepRole}
    for scalar in checkpoint.scalars(SCALARS_A_FILE):
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
            Weight.CONTRADICTION,
            f"the trainer counts {step:.0f} steps and the optimizer {max(optimizer):.0f}: "
            "a torn save, unless they count different things",
        )
    # A schedule that counts samples, or ranks times steps, shows a multiple.
    if schedule and step not in schedule and not (step and max(schedule) % step == 0):
        yield Remark(
            "scheduler-step",
            Weight.CONTRADICTION,
            f"the trainer counts {step:.0f} steps and the schedule {max(schedule):.0f}: off by "
            f"{abs(step - max(schedule)):.0f}, unless they count different things",
        )


def _stale(checkpoint: Checkpoint, following: Checkpoint, counter: Counter) -> Iterator[Remark]:
    """Yield which components the next checkpoint repeats bit for bit."""
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
                Weight.CONTRADICTION,
                f"all {counted(len(same_as), 'tensor')} of {component} are bit for bit those of "
                "the next checkpoint: one of the two saves kept an older state",
            )
    if not pairs:
        yield Remark("stale", Weight.RISK, "the two checkpoints have no tensor in common")
