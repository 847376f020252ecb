"""One operation, divided among machines that know nothing of each other.

Every machine computes the same plan from the listing, the flags and the version, and does the tasks
of its share. What it did becomes a record in a place that all machines reach, created last and
never replaced. Who has all records repeats the operation with their results in place of the tasks,
so that its answer is the answer of one machine.

- `environment` finds out which part this process is; `shares` divides; `plan` names what is done.
- `units` writes the results of tasks as JSON; `record` is one file of them; `place` holds them.
- `division` does a share, or answers from records; `finish` gathers and judges the records.

Nothing here decides by a clock, except which records are too old to speak for what is read now.
"""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.errors import UsageError


class WorkPart(NamedTuple):
    """One of several parts of an operation.

    Attributes:
        number: which, from 0.
        of: how many there are.
        found: the environment variables that said so; "" where the user did.
    """

    number: int
    of: int
    found: str = ""

    def __str__(self) -> str:
        """Return it as the user types it."""
        return f"{self.number}/{self.of}"


# More parts than this are a slip of the keyboard, not a cluster.
MOST = 1_000_000


def parse_part(text: str) -> WorkPart:
    """Return the part that a text such as `3/12` names.

    Raises:
        UsageError: it names none.
    """
    number, slash, of = text.partition("/")
    if not (slash and number.isascii() and number.isdigit() and of.isascii() and of.isdigit()):
        raise UsageError(
            f"--part {text!r} is not I/N",
            hint="--part 0/12 to --part 11/12, or --part auto where a scheduler says which",
        )
    return checked(WorkPart(int(number), int(of)))


def checked(part: WorkPart) -> WorkPart:
    """Return a part that can be.

    Raises:
        UsageError: its number is not below the number of parts, or there are too many.
    """
    by = f", by {part.found}" if part.found else ""
    if not 1 <= part.of <= MOST:
        raise UsageError(f"{part.of} parts cannot be{by}: 1 to {MOST} can")
    if not 0 <= part.number < part.of:
        hint = f"0/{part.of} to {part.of - 1}/{part.of}"
        if part.found:
            hint += f"; --part auto/N where the tasks are some of N: {part.found} do not say N"
        raise UsageError(f"part {part}{by} cannot be: the first is part 0", hint=hint)
    return part


def as_array(numbers: list[int]) -> str:
    """Return numbers as schedulers take them: `3,17-19`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
