"""`ftckpt demo`: the first contact."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, terminal_width
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument

STORAGE = False
EXAMPLES = (
    ("ftckpt demo", "in ./ftckpt-demo"),
    ("ftckpt demo --json | jq -r '.steps[].command'", "the commands that it has run"),
    ("ftckpt demo /tmp/try", "somewhere else; the checkpoints stay there to play with"),
)
CODES = {
    ExitCode.OK: "every step ended as it should: good is 0, the damage is found",
    ExitCode.REFUSED: "the directory exists and is not empty",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
}


def command(
    invocation: Invocation,
    directory: Annotated[
        str, argument("[DIR]", "Directory to make; must not exist, or be empty.")
    ] = "ftckpt-demo",
) -> Result:
    """Make a small real checkpoint, damage it, and find the damage.

    Trains a tiny model for thirty steps, saves it three times with torch's own distributed
    checkpoint, inspects and seals, flips one bit of the newest, and shows how verify finds it and
    how latest steps back to the newest good one.
    """
    from ftckpt.demonstration import flip_bit, train_and_save

    invocation.report(target=directory, format="dcp", steps=[])
    invocation.say("training 30 steps and saving three checkpoints with torch ...")
    paths = train_and_save(directory)
    newest = paths[-1]
    walk = _Walk(invocation)
    walk.remark("What is in the newest, and what would a restart lack?")
    walk.run(ExitCode.OK, "inspect", newest)
    walk.remark("Is it whole? torch puts a CRC-32 beside every tensor and never checks it; we do.")
    walk.run(ExitCode.OK, "verify", newest)
    walk.remark("Seal the one before it: digests of every block, so that any change is found.")
    walk.run(ExitCode.OK, "seal", paths[-2])
    victim, offset = middle_of_a_tensor(newest)
    flip_bit(victim, offset)
    walk.remark(f"Now one bit of {victim} flips, at byte {offset}. torch would load it.")
    walk.run(ExitCode.CORRUPT, "verify", newest)
    walk.remark("03:14, the job is down. What is the newest checkpoint to restart from?")
    walk.run(ExitCode.OK, "latest", directory, "--level", "content")
    invocation.print()
    invocation.print(f"The checkpoints are in {directory}; remove it when you are done.")
    if walk.surprises:
        return invocation.fail(ExitCode.INTERNAL, walk.surprises[0])
    return Result(ExitCode.OK, "the damage was found and stepped over")


def middle_of_a_tensor(path: str) -> tuple[str, int]:
    """Return the file and the offset of a byte in the middle of the largest weight."""
    from ftckpt import open_checkpoint

    checkpoint = open_checkpoint(path)
    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    place = checkpoint.payload(largest.pieces[0]).extent
    return os.path.join(path, place.file), place.offset + place.length // 2


class _Walk:
    """Runs commands as a user would and notes what did not end as it should."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._steps: list[dict[str, object]] = []
        self.surprises: list[str] = []

    def remark(self, text: str) -> None:
        """Say what comes next."""
        self._invocation.print()
        self._invocation.print(f"# {text}")

    def run(self, expected: ExitCode, *arguments: str) -> None:
        """Run one verb in a process of its own and show what it prints."""
        shown = shlex.join(["ftckpt", *arguments])
        width = terminal_width()  # its output comes through a pipe, so it cannot see the terminal
        environment = os.environ | ({"COLUMNS": str(width)} if width else {})
        self._invocation.print(f"$ {shown}")
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
        self._invocation.print(block(*done.stdout.rstrip("\n").split("\n")))
        self._invocation.print(f"(exit {done.returncode})")
        self._steps.append({"command": shown, "code": done.returncode, "output": done.stdout})
        self._invocation.report(steps=self._steps)
        if done.returncode != expected:
            self.surprises.append(f"{shown} ended with {done.returncode}, not {int(expected)}")
