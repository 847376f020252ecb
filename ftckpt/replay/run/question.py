"""The inputs of a trial: commands, place, number of steps, frequency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be tried.

    Attributes:
        command: of a restart; `{checkpoint}`, `{steps}` and `{log}` are filled in.
        directory: where everything is kept.
        steps: how many steps after the checkpoint are compared.
        at: number of steps that the checkpoint has; 0: where the command first saves.
        checkpoint: the user's checkpoint; "" lets the command make one.
        baseline: command of the uninterrupted run; () means `command` from the beginning.
        baseline_at: number of steps that the training has when `baseline` begins.
        reference: log of an uninterrupted run, instead of running one.
        runs: how often each is run.
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
