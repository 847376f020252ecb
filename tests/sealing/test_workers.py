"""Sealing what Megatron's and NVRx's asynchronous writers write in other processes.

With the real ones where they are installed; and always with two small writers that have their
hooks, so that the mechanism is tested where they are not.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.own_files import MANIFEST
from ftckpt.torch import SealingWriter, SealWarning, seal_after
from ftckpt.torch import files as our_workers

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
REAL = {
    "megatron": "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank, which these writers ask for their rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = not dist.is_initialized()
    if started:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    if started:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def written(stream: Any, value: Any, item: Any, key: str) -> Any:
    """Write an item as torch's own writers do, of this version and of older ones."""
    more: dict[str, Any] = {}
    if "serialization_format" in inspect.signature(filesystem._write_item).parameters:
        more["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    transforms = getattr(filesystem, "_StorageWriterTransforms", None)
    first = [transforms()] if transforms else []
    write: Any = filesystem._write_item
    return write(*first, stream, value, item, key, **more)


class InProcess(FileSystemWriter):
    """Writes as Megatron's: a static function of this module, which calls `open`."""

    def get_save_function_and_args(self) -> Any:
        return partial(self.write_all, "x"), None, [0, self.buckets, self.done]

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self.done: Any = queue.Queue()
        data = [(one, planner.resolve_data(one)) for one in plan.items]
        half = len(data) // 2
        self.buckets = [
            (os.path.join(self.path, f"__0_{n}.distcp"), f"__0_{n}.distcp", some)
            for n, some in enumerate((data[:half], data[half:]))
        ]

    @staticmethod
    def write_all(_: str, rank: int, buckets: Any, done: Any, opener: Any = None) -> None:
        results = []
        for path, key, some in buckets:
            with (opener or open)(path, "wb") as stream:
                results += [written(stream, value, item, key) for item, value in some]
                os.fsync(stream.fileno())
        done.put(results)

    def retrieve_write_results(self) -> Any:
        return self.done.get_nowait()


class WithOpener(InProcess):
    """Writes as NVRx's newest, which is told how to open."""

    open_file: Any = open

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.open_file = open

    def get_save_function_and_args(self) -> Any:
        save = partial(self.write_all, "x", opener=self.open_file)
        return save, None, [0, self.buckets, self.done]


def state() -> dict[str, Any]:
    return {"model": {f"layer.{n}": torch.randn(300, 70) for n in range(6)}, "step": 7}


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Any:
    """A writer's class; a framework is imported here alone, because that takes seconds."""
    if request.param not in REAL:
        return request.param
    module = REAL[request.param]
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{request.param} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module).FileSystemWriterAsync


def in_own_group(save: Any, *given: Any) -> None:
    """Run a worker so that it can be killed with its own workers."""
    os.setpgrp()
    save(*given)


