"""`--like` with DeepSpeed as a user runs it: examples that are damaged, hostile or contradicted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.builders.checkpoints import flip
from tests.commands.golden import ftckpt
from tests.formats.deepspeed.sets import tag


@pytest.fixture
def here(tmp_path: Path) -> Path:
    shutil.copytree(tag("z1"), tmp_path / "run" / "global_step2")
    shutil.copytree(tag("z2"), tmp_path / "new" / "global_step0")
    return tmp_path


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


RESHARD = ("reshard", "run/global_step2", "out", "--like", "new/global_step0")


def test_a_checkpoint_for_the_job_that_saved_the_example(here: Path) -> None:
    """The elastic form has no settings of groups, so they must be dropped."""
    before = contents(here / "new")
    done = ftckpt(*RESHARD, cwd=here)
    assert done.returncode == 13, done.stderr
    assert "optimizer.param_groups" in done.stderr
    done = ftckpt(*RESHARD, "--drop", "*optimizer.param_groups", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["like"].endswith("new/global_step0")
    assert document["proof"]["tensors"] > 0
    assert contents(here / "new") == before
    assert ftckpt("verify", "out", "--level", "content", cwd=here).returncode == 0
    back = ("convert", "out", "back", "--like", "run/global_step2")
    assert ftckpt(*back, cwd=here).returncode == 0
    files = {*os.listdir(here / "run/global_step2"), "ftckpt.manifest.json"}
    assert set(os.listdir(here / "back")) == files


def test_an_example_with_a_missing_rank_is_refused(here: Path) -> None:
    next((here / "new").rglob("*rank_1*optim*")).unlink()
    done = ftckpt(*RESHARD, cwd=here)
    assert done.returncode == 5, done.stderr  # nothing marks the save as finished
    assert "the example" in done.stderr
    assert "cannot be trusted" in done.stderr


def test_an_example_whose_pickle_is_damaged_is_refused(here: Path) -> None:
    """A name in the list of parameters is another: the file still parses."""
    path = next((here / "new").rglob("*model_states.pt"))
    flip(path, path.read_bytes().index(b"up.weight"))
    done = ftckpt(*RESHARD, cwd=here)
    assert done.returncode == 4, done.stderr
    assert not (here / "out").exists()


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_of_a_hostile_example_runs(here: Path) -> None:
    import torch

    path = next((here / "new").rglob("*model_states.pt"))
    torch.save({"module": {}, "param_shapes": Hostile()}, path)
    done = ftckpt(*RESHARD, cwd=here)
    assert done.returncode == 7, done.stderr
    assert sorted(os.listdir(here)) == ["new", "run"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--like absent", 9, "absent"),
        ("--like new/global_step0 --dp 4", 2, "--dp 4 contradicts --like: the example has 3"),
        ("--like new/global_step0 --zero-stage 1", 2, "the example has 2"),
        ("--like new/global_step0 --ep 2", 2, "--ep 2 contradicts --like"),
        ("--tp 2", 13, "--like EXAMPLE"),
    ],
)
def test_what_contradicts_the_example_is_refused(
    here: Path, words: str, code: int, says: str
) -> None:
    done = ftckpt("reshard", "run/global_step2", "out", *words.split(), cwd=here)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert sorted(os.listdir(here)) == ["new", "run"]


def test_another_format_than_the_examples_is_refused(here: Path) -> None:
    words = ("convert", "run/global_step2", "out", "--to", "deepspeed-universal")
    done = ftckpt(*words, "--like", "new/global_step0", cwd=here)
    assert done.returncode == 2
    assert "not laid out by an example" in done.stderr


def test_nothing_is_built_inside_the_example(here: Path) -> None:
    words = ("reshard", "run/global_step2", "new/global_step0/out", "--like", "new/global_step0")
    done = ftckpt(*words, cwd=here)
    assert done.returncode == 8
    assert "lies inside the example" in done.stderr
