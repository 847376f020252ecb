"""NeMo 2: torch_dist in `weights/`, configuration in `context/`, and a mark while it saves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt.discovery.step_names import says_other_step, step_in_name
from tests.builders.checkpoints import flip, open_checkpoint
from tests.formats.megatron.torch_dist.test_reader import of_data
from tests.json_run import ftckpt_json

NAME = "llama--val_loss=2.10-step=1-consumed_samples=16.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a root with one checkpoint, in the places of NeMo 2.6, and its copy `-last`."""
    root = tmp_path / "root"
    shutil.copytree(of_data("model_space_tp2", tmp_path / "made").path, root / NAME / "weights")
    context = root / NAME / "context"
    context.mkdir()
    (context / "io.json").write_text('{"objects": {}}')
    (context / "model.yaml").write_text("num_layers: 2\n")
    shutil.copytree(root / NAME, root / f"{NAME}-last")
    return root


def test_it_is_read_as_its_store_is(root: Path) -> None:
    whole, store = open_checkpoint(root / NAME), open_checkpoint(root / NAME / "weights")
    assert (whole.format, whole.dialect) == ("bundle", "written by NeMo 2")
    assert {k: (i.shape, i.dtype) for k, i in whole.tensors.items()} == {
        k: (i.shape, i.dtype) for k, i in store.tensors.items()
    }
    assert {"context/io.json", "context/model.yaml", "weights/metadata.json"} <= set(
        whole.members()
    )
    diff = ftckpt_json("diff", str(root / NAME), str(root / NAME / "weights"))
    assert diff["result"]["code"] == 0


def test_its_verbs(root: Path, tmp_path: Path) -> None:
    one = str(root / NAME)
    assert ftckpt_json("verify", one, "--level", "values")["result"]["code"] == 0
    assert ftckpt_json("copy", one, str(tmp_path / "copy"))["result"]["code"] == 0
    assert (tmp_path / "copy/context/model.yaml").read_text() == "num_layers: 2\n"
    for form in ("safetensors", "dcp"):
        made = ftckpt_json("convert", one, str(tmp_path / form), "--to", form)
        assert made["result"]["code"] == 0
        assert ftckpt_json("diff", one, str(tmp_path / form))["result"]["code"] == 0


def test_a_flipped_bit_is_named_with_its_folder(root: Path) -> None:
    checkpoint = open_checkpoint(root / NAME)
    piece = next(iter(checkpoint.tensors.values())).pieces[0]
    extent = checkpoint.payload(piece).extent
    flip(root / NAME / extent.file, extent.offset)
    answer = ftckpt_json("verify", str(root / NAME))
    assert answer["result"]["code"] == 4
    assert extent.file.startswith("weights/")
    assert extent.file in {f["file"] for f in answer["findings"]}


def test_a_lost_store_marker_is_an_unfinished_save(root: Path) -> None:
    (root / NAME / "weights/metadata.json").unlink()
    assert ftckpt_json("verify", str(root / NAME))["result"]["code"] == 5


def test_a_marked_checkpoint_is_not_finished(root: Path) -> None:
    assert ftckpt_json("latest", str(root))["skipped"] == []
    (root / f"{NAME}-last-unfinished").touch()
    (root / f"{NAME}-unfinished").touch()
    assert ftckpt_json("latest", str(root))["result"]["code"] == 5
    (root / f"{NAME}-unfinished").unlink()
    assert ftckpt_json("latest", str(root))["path"].endswith(NAME)
    decided = ftckpt_json("gc", str(root), "--keep-last", "1")["plan"]["decisions"]
    assert {d["name"]: d["entry_class"] for d in decided} == {
        NAME: "COMMITTED",
        f"{NAME}-last": "STAGING",
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAME, 1),
        (f"{NAME}-last", 1),
        ("gpt_7b--reduced_train_loss=0.01-epoch=0-step=49-consumed_samples=400.0", 49),
        ("llama--step=7", 7),
        ("llama--val_loss=2.10-epoch=0-last", None),
        ("llama--step=7.tmp", None),
    ],
)
def test_the_step_of_a_name(name: str, said: int | None) -> None:
    assert step_in_name(name) == said
    if said is not None:
        assert not says_other_step(name, said)
        assert not says_other_step(name, said + 1)  # counted after the values were logged
        assert says_other_step(name, said + 2)
    assert says_other_step("step-3", 4)
