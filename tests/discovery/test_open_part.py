"""A file that a seal lists and that is missing is damage, not an unfinished save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import CorruptError, FtckptError, IncompleteError
from ftckpt.own_files import MANIFEST
from tests.json_run import ftckpt_json

RUN = Path(__file__).parents[1] / "data" / "run"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = Path(shutil.copytree(RUN / "step-2", tmp_path / "step-2"))
    ftckpt.seal(str(path))
    return path


def _grown(path: Path) -> None:
    with next(path.glob("*.distcp")).open("ab") as file:
        file.write(b"more")


def _unreadable(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"{")


@pytest.mark.parametrize(
    ("then", "error"),
    [
        (lambda path: None, CorruptError),
        (_grown, IncompleteError),  # a trainer may be saving again into the sealed directory
        (_unreadable, IncompleteError),
        (lambda path: (path / MANIFEST).unlink(), IncompleteError),
    ],
)
def test_a_sealed_checkpoint_without_its_marker(
    sealed: Path, then: Callable[[Path], None], error: type[FtckptError]
) -> None:
    (sealed / ".metadata").unlink()
    then(sealed)
    with pytest.raises(error) as raised:
        ftckpt.inspect(str(sealed))
    assert type(raised.value) is error
    assert raised.value.file == ".metadata"
    assert ftckpt_json("verify", str(sealed))["result"]["code"] == error.exit_code


def test_latest_names_the_loss_and_passes_over(sealed: Path) -> None:
    shutil.copytree(RUN / "step-1", sealed.parent / "step-1")
    (sealed / ".metadata").unlink()
    document = ftckpt_json("latest", str(sealed.parent))
    assert document["result"]["code"] == 0
    assert document["path"].endswith("step-1")
    (skipped,) = document["skipped"]
    assert (skipped["code"], skipped["name"]) == (4, "CORRUPT")
