"""Account for every second of every simulated run."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ftckpt.errors import FtckptError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]

ACCOUNTS = ("useful", "save", "lost", "detection", "restart", "waiting")


class TimeLedger:
    """Seconds by account, one number per run.

    `wall` follows the failure clock and the accounts follow the job, so `check` finds a second that
    was forgotten or counted twice.
    """

    def __init__(self, runs: int) -> None:
        import numpy as np

        self.wall = np.zeros(runs)
        self.useful = np.zeros(runs)
        self.save = np.zeros(runs)
        self.lost = np.zeros(runs)
        self.detection = np.zeros(runs)
        self.restart = np.zeros(runs)
        self.waiting = np.zeros(runs)
        self.segments = 0

    def clear(self) -> None:
        """Reset the counts. Work discarded later may make an account fall below 0."""
        for account in (*ACCOUNTS, "wall"):
            getattr(self, account)[:] = 0.0
        self.segments = 0

    def copy(self, other: TimeLedger, which: npt.NDArray[np.bool_]) -> None:
        """Copy the accounts and the wall time of some runs."""
        for account in (*ACCOUNTS, "wall"):
            getattr(self, account)[which] = getattr(other, account)[which]

    def check(self) -> None:
        """Compare the sum of all accounts with the wall time.

        Raises:
            FtckptError: they differ by more than 1e-9 of it: the simulation is wrong.
        """
        total = sum(getattr(self, account) for account in ACCOUNTS)
        gap = float(abs(total - self.wall).max())
        if not gap <= 1e-9 * float(self.wall.max()):
            raise FtckptError(f"the simulation cannot account for {gap:g} s of its time")
