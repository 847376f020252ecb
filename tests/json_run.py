"""Run the command line for its JSON answer."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.workers.forked import run


def ftckpt_json(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run `ftckpt ... --json` and return the one document, which must agree with the exit code."""
    done = run([*arguments, "--json"], os.environ | environment)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    assert document["result"]["code"] == done.returncode, done.stderr
    return document
