"""Runs lists of recorded trainings, and says what one of them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ftckpt.replay.processes import Settings

HERE = Path(__file__).parent


def training(
    settings: Settings,
    place: Path,
    steps: int,
    *,
    save_at: int = 0,
    drop: str = "",
    **environment: str,
) -> dict[str, Any]:
    """Return one run of `train.py` for `run_lists`; it saves only where `save_at` says when."""
    arguments = ["--dir", str(place), "--steps", str(steps), "--drop", drop]
    arguments += ["--save-at", str(save_at or 100_000)]
    return {"arguments": arguments, "environment": settings.environment() | environment}


def run_lists(folder: Path, *lists: list[dict[str, Any]]) -> None:
    """Run lists side by side, the trainings of a list one after the other."""
    file = folder / "lists.json"
    file.write_text(json.dumps(lists))
    done = subprocess.run(
        [sys.executable, HERE / "forks.py", file],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr
