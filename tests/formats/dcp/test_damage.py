"""What can happen to a distributed checkpoint on disk, and what is said about it."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.digests.blocks import blocks_of_bytes
from ftckpt.errors import CorruptError, ExitCode, IncompleteError, UnsupportedError
from ftckpt.findings import Finding, Severity, Strictness
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.checks import check_names, check_rank_metadata
from ftckpt.formats.dcp.metadata import parse_metadata
from ftckpt.formats.dcp.records import TABLE
from ftckpt.manifest import FileDigest
from ftckpt.manifest.rank_digests import leave
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.conformance.formats import open_path
from tests.formats.dcp.writing import DATA, save

FILES = [f"__{rank}_0.distcp" for rank in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "fsdp2" / "step-3", tmp_path / "step-3"))


STRICT = VerifyOptions(strict=frozenset(Strictness))


def report(path: Path, level: Level = Level.STRUCTURE) -> VerifyReport:
    return verify(open_path(Dcp(), path), VerifyOptions(level=level))


def errors(path: Path, level: Level = Level.STRUCTURE) -> list[Finding]:
    return [f for f in report(path, level).findings if f.severity is Severity.ERROR]


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata as the writer could have: through torch's own classes."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.AUTO, Level.VALUES])
def test_a_missing_file_is_a_verdict_at_every_level(path: Path, level: Level) -> None:
    (path / FILES[2]).unlink()
    answer = report(path, level)
    assert answer.code is ExitCode.CORRUPT
    assert ("missing-file", FILES[2]) in {(f.kind, f.file) for f in answer.findings}


def test_a_cut_file_names_what_is_cut_off(path: Path) -> None:
    data = (path / FILES[1]).read_bytes()
    (path / FILES[1]).write_bytes(data[:-100])
    found = next(f for f in errors(path) if f.kind == "truncated-file" and f.length == 100)
    assert (found.file, found.offset) == (FILES[1], len(data) - 100)
    assert found.tensor is not None


def test_bytes_after_the_last_item_are_found(path: Path) -> None:
    size = (path / FILES[0]).stat().st_size
    with (path / FILES[0]).open("ab") as file:
        file.write(b"more")
    (found,) = errors(path)
    assert (found.kind, found.file, found.offset, found.length) == (
        "trailing-bytes", FILES[0], size, 4)  # fmt: skip


def test_two_files_in_each_others_place_are_found(path: Path) -> None:
    (path / FILES[0]).rename(path / "x")
    (path / FILES[1]).rename(path / FILES[0])
    (path / "x").rename(path / FILES[1])
    assert {f.file for f in errors(path)} >= {FILES[0], FILES[1]}
    assert report(path).code is ExitCode.CORRUPT


def test_files_of_one_size_in_each_others_place_are_found(tmp_path: Path) -> None:
    # Equal sizes, so that the listing shows nothing: what the records hold must tell.
    state = {"model": {"a": torch.zeros(4, 2), "b": torch.zeros(2, 4)}}
    path = save(state, tmp_path / "c", single_file_per_rank=False)
    first, second = sorted(path.glob("*.distcp"))
    assert first.stat().st_size == second.stat().st_size
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)
    assert {f.kind for f in errors(path)} == {"shape-mismatch"}


def test_a_record_of_another_type_is_found(tmp_path: Path) -> None:
    one = save({"model": {"a": torch.zeros(4, dtype=torch.float16)}}, tmp_path / "one")
    two = save({"model": {"a": torch.zeros(4, dtype=torch.bfloat16)}}, tmp_path / "two")
    shutil.copy(two / FILES[0], one / FILES[0])
    kinds = {f.kind for f in errors(one)}
    assert kinds <= {"dtype-mismatch", "trailing-bytes", "truncated-file", "bad-zip"}
    edit(one, lambda m: _resize(m, (two / FILES[0]).stat().st_size))
    assert [f.kind for f in errors(one)] == ["dtype-mismatch"]


def _resize(metadata: Any, length: int) -> None:
    for stored in metadata.storage_data.values():
        stored.length = length


def test_shards_of_an_earlier_save_with_more_ranks_are_noticed(path: Path) -> None:
    shutil.copy(path / FILES[0], path / "__7_0.distcp")
    answer = report(path)
    assert answer.code is ExitCode.OK
    stale = next(f for f in answer.findings if f.kind == "stale-shard")
    assert (stale.file, stale.severity) == ("__7_0.distcp", Severity.WARNING)
    assert verify(open_path(Dcp(), path), STRICT).code is ExitCode.CORRUPT


def test_a_checkpoint_below_is_no_stale_shard(path: Path) -> None:
    shutil.copytree(DATA / "hsdp" / "step-3", path / "other")
    assert "stale-shard" not in {f.kind for f in report(path).findings}


def test_a_fifo_in_place_of_a_shard_is_refused_and_not_opened(path: Path) -> None:
    (path / FILES[0]).unlink()
    os.mkfifo(path / FILES[0])
    answer = report(path)
    assert answer.code is ExitCode.UNSAFE


# --- commit -------------------------------------------------------------------------------------


def test_without_metadata_it_is_not_committed(path: Path) -> None:
    (path / ".metadata").unlink()
    with pytest.raises(IncompleteError, match="4 data files"):
        open_path(Dcp(), path)


def test_temporary_metadata_that_is_whole_is_said_to_be(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")
    with pytest.raises(IncompleteError, match=r"\.metadata\.tmp is complete and fits") as caught:
        open_path(Dcp(), path)
    assert "renaming" in caught.value.hint


def test_temporary_metadata_that_was_cut_is_not(path: Path) -> None:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    (path / ".metadata.tmp").write_bytes(data[:-50])
    with pytest.raises(IncompleteError) as caught:
        open_path(Dcp(), path)
    assert "complete" not in caught.value.message
    assert "renaming" not in caught.value.hint


def test_temporary_metadata_that_does_not_fit_the_files_is_not(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")
    (path / FILES[0]).write_bytes(b"")
    with pytest.raises(IncompleteError) as caught:
        open_path(Dcp(), path)
    assert "complete" not in caught.value.message


def test_an_empty_metadata_is_damage(path: Path) -> None:
    from ftckpt.errors import CorruptError

    (path / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptError):
        open_path(Dcp(), path)


def test_a_leftover_of_another_commit_is_a_note(path: Path) -> None:
    (path / ".metadata.tmp").write_bytes(b"x")
    answer = report(path)
    assert answer.code is ExitCode.OK
    assert "leftover-commit" in {f.kind for f in answer.findings}


def test_data_newer_than_the_commit_is_a_note_and_never_a_verdict(path: Path) -> None:
    os.utime(path / ".metadata", (1_000_000, 1_000_000))
    answer = verify(open_path(Dcp(), path), STRICT)
    assert answer.code is ExitCode.OK
    (found,) = [f for f in answer.findings if f.kind == "write-order"]
    assert found.severity is Severity.NOTE
    for file in path.iterdir():
        os.utime(file, (1_000_000, 1_000_000))
    assert "write-order" not in {f.kind for f in report(path).findings}


# --- the index against the files ----------------------------------------------------------------


def test_a_chunk_without_an_item(path: Path) -> None:
    edit(path, lambda m: m.storage_data.pop(next(k for k in m.storage_data if k.offset)))
    found = errors(path)
    assert {f.kind for f in found} == {"bad-metadata"}
    assert report(path).code is ExitCode.CORRUPT


def test_an_item_without_a_chunk(path: Path) -> None:
    edit(path, lambda m: m.state_dict_metadata.pop("model.gain"))
    assert {(f.kind, f.tensor) for f in errors(path)} == {("bad-metadata", "model.gain")}


def test_an_object_without_an_item(path: Path) -> None:
    def drop(metadata: Any) -> None:
        key = next(k for k in metadata.storage_data if k.fqn == "train_state.step")
        del metadata.storage_data[key]

    edit(path, drop)
    assert ("bad-metadata", "train_state.step") in {(f.kind, f.tensor) for f in errors(path)}


def _chunks(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.up.weight"]


def test_a_hole(path: Path) -> None:
    def grow(metadata: Any) -> None:
        _chunks(metadata).size = torch.Size([11, 6])

    edit(path, grow)
    (found,) = errors(path)
    assert (found.kind, found.tensor) == ("hole", "up.weight")
    assert "rows [10, 11)" in found.message


def test_chunks_that_leave_the_tensor(path: Path) -> None:
    def shrink(metadata: Any) -> None:
        _chunks(metadata).size = torch.Size([9, 6])

    edit(path, shrink)
    assert "out-of-bounds" in {f.kind for f in errors(path)}


def test_chunks_that_overlap(path: Path) -> None:
    def widen(metadata: Any) -> None:
        first = _chunks(metadata).chunks[0]
        first.sizes = torch.Size([first.sizes[0] + 1, 6])

    edit(path, widen)
    assert {"overlap", "shape-mismatch"} == {f.kind for f in errors(path)}


def test_items_that_claim_the_same_bytes(path: Path) -> None:
    def shift(metadata: Any) -> None:
        stored = [s for s in metadata.storage_data.values() if s.relative_path == FILES[0]]
        max(stored, key=lambda s: s.offset).offset -= 10

    edit(path, shift)
    assert "extent-overlap" in {f.kind for f in errors(path)}


def test_an_index_that_swaps_two_tensors(path: Path) -> None:
    def swap(metadata: Any) -> None:
        keys = {
            k.fqn: k
            for k in metadata.storage_data
            if "down.weight" in k.fqn and k.offset == torch.Size([0, 0])
        }
        first, second = keys["model.down.weight"], keys["optimizer.state.down.weight.exp_avg"]
        table = metadata.storage_data
        table[first], table[second] = table[second], table[first]

    # Same shape and type: nothing in a record says whose it is, so no structure shows this.
    edit(path, swap)
    assert errors(path) == []


# --- objects ------------------------------------------------------------------------------------


def with_item(path: Path, name: str, payload: bytes) -> None:
    """Put another stream in the place of one item, at the end of its file."""

    def change(metadata: Any) -> None:
        stored = next(s for k, s in metadata.storage_data.items() if k.fqn == name)
        file = path / stored.relative_path
        others = [
            s
            for s in metadata.storage_data.values()
            if s.relative_path == stored.relative_path and s is not stored
        ]
        data = file.read_bytes()
        kept = b""
        for other in others:
            part = data[other.offset : other.offset + other.length]
            other.offset = len(kept)
            kept += part
        stored.offset, stored.length = len(kept), len(payload)
        file.write_bytes(kept + payload)

    edit(path, change)


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.canary}",))


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, out)
    return out.getvalue()


def test_a_hostile_object_is_refused_and_not_run(path: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with_item(path, "train_state.tokens", saved(Payload(canary)))
    for level in (Level.STRUCTURE, Level.AUTO, Level.VALUES):
        answer = report(path, level)
        assert answer.code is ExitCode.UNSAFE
        (found,) = [f for f in answer.findings if f.code is ExitCode.UNSAFE]
        assert (found.kind, found.tensor) == ("unsafe-pickle", "train_state.tokens")
    assert not canary.exists()


def test_an_object_in_place_of_a_tensor_is_found(path: Path) -> None:
    with_item(path, "model.seen", saved({"a": 1}))
    assert ("bad-metadata", "seen") in {(f.kind, f.tensor) for f in errors(path)}


class Config:
    pass


def test_classes_outside_the_list_share_one_note(tmp_path: Path) -> None:
    class Other:
        pass

    Config.__module__ = Other.__module__ = "trainer.config"
    Other.__qualname__ = "Other"
    import sys
    import types

    module = types.ModuleType("trainer.config")
    module.Config, module.Other = Config, Other  # type: ignore[attr-defined]
    sys.modules["trainer"] = types.ModuleType("trainer")
    sys.modules["trainer.config"] = module
    try:
        path = save(
            {"a": Config(), "b": Other(), "c": Config(), "w": torch.ones(2)}, tmp_path / "c"
        )
    finally:
        del sys.modules["trainer.config"], sys.modules["trainer"]
    answer = report(path)
    assert answer.code is ExitCode.OK
    (note,) = [f for f in answer.findings if f.kind == "opaque-object"]
    assert "2 classes" in note.message
    assert "trainer.config.Config" in note.message
    assert verify(open_path(Dcp(), path), STRICT).code is ExitCode.UNSAFE


# --- steps --------------------------------------------------------------------------------------


def test_a_file_of_another_step_is_found_by_structure_alone(path: Path) -> None:
    other = DATA / "fsdp2" / "step-4"
    assert (path / FILES[3]).stat().st_size == (other / FILES[3]).stat().st_size
    shutil.copy(other / FILES[3], path / FILES[3])
    answer = report(path)
    assert answer.code is ExitCode.CORRUPT
    found = [f for f in answer.findings if f.severity is Severity.ERROR]
    assert {f.kind for f in found} == {"mixed-steps"}
    assert FILES[3] in {f.file for f in found}


def test_the_crcs_of_mixed_steps_are_whole(path: Path) -> None:
    # Rank 2 keeps no counter: nothing in the files tells its step, and every CRC matches.
    shutil.copy(DATA / "fsdp2" / "step-4" / FILES[2], path / FILES[2])
    answer = report(path, Level.AUTO)
    assert answer.code is ExitCode.OK
    # `inspect` finds the step of the save, so that of one file is not said to be unknown.
    assert "step-unknown" not in {f.kind for f in answer.findings}


def test_one_counter_alone_is_no_verdict(tmp_path: Path) -> None:
    def part(step: int, where: str) -> Path:
        state = {
            "model": {"a": torch.zeros(3), "b": torch.zeros(3)},
            "optimizer": {"state": {n: {"step": torch.tensor(float(step))} for n in "ab"}},
        }
        return save(state, tmp_path / where, single_file_per_rank=False)

    first, second = part(3, "three"), part(4, "four")
    names = {f.file for f in open_path(Dcp(), first).scalars(8)}
    assert len(names) == 2
    shutil.copy(second / max(names), first / max(names))
    answer = report(first)
    assert answer.code is ExitCode.OK
    assert "step-disagrees" in {f.kind for f in answer.findings}


def test_no_counters_is_said(tmp_path: Path) -> None:
    path = save({"model": {"a": torch.zeros(3)}}, tmp_path / "c")
    assert open_path(Dcp(), path).step is None
    (found,) = [f for f in report(path).findings if f.kind == "step-unknown"]
    assert "cannot tell which step __0_0.distcp is of" in found.message


def test_the_name_of_the_directory_is_compared(path: Path) -> None:
    moved = path.rename(path.with_name("step-9"))
    found = next(f for f in report(moved).findings if f.kind == "step-name")
    assert (found.severity, found.code) == (Severity.WARNING, ExitCode.OK)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_counter_that_is_no_count_is_ignored(tmp_path: Path, value: float) -> None:
    state = {"optimizer": {"state": {"a": {"step": torch.tensor(value, dtype=torch.float64)}}},
             "train_state": {"step": value}, "iteration": 10**400,
             "model": {"a": torch.ones(1)}}  # fmt: skip
    path = save(state, tmp_path / "c")
    assert open_path(Dcp(), path).step is None
    assert report(path).code is ExitCode.OK


def test_a_dict_that_is_one_object_shows_its_step(tmp_path: Path) -> None:
    # Before torch 2.4 a dict without a tensor was not taken apart.
    path = save({"train_state": 1, "model": {"a": torch.ones(1)}}, tmp_path / "c")
    with_item(path, "train_state", saved({"step": 12, "tokens": 5, 10**5000: 1}))
    checkpoint = open_path(Dcp(), path)
    assert checkpoint.step == 12
    assert {"train_state.step", "train_state.tokens"} <= set(checkpoint.fields())
    assert report(path).code is ExitCode.OK


# --- Megatron's common state in a file of its own -------------------------------------------------


def megatron(tmp_path: Path) -> Path:
    import argparse

    path = save({"decoder.weight": torch.ones(2)}, tmp_path / "c")
    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=4, data_parallel_size=8,
        expert_model_parallel_size=1, world_size=64, iteration=0,
    )  # fmt: skip
    common = {"args": args, "iteration": 30, "opt_param_scheduler": {"num_steps": 960}}
    (path / "common.pt").write_bytes(saved(common))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return path


def test_arguments_give_topology_and_step(tmp_path: Path) -> None:
    checkpoint = open_path(Dcp(), megatron(tmp_path))
    known = checkpoint.topology
    assert (known.world_size, known.tp, known.pp, known.dp, known.ep) == (64, 2, 4, 8, 1)
    assert "common.pt" in known.evidence
    assert checkpoint.step == 30
    assert "common.pt.opt_param_scheduler.num_steps" in set(checkpoint.fields())
    assert set(checkpoint.members()) == set(checkpoint.source.entries)


def test_a_flip_in_the_common_state_is_found(tmp_path: Path) -> None:
    path = megatron(tmp_path)
    place = next(r.extent for r in open_path(Dcp(), path).records() if r.owner == "common.pt")
    data = bytearray((path / "common.pt").read_bytes())
    data[place.offset + 20] ^= 1
    (path / "common.pt").write_bytes(data)
    found = errors(path, Level.AUTO)
    assert {(f.kind, f.file, f.tensor) for f in found} == {("bad-crc", "common.pt", "common.pt")}
    assert open_path(Dcp(), path).topology.tp is None


def test_a_cut_common_state_is_found(tmp_path: Path) -> None:
    path = megatron(tmp_path)
    data = (path / "common.pt").read_bytes()
    (path / "common.pt").write_bytes(data[: len(data) // 2])
    assert {f.file for f in errors(path)} == {"common.pt"}
    assert report(path).code is ExitCode.CORRUPT


def test_a_flipped_bit_in_the_name_of_a_class_is_damage(path: Path) -> None:
    good = (path / ".metadata").read_bytes()
    names = [arg for op, arg, _ in pickletools.genops(good) if op.name == "SHORT_BINUNICODE"]
    classes = [one for one in names if str(one).startswith("torch.") or one in TORCHS]
    assert len(classes) > 8
    for name in classes:
        begin = good.index(str(name).encode())
        for at in range(begin, begin + len(str(name)), 3):
            data = bytearray(good)
            data[at] ^= 1 << at % 7
            assert is_damaged(bytes(data)), (name, at)


TORCHS = frozenset(name.rpartition(".")[2] for name in TABLE)


def is_damaged(metadata: bytes) -> bool:
    try:
        parsed = parse_metadata(metadata, ".metadata")
    except CorruptError:
        return True
    return any(found.code is ExitCode.CORRUPT for found in check_names(parsed, ".metadata"))


def test_another_record_of_torch_is_a_newer_writers(path: Path) -> None:
    good = (path / ".metadata").read_bytes()
    for near in (b"TensorStorageMetadatb", b"TensorStorageMetaDATA"):
        (path / ".metadata").write_bytes(good.replace(b"TensorStorageMetadata", near))
        with pytest.raises(UnsupportedError, match=f"found torch.*{near.decode()}"):
            open_path(Dcp(), path)


def test_the_number_of_ranks_without_collectives_is_unknown(tmp_path: Path) -> None:
    source = Source(LocalStore(str(tmp_path)), "", {})
    assert [f.kind for f in check_rank_metadata(source, (".metadata",))] == []
    assert [f.kind for f in check_rank_metadata(source, ("__0.metadata",))] == ["count-unknown"]
    found = list(check_rank_metadata(source, ("__0.metadata", f"__{10**15}.metadata")))
    assert [(f.kind, f.rank) for f in found] == [("missing-rank", 1), ("count-unknown", None)]
    place = shutil.copytree(DATA / "ranklocal" / "step-3", tmp_path / "step-3")
    (place / "__0.metadata").unlink()
    assert verify(open_path(Dcp(), place)).code is ExitCode.CORRUPT


def test_what_ranks_left_says_how_many_they_were(tmp_path: Path) -> None:
    place = shutil.copytree(DATA / "ranklocal" / "step-3", tmp_path / "step-3")
    ranks = len(list(place.glob("__*.metadata")))
    data = (place / "__0_0.distcp").read_bytes()
    written = {"__0_0.distcp": FileDigest("", len(data), blocks_of_bytes(data))}
    for world, code in ((ranks, ExitCode.OK), (ranks + 2, ExitCode.CORRUPT)):
        leave(str(place), 0, written, world)
        report = verify(open_path(Dcp(), place))
        assert report.code is code
        assert "count-unknown" not in {found.kind for found in report.findings}
        if world > ranks:
            assert f"2 ranks of {world} left no metadata, the first is {ranks}" in report.message
            with pytest.raises(CorruptError, match="not sealed"):
                ftckpt.seal(str(place))
    os.utime(place / "__0_0.distcp", (1, 1))  # of a later save, through another writer
    report = verify(open_path(Dcp(), place))
    assert report.code is ExitCode.OK
    assert "count-unknown" in {found.kind for found in report.findings}
