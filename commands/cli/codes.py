"""What each exit code means, in the words of the help and of docs/exit-codes.md."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.errors import ExitCode


class Meaning(NamedTuple):
    """One exit code, explained.

    Attributes:
        meaning: what happened.
        retry: whether trying again can help: `no`, `yes`, `later`, or what must be done first.
    """

    meaning: str
    retry: str = "no"


class CommandCode(int):
    """The exit code of a command that a verb ran, and ends with in its turn."""

    @property
    def name(self) -> str:
        """Return what stands in place of an exit code's name."""
        return "COMMAND"


MEANINGS: dict[ExitCode, Meaning] = {
    ExitCode.OK: Meaning("done, positive, complete", "-"),
    ExitCode.INTERNAL: Meaning("a bug in ftckpt; never a verdict"),
    ExitCode.USAGE: Meaning("flags, configuration, or an ambiguous target"),
    ExitCode.DIFFERENT: Meaning("a comparison found a difference"),
    ExitCode.CORRUPT: Meaning("proven damage"),
    ExitCode.INCOMPLETE: Meaning("not committed, or still being written", "later"),
    ExitCode.UNVERIFIED: Meaning("the evidence that was asked for does not exist"),
    ExitCode.UNSAFE: Meaning("hostile or ambiguous content, refused; nothing was executed"),
    ExitCode.REFUSED: Meaning("a safety rule stopped it", "look first"),
    ExitCode.NOT_FOUND: Meaning("root, step or tensor absent; nothing matched"),
    ExitCode.UNAVAILABLE: Meaning("storage failed after retries", "yes"),
    ExitCode.DENIED: Meaning("credentials or permissions"),
    ExitCode.NO_RESOURCE: Meaning("disk, quota or memory budget", "after a fix"),
    ExitCode.UNSUPPORTED: Meaning("a layout, version or store capability that is not supported"),
    ExitCode.PARTIAL: Meaning("finished, but some items failed; they are listed", "look first"),
    ExitCode.MISSING: Meaning("nothing shows that the root is there: no fresh start", "look first"),
    ExitCode.REQUEUE: Meaning("the job was preempted, and goes on when it is started again", "yes"),
    ExitCode.INTERRUPTED: Meaning("interrupted (SIGINT, Ctrl-C)", "yes"),
    ExitCode.CLOSED_PIPE: Meaning("the reader of the output closed the pipe", "-"),
    ExitCode.TERMINATED: Meaning("terminated (SIGTERM)", "yes"),
}

# Any verb can end with these; its help says the others.
ALWAYS = (
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.INTERRUPTED,
    ExitCode.CLOSED_PIPE,
    ExitCode.TERMINATED,
)
