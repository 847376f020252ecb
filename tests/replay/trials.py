"""Trials of one training that share their uninterrupted runs: each adds its own restarts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from ftckpt.replay.run import trial
from ftckpt.replay.run.question import Trial
from ftckpt.replay.run.trial import Tried


class Trials:
    """Makes trials of a command, which is told by `--drop` what a restart leaves out.

    Args:
        root: where they are kept.
        command: with `{checkpoint}` and `{steps}`.
        at: the step after which it is killed.
        steps: compared after it.
        saves: what `--drop` may say that changes what is saved, not what is restored.
        runs: how often each is run.
    """

    def __init__(
        self, root: Path, command: Sequence[str], at: int, steps: int = 4,
        saves: Sequence[str] = (), runs: int = 2,
    ) -> None:  # fmt: skip
        self._root, self._command, self._at, self._steps = root, command, at, steps
        self._saves, self._runs = saves, runs

    def tried(self, drop: str = "", number: int = 0) -> Tried:
        """Return the trial of a restart; one that drops nothing may be repeated by its number."""
        whole, folder = self._root / "exact-0", self._root / (drop or f"exact-{number}")
        if not folder.exists() and (whole / f"baseline-{self._runs}" / "outcome.json").exists():
            folder.mkdir()
            (folder / "trial.lock").touch()  # as where a trial was interrupted
            shared = [f"baseline-{number + 1}" for number in range(self._runs)]
            for run in (*shared, *(() if drop in self._saves else ("interrupted",))):
                shutil.copytree(whole / run, folder / run, symlinks=True)
        command = (*self._command, "--dir", "{checkpoint}", "--steps", "{steps}", "--drop", drop)
        asked = Trial(command, folder, steps=self._steps, at=self._at,
                            runs=self._runs,
                            timeout=300.0)  # fmt: skip
        with patch.object(trial, "look_closer", lambda runs, judgement, *_: judgement):
            return trial.carry_out(asked)
