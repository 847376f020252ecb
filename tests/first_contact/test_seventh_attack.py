"""A seventh attack: two writers on a local disk, plug-ins that misbehave, planted words."""

from __future__ import annotations

import subprocess
import sys

from ftckpt.guard.supervise import KEEPER


def test_the_guards_keeper_needs_the_standard_library_alone() -> None:
    """It runs without site-packages: with an import of ours guard starts no command at all."""
    line = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(KEEPER)!r})"]
    assert subprocess.run(line, capture_output=True, check=False).stderr == b""