class Saving(SimpleNamespace):
    """One save, in the steps of Megatron's and NVRx's `save_state_dict_async_plan`."""

    writer: Any

    @classmethod
    def planned(cls, writer: Any, saved: dict[str, Any]) -> Saving:
        planner = DefaultSavePlanner()
        planner.set_up_planner(saved, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        if getattr(writer, "can_run_decentralized_global_plan", False):
            plan = writer.prepare_decentralized_global_plan(plans[0])
        else:
            plan = writer.prepare_global_plan(plans)[0]
        writer.prepare_write_data(planner.finish_plan(plan), planner)
        return cls(writer=writer, metadata=metadata)

    def write(self, *, forked: bool) -> int | None:
        """Write in this process or in another; return how that ended."""
        save, stage, arguments = self.writer.get_save_function_and_args()
        pickle.dumps(save)  # NVRx's persistent worker gets it so
        if stage is not None:
            arguments[1] = stage()
        if not forked:
            save(*arguments)
            return 0
        context = multiprocessing.get_context("fork")
        worker = context.Process(target=in_own_group, args=(save, *arguments))
        worker.start()
        worker.join(120)
        return worker.exitcode

    def finish(self) -> Any:
        results = self.writer.retrieve_write_results()
        if isinstance(results, list):
            self.writer.finish(self.metadata, [results])
        return results


def require_covered(path: Path) -> None:
    """The manifest is the one that a seal by reading makes."""
    standing = find(ftckpt.open_checkpoint(str(path)).source)
    assert standing is not None
    (path / MANIFEST).unlink()
    assert standing.files == seal(ftckpt.open_checkpoint(str(path))).manifest.files
    assert ftckpt.verify(str(path), level="content").code is ExitCode.OK


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each seal has read."""
    found: list[int] = []
    after = seal_after

    def counted(*given: Any, **more: Any) -> Any:
        report = after(*given, **more)
        found.append(report.bytes_read if report else -1)
        return report

    monkeypatch.setattr("ftckpt.torch.writer.seal_after", counted)
    return found


@pytest.mark.parametrize("kind", [InProcess, WithOpener, *REAL], indirect=True)
def test_workers_hash_what_they_write(tmp_path: Path, kind: Any, reads: list[int]) -> None:
    saved = state()
    forked = kind not in (InProcess, WithOpener)
    more: dict[str, Any] = {"thread_count": 2} if forked else {}
    for name in ("plain", "sealed", "sealed"):
        writer = kind(tmp_path / name, **more)
        if name == "sealed":
            writer = SealingWriter(writer, strict=True)
        saving = Saving.planned(writer, saved)
        assert not (tmp_path / name / MANIFEST).exists()  # nor that of the save before
        assert saving.write(forked=forked) == 0
        assert not (tmp_path / name / MANIFEST).exists()
        saving.finish()
    assert reads == [0, 0]
    data = {one.name for one in (tmp_path / "plain").glob("*.distcp")}
    assert len(data) == 2
    for name in data:
        there = (tmp_path / "sealed" / name).read_bytes()
        assert there == (tmp_path / "plain" / name).read_bytes()
    require_covered(tmp_path / "sealed")
    assert "open" not in vars(importlib.import_module(kind.__module__))


@pytest.mark.parametrize("kind", list(REAL), indirect=True)
def test_a_worker_that_dies_leaves_no_seal(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = our_workers._RecordedFile.write
    begun = tmp_path / "begun"

    def dying(self: Any, data: Any) -> int:
        if "__0_1" in self._path and self._stream.tell() > 100:
            begun.touch()
            os.killpg(0, signal.SIGKILL)
        return write(self, data)

    monkeypatch.setattr(our_workers._RecordedFile, "write", dying)
    saving = Saving.planned(
        SealingWriter(kind(tmp_path / "a", thread_count=2), strict=True), state()
    )
    place = saving.writer
    assert saving.write(forked=True) == -9
    left = Path(place._records._place)
    assert begun.exists()
    with suppress(RuntimeError):  # older ones raise, newer ones return what gather takes along
        assert not isinstance(saving.finish(), list)
    assert not left.exists()
    assert not (tmp_path / "a" / MANIFEST).exists()
    assert ftckpt.verify(str(tmp_path / "a")).code is ExitCode.INCOMPLETE


def test_a_failed_write_keeps_no_digest(tmp_path: Path) -> None:
    records = our_workers.WorkersRecords()
    opens = pickle.loads(pickle.dumps(records.opens()))
    with suppress(RuntimeError), opens(tmp_path / "bad", "wb") as stream:
        stream.write(b"half")
        raise RuntimeError
    for text in (b"first", b"second"):
        with opens(tmp_path / "good", "wb") as stream:
            stream.write(text)
    with opens(tmp_path / "good", "rb") as stream:
        assert stream.read() == b"second"
    (Path(records._place) / "x.json").write_text("{")
    taken = records.take()
    assert {Path(name).name: file.size for name, file in taken.items()} == {"good": 6}
    records.remove()
    assert not Path(records._place).exists()
    assert records.take() == {}  # something cleaned up: no failure of the save


def test_without_a_place_for_digests_the_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    saving = Saving.planned(SealingWriter(InProcess(tmp_path / "a")), state())
    with pytest.warns(SealWarning, match="No space left"):
        saving.write(forked=False)
    saving.finish()
    assert reads[0] > 0
    require_covered(tmp_path / "a")


def test_a_writer_that_waits_seals_when_it_is_told(tmp_path: Path, reads: list[int]) -> None:
    writer = SealingWriter(InProcess(tmp_path), strict=True, wait=True)
    saving = Saving.planned(writer, state())
    saving.write(forked=False)
    saving.finish()
    assert not (tmp_path / MANIFEST).exists()
    writer.seal()
    assert reads == [0]
    require_covered(tmp_path)
