"""The inputs of a trial: commands, place, number of steps, frequency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Trial:
    """The inputs of a trial.

    Attributes:
        command: of a restart; `{checkpoint}`, `{steps}` and `{log}` are filled in.
        directory: for all files of the trial.
        steps: number of compared steps after the checkpoint.
        at: number of steps that the checkpoint has; 0: at the command's first save.
        checkpoint: the user's checkpoint; "" lets the command make one.
        baseline: command of the uninterrupted run; () means `command` from the beginning.
        baseline_at: number of steps of the training when `baseline` begins.
        reference: log of an uninterrupted run, instead of running one.
        runs: number of repetitions of each.
        every: whole tensors are read every this many steps.
        timeout: seconds for one run.
    """

    command: tuple[str, ...]
    directory: Path
    steps: int = 20
    at: int = 0
    checkpoint: str = ""
    baseline: tuple[str, ...] = ()
    baseline_at: int = 0
    reference: str = ""
    runs: int = 2
    every: int = 1
    timeout: float = 3600.0
