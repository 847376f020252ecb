"""Pipeline stages of one step, side by side with those of other steps, as trainers save by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.formats.ranks import Ranks
from ftckpt.formats.ranks.writer import RanksWriter
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made
from tests.data.by_hand import make_by_hand
from tests.formats.ranks.jobs import truth_file
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
FIRST = "checkpoint_step{}_stage0.pt"


class TestStages(FormatTests):
    format = Ranks()
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        folder = Path(shutil.copytree(DATA / "stages", root / "stages"))
        return [Made(folder, truth_file(DATA / "truth.safetensors"))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (100, 200, 300):
        make_by_hand.stages(tmp_path / "root", step)
    return tmp_path / "root"


def code_of(*arguments: str | Path) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


def test_each_step_of_a_directory_is_a_checkpoint(root: Path) -> None:
    for step in (100, 200, 300):
        for stage in (0, 1):
            checkpoint = open_checkpoint(root / f"checkpoint_step{step}_stage{stage}.pt")
            assert (checkpoint.format, checkpoint.step) == ("ranks", step)
            assert len(list(checkpoint.members())) == 2
            assert {"embed.weight", "norm.weight"} < set(checkpoint.tensors)
    answer = ftckpt_json("latest", str(root), "--level", "content")
    assert (answer["path"], answer["step"]) == (str(root / FIRST.format(300)), 300)
    assert code_of("verify", f"{root}@100", "--level", "content") == 0


def test_a_lost_stage_is_no_checkpoint(root: Path) -> None:
    (root / "checkpoint_step300_stage1.pt").unlink()
    assert code_of("verify", root / FIRST.format(300)) == ExitCode.INCOMPLETE
    answer = ftckpt_json("latest", str(root), "--level", "structure")
    assert answer["path"] == str(root / FIRST.format(200))
    (root / "checkpoint_step200_stage0.pt").unlink()
    answer = ftckpt_json("latest", str(root), "--level", "structure")
    assert answer["path"] == str(root / FIRST.format(100))


def test_one_step_alone_is_a_checkpoint_and_a_root(tmp_path: Path) -> None:
    make_by_hand.stages(tmp_path / "root", 100)
    assert open_checkpoint(tmp_path / "root").step == 100
    assert ftckpt_json("latest", str(tmp_path / "root"))["step"] == 100


def test_stages_of_two_steps_under_one_number(root: Path) -> None:
    """A stage of another save under this step's name is told by what it records."""
    shutil.copy(root / "checkpoint_step200_stage1.pt", root / "checkpoint_step300_stage1.pt")
    assert code_of("verify", root / FIRST.format(300)) == ExitCode.CORRUPT


def test_a_stage_under_another_stages_name(root: Path) -> None:
    shutil.copy(root / "checkpoint_step300_stage0.pt", root / "checkpoint_step300_stage1.pt")
    found = list(open_checkpoint(root / FIRST.format(300)).check())
    assert "wrong-rank" in {f.kind for f in found}


def test_nothing_drops_or_seals_a_part_of_a_shared_directory(root: Path) -> None:
    before = sorted(root.iterdir())
    answer = ftckpt_json("gc", str(root), "--keep-last", "1", "--apply")
    assert answer["result"]["code"] == 0
    assert code_of("seal", f"{root}@100") == ExitCode.UNSUPPORTED
    assert [p for p in sorted(root.iterdir()) if p.suffix == ".pt"] == before


def test_a_copy_of_a_step_has_a_directory_of_its_own(root: Path, tmp_path: Path) -> None:
    assert code_of("copy", f"{root}@200", tmp_path / "copy") == 0
    names = {p.name for p in (tmp_path / "copy").glob("*.pt")}
    assert names == {"checkpoint_step200_stage0.pt", "checkpoint_step200_stage1.pt"}
    assert code_of("verify", tmp_path / "copy", "--level", "content") == 0
    out = tmp_path / "whole.pt"
    assert code_of("convert", f"{root}@200", out, "--to", "torchsave") == 0
    assert len(torch.load(out, weights_only=True)["model"]) == len(make_by_hand.CUTS)


def test_stages_are_not_divided_anew() -> None:
    source = open_checkpoint(DATA / "stages")
    for request in (LayoutRequest(tp=4), LayoutRequest(dp=4)):
        with pytest.raises(UnsupportedError, match="stages") as caught:
            RanksWriter().layout(Content.of(source), request)
        assert "which layers" in caught.value.message
        assert "convert SRC DST --to safetensors (or torchsave)" in caught.value.hint


