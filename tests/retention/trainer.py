"""A trainer that saves real checkpoints by a clock of its own, crashes, restarts, is damaged."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.builders.checkpoints import open_checkpoint
from tests.delta.on_disk import pack_delta, state_at

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

# Between two saves.
STEPS, EVERY = 50, 22 * MINUTE


@dataclass(frozen=True)
class Saved:
    """A save that was finished and is whole.

    Attributes:
        step: of the training.
        time: when.
        upon: the name of the checkpoint that it depends on; "" for a whole one.
        digest: of its tensors, by key.
    """

    step: int
    time: float
    upon: str
    digest: dict[str, str]


class Trainer:
    """One run and what it knows of its root; `whole` is the truth that nobody else is told.

    Args:
        root: of the run.
        choose: where chance comes from.
        days: how long it is to run, up to now.
    """

    def __init__(self, root: Path, choose: Random, days: float) -> None:
        self.root = root
        self.choose = choose
        self.now = time.time() - days * DAY - DAY
        self.step = 0
        self.whole: dict[str, Saved] = {}
        root.mkdir()

    def newest(self) -> str:
        """Return the name of the whole save with the highest step."""
        return max(self.whole, key=lambda name: self.whole[name].step)

    def hour(self) -> None:
        """Train for an hour."""
        end = self.now + HOUR
        while self.now < end:
            self.now += EVERY
            self.step += STEPS
            luck = self.choose.random()
            if luck < 0.04:
                self.crash()
            elif luck < 0.14 and self.whole:
                self.save(upon=self.newest())
            else:
                self.save()
            if self.choose.random() < 0.02 and len(self.whole) > 4:
                self.damage(self.choose.choice(sorted(self.whole)))

    def save(self, upon: str = "") -> None:
        """Save; a step that is there already stays as it is."""
        name = f"step-{self.step}"
        if name in self.whole:
            return
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        if upon:
            full = self.root.parent / "full"
            _save(full, self.step)
            pack_delta(path, state_at(open_checkpoint(full)), self.root / upon, step=self.step)
            shutil.rmtree(full)
        else:
            _save(path, self.step)
        self._date(path)
        self.whole[name] = Saved(self.step, self.now, upon, digests(path))

    def crash(self) -> None:
        """Die in a save, and go on from one of the last ones."""
        path = self.root / f"step-{self.step}"
        if path.name not in self.whole:
            shutil.rmtree(path, ignore_errors=True)
            _save(path, self.step)
            (path / ".metadata").unlink()
            self._date(path)
        self.now += 12 * MINUTE
        steps = sorted(saved.step for saved in self.whole.values())
        self.step = self.choose.choice(steps[-3:]) if steps else 0

    def damage(self, name: str) -> None:
        """Cut a file of a save short; what is a delta based on it is lost with it."""
        data = max((self.root / name).iterdir(), key=lambda p: (p.stat().st_size, p.name))
        then = data.stat().st_mtime
        os.truncate(data, data.stat().st_size // 2)
        os.utime(data, (then + 1, then + 1))
        self.forget(name)

    def forget(self, name: str) -> None:
        """Know no more of a save, nor of what is built on it."""
        del self.whole[name]
        for other in [n for n, saved in self.whole.items() if saved.upon == name]:
            self.forget(other)

    def _date(self, path: Path) -> None:
        for each in (*path.rglob("*"), path):
            os.utime(each, (self.now, self.now))


def digests(path: Path) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint, read whole."""
    import hashlib

    state = state_at(open_checkpoint(path))
    return {key: hashlib.sha256(data).hexdigest() for key, data in state.data.items()}


def _save(path: Path, step: int) -> None:
    """Let torch save weights that are of this step alone, by one process."""
    import torch
    import torch.distributed.checkpoint.state_dict_saver as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        dcp.save({"model": {"w": torch.arange(64.0) + step}}, checkpoint_id=path, no_dist=True)
