"""What lies around a destination: a checkpoint is closed to what others write, a root is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt import api
from ftckpt.commands.app import run
from ftckpt.commands.invocation import Invocation
from ftckpt.errors import ExitCode, RefusedError
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest import NAME
from ftckpt.stores import StoreOptions, open_store
from ftckpt.transfer.outside import require_outside
from tests.small_format import Small

DATA = Path(__file__).parents[1] / "data"
OPTIONS = StoreOptions()
# How a file of torch.save begins.
_FILE = b"PK\3\4" + bytes(26) + b"archive/data.pkl"

# What each checkpoint gives itself away by: names alone.
INSIDE = {
    "dcp": [".metadata"],
    "dcp being written": ["__0_0.distcp"],
    "Hugging Face": ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
    "Megatron": ["mp_rank_00_000/model_optim_rng.pt"],
    "DeepSpeed": ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "verl": ["model_world_size_1_rank_0.pt"],
    "sealed": [NAME],
}
OUTSIDE = {
    "a root": ["step-10/.metadata", "latest"],
    "a root with the last weights": ["model.safetensors.index.json", "checkpoint-5/a"],
    "a root whose last weights are sealed": ["model.safetensors", NAME, "checkpoint-5/a"],
    "a home with a file": ["model.safetensors", "notes.txt"],
    "a home with another": ["pytorch_model.bin"],
    "a project": ["net.onnx", "saved_model.pb"],
    "nothing": [],
}


def _make(folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(_FILE)


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("below", ["out", "mp_rank_00_000/out", "not/there/out/"])
def test_nothing_is_written_into_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, below: str
) -> None:
    _make(tmp_path / "around", INSIDE[kind])
    (tmp_path / "linked").symlink_to("around")
    for typed in (f"{tmp_path}/around/{below}", f"{tmp_path}/linked/{below}"):
        with pytest.raises(RefusedError, match="lies inside the checkpoint"):
            require_outside(typed, FORMATS, OPTIONS)
    monkeypatch.chdir(tmp_path / "around")
    with pytest.raises(RefusedError, match="lies inside the checkpoint"):
        require_outside(below, FORMATS, OPTIONS)
    require_outside("../out", FORMATS, OPTIONS)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_holds_checkpoints_may_hold_another(tmp_path: Path, kind: str) -> None:
    _make(tmp_path / "around", OUTSIDE[kind])
    require_outside(f"{tmp_path}/around/out", FORMATS, OPTIONS)
    require_outside(f"{tmp_path}/around/not/there/out", FORMATS, OPTIONS)


def test_an_object_store_is_asked_about_the_nearest_place() -> None:
    open_store("memory://bucket/inside/step-1").put("marker", b"{}")
    with pytest.raises(RefusedError):
        require_outside("memory://bucket/inside/step-1/out", [Small()], OPTIONS)
    require_outside("memory://bucket/inside/step-1-out", [Small()], OPTIONS)
    require_outside("memory://bucket/nowhere/out", [Small()], OPTIONS)


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
    _make(around, [".metadata"])
    places = {"A": str(DATA / "run" / "step-1"), "B": str(around)}
    typed = [places.get(w[:1], w[:1]) + w[1:] if w[:1] in places else w for w in words]
    assert run(typed, Invocation()).code is ExitCode.REFUSED
    assert "lies inside the checkpoint" in capsys.readouterr().err
    assert [path.name for path in around.iterdir()] == [".metadata"]


def test_the_interface_of_python_asks_too(tmp_path: Path) -> None:
    _make(tmp_path / "step-2", [".metadata"])
    opened = api.open_checkpoint(str(DATA / "run" / "step-1"))
    for write in (api.copy, api.convert):
        with pytest.raises(RefusedError, match="lies inside the checkpoint"):
            write(opened, f"{tmp_path}/step-2/out")
