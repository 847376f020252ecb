"""What users read is kept in files, and compared whole.

`WRITE_GOLDEN=1` writes them anew; look at the difference before committing it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.workers.forked import run

DATA = Path(__file__).parents[1] / "data"
RUN = DATA / "run"
GOLDEN = DATA / "golden"

_TIMES = re.compile(r"\d+(?:\.\d+)? (?:ms|s)\b(?: \([\d.]+ \w+/s\))?")
_MEASURED = re.compile(r"(?<=slower than )[\d.]+ \w+/s")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def ftckpt(
    *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, without a terminal."""
    return run([*map(str, arguments)], os.environ | environment, cwd)


def check_golden(name: str, done: subprocess.CompletedProcess[str], *, timed: bool = True) -> None:
    """Compare what a run printed, and its exit code, with the kept file.

    Args:
        name: of the kept file.
        done: the run.
        timed: whether durations in it differ from run to run; then they are not compared.
    """
    text = f"exit {done.returncode}\n--- stdout\n{done.stdout}--- stderr\n{done.stderr}"
    if timed:
        text = _STAMP.sub("TIME", _TIMES.sub("TIME", _MEASURED.sub("RATE", text)))
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
