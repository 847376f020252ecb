"""Sealing inside the training process: torch's own writers, one and several ranks, and failures."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from xxhash import xxh3_128_digest

import ftckpt
from ftckpt.errors import ExitCode, IncompleteError, NotFoundError
from ftckpt.extents import BLOCK
from ftckpt.manifest import rank_digests
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.own_files import MANIFEST
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.torch import SealingWriter, SealWarning, WrittenFile, seal_after, seal_dcp
from ftckpt.torch.files import HashingStream
from tests.builders.checkpoints import flip

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)
RANKS = Path(__file__).parent / "ranks_job.py"


def state() -> dict[str, Any]:
    # One tensor is larger than a block, so that a block ends inside a write.
    weights = {"large": torch.arange(BLOCK // 4 + 1000, dtype=torch.float32)}
    weights |= {f"layer.{n}": torch.randn(30, 7) for n in range(3)}
    return {"model": weights, "step": 7, "config": {"name": "x"}}


def small() -> dict[str, Any]:
    return {"model": {f"layer.{n}": torch.randn(30, 7) for n in range(3)}, "step": 7}


def require_argument(call: Any, name: str) -> None:
    """Skip a test of what an older torch has not."""
    if name not in inspect.signature(call).parameters:
        pytest.skip(f"this torch has no {name}")


def code_of(path: Path) -> ExitCode:
    return ftckpt.verify(str(path), level="content").code


def require_covered(path: Path) -> None:
    """The manifest is the one that a seal by reading makes, and every byte is covered."""
    checkpoint = ftckpt.open_checkpoint(str(path))
    standing = find(checkpoint.source)
    assert standing is not None
    (path / MANIFEST).rename(path.parent / "kept.json")
    read = seal(ftckpt.open_checkpoint(str(path))).manifest
    assert standing.files == read.files
    assert code_of(path) is ExitCode.OK


def plain(path: Path, state: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of the same save without a seal."""
    save(state, storage_writer=FileSystemWriter(path))
    return {one.name: one.read_bytes() for one in path.iterdir() if one.suffix == ".distcp"}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_is_sealed_and_its_files_are_the_same_bytes(tmp_path: Path, threads: int) -> None:
    saved = state()
    inner = FileSystemWriter(tmp_path / "sealed", thread_count=threads)
    save(saved, storage_writer=SealingWriter(inner, strict=True))
    require_covered(tmp_path / "sealed")
    if threads == 1:
        there = plain(tmp_path / "plain", saved)
        assert there == {name: (tmp_path / "sealed" / name).read_bytes() for name in there}
    loaded = state()
    load(loaded, checkpoint_id=tmp_path / "sealed")
    assert all(torch.equal(loaded["model"][k], t) for k, t in saved["model"].items())


def test_nothing_is_read_again(tmp_path: Path) -> None:
    writer = SealingWriter(FileSystemWriter(tmp_path / "a"), strict=True)
    save(state(), storage_writer=writer)
    data = (tmp_path / "a" / "__0_0.distcp").read_bytes()
    # What was written is what the seal says, whatever the disk has made of it since.
    (tmp_path / "a" / "__0_0.distcp").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert code_of(tmp_path / "a") is ExitCode.CORRUPT


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_async_saves(tmp_path: Path, kind: str) -> None:
    if kind == "process":
        require_argument(async_save, "async_checkpointer_type")
        _run_ranks(1, tmp_path, "process")
    else:
        writer = SealingWriter(FileSystemWriter(tmp_path / kind), strict=True)
        done: Any = async_save(state(), storage_writer=writer)
        done.result()
    require_covered(tmp_path / kind)


