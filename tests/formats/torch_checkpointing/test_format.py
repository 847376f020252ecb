"""Saves of torch_checkpointing 0.1.1 by real jobs: whole, damaged, of other versions, written."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import CommitState, Kind
from ftckpt.errors import CorruptError, ExitCode, NewerWriterError, UnsafeError
from ftckpt.formats.torch_checkpointing import TorchCheckpointing
from ftckpt.formats.torch_checkpointing.writer import TorchCheckpointingWriter
from ftckpt.formats.writers import WRITERS
from tests.builders.checkpoints import open_checkpoint
from tests.builders.jobs import run_job
from tests.conformance.formats import FormatTests, Made, findings_of, open_path
from tests.conformance.writers import assert_same_tensors, assert_sound, write
from tests.faults.cli import here
from tests.formats.ranks.jobs import truth_file

DATA = Path(__file__).parents[2] / "data" / "torch_checkpointing"
SAMPLES = ("fsdp", "grid", "fsdp_tp", "mixed")


class TestTorchCheckpointing(FormatTests):
    format = TorchCheckpointing()
    truncated = frozenset({"bad-zip", "truncated-file", "bad-header"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file", "bad-header"})

    def make(self, root: Path) -> list[Made]:
        made = []
        for name in SAMPLES:
            shutil.copytree(DATA / name / "step-10", root / name / "step-10")
            made.append(
                Made(root / name / "step-10", truth_file(DATA / name / "truth.safetensors"))
            )
        return made


def sample(name: str, to: Path) -> Path:
    shutil.copytree(DATA / name / "step-10", to / "step-10")
    return to / "step-10"


def change(folder: Path, how: Callable[[dict[str, Any]], Any]) -> Path:
    """Write changed metadata: the package pickles plain dicts."""
    file = folder / "metadata.pkl"
    tree = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(how(tree) or tree))
    return folder


def kinds(folder: Path) -> set[str]:
    return {f.kind for f in findings_of(TorchCheckpointing(), folder) if f.code is not ExitCode.OK}


class TestRead:
    def test_step_world_and_state_are_what_the_job_saved(self) -> None:
        checkpoint = open_path(TorchCheckpointing(), DATA / "fsdp" / "step-10")
        assert checkpoint.step == 10
        assert checkpoint.topology.world_size == 3
        assert checkpoint.commit.state is CommitState.COMMITTED
        assert checkpoint.load_object("rank_2.dataloader") == {"dp_rank_2": b"abc", "world_size": 3}
        assert checkpoint.load_object("rank_0.lr_scheduler") == {"last_epoch": 10}
        assert checkpoint.tensors["scale"].kind is Kind.PARAM

    def test_items_in_other_forms_are_read(self) -> None:
        checkpoint = open_path(TorchCheckpointing(), DATA / "mixed" / "step-10")
        assert checkpoint.load_object("rank_1.train_state") == {"step": 10, "ntokens": 1000}
        assert checkpoint.load_object("rank_0.blob") == b"raw bytes"

    def test_metadata_of_version_1_say_the_same(self, tmp_path: Path) -> None:
        def older(tree: dict[str, Any]) -> dict[str, Any]:
            flat: dict[str, Any] = {}
            layouts: dict[int, dict[str, Any]] = {rank: {} for rank in range(2)}
            for item, record in tree["metadata"].items():
                for path, groups in record["nested_path_to_metadata"].items():
                    flat[f'["{item}",{path[1:]}'] = groups
                for rank, layout in record["rank_to_layout_info"].items():
                    layouts[rank][item] = layout
            return {"metadata": flat, "rank_to_layout_info_mappings": layouts, "world_size": 2}

        folder = change(sample("mixed", tmp_path), older)
        checkpoint = open_checkpoint(folder)
        assert_same_tensors(checkpoint, open_checkpoint(DATA / "mixed" / "step-10"))

    def test_a_tensor_that_lists_its_boxes_lies_where_they_say(self, tmp_path: Path) -> None:
        def boxes(tree: dict[str, Any]) -> None:
            paths = tree["metadata"]["model"]["nested_path_to_metadata"]
            said = paths['["embed.weight"]']
            data = said[0]["sharding_metadata"]["data"]
            paths['["embed.weight"]'] = [
                {
                    "ranks": (rank,),
                    "sharding_metadata": {
                        "type": "default_tensor_v1",
                        "data": {
                            "global_shape": data["global_shape"],
                            "dtype": data["dtype"],
                            "global_offsets": [[rank * 5, 0], [rank * 5 + 2, 0]],
                            "local_offsets": [[0, 0], [2, 0]],
                            "local_sizes": [[2, 6], [3, 6]],
                        },
                    },
                }
                for rank in range(2)
            ]

        checkpoint = open_checkpoint(change(sample("mixed", tmp_path), boxes))
        assert len(checkpoint.tensors["embed.weight"].pieces) == 4
        assert_same_tensors(checkpoint, open_checkpoint(DATA / "mixed" / "step-10"))


class TestWrong:
    @pytest.mark.parametrize(
        ("file", "kind"),
        [
            ("model_1.pt", "missing-rank"),
            ("optimizer_2.pt", "missing-rank"),
            ("train_state_1.pt", "missing-rank"),
        ],
    )
    def test_a_lost_file_of_a_rank_is_told(self, tmp_path: Path, file: str, kind: str) -> None:
        folder = sample("fsdp", tmp_path)
        (folder / file).unlink()
        found = [f for f in findings_of(TorchCheckpointing(), folder) if f.kind == kind]
        assert [f.file for f in found] == [file]

    def test_an_item_of_the_first_rank_alone_is_whole(self, tmp_path: Path) -> None:
        folder = sample("fsdp", tmp_path)
        for rank in (1, 2):
            (folder / f"train_state_{rank}.pt").unlink()
        assert kinds(folder) == set()

    @pytest.mark.parametrize(
        ("what", "value"),
        [
            ("global_shape", [12, 6]),
            ("dtype", "torch.float16"),
            ("placements", [{"type": "Replicate"}]),
        ],
    )
    def test_metadata_and_files_that_disagree_are_damage(
        self, tmp_path: Path, what: str, value: Any
    ) -> None:
        def wrong(tree: dict[str, Any]) -> None:
            paths = tree["metadata"]["model"]["nested_path_to_metadata"]
            paths['["embed.weight"]'][0]["sharding_metadata"]["data"][what] = value

        assert "bad-metadata" in kinds(change(sample("fsdp", tmp_path), wrong))

    def test_a_tensor_that_no_file_holds_is_missing(self, tmp_path: Path) -> None:
        def more(tree: dict[str, Any]) -> None:
            paths = tree["metadata"]["model"]["nested_path_to_metadata"]
            paths['["lost"]'] = paths['["embed.weight"]']

        assert "missing-tensor" in kinds(change(sample("fsdp", tmp_path), more))

    def test_a_later_version_or_another_record_is_a_newer_writer(self, tmp_path: Path) -> None:
        folder = change(sample("fsdp", tmp_path / "a"), lambda tree: tree.update(version="3.0"))
        with pytest.raises(NewerWriterError, match=r"expected version 1\.0 or 2\.0, found 3\.0"):
            open_path(TorchCheckpointing(), folder)

        def other(tree: dict[str, Any]) -> None:
            paths = tree["metadata"]["model"]["nested_path_to_metadata"]
            paths['["norm"]'][0]["sharding_metadata"]["type"] = "GridMetadata"

        with pytest.raises(NewerWriterError, match="found GridMetadata"):
            open_path(TorchCheckpointing(), change(sample("fsdp", tmp_path / "b"), other))

    def test_numbers_that_cannot_be_are_damage(self, tmp_path: Path) -> None:
        folder = change(sample("fsdp", tmp_path), lambda tree: tree.update(world_size=2))
        with pytest.raises(CorruptError, match="and a world of 2"):
            open_path(TorchCheckpointing(), folder)

    def test_a_path_that_leaves_the_save_is_refused(self, tmp_path: Path) -> None:
        def climbs(tree: dict[str, Any]) -> None:
            layouts = tree["metadata"]["model"]["rank_to_layout_info"]
            layouts[0]["file_path"] = "../../secret.safetensors"

        with pytest.raises(UnsafeError):
            open_path(TorchCheckpointing(), change(sample("mixed", tmp_path), climbs))

    def test_metadata_that_call_something_are_refused(self, tmp_path: Path) -> None:
        folder = sample("fsdp", tmp_path)
        file = folder / "metadata.pkl"
        file.write_bytes(b"\x80\x04cos\nsystem\n(Vtrue\ntR.nested_path_to_metadata")
        with pytest.raises(UnsafeError):
            open_path(TorchCheckpointing(), folder)


class TestWritten:
    @pytest.mark.parametrize("name", SAMPLES)
    def test_it_writes_what_it_reads(self, tmp_path: Path, name: str) -> None:
        source = open_checkpoint(DATA / name / "step-10")
        result = write(TorchCheckpointingWriter(), source, tmp_path / "out")
        assert_same_tensors(result, source)
        assert_sound(result)
        assert set(result.objects) == set(source.objects)
        for key in source.objects:
            assert result.load_object(key) == source.load_object(key)

    @pytest.mark.parametrize("world", [1, 2, 5])
    def test_other_ranks_hold_the_same(self, tmp_path: Path, world: int) -> None:
        source = open_checkpoint(DATA / "fsdp_tp" / "step-10")
        result = write(TorchCheckpointingWriter(), source, tmp_path / "out", dp=world)
        assert result.topology.world_size == world
        assert_same_tensors(result, source)

    @pytest.mark.parametrize("name", ["dcp", "ranks", "torchsave"])
    def test_there_and_back_is_equal(self, tmp_path: Path, name: str) -> None:
        source = open_checkpoint(DATA / "fsdp_tp" / "step-10")
        middle = write(WRITERS[name](), source, tmp_path / "there")
        back = write(TorchCheckpointingWriter(), middle, tmp_path / "back", dp=4)
        assert_same_tensors(back, source)
        done = here("diff", DATA / "fsdp_tp" / "step-10", tmp_path / "back")
        assert done.code == ExitCode.OK, done.document

    def test_what_all_ranks_hold_alike_is_one_in_a_store(self, tmp_path: Path) -> None:
        source = open_checkpoint(DATA / "fsdp" / "step-10")
        store = write(WRITERS["dcp"](), source, tmp_path / "there")
        names = set(store.objects)
        assert {"train_state.step", "lr_scheduler.last_epoch"} <= names
        assert "optimizer.param_groups.0.lr" in names
        assert "rank_1.dataloader.dp_rank_1" in names


class TestLoadedByThePackage:
    def test_what_is_written_loads_on_other_ranks(self, tmp_path: Path) -> None:
        cases: list[Path] = []
        for name in SAMPLES:
            source = open_checkpoint(DATA / name / "step-10")
            store = write(WRITERS["dcp"](), source, tmp_path / name / "dcp")
            write(TorchCheckpointingWriter(), store, tmp_path / name / "save", dp=3)
            cases += [tmp_path / name / "save", DATA / name / "truth.safetensors"]
        run_job(2, Path(__file__).with_name("loading.py"), *cases)


class TestRoots:
    def test_a_save_that_did_not_finish_is_passed_over(self, tmp_path: Path) -> None:
        sample("fsdp", tmp_path)
        shutil.copytree(tmp_path / "step-10", tmp_path / "tmp_step-20")
        done = here("latest", tmp_path)
        assert (done.code, done.document["step"]) == (ExitCode.OK, 10)
