"""What the files of ranks record of their job is evidence: a set that lacks some is not whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ExitCode
from ftckpt.findings import Strictness
from ftckpt.formats.ranks.recorded_job import Evidence
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

Record = Callable[[int], dict[str, Any]]


def saved(
    folder: Path,
    record: Record,
    ranks: int | range = 8,
    *,
    name: str = "shard_{:05d}.pt",
    beside: Mapping[str, Any] | None = None,
) -> Path:
    """Write files of ranks by hand, each with what `record` says of its rank."""
    folder.mkdir(parents=True)
    for rank in range(ranks) if isinstance(ranks, int) else ranks:
        state = {"tensors": {"w": torch.full((2, 3), float(rank))}, **record(rank)}
        torch.save(state, folder / name.format(rank))
    if beside is not None:
        (folder / "metadata.json").write_text(json.dumps(beside))
    return folder


def checked(folder: Path, *, strict: bool = False) -> VerifyReport:
    classes = frozenset(Strictness) if strict else frozenset[Strictness]()
    options = VerifyOptions(level=Level.CONTENT, strict=classes)
    return verify(open_checkpoint(folder), options)


def kinds(report: VerifyReport) -> set[str]:
    return {f.kind for f in report.findings if f.code is not ExitCode.OK}


SPELLINGS: list[Mapping[str, Any]] = [
    {"world_size": 8},
    {"world": 8},
    {"num_shards": 8},
    {"n_ranks": 8},
    {"dp_world_size": 8},
    {"mp_size": 8},
    {"tp_size": 8},
    {"tensor_parallel_size": 8},
    {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
    {"tp": 2, "dp": 4},
    {"config": {"world_size": 8}},
    {"meta": {"distributed": {"num_ranks": 8}}},
    {"args": {"parallel": {"tp_size": 4, "pp_size": 2}}},
    {"shard_info": {"total_shards": 8}},
]


@pytest.mark.parametrize("record", SPELLINGS, ids=str)
def test_a_lost_last_rank_is_found_however_the_world_is_spelled(
    tmp_path: Path, record: Mapping[str, Any]
) -> None:
    whole = checked(saved(tmp_path / "whole", lambda rank: {**record, "step": 3}))
    assert whole.code is ExitCode.OK, whole.findings
    assert "count-unknown" not in {f.kind for f in whole.findings}
    lost = checked(saved(tmp_path / "lost", lambda rank: {**record, "step": 3}, 7))
    assert lost.code is ExitCode.INCOMPLETE, lost.findings
    assert kinds(lost) == {"missing-rank"}
    assert [f.rank for f in lost.findings if f.kind == "missing-rank"] == [7]


def test_with_a_commit_marker_a_lost_rank_is_damage(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 8}, 7, beside={"step": 3})
    assert checked(folder).code is ExitCode.CORRUPT


def test_latest_walks_back_over_a_set_that_lost_a_rank(tmp_path: Path) -> None:
    old = saved(tmp_path / "step-100", lambda rank: {"world_size": 8, "rank": rank, "step": 100})
    saved(tmp_path / "step-200", lambda rank: {"world_size": 8, "rank": rank, "step": 200}, 7)
    for level in ("structure", "content"):
        answer = ftckpt_json("latest", str(tmp_path), "--level", level)
        assert (answer["result"]["code"], answer["path"]) == (ExitCode.OK, str(old))
    answer = ftckpt_json("verify", str(tmp_path / "step-200"))
    assert answer["result"]["code"] == ExitCode.INCOMPLETE


def test_a_count_that_nothing_records_is_called_unknown(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"step": 3})
    report = checked(folder)
    assert report.code is ExitCode.OK
    (found,) = (f for f in report.findings if f.kind == "count-unknown")
    assert found.severity == "warning"
    assert checked(folder, strict=True).code is ExitCode.UNVERIFIED


def test_replicas_of_which_one_saves_for_all_are_no_lost_ranks(tmp_path: Path) -> None:
    record = {"world_size": 8, "tp_size": 4, "dp_size": 2}
    folder = saved(tmp_path / "c", lambda rank: {**record, "tp_rank": rank, "dp_rank": 0}, 4)
    assert checked(folder).code is ExitCode.OK


def test_but_not_where_replicas_save_too(tmp_path: Path) -> None:
    record = {"world_size": 8, "tp_size": 2}
    more = saved(tmp_path / "d", lambda rank: {**record, "dp_rank": rank // 2}, 6)
    assert checked(more).code is ExitCode.INCOMPLETE


def test_a_file_of_another_world(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 4 if rank == 2 else 8, "rank": rank})
    report = checked(folder)
    assert report.code is ExitCode.CORRUPT
    (found,) = (f for f in report.findings if f.kind == "world-size")
    assert (found.file, found.rank) == ("shard_00002.pt", 2)


def test_names_that_say_another_world_than_the_files(tmp_path: Path) -> None:
    name = "shard_{}_of_4.pt"
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 8, "rank": rank}, 4, name=name)
    assert checked(folder).code is ExitCode.CORRUPT
    assert kinds(checked(folder)) == {"world-size"}


def test_a_record_beside_them_that_says_another_world(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"num_shards": 8}, beside={"world_size": 4})
    assert "world-size" in kinds(checked(folder))


def test_groups_that_differ_though_their_product_is_the_same(tmp_path: Path) -> None:
    def grid(rank: int) -> dict[str, Any]:
        tp = 2 if rank == 5 else 4
        return {"tp_size": tp, "pp_size": 8 // tp}

    report = checked(saved(tmp_path / "c", grid))
    assert [f.file for f in report.findings if f.kind == "world-size"] == ["shard_00005.pt"]


def test_a_file_that_contradicts_itself_is_of_another_save(tmp_path: Path) -> None:
    def record(rank: int) -> dict[str, Any]:
        inner = 8 if rank == 2 else 4
        return {"world_size": 4, "config": {"world_size": inner}}

    report = checked(saved(tmp_path / "c", record, 4))
    assert report.code is ExitCode.CORRUPT
    (found,) = (f for f in report.findings if f.kind == "world-size")
    assert (found.file, found.rank) == ("shard_00002.pt", 2)
    assert "world_size = 4 and config.world_size = 8" in found.message

    def place(rank: int) -> dict[str, Any]:
        return {"world_size": 4, "tp_rank": rank, "meta": {"tp_rank": rank ^ (rank == 2)}}

    report = checked(saved(tmp_path / "d", place, 4))
    assert [(f.kind, f.rank) for f in report.findings if f.code] == [("wrong-rank", 2)]


@pytest.mark.parametrize("inner", [1, 8])
def test_a_configuration_of_another_job_in_every_file(inner: int, tmp_path: Path) -> None:
    """The outermost number counts; by a larger one there may have been more files."""
    record = {"world_size": 4, "config": {"world_size": inner}}
    folder = saved(tmp_path / "c", lambda rank: record, 4)
    report = checked(folder)
    assert report.code is ExitCode.OK
    assert ("count-unknown" in {f.kind for f in report.findings}) is (inner > 4)
    (folder / "shard_00003.pt").unlink()
    assert checked(folder).code is ExitCode.INCOMPLETE


def test_a_record_beside_them_that_contradicts_itself(tmp_path: Path) -> None:
    beside = {"world_size": 4, "job": {"world_size": 8}}
    report = checked(saved(tmp_path / "c", lambda rank: {}, 4, beside=beside))
    assert [f.file for f in report.findings if f.kind == "count-unknown"] == ["metadata.json"]


def test_series_of_files_may_record_different_things(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 4}, 4, name="model_rank_{}.pt")
    for rank in range(4):
        torn = {"world_size": 4, "config": {"world_size": 2}}
        torch.save({"tensors": {"w": torch.ones(2, 3)}, **torn}, folder / f"ema_rank_{rank}.pt")
    assert checked(folder).code is ExitCode.OK


@pytest.mark.parametrize("spelled", ["rank", "global_rank", "shard_id", "process_index"])
def test_two_files_that_were_swapped(tmp_path: Path, spelled: str) -> None:
    swapped = {3: 4, 4: 3}
    folder = saved(tmp_path / "c", lambda r: {"world_size": 8, spelled: swapped.get(r, r)})
    report = checked(folder)
    assert report.code is ExitCode.CORRUPT
    assert {f.rank for f in report.findings if f.kind == "wrong-rank"} == {3, 4}


def test_a_copied_rank_is_told_by_its_coordinates(tmp_path: Path) -> None:
    def grid(rank: int) -> dict[str, Any]:
        rank = 1 if rank == 6 else rank
        return {"tp_size": 4, "pp_size": 2, "tp_rank": rank % 4, "pp_rank": rank // 4}

    report = checked(saved(tmp_path / "c", grid))
    assert [f.file for f in report.findings if f.kind == "wrong-rank"] == ["shard_00006.pt"]


def test_two_mixed_steps(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 8, "step": 90 if rank == 7 else 100})
    report = checked(folder)
    assert report.code is ExitCode.CORRUPT
    assert [f.file for f in report.findings if f.kind == "mixed-steps"] == ["shard_00007.pt"]


def test_a_record_of_another_step_than_the_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"step": 90}, beside={"world_size": 8, "step": 100})
    assert "mixed-steps" in kinds(checked(folder))


def test_what_counts_something_else_is_no_world(tmp_path: Path) -> None:
    """A dataset's shards, a loader's workers, LoRA's rank, a model's sizes."""
    record = {
        "data_config": {"num_shards": 1024},
        "config": {"rank": 16, "dataset": {"num_shards": 512}, "lora": {"rank": 8}},
        "optimizer_config": {"world_size": 3},
        "model_args": {"tp": -1},
    }
    report = checked(saved(tmp_path / "c", lambda rank: {**record, "world_size": 8}))
    assert report.code is ExitCode.OK, report.findings


def test_a_tree_that_holds_itself_ends(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"world_size": 2}
    loop["meta"] = loop
    evidence = Evidence("f", 0)
    evidence.read(loop)
    assert evidence.world == 2


@pytest.mark.parametrize("name", [
    "shard_{}.pt", "shard_{}_of_8.pt", "shard_{:05d}_of_8.pt", "shard-{:02d}-of-08.pth",
    "rank_{}.pt", "rank{}.pt", "model_rank_{}.pt", "checkpoint_rank{:03d}.pth",
    "ckpt_step100_rank{}.pt", "pytorch_model_fsdp_rank{}.bin",
])  # fmt: skip
def test_names_that_trainers_give(tmp_path: Path, name: str) -> None:
    record = {"world_size": 8, "step": 100}
    folder = saved(tmp_path / "c", lambda rank: {**record, "rank": rank}, name=name)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.topology.world_size) == ("ranks", 8)
    assert checked(folder).code is ExitCode.OK
    lost = folder / name.format(7)
    lost.unlink()
    report = checked(folder)
    assert report.code is ExitCode.INCOMPLETE
    assert [f.file for f in report.findings if f.kind == "missing-rank"] == [lost.name]


def test_names_that_count_from_one(tmp_path: Path) -> None:
    name = "shard_{}_of_4.pt"
    folder = saved(
        tmp_path / "c", lambda n: {"world_size": 4, "rank": n - 1}, range(1, 5), name=name
    )
    report = checked(folder)
    assert report.code is ExitCode.OK, report.findings
    (folder / "shard_2_of_4.pt").unlink()
    lost = [f for f in checked(folder).findings if f.kind == "missing-rank"]
    assert [(f.file, f.rank) for f in lost] == [("shard_2_of_4.pt", 1)]


def test_each_series_of_files_must_be_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", lambda rank: {"world_size": 4}, 4, name="model_rank_{}.pt")
    for rank in range(4):
        torch.save({"tensors": {"w": torch.ones(2, 3)}}, folder / f"ema_rank_{rank}.pt")
    assert checked(folder).code is ExitCode.OK
    (folder / "ema_rank_2.pt").unlink()
    report = checked(folder)
    assert report.code is ExitCode.INCOMPLETE
    assert [f.file for f in report.findings if f.kind == "missing-rank"] == ["ema_rank_2.pt"]
