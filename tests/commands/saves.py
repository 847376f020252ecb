"""Checkpoints of a few bytes and any age, verbs run in this process, and pictures of a tree."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ftckpt.commands.cli import app
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.render import json_text
from tests.test_docs import validate

HOUR, DAY = 3600.0, 86400.0

_HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
# A whole safetensors file: the length of the header, the header, the data.
WHOLE = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8)


def save(root: Path, name: str, age: float, *, damaged: bool = False) -> Path:
    """Write a Trainer's checkpoint that seems to have been saved so many seconds ago."""
    path = root / name
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(WHOLE[:-1] if damaged else WHOLE)
    then = time.time() - age
    for each in (path / "model.safetensors", path):
        os.utime(each, (then, then))
    return path


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return every name below a directory with its time, mode and content."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mtime_ns,
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(root.rglob("*"))
    }


def answer(*words: str) -> dict[str, Any]:
    """Run a command line in this process; return its JSON document, held to its schema."""
    line = app.scan(words)
    invocation = Invocation(verb=line.verb, words=words, json=True, quiet=True)
    result = app.run(words, invocation)
    document = json.loads(json_text(app.document(invocation, result)))
    assert isinstance(document, dict)
    validate(document)
    return document


def ended(*words: str) -> int:
    """Run a command line in this process; return its exit code."""
    code = answer(*words)["result"]["code"]
    assert isinstance(code, int)
    return code
