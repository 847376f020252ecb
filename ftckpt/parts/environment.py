"""Find out from the environment which part this process is.

Schedulers and launchers number what they start. A job of one may start processes of another (an
array task that runs `srun`), so several may speak: where they contradict each other nobody guesses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ftckpt.errors import UsageError

from . import WorkPart, checked

# (name of it, number, how many): launchers that number their processes from 0.
_RANKS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_TYPED = "--part I/N names it"


def part_of(environment: Mapping[str, str] = os.environ, parts: int | None = None) -> WorkPart:
    """Return the part that the environment names.

    Args:
        environment: of the process.
        parts: the number of parts, where the user says it: a Kubernetes Job does not.

    Raises:
        UsageError: no variable names one, a variable is not a number, or two contradict each other.
    """
    found = list(_found(environment, parts))
    if not found:
        raise UsageError(
            "--part auto found no scheduler: no variable of Slurm, Kubernetes, torchrun or MPI is"
            " set",
            hint=_TYPED,
        )
    # One process of a launcher divides nothing: `srun` in an array task sets both.
    telling = [part for part in found if part.of > 1] or found
    first = telling[0]
    for other in telling[1:]:
        if (other.number, other.of) != (first.number, first.of):
            raise UsageError(
                f"--part auto is ambiguous: {first.found} say part {first}, and {other.found}"
                f" say part {other}",
                hint=f"{_TYPED}, or start one process in each task of the array",
            )
    if parts is not None and first.of != parts:
        raise UsageError(f"{first.found} say {first.of} parts, and {parts} were named", hint=_TYPED)
    return checked(first)


def _found(environment: Mapping[str, str], parts: int | None) -> Iterator[WorkPart]:
    """Yield what each scheduler and launcher says."""
    array = _number(environment, "SLURM_ARRAY_TASK_ID")
    if array is not None:
        first = _number(environment, "SLURM_ARRAY_TASK_MIN") or 0
        step = _number(environment, "SLURM_ARRAY_TASK_STEP") or 1
        count = _number(environment, "SLURM_ARRAY_TASK_COUNT")
        if parts is not None:
            # The tasks that were missing are an array of their own, with the numbers of the first.
            yield WorkPart(array, parts, "SLURM_ARRAY_TASK_ID")
        elif count is not None:
            named = "SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT"
            yield WorkPart((array - first) // step, count, named)
        else:
            message = "SLURM_ARRAY_TASK_ID is set without SLURM_ARRAY_TASK_COUNT"
            raise UsageError(message, hint=_TYPED)
    index = _number(environment, "JOB_COMPLETION_INDEX")
    if index is not None:
        of = _number(environment, "JOB_COMPLETIONS")
        if of is None and parts is None:
            raise UsageError(
                "JOB_COMPLETION_INDEX is set, and nothing says how many completions the Job has",
                hint="--part auto/N, or set JOB_COMPLETIONS in the Job to its .spec.completions",
            )
        yield WorkPart(index, of or parts or 0, "JOB_COMPLETION_INDEX")
    for name, size in _RANKS:
        rank, of = _number(environment, name), _number(environment, size)
        if rank is not None and of is not None:
            yield WorkPart(rank, of, f"{name} and {size}")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}, which is not a number", hint=_TYPED)
    return int(text)
