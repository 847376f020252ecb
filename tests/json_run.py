"""Run the command line for its JSON answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def ftckpt_json(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run `ftckpt ... --json` and return the one document, which must agree with the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "ftckpt", *arguments, "--json"],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
        check=False,
    )
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    assert document["result"]["code"] == done.returncode, done.stderr
    return document
