"""`ftckpt demo` on real training, whole; it must not overwrite anything."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands.golden import ftckpt


def test_the_whole_walk(tmp_path: Path) -> None:
    done = ftckpt("demo", "try", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["code"] for step in document["steps"]] == [0, 0, 0, 4, 0]
    assert "weight" in document["steps"][3]["output"]
    assert document["steps"][4]["output"].splitlines()[-1] == "try/step-20"
    again = ftckpt("demo", "try", cwd=tmp_path)
    assert again.returncode == 8
    assert "not empty" in again.stderr