@pytest.mark.parametrize("to", ["safetensors", "torchsave"])
def test_what_the_refusal_names_joins_the_stages(to: str, tmp_path: Path) -> None:
    out = tmp_path / ("whole" if to == "safetensors" else "whole.pt")
    assert code_of("convert", DATA / "stages", out, "--to", to) == 0
    assert code_of("verify", out, "--level", "content") == 0
    joined = open_checkpoint(out)
    truth = truth_file(DATA / "truth.safetensors")
    assert set(joined.tensors) == set(truth)
    assert all(read_tensor(joined, key) == one.data for key, one in truth.items())


class TestDamage:
    """Twins of the sample: a flipped bit, a stage that was recorded in another world."""

    def checked(self, folder: Path) -> VerifyReport:
        return verify(open_checkpoint(folder), VerifyOptions(level=Level.CONTENT))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA / "stages", tmp_path / "stages"))

    def test_whole(self, folder: Path) -> None:
        assert self.checked(folder).code is ExitCode.OK

    @pytest.mark.parametrize("stage", [0, 1])
    def test_a_flipped_bit(self, folder: Path, stage: int) -> None:
        file = folder / f"checkpoint_step100_stage{stage}.pt"
        for tensor in open_checkpoint(folder).tensors.values():
            extent = tensor.pieces[0].extent
            if extent.file != file.name or not extent.length:
                continue
            good = file.read_bytes()
            data = bytearray(good)
            data[extent.offset + extent.length // 2] ^= 4
            file.write_bytes(data)
            report = self.checked(folder)
            file.write_bytes(good)
            assert report.code is ExitCode.CORRUPT
            assert {(f.kind, f.file) for f in report.findings if f.code is ExitCode.CORRUPT} == {
                ("bad-crc", file.name)
            }

    @pytest.mark.parametrize("key", ["num_stages", "pp_size", "world_size"])
    def test_a_stage_of_another_world(self, folder: Path, key: str) -> None:
        for stage in range(2):
            file = folder / f"checkpoint_step100_stage{stage}.pt"
            state = torch.load(file, weights_only=True)
            state["config"] = {key: 4 if stage else 2}
            torch.save(state, file)
        report = self.checked(folder)
        assert report.code is ExitCode.CORRUPT
        assert "world-size" in {f.kind for f in report.findings if f.code is ExitCode.CORRUPT}

    def test_stages_that_all_record_more_than_there_are(self, folder: Path) -> None:
        for stage in range(2):
            file = folder / f"checkpoint_step100_stage{stage}.pt"
            state = torch.load(file, weights_only=True)
            state["config"]["num_stages"] = 4
            torch.save(state, file)
        report = self.checked(folder)
        assert report.code is ExitCode.INCOMPLETE
        assert "missing-rank" in {f.kind for f in report.findings}


def test_layers_that_each_stage_counts_by_itself_are_not_merged(tmp_path: Path) -> None:
    for stage in range(2):
        layers = {f"layers.{i}.w": torch.full((2,), float(stage)) for i in range(3 - stage)}
        state = {"model": {**layers, "embed": torch.ones(3)}, "stage": stage, "num_stages": 2}
        torch.save(state, tmp_path / f"stage_{stage}.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert "layers.2.w" not in checkpoint.tensors
    assert {"extra:rank0:layers.2.w", "extra:rank1:layers.0.w", "embed"} < set(checkpoint.tensors)
    assert [p.replica for p in checkpoint.tensors["embed"].pieces] == [0, 1]


def test_stages_without_a_count_are_called_unknown(tmp_path: Path) -> None:
    for stage in range(2):
        state = {"model": {f"layers.{stage}.w": torch.ones(2)}, "world_size": 4}
        torch.save(state, tmp_path / f"stage{stage}.pt")
    report = verify(open_checkpoint(tmp_path), VerifyOptions())
    assert report.code is ExitCode.OK
    assert "count-unknown" in {f.kind for f in report.findings}
    shutil.copy(tmp_path / "stage1.pt", tmp_path / "stage2.pt")
    odd = verify(open_checkpoint(tmp_path), VerifyOptions())
    assert odd.code is not ExitCode.OK  # four ranks cannot share three stages


def test_an_object_store_has_the_same_steps(root: Path) -> None:
    memory = open_store("memory://stages-by-hand")
    for file in root.iterdir():
        memory.put(f"run/{file.name}", file.read_bytes())
    source = Source.file(memory, memory.stat(f"run/{FIRST.format(200)}"))
    checkpoint = Ranks().open(source)
    assert checkpoint.step == 200
    assert list(checkpoint.check()) == []
