"""Objects that share one another sixty levels deep: every walk over them ends.

Each level holds the one below twice, so that written out there would be 2**60 of them. Lists, dicts
and tuples of that shape are refused by the unpickler; unknown objects are kept, and must be walked
once each wherever they are compared, carried over or written.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

LEVELS = 60
# Each makes one level of two GETs of the one before, and leaves it on the stack.
SHAPES = {
    "state": (b"cmylib.things\nConf\n)\x81}(X\1\0\0\0a", b"X\1\0\0\0b", b"ub"),
    "arguments": (b"cmylib.things\nmake\n", b"", b"\x86R"),
    "items": (b"cmylib.things\nList\n)\x81(", b"", b"e"),
    "a list as state": (b"cmylib.things\nConf\n)\x81](", b"", b"eb"),
}
VERBS = {
    "verify": (["verify", "a.pt", "--level", "values"], 0),
    "inspect": (["inspect", "a.pt"], 0),
    "diff": (["diff", "a.pt", "b.pt"], 3),
    "the same": (["diff", "a.pt", "c.pt"], 0),
    "dcp": (["convert", "a.pt", "out", "--to", "dcp"], 0),
    "torchsave": (["convert", "a.pt", "out.pt", "--to", "torchsave"], 0),
}
# Far more than any of them takes, and far less than a walk of 2**60.
SECONDS = 120


def write(path: Path, shape: str, weight: float) -> None:
    """Save a model as torch does, and put the objects beside it as `extra`."""
    first, between, last = SHAPES[shape]
    body = b"}q\1"
    for level in range(1, LEVELS + 1):
        get = b"h" + bytes([level])
        body += b"0" + first + get + between + get + last + b"q" + bytes([level + 1])
    stream = io.BytesIO()
    torch.save({"model": {"w": torch.full((4,), weight)}, "step": 5}, stream)
    with zipfile.ZipFile(stream) as plain, zipfile.ZipFile(path, "w") as made:
        for name in plain.namelist():
            data = plain.read(name)
            if name.endswith("/data.pkl"):
                kept = body + b"q\xf00"
                data = data[:2] + kept + data[2:-1] + b"X\5\0\0\0extrah\xf0s."
            made.writestr(name, data)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_walk_ends(tmp_path: Path, shape: str, verb: str) -> None:
    for name, weight in (("a.pt", 1.0), ("b.pt", 2.0), ("c.pt", 1.0)):
        write(tmp_path / name, shape, weight)
    words, code = VERBS[verb]
    done = subprocess.run(
        [sys.executable, "-m", "ftckpt", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if verb == "verify":
        assert "mylib.things" in done.stdout + done.stderr  # they are there
