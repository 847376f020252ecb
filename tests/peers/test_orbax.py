"""Orbax restores what was written for it, bit for bit, whole and over 8 devices.

`FTCKPT_PEER_ORBAX` names the Python of an environment that has it; `orbax.sh` makes one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.orbax.checkpoint import OrbaxCheckpoint
from ftckpt.formats.orbax.writer import OrbaxWriter
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.writers import write
from tests.formats.orbax.test_writer import DIGESTS, JUDGED, digest_of, small_chunks

PYTHON = os.environ.get("FTCKPT_PEER_ORBAX", "")
JOB = Path(__file__).with_name("orbax_job.py")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="FTCKPT_PEER_ORBAX names no Python with Orbax"),
]


def restore(steps: list[dict[str, object]], folder: Path) -> list[dict[str, list[object]]]:
    """Return what Orbax restored of each step, by path."""
    (folder / "spec.json").write_text(json.dumps({"steps": steps}))
    done = subprocess.run(
        [PYTHON, str(JOB), str(folder / "spec.json"), str(folder / "said.json")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[dict[str, list[object]]] = json.loads((folder / "said.json").read_text())
    return found


def truth(source: str, result: OrbaxCheckpoint, item: str) -> dict[str, list[object]]:
    """Return what the source's tensors are, by the path in the tree that was written."""
    before = open_checkpoint(source)
    found: dict[str, list[object]] = {}
    for key, (where, path) in result.paths.items():
        info = before.tensors[key]
        if where == item:
            digest = hashlib.sha256(read_tensor(before, key)).hexdigest()
            found[".".join(path)] = [info.dtype.name, list(info.shape), digest]
    for name, (where, path) in result.strings.items():
        if where == item:
            found[".".join(path)] = ["str", [], before.load_object(name)]
    return found


def test_orbax_restores_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    steps: list[dict[str, object]] = []
    expected = []
    for number, (name, path) in enumerate(JUDGED.items()):
        place = tmp_path / name / str(number)
        result = write(OrbaxWriter(), open_checkpoint(path), place)
        assert isinstance(result, OrbaxCheckpoint)
        [item] = result.trees
        spread = name in ("dcp", "processes")
        steps.append({"path": str(place), "item": item, "whole": bool(item),
                      "host": name == "processes", "sharded": spread})  # fmt: skip
        expected.append(truth(str(path), result, item))
        assert json.loads(DIGESTS.read_text())[name] == digest_of(place)
    for name, found, known in zip(JUDGED, restore(steps, tmp_path), expected, strict=True):
        assert found == known, name


def test_a_conversion_by_the_verb(tmp_path: Path) -> None:
    """The manifest beside the step does not disturb the manager."""
    place = tmp_path / "run" / "3"
    api.convert(str(JUDGED["dcp"]), str(place), "orbax")
    result = open_checkpoint(place)
    assert isinstance(result, OrbaxCheckpoint)
    step: dict[str, object] = {"path": str(place), "item": "default", "whole": True}
    [found] = restore([step | {"host": False, "sharded": True}], tmp_path)
    assert found == truth(str(JUDGED["dcp"]), result, "default")