def test_a_save_that_outlives_the_script(tmp_path: Path) -> None:
    """Python waits for torch's thread, and `ThreadPoolExecutor` takes no calls by then."""
    program = """
import sys, time, torch
from concurrent.futures import thread
from torch.distributed.checkpoint import FileSystemWriter, async_save
from ftckpt.torch import SealingWriter
class Slow(FileSystemWriter):
    def write_data(self, *given):
        while not thread._shutdown:  # the script has ended
            time.sleep(0.01)
        return super().write_data(*given)
writer = SealingWriter(Slow(sys.argv[1]), strict=True)
async_save({"a": torch.arange(100000)}, storage_writer=writer)
"""
    told = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "a")]
    subprocess.run(told, check=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (tmp_path / "a" / ".metadata").exists()
    require_covered(tmp_path / "a")


def test_a_save_without_a_second_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saved = {"a": torch.arange(100_000), "b": torch.arange(100_000)}
    stream = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        files = HashingStream(stream)
        files.write(saved["a"].numpy())
    files.write(saved["b"].numpy())  # now there is one again: nothing is hashed twice
    files.end()
    assert files.file() == WrittenFile(1_600_000, xxh3_128_digest(stream.getvalue()))


def test_a_hash_that_fails_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HashingStream, "_add", fail)
    save({"a": torch.arange(100_000)}, storage_writer=SealingWriter(FileSystemWriter(tmp_path)))
    require_covered(tmp_path)  # by reading


