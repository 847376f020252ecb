"""Sealing inside the training process: torch's own writers, one and several ranks, and failures."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import ftckpt
from ftckpt.errors import ExitCode, NotFoundError, UnsupportedError
from ftckpt.extents import BLOCK
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.own_files import MANIFEST
from ftckpt.torch import SealingWriter, SealWarning, seal_after
from tests.builders.checkpoints import flip

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)
RANKS = Path(__file__).parent / "sealing_ranks.py"


def state() -> dict[str, Any]:
    # One tensor is larger than a block, so that a block ends inside a write.
    weights = {"large": torch.arange(BLOCK // 4 + 1000, dtype=torch.float32)}
    weights |= {f"layer.{n}": torch.randn(30, 7) for n in range(3)}
    return {"model": weights, "step": 7, "config": {"name": "x"}}


def code_of(path: Path) -> ExitCode:
    return ftckpt.verify(str(path), require="content").code


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


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_async_saves(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    if kind is AsyncCheckpointerType.PROCESS:
        _run_ranks(1, tmp_path, "process")
    else:
        writer = SealingWriter(FileSystemWriter(tmp_path / "step-1"), strict=True)
        done: Any = async_save(state(), storage_writer=writer, async_checkpointer_type=kind)
        done.result()
    require_covered(tmp_path / "step-1")


def test_two_ranks(tmp_path: Path) -> None:
    _run_ranks(2, tmp_path, "save")
    require_covered(tmp_path / "step-1")
    assert len(list((tmp_path / "step-1").glob("*.distcp"))) == 2


def test_a_rank_that_dies_leaves_no_seal(tmp_path: Path) -> None:
    _run_ranks(2, tmp_path, "die")
    assert list((tmp_path / "step-1").glob("*.distcp"))
    assert not (tmp_path / "step-1" / MANIFEST).exists()
    assert code_of(tmp_path / "step-1") is ExitCode.INCOMPLETE


def test_saves_without_collectives_say_that_they_are_not_sealed(tmp_path: Path) -> None:
    _run_ranks(2, tmp_path, "alone")
    assert not (tmp_path / "step-1" / MANIFEST).exists()
    assert seal_after(tmp_path / "step-1", strict=True) is not None
    assert code_of(tmp_path / "step-1") is ExitCode.OK


@pytest.mark.parametrize("consolidate", [False, True])
def test_hugging_faces_writer(tmp_path: Path, consolidate: bool) -> None:
    weights = {f"layer.{n}.weight": torch.randn(40, 7) for n in range(3)}
    inner = HuggingFaceStorageWriter(
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


def _run_ranks(world: int, root: Path, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subprocess.run(
            [sys.executable, RANKS, str(world), str(root), how],
            check=True, timeout=300, cwd=Path(__file__).parent.parent,
        )  # fmt: skip


def test_the_error_of_saves_without_collectives(tmp_path: Path) -> None:
    writer = SealingWriter(FileSystemWriter(tmp_path / "a"), strict=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UnsupportedError, match="without collectives"):
        writer._seal({})
