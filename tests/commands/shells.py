"""A real shell on a terminal of its own: keys go in, and what would have been run comes out."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    name: ROOT / "completions" / file
    for name, file in {"bash": "ftckpt.bash", "zsh": "_ftckpt", "fish": "ftckpt.fish"}.items()
}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": f"source '{SCRIPTS['bash']}'",
    "zsh": f"fpath=('{SCRIPTS['zsh'].parent}' $fpath); autoload -Uz compinit; compinit -u -D",
    "fish": f"source '{SCRIPTS['fish']}'",
}
# What stands for the installed script: completions are the real ones, with time for a busy machine,
# and of every other command line the words are kept.
PROGRAM = """#!/bin/sh
if [ "$1" = __complete ]; then
    shift
    exec {python} -c "import sys, ftckpt.commands.completing as c
c.DEADLINE = 20
c.main(sys.argv[1:])" "$@"
fi
printf '%s\\0' "$@" > said.new && mv said.new said
"""


def place_program(folder: Path) -> None:
    """Put a program called `ftckpt` into `folder/bin`."""
    program = folder / "bin" / "ftckpt"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose home is `folder`."""
    return {
        "PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "TERM": "xterm",
        "PS1": "$ ",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        # Coverage and the like are for the tests themselves.
    }


class Terminal:
    """A shell that was told about the completions.

    Args:
        shell: bash, zsh or fish; the test is skipped where it is not installed.
        folder: its home and its working directory.
    """

    def __init__(self, shell: str, folder: Path) -> None:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        self._said = folder / "said"
        self._pid, self._fd = pty.fork()
        if self._pid == 0:  # pragma: no cover
            os.chdir(folder)
            os.execvpe(START[shell][0], START[shell], environment(folder))
        self._quiet(0.3)
        self._type(LOAD[shell] + "\n")

    def run(self, line: str) -> list[str]:
        """Type a line and Return; where it has a tab, wait for what the shell does then.

        Returns the words that the program was called with.
        """
        self._said.unlink(missing_ok=True)
        first, *rest = line.split("\t")
        self._type(first)
        for part in rest:
            self._type("\t")
            if part:
                self._type(part)
        self._type("\n")
        ends = time.monotonic() + 60
        while not self._said.exists() and time.monotonic() < ends:
            self._quiet(0.02)
        return self._said.read_bytes().decode().split("\0")[:-1]

    def close(self) -> None:
        """End the shell."""
        os.close(self._fd)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())
        self._quiet(0.15)

    def _quiet(self, seconds: float) -> None:
        """Wait for the answer of the shell, and until it says no more for some time."""
        wait = 20.0
        while select.select([self._fd], [], [], wait)[0]:
            try:
                if not os.read(self._fd, 1 << 16):
                    return
            except OSError:
                return
            wait = seconds
