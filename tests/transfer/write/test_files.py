"""The engine makes exactly the bytes that a layout describes, in any blocks, and takes over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt.digests.blocks
import ftckpt.transfer.write.blocks
import ftckpt.transfer.write.files
import ftckpt.workers.processes
from ftckpt.errors import UnavailableError
from ftckpt.manifest import FileDigest
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Upload
from ftckpt.transfer.layout import Layout, Literal, OutputFile, Segment
from ftckpt.transfer.read.copies_plan import boxes_of_range, whole_rows
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.transfer.write.files import Built, MadeShare, build, make_shares
from ftckpt.workers import Work
from tests.builders.materialise import file_bytes
from tests.builders.raw_checkpoint import RawCheckpoint, slices
from tests.campaign import examples
from tests.transfer.layouts import Crcs, transfers

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

BLOCK = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        ftckpt.digests.blocks,
        ftckpt.transfer.write.blocks,
        ftckpt.transfer.write.files,
    ):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(Gatherer, "chunk", 24)


class MemoryUpload(Upload):
    def __init__(self, size: int, unit: int) -> None:
        self.data = bytearray(size)
        self.unit = unit
        self.is_finished = False

    def write(self, offset: int, view: memoryview) -> None:
        if self.unit > 1:
            assert offset % self.unit == 0
            assert len(view) == min(self.unit, len(self.data) - offset)
        self.data[offset : offset + len(view)] = view

    def finish(self, size: int | None = None) -> None:
        self.is_finished = True

    def close(self) -> None:
        return


class MemoryStaging(Staging):
    """Keeps files in memory, and what was made, as a run after a kill would find it."""

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self.uploads: dict[str, MemoryUpload] = {}
        self.made: list[BlockMade] = []
        self.fail_after: int | None = None
        self.lock = threading.Lock()

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        return False

    def open(self, file: OutputFile, *, at_most: bool = False) -> StagedFile:
        upload = self.uploads.get(file.path) or MemoryUpload(file.size, self.unit)
        self.uploads[file.path] = upload
        return StagedFile(upload, {m.number: m for m in self.made if m.file == file.path})

    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        data = self.uploads[file.path].data[made.number * BLOCK :][:BLOCK]
        return xxhash.xxh3_128_digest(bytes(data)) == made.digest

    def add(self, made: BlockMade) -> None:
        with self.lock:
            if self.fail_after is not None and len(self.made) >= self.fail_after:
                raise UnavailableError("the disk went away")
            self.made.append(made)

    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        assert self.uploads[file.path].is_finished

    def source(self, commit: Mapping[str, bytes]) -> Source:
        raise NotImplementedError

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


def _carry_out(
    checkpoint: RawCheckpoint,
    layout: Layout,
    staging: Staging,
    jobs: int,
    gatherer: Gatherer | None = None,
) -> Built:
    gatherer = gatherer or Gatherer(checkpoint)
    try:
        return build(layout, gatherer, staging, Work(threads=jobs))
    finally:
        gatherer.close()


def _require_right(
    checkpoint: RawCheckpoint, layout: Layout, staging: MemoryStaging, built: Built
) -> None:
    for file, digest in zip(layout.files, built.digests, strict=True):
        data = file_bytes(file, checkpoint)
        assert bytes(staging.uploads[file.path].data) == data
        blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
        digests = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
        assert digest == FileDigest(file.path, len(data), digests)


@settings(deadline=None, max_examples=examples(50, 800))
@given(transfers(), st.sampled_from([1, BLOCK]), st.integers(1, 3))
def test_the_engine_makes_what_the_layout_says(
    drawn: tuple[RawCheckpoint, Layout], unit: int, jobs: int
) -> None:
    checkpoint, layout = drawn
    staging = MemoryStaging(unit)
    built = _carry_out(checkpoint, layout, staging, jobs)
    _require_right(checkpoint, layout, staging, built)
    assert built.taken_over == 0


@settings(deadline=None, max_examples=examples(40, 400))
@given(transfers(), st.integers(0, 6), st.booleans())
def test_a_second_run_takes_over_what_a_first_has_made(
    drawn: tuple[RawCheckpoint, Layout], after: int, damaged: bool
) -> None:
    checkpoint, layout = drawn
    staging = MemoryStaging()
    staging.fail_after = after
    blocks = sum(-(-file.size // BLOCK) for file in layout.files)
    if after < blocks:
        with pytest.raises(UnavailableError):
            _carry_out(checkpoint, layout, staging, 2)
    staging.fail_after = None
    held = len(staging.made)
    if damaged and held:
        first = staging.made[0]
        staging.uploads[first.file].data[first.number * BLOCK] ^= 1
        held -= 1
    built = _carry_out(checkpoint, layout, staging, 2)
    _require_right(checkpoint, layout, staging, built)
    if after >= held and held:
        assert built.taken_over > 0 or all(file.size == 0 for file in layout.files)


def _nothing() -> RawCheckpoint:
    store = open_store("memory://building")
    store.put("nothing", b"")
    return RawCheckpoint(source=Source.directory(store), tensors={}, objects={})


def _three_files() -> Layout:
    return Layout(files=[OutputFile(f"file{n}", [Literal(bytes([n]) * BLOCK)]) for n in range(3)])


def test_nobody_waits_for_the_flush_of_a_file_to_make_the_next() -> None:
    staging, layout, last = MemoryStaging(), _three_files(), threading.Event()

    class Slow(MemoryUpload):
        def finish(self, size: int | None = None) -> None:
            assert last.wait(60), "the last file was not begun"
            super().finish(size)

    class Last(MemoryUpload):
        def write(self, offset: int, view: memoryview) -> None:
            last.set()
            super().write(offset, view)

    kinds = [Slow, Slow, Last]
    staging.uploads = {f"file{n}": kind(BLOCK, 1) for n, kind in enumerate(kinds)}
    checkpoint = _nothing()
    built = _carry_out(checkpoint, layout, staging, 1)
    _require_right(checkpoint, layout, staging, built)
    assert all(upload.is_finished for upload in staging.uploads.values())


@pytest.mark.parametrize("number", [0, 2])
def test_a_flush_that_fails_is_the_end(number: int) -> None:
    staging = MemoryStaging()

    class Failing(MemoryUpload):
        def finish(self, size: int | None = None) -> None:
            raise UnavailableError("the disk went away")

    staging.uploads[f"file{number}"] = Failing(BLOCK, 1)
    with pytest.raises(UnavailableError, match="went away"):
        _carry_out(_nothing(), _three_files(), staging, 1)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
@settings(deadline=None)
def test_a_range_of_elements_is_a_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = list(boxes_of_range(shape, start, stop))
    found = [i for box in boxes for i in whole[slices(box)].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 300))
@settings(deadline=None)
def test_steps_of_whole_rows_need_few_boxes(shape: list[int], most: int) -> None:
    step = whole_rows(shape, most)
    volume = int(np.prod(shape))
    assert min(most, volume) // 2 < step <= most
    for start in range(0, volume, step):
        boxes = list(boxes_of_range(shape, start, min(start + step, volume)))
        if most >= shape[-1]:
            assert all(box.sizes[-1] == shape[-1] for box in boxes), "no row is cut"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_tensor_without_rows_is_one_step(shape: tuple[int, ...]) -> None:
    assert whole_rows(shape, 5) == 5


@pytest.mark.parametrize(
    ("sizes", "covered", "apart"),
    [([9], False, True), ([9], True, False), ([5, 4], True, True), ([8, 1], True, False)],
)
def test_threads_share_a_file_that_a_process_would_make_alone(
    sizes: list[int], covered: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def made(*what: object, **how: object) -> Iterator[MadeShare]:
        asked.append(what)
        return make_shares(*what, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(ftckpt.transfer.write.files, "make_shares", made)
    files = []
    for number, size in enumerate(sizes):
        segments: list[Segment] = [Literal(bytes(size * BLOCK))]
        segments += [Crcs([(0, size * BLOCK)])] if covered else []
        files.append(OutputFile(f"file{number}", segments))
    staging, layout, checkpoint = MemoryStaging(), Layout(files=files), _nothing()
    staging.by_processes = True
    monkeypatch.setattr(
        ftckpt.workers.processes, "are_safe", lambda: False
    )  # the staging is in memory
    built = build(layout, Gatherer(checkpoint), staging, Work(threads=2, processes=2))
    _require_right(checkpoint, layout, staging, built)
    assert bool(asked) == apart
