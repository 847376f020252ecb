"""Settings that a recorded process gets through its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "FTCKPT_REPLAY_"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a process records itself.

    Attributes:
        log: directory of the log; "" records nothing.
        at: number of steps of the training before the process starts.
        last: the last step to record; the process then waits to be ended. 0: as long as it runs.
        dense_from: first step in which whole tensors are read, beside the very first.
        every: from there on, whole tensors are read every this many steps; 0: never.
        stop_at: end the process after this step, as a failure would; 0: never.
        stop_after_save: end it after the step of its first save.
        passes: backward passes of step `pass_step` that the checkpoint holds, if it was saved
            within a window of gradient accumulation; that step is recorded from there on.
        pass_step: the first step after the checkpoint, if `passes` is not 0.
        look_step: step at which the values of tensors are kept; 0: none.
        look_event: the event that they belong to.
        look_items: their names, one per line.
    """

    log: str = ""
    at: int = 0
    last: int = 0
    dense_from: int = 1
    every: int = 1
    stop_at: int = 0
    stop_after_save: bool = False
    passes: int = 0
    pass_step: int = 0
    look_step: int = 0
    look_event: str = ""
    look_items: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables for `read_settings`."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v)
                for name, v in values}  # fmt: skip

    def reads_tensors(self, step: int) -> bool:
        """Whether whole tensors are read at the beginning of this step and in it."""
        if self.every and (step == self.at + 1 or step == 1 or (self.last and step > self.last)):
            return True
        return bool(self.every) and step >= self.dense_from and not (
            (step - self.dense_from) % self.every
        )  # fmt: skip


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in an environment; a variable that is not a number counts as absent."""
    values: dict[str, str | int | bool] = {}
    for field in fields(Settings):
        text = environment.get(PREFIX + field.name.upper())
        if text is None:
            continue
        if isinstance(field.default, str):
            values[field.name] = text
        elif text.isdecimal():
            values[field.name] = text != "0" if field.name == "stop_after_save" else int(text)
    return Settings(**values)  # type: ignore[arg-type]


def done_marker(folder: Path, rank: int) -> Path:
    """Return the file by which a rank reports that its recording is complete."""
    return folder / f"rank-{rank}.done"


def stopped_marker(folder: Path) -> Path:
    """Return the file by which a process reports that it is where it should be ended."""
    return folder / "stopped"


def saves_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank notes its saves: lines of steps and backward passes."""
    return folder / f"rank-{rank}.saves"


def values_file(folder: Path, rank: int, number: int) -> Path:
    """Return the file with the values of one tensor of `Settings.look_items`."""
    return folder / "values" / f"rank-{rank}-{number}.bin"
