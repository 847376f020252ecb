"""What lies around a destination: a checkpoint is closed to what others write, a root is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ftckpt as api
from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode, RefusedError
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.places import require_outside

DATA = Path(__file__).parents[2] / "data"
OPTIONS = StoreOptions()
OUTSIDE = {
    "a root": ["step-10/.metadata", "latest"],
    "a root whose last weights are sealed": ["model.safetensors", MANIFEST, "checkpoint-5/a"],
    "a home with files of weights": ["model.safetensors", "scheduler.pt"],
    "a step whose parts are copied one by one": [f"actor/{MANIFEST}"],
    "a file that was copied": ["model.safetensors", f"model.safetensors{SUFFIX}"],
    "nothing": [],
}


def _make(folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize("below", ["out", "mp_rank_00_000/out", "not/there/out/"])
def test_nothing_is_written_into_a_sealed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    _make(tmp_path / "around", [MANIFEST])
    (tmp_path / "linked").symlink_to("around")
    for typed in (f"{tmp_path}/around/{below}", f"{tmp_path}/linked/{below}"):
        with pytest.raises(RefusedError, match="lies inside the checkpoint"):
            require_outside(open_store(typed, OPTIONS))
    monkeypatch.chdir(tmp_path / "around")
    with pytest.raises(RefusedError, match="lies inside the checkpoint"):
        require_outside(open_store(below, OPTIONS))
    require_outside(open_store("../out", OPTIONS))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_holds_checkpoints_may_hold_another(tmp_path: Path, kind: str) -> None:
    _make(tmp_path / "around", OUTSIDE[kind])
    require_outside(open_store(f"{tmp_path}/around/out", OPTIONS))
    require_outside(open_store(f"{tmp_path}/around/not/there/out", OPTIONS))


def test_parts_of_a_step_are_copied_one_by_one_and_again(tmp_path: Path) -> None:
    step = tmp_path / "global_step_10"
    step.mkdir()
    for part in ("actor", "critic", "actor"):
        assert run(["copy", str(DATA / "run" / "step-1"), str(step / part)], Invocation()).code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "A", "B/out", "--to", "torchsave"],
        ["reshard", "A", "B/out", "--dp", "1", "--dry-run"],
        ["copy", "A", "B/"],
        ["delta", "pack", "A", "B/out"],
    ],
)
def test_every_verb_that_writes_a_checkpoint_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    around = tmp_path / "step-2"
    _make(around, [MANIFEST])
    places = {"A": str(DATA / "run" / "step-1"), "B": str(around)}
    typed = [places.get(w[:1], w[:1]) + w[1:] if w[:1] in places else w for w in words]
    assert run(typed, Invocation()).code is ExitCode.REFUSED
    assert "lies inside the checkpoint" in capsys.readouterr().err
    assert [path.name for path in around.iterdir()] == [MANIFEST]


def test_the_interface_of_python_asks_too(tmp_path: Path) -> None:
    _make(tmp_path / "step-2", [MANIFEST])
    opened = api.open_checkpoint(str(DATA / "run" / "step-1"))
    for write in (api.copy, api.convert):
        with pytest.raises(RefusedError, match="lies inside the checkpoint"):
            write(opened, f"{tmp_path}/step-2/out")


@pytest.mark.parametrize("verb", ["convert", "reshard"])
def test_a_dry_run_too_is_refused_inside_its_source(tmp_path: Path, verb: str) -> None:
    source = tmp_path / "step-3"
    shutil.copytree(DATA / "dcp" / "fsdp2" / "step-3", source)
    words = [verb, str(source), f"{source}/out", "--dry-run"]
    words += ["--to", "dcp"] if verb == "convert" else ["--dp", "2"]
    done = run(words, Invocation())
    assert done.code is ExitCode.REFUSED
    assert not (source / "out").exists()


def test_nothing_is_written_into_what_a_delta_stands_upon(tmp_path: Path) -> None:
    for name in ("step-3", "step-4"):
        shutil.copytree(DATA / "dcp" / "fsdp2" / name, tmp_path / name)
    pack = ["delta", "pack", f"{tmp_path}/step-3", f"{tmp_path}/step-4", f"{tmp_path}/delta"]
    assert run(pack, Invocation()).code is ExitCode.OK
    inside = f"{tmp_path}/step-3/out"
    for words in (
        ["delta", "unpack", f"{tmp_path}/delta", inside],
        ["convert", f"{tmp_path}/delta", inside, "--to", "safetensors"],
        ["convert", f"{tmp_path}/delta", inside, "--to", "safetensors", "--dry-run"],
        ["delta", "pack", f"{tmp_path}/step-4", f"{tmp_path}/delta", inside],
        ["copy", f"{tmp_path}/delta", inside],
    ):
        assert run(words, Invocation()).code is ExitCode.REFUSED, words
    assert not (tmp_path / "step-3" / "out").exists()
