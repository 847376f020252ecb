"""`inspect --resume`, `replay audit` and `latest --require` judge a restart by one function."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ftckpt
from ftckpt.discovery.conditions import Part, lacking
from ftckpt.formats.state import state_contents

DATA = Path(__file__).parents[1] / "data"
LAYOUTS = ("run/step-1", "dcp/hsdp", "trainer_dirs", "deepspeed", "ranks")


def checkpoints() -> list[Path]:
    """Return a checkpoint of each layout that the samples have, whatever its format."""
    found = []
    for name in LAYOUTS:
        for folder in (DATA / name, *sorted((DATA / name).iterdir())):
            try:
                ftckpt.open_checkpoint(str(folder))
            except ftckpt.errors.FtckptError:
                continue
            found.append(folder)
            break
    return found


CHECKPOINTS = checkpoints()


def test_there_are_several() -> None:
    assert len(CHECKPOINTS) >= 4


@pytest.mark.parametrize("place", CHECKPOINTS, ids=lambda place: place.name)
def test_all_three_agree(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / place.name
    shutil.copytree(place, path)
    shown = ftckpt.inspect(str(path)).resume
    assert ftckpt.replay_audit(str(path)).resume == shown
    opened = ftckpt.open_checkpoint(str(path))
    by_key = {item.key: item for item in shown}
    for part, key in ((Part.STEP, "step"), (Part.SCHEDULER, "scheduler"), (Part.MODEL, "weights")):
        item = by_key[key]
        lacks = lacking(opened, [part], contents=state_contents)
        assert bool(lacks) is (item.needed and item.presence != "present"), (key, item, lacks)