def test_an_array_without_elements_is_written(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        stream = HashingStream(file)
        stream.write(torch.zeros(0, 3).numpy())
        stream.end()
    assert stream.file() is None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each way in which one job of two ranks has saved; in the last one dies."""
    root = tmp_path_factory.mktemp("ranks")
    _run_ranks(2, root, *WAYS, "die")
    return root


WAYS = ["save", "thread"]
if "use_collectives" in inspect.signature(save).parameters:
    WAYS += ["alone", "alone-thread"]


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks(two_ranks: Path, how: str) -> None:
    require_covered(two_ranks / how)
    assert len(list((two_ranks / how).glob("*.distcp"))) == 2


def test_a_rank_that_dies_leaves_no_seal(two_ranks: Path) -> None:
    assert list((two_ranks / "die").glob("*.distcp"))
    assert not (two_ranks / "die" / MANIFEST).exists()
    assert code_of(two_ranks / "die") is ExitCode.INCOMPLETE


def test_one_process_without_collectives_seals(tmp_path: Path) -> None:
    require_argument(save, "use_collectives")
    writer = SealingWriter(FileSystemWriter(tmp_path / "a"), strict=True)
    save(small(), storage_writer=writer, no_dist=True, use_collectives=False)
    assert (tmp_path / "a" / "__0.metadata").is_file()
    require_covered(tmp_path / "a")


def test_what_has_changed_since_a_rank_left_it_is_read(tmp_path: Path) -> None:
    save(small(), storage_writer=FileSystemWriter(tmp_path))
    data = tmp_path / "__0_0.distcp"
    wrong = {data.name: WrittenFile(data.stat().st_size, bytes(16))}
    rank_digests.leave(str(tmp_path), 0, wrong, 2)
    never = {"__0_0.distcp": WrittenFile(1, bytes(16))}  # it was never so short
    rank_digests.leave(str(tmp_path), 1, never, 2)
    os.utime(data, (1, 1))  # written again
    report = seal_after(tmp_path, strict=True)
    assert report is not None
    assert report.bytes_read > data.stat().st_size
    assert code_of(tmp_path) is ExitCode.OK
    assert not list(tmp_path.glob(".ftckpt/sealing/*"))


@pytest.mark.parametrize(
    "worlds", [{0: 2}, {1: 2}, {0: 1, 1: 2}, {0: 1, 1: 1}, {0: 2, 1: 2, 2: 3}, {0: 1, 1: None}]
)
def test_a_save_that_lacks_a_rank_is_not_sealed(
    tmp_path: Path, worlds: dict[int, int | None]
) -> None:
    save(small(), storage_writer=FileSystemWriter(tmp_path))
    for rank, world in worlds.items():
        rank_digests.leave(str(tmp_path), rank, {}, world or 1)
        if world is None:
            (tmp_path / rank_digests.name_of(rank)).write_text('{"schema": "ftckpt.sealing/1"}')
    with pytest.warns(SealWarning, match="is not sealed: .ftckpt/sealing/rank-"):
        assert seal_after(tmp_path) is None
    assert not (tmp_path / MANIFEST).exists()
    # The next save with collectives leaves none, and is whole.
    save(small(), storage_writer=SealingWriter(FileSystemWriter(tmp_path), strict=True))
    require_covered(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": "ftckpt.sealing/1", "world": Infinity, "files": {}}',
        '{"schema": "ftckpt.sealing/1", "world": 1e3, "files": {}}',
        '{"schema": "ftckpt.sealing/1", "world": -1, "files": {}}',
        '{"schema": "ftckpt.sealing/1", "world": 1048577, "files": {}}',
        '{"schema": "ftckpt.sealing/1", "world": 1, "world": 2, "files": {}}',
        "[" * 100_000,
    ],
)
def test_a_hostile_record_of_a_rank_says_nothing(tmp_path: Path, text: str) -> None:
    save(small(), storage_writer=FileSystemWriter(tmp_path))
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    rank_digests.leave(str(tmp_path), 0, {}, 1)
    (tmp_path / rank_digests.name_of(0)).write_text(text)
    assert code_of(tmp_path) is ExitCode.OK
    left = rank_digests.left_in(ftckpt.open_checkpoint(str(tmp_path)).source)
    assert not left.worlds
    with pytest.raises(IncompleteError, match=r"rank-0\.json is not the record"):
        left.require_all()


def test_no_name_is_made_for_a_number_that_a_record_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    real = rank_digests.name_of

    def name_of(rank: int) -> str:
        made.append(rank)
        return real(rank)

    monkeypatch.setattr(rank_digests, "name_of", name_of)
    worlds = {real(rank): 1 << 20 for rank in (0, 1, 10)}
    with pytest.raises(IncompleteError, match=r"rank-2\.json is not the record of one of 1048576"):
        rank_digests.LeftDigests(
            Source(MemoryStore("memory://ranks"), "", {}), [*worlds], worlds=worlds
        ).require_all()
    assert len(made) < 10


@pytest.mark.parametrize("consolidate", [False, True])
def test_hugging_faces_writer(tmp_path: Path, consolidate: bool) -> None:
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    weights = {f"layer.{n}.weight": torch.randn(40, 7) for n in range(3)}
    inner = storage.HuggingFaceStorageWriter(
        str(tmp_path / "hf"), save_distributed=True, enable_consolidation=consolidate
    )
    save(weights, storage_writer=SealingWriter(inner, strict=True))
    require_covered(tmp_path / "hf")
    assert (tmp_path / "hf" / "sharded").exists() is consolidate


def test_a_second_save_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SealingWriter(FileSystemWriter(tmp_path / "a"), strict=True)
    save(state(), storage_writer=writer)
    save(state(), storage_writer=writer)
    require_covered(tmp_path / "a")

    # One that is cut short has no seal, neither the old one nor a new one.
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(CheckpointException, match="No space left"):
        save(state(), storage_writer=writer)
    assert not (tmp_path / "a" / MANIFEST).exists()


def test_a_save_that_is_refused_leaves_the_seal_of_the_one_before(tmp_path: Path) -> None:
    save(small(), storage_writer=SealingWriter(FileSystemWriter(tmp_path), strict=True))
    again = SealingWriter(FileSystemWriter(tmp_path, overwrite=False), strict=True)
    with pytest.raises(CheckpointException, match="already exists"):
        save(small(), storage_writer=again)
    assert code_of(tmp_path) is ExitCode.OK
    assert (tmp_path / MANIFEST).exists()


def test_digests_of_an_earlier_save_are_forgotten(tmp_path: Path) -> None:
    writer = SealingWriter(FileSystemWriter(tmp_path), strict=True)
    save(small(), storage_writer=writer)
    stale = {str(tmp_path / "__0_0.distcp"): WrittenFile(1, bytes(16))}
    writer._gathered = dict(stale)
    writer._files.written.update({str(tmp_path / "__1_0.distcp"): WrittenFile(1, bytes(16))})
    writer.set_up_storage_writer(True)
    assert not writer._gathered
    assert not writer._files.written


@pytest.mark.parametrize("what", ["refused", "cut"])
def test_a_seal_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def hinder() -> None:
        if what == "cut":
            file = tmp_path / "a" / "__0_0.distcp"
            file.write_bytes(file.read_bytes()[:-1])
        else:
            (tmp_path / "a" / MANIFEST).mkdir()

    finish = FileSystemWriter.finish

    def hindered(self: FileSystemWriter, *given: Any) -> None:
        finish(self, *given)
        hinder()

    monkeypatch.setattr(FileSystemWriter, "finish", hindered)
    with pytest.warns(SealWarning, match="is not sealed"):
        save(state(), storage_writer=SealingWriter(FileSystemWriter(tmp_path / "a")))
    assert (tmp_path / "a" / ".metadata").exists()
    assert not (tmp_path / "a" / MANIFEST).is_file()


def test_strict_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = FileSystemWriter.finish

    def cut(self: FileSystemWriter, *given: Any) -> None:
        finish(self, *given)
        (tmp_path / "a" / "__0_0.distcp").write_bytes(b"")

    monkeypatch.setattr(FileSystemWriter, "finish", cut)
    writer = SealingWriter(FileSystemWriter(tmp_path / "a"), strict=True)
    with pytest.raises(CheckpointException, match="were written"):
        save(state(), storage_writer=writer)


def test_trainers_that_make_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp: Any = checkpointing
    monkeypatch.setattr(dcp, "save", dcp.save)
    monkeypatch.setattr(dcp, "async_save", dcp.async_save)
    seal_dcp(strict=True)
    seal_dcp(strict=True)
    dcp.save(small(), checkpoint_id=tmp_path / "a")
    require_covered(tmp_path / "a")
    done: Any = dcp.async_save(small(), checkpoint_id=str(tmp_path / "b"))
    done.result()
    require_covered(tmp_path / "b")
    given = FileSystemWriter(tmp_path / "c")
    for _ in range(2):  # a trainer's own writer is wrapped once, however often it saves
        dcp.save(small(), storage_writer=given)
        require_covered(tmp_path / "c")
    inner: Any = given.fs
    assert isinstance(inner._fs, FileSystem)
    done = dcp.async_save(small(), storage_writer=SealingWriter(given, strict=True))
    done.result()
    require_covered(tmp_path / "c")


def test_a_writer_without_files_is_refused() -> None:
    class Nowhere:
        pass

    with pytest.raises(TypeError, match="Nowhere"):
        SealingWriter(Nowhere())  # type: ignore[arg-type]


def _torch_file(path: Path) -> None:
    torch.save({"model": state()["model"], "step": 7}, path)


def _safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    save_file(state()["model"], path / "model.safetensors")


@pytest.mark.parametrize(("name", "write"), [("a.pt", _torch_file), ("hf", _safetensors)])
def test_after_other_saves(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / name
    write(path)
    report = seal_after(path)
    assert report is not None
    assert report.bytes_read > BLOCK
    assert code_of(path) is ExitCode.OK
    flip(path if path.is_file() else path / "model.safetensors", 5000)
    assert code_of(path) is ExitCode.CORRUPT


def test_after_nothing(tmp_path: Path) -> None:
    with pytest.warns(SealWarning, match="not sealed"):
        assert seal_after(tmp_path / "absent") is None
    with pytest.raises(NotFoundError):
        seal_after(tmp_path / "absent", strict=True)


def test_a_training_that_never_saves_imports_nothing_heavy() -> None:
    told = "import sys, torch; before = set(sys.modules); import ftckpt.torch; "
    told += "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"fsspec", "s3fs", "rich", "typer", "botocore"}


def _run_ranks(world: int, root: Path, *ways: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subprocess.run(
            [sys.executable, RANKS, str(world), str(root), *ways],
            check=True, timeout=300, cwd=Path(__file__).parents[2],
        )  # fmt: skip
