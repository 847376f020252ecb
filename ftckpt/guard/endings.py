"""How a guard ends, as a code and a sentence."""

from __future__ import annotations

from ftckpt.errors import ExitCode

from .decisions import CommandEnd, Next
from .terms import Ended
from .watch import CheckedSave

IDLE = "preempted while no command ran: the scheduler is to start the job again"
# Verdicts that nobody needs to be told of: the scheduler or a person knows what follows.
QUIET = (ExitCode.OK, ExitCode.REQUEUE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
FREE_SPACE = (
    "no checkpoint is to blame; make room (ftckpt gc ROOT --keep-last 2 --free 500GB --apply"
    " --purge-now --yes), and start again"
)
_STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_BAD = (ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.UNSAFE)


def ended(
    ending: CommandEnd, after: Next, last: CheckedSave | None, unseen: str, restarts: int
) -> Ended:
    """Return how a guard ends after its command did.

    0 would say that all is well: it takes a last save that passes.

    Args:
        ending: why the command ended.
        after: what follows; no restart.
        last: the verdict on its newest save; None if there is none.
        unseen: why that save could not be verified; "" if it could.
        restarts: how often the command was restarted.
    """
    if after.code == 0 and unseen:
        return own(
            ExitCode.UNAVAILABLE,
            f"the command has finished, and its last save is not verified: {unseen}",
            "ftckpt latest ROOT --verify content, when the store answers",
            restarts,
        )
    if after.code == 0 and last is not None and last.code in _BAD:
        return own(
            last.code,
            f"the command has finished, and {last.save.path} is not good: {last.message}",
            "ftckpt verify ROOT --all names the damage of each save",
            restarts,
        )
    if after.code in (ExitCode.OK, ExitCode.REQUEUE) or (
        ending is CommandEnd.STOPPED and after.code in _STOPPED
    ):
        return own(ExitCode(after.code), after.reason, "", restarts)
    if ending is CommandEnd.UNSTARTED and after.code == ExitCode.USAGE:
        hint = "no checkpoint is to blame: name the program by its path, and install it"
        return own(ExitCode.USAGE, after.reason, hint, restarts)
    if after.full:
        return own(ExitCode.NO_RESOURCE, after.reason, FREE_SPACE, restarts)
    hint = "its own output says why; .ftckpt/guard.jsonl of the root says what was tried"
    return Ended(after.code, None, after.reason, hint, restarts)


def own(code: ExitCode, message: str, hint: str, restarts: int) -> Ended:
    """Return an end whose code is the guard's own verdict."""
    return Ended(int(code), code, message, hint, restarts)
