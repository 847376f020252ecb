"""Metadata read in bulk is what the general reader makes of it, or is left to that reader."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.formats import dcp_bulk, dcp_markers, lockstep
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp_bulk import parse_in_bulk
from ftckpt.formats.dcp_checkpoint import DcpCheckpoint
from ftckpt.formats.dcp_columns import EntryColumns
from ftckpt.formats.dcp_metadata import DcpMetadata, parse_metadata, take_members
from ftckpt.formats.pickle_cut import DeclinedError, Walk
from ftckpt.formats.pickle_words import PADDING, Words
from ftckpt.inspection import inspect
from ftckpt.source import Source
from ftckpt.stores import open_store
from tests.campaign import examples
from tests.formats.dcp_writing import DATA


def bulk(data: bytes) -> DcpMetadata | None:
    return parse_in_bulk(bytearray(data + bytes(PADDING)), len(data), ".metadata")


def general(data: bytes) -> DcpMetadata:
    return parse_metadata(data, ".metadata")


def item_of(item: Any) -> Any:
    return item and (item.path, item.offset, item.length, item.transforms)


def plain(meta: DcpMetadata) -> list[Any]:
    """Return everything that a metadata says, to be compared."""
    tensors = [
        (name, e.size, e.dtype, [(c.offsets, c.sizes, item_of(c.item)) for c in e.chunks])
        for name, e in meta.tensors.items()
    ]
    objects = [(name, item_of(item)) for name, item in meta.objects.items()]
    return [
        tensors, objects, meta.paths, meta.orphans, meta.copies, meta.files, meta.transforms,
        meta.save_id, meta.version, meta.reformulated, meta.extras, meta.opaque,
    ]  # fmt: skip


def check(data: bytes, *, read: bool = True) -> None:
    """Compare the two readers; with `read`, the bulk reader must not leave it to the other."""
    found = bulk(data)
    if found is None:
        assert not read
        return
    assert isinstance(found.tensors, EntryColumns)
    assert plain(found) == plain(general(data))  # raises where the general reader refuses


# --- what torch writes --------------------------------------------------------------------------


def fixtures() -> list[Path]:
    return sorted(DATA.glob("*/*/*.metadata"))


@pytest.mark.parametrize("path", fixtures(), ids=lambda p: "/".join(p.parts[-3:]))
def test_metadata_that_torch_saved(path: Path) -> None:
    check(path.read_bytes(), read=path.name == ".metadata")


def real(name: str, unpacked: Path) -> list[Path]:
    import tarfile

    archive = Path(__file__).parents[2] / ".." / "shared" / "checkpoints" / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive.name} is not here")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, [m for m in tar if m.name.endswith(".metadata")], filter="data")
    return sorted(unpacked.rglob("*.metadata"))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("accelerate_fsdp1", True),
        ("accelerate_fsdp2", True),
        ("dcp_2d_tpfsdp", True),
        ("dcp_fsdp2_nested", True),
        ("dcp_fsdp2_titan", True),
        ("dcp_torch26_fsdp2_async", True),
        # Megatron's plans refer to what was cut out.
        ("mcore_torchdist_tp2pp2", False),
        ("mcore0161_tp2dp2_dpreshard", False),
    ],
)
def test_metadata_of_real_jobs(name: str, read: bool, tmp_path: Path) -> None:
    paths = real(name, tmp_path)
    assert paths
    for path in paths:
        check(path.read_bytes(), read=read)


NAMES = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["w" * 300, "fqn", "size", "sizes", "offset", "offsets", "index", "properties", "Size", "é" * 9]
)
KEYS = st.sampled_from(["model", "layers", "0", "10", "weight", "t", "", "é", "k" * 300, "a.b"])
NAMES |= st.lists(KEYS, min_size=2, max_size=7).map(".".join)
NUMBERS = st.sampled_from([0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 40) + 7])
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


@st.composite
def saved(draw: st.DrawFn) -> Metadata:
    """Metadata of torch's own classes: what is shared between records differs from save to save."""
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=12))
    files = draw(st.lists(st.sampled_from(["__0_0.distcp", "a/__1_0.distcp", "x"]), min_size=1))
    copied = draw(st.booleans())
    state: dict[str, Any] = {}
    planner: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}

    def said(text: str) -> str:
        return "".join(list(text)) if copied else text

    def info() -> _StorageInfo:
        return _StorageInfo(said(draw(st.sampled_from(files))), draw(NUMBERS), draw(NUMBERS))

    for name in names:
        others = st.lists(st.sampled_from([name, "model", "exp_avg_sq"]), min_size=1, max_size=5)
        keys = draw(others | st.just(name.split(".")) | st.just(name.split(".", 2)))
        planner[said(name)] = tuple(map(said, keys))
        if draw(st.integers(0, 3)) == 0:
            state[name] = BytesStorageMetadata()
            storage[MetadataIndex(said(name))] = info()
            continue
        rank = draw(st.integers(0, 5))
        rows = draw(st.integers(0, 4))
        rest = [draw(st.sampled_from([1, 3, 300])) for _ in range(rank - 1)]
        chunks = [
            ChunkStorageMetadata(
                torch.Size([2 * row, *[0] * (rank - 1)][:rank]), torch.Size([2, *rest][:rank])
            )
            for row in range(rows if rank else 1)
        ]
        size = torch.Size([2 * rows, *rest][:rank])
        state[name] = TensorStorageMetadata(TensorProperties(draw(TYPES)), size, chunks)
        hinted = draw(st.booleans()) or len(chunks) > 1
        for number, chunk in enumerate(chunks):
            offsets = torch.Size(list(chunk.offsets)) if copied else chunk.offsets
            index = MetadataIndex(said(name), offsets, number if hinted else None)
            storage[index] = info()
    if draw(st.booleans()):
        storage = dict(reversed(storage.items()))
    return Metadata(state, planner, storage, StorageMeta(save_id="an-id"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(saved(), st.sampled_from([4, 5]))
def test_any_metadata_of_torchs_classes(metadata: Metadata, protocol: int) -> None:
    check(pickle.dumps(metadata, protocol), read=False)
    assert bulk(pickle.dumps(metadata, 2)) is None


def large(tensors: int = 1200, *, own: str = "", copied: bool = True) -> Metadata:
    """Metadata of more than a batch of the pickler, in several frames."""
    state: dict[str, Any] = {}
    planner: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(tensors):
        name = f"model.layers.{number}.{own}weight"
        planner[name] = ("model", name[6:])
        if number % 7 == 3:
            state[name] = BytesStorageMetadata()
            storage[MetadataIndex(name[:3] + name[3:])] = _StorageInfo("__0_0.distcp", number, 9)
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size([half * 300, 0]), torch.Size([300, 7]))
            for half in range(1 + number % 3)
        ]
        dtype = torch.bfloat16 if number % 5 else torch.float32
        size = torch.Size([300 * len(chunks), 7])
        state[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
        for half, chunk in enumerate(chunks):
            fqn = name[:3] + name[3:] if copied else name
            offsets = torch.Size(list(chunk.offsets)) if copied else chunk.offsets
            storage[MetadataIndex(fqn, offsets, half)] = _StorageInfo(
                f"__{half}_0.distcp", number * 70_000, 70_000
            )
    return Metadata(state, planner, storage)


@pytest.mark.parametrize("own", ["", "ü."])
@pytest.mark.parametrize("copied", [False, True])
def test_batches_and_frames(own: str, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(large(own=own, copied=copied), 4)
    assert data.count(b"\x95") > 4
    check(data)
    monkeypatch.setattr("ftckpt.formats.dcp_tables.LANES", 100)
    check(data)


def test_frames_begin_between_opcodes() -> None:
    data = pickle.dumps(large(9), 4)
    assert data.count(b"\x95") == 1
    body = data[11:]
    begin = {place for _, _, place in pickletools.genops(data)}

    for place in range(0, len(body), 29):
        cut = framed(body[:place], body[place:])
        if place + 11 in begin:
            check(cut)
        else:
            assert bulk(cut) is None


@pytest.mark.parametrize("frames", [b"", b"\x95" + bytes(8)])
def test_frames_that_leave_something_out_are_left(frames: bytes) -> None:
    data = pickle.dumps(large(30), 4)
    check(data[:2] + frames * 3 + data[2:])
    assert bulk(data[:2] + frames + data[11:]) is None
    assert bulk(data + b".") is None


def sharded(tensors: int, chunks: int) -> Metadata:
    """Metadata of tensors with many chunks each."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name in [f"w{n}" for n in range(tensors)]:
        parts = [ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(chunks)]
        properties = TensorProperties(torch.float32)
        state[name] = TensorStorageMetadata(properties, torch.Size([chunks]), parts)
        for number, part in enumerate(parts):
            index = MetadataIndex(name, part.offsets, number)
            storage[index] = _StorageInfo(f"__{number}_0.distcp", number, 1)
    return Metadata(state, {}, storage)


@pytest.mark.parametrize(("tensors", "chunks"), [(300, 70), (40, 1)])
def test_tensors_of_many_chunks(tensors: int, chunks: int) -> None:
    check(pickle.dumps(sharded(tensors, chunks), 4))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, (1 << 63) - 1) | NUMBERS, min_size=1))
@example([(1 << n) - 1 for n in range(64)])
@example([1 << n for n in range(63)])
def test_integers_of_every_width(numbers: list[int]) -> None:
    import numpy as np

    data = bytearray(b"".join(pickle.dumps(n, 2)[2:-1] for n in numbers))
    at = np.cumsum([0, *(len(pickle.dumps(n, 2)) - 3 for n in numbers)])[:-1]
    lanes = lockstep.Lanes(Words(data + bytes(PADDING), len(data)), at)
    assert lanes.integer().tolist() == numbers
    assert lanes.ok.all()
    assert lanes.at.tolist() == [*at[1:].tolist(), len(data)]


@pytest.mark.parametrize("number", [-1, -(1 << 31), -(1 << 40), 1 << 63, 1 << 64, 1 << 200])
def test_integers_that_no_size_has(number: int) -> None:
    import numpy as np

    data = bytearray(pickle.dumps(number, 2)[2:-1])
    words = Words(data + bytes(PADDING), len(data))
    lanes = lockstep.Lanes(words, np.zeros(1, np.int64))
    lanes.integer()
    assert not lanes.ok.any()


# --- what nobody writes by accident -------------------------------------------------------------

SEED = pickle.dumps(large(60), 4)
assert int.from_bytes(SEED[3:11], "little") == len(SEED) - 11, "one frame"


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(SEED)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(11, len(data) - 1))
        how = draw(st.sampled_from(["set", "flip", "insert", "delete", "copy", "swap"]))
        if how == "set":
            data[at] = draw(st.sampled_from(b"\x94h(ub.)ReaKN\x85\x86\x81\x93Q0sJ"))
        elif how == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 9))]
        elif how == "copy":
            start = draw(st.integers(11, len(data) - 1))
            data[at:at] = data[start : start + draw(st.integers(1, 400))]
        else:
            start = draw(st.integers(11, len(data) - 1))
            length = draw(st.integers(1, 6))
            data[at : at + length] = data[start : start + length]
    data[3:11] = (len(data) - 11).to_bytes(8, "little")
    return bytes(data)


@settings(max_examples=examples(short=300, full=6000), deadline=None)
@given(mutated())
def test_mutated_metadata_is_read_alike_or_left(data: bytes) -> None:
    found = bulk(data)
    if found is not None:
        assert plain(found) == plain(general(data))


# --- as a checkpoint ----------------------------------------------------------------------------


def opened(path: Path) -> list[Any]:
    """Return what a checkpoint says with whatever reader."""
    checkpoint = Dcp().open(Source.directory(open_store(str(path))))
    tensors = [(key, info, list(info.pieces)) for key, info in checkpoint.tensors.items()]
    found = [(f.kind, f.message, f.file, f.tensor, f.offset) for f in checkpoint.check()]
    records = list(checkpoint.records())
    return [tensors, checkpoint.objects, found, records, inspect(checkpoint), checkpoint.topology]


@pytest.mark.parametrize("name", ["fsdp2/step-3", "hsdp/step-3", "tp/step-3", "ranklocal/step-3"])
def test_a_checkpoint_is_the_same_with_both_readers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened(DATA / name)
    monkeypatch.setattr(dcp_markers, "LARGE", 0)
    assert opened(DATA / name) == expected


def test_what_is_left_to_the_general_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_markers, "LARGE", 0)
    metadata = large(5)
    for protocol, columns in ((4, True), (2, False)):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        checkpoint = Dcp().open(Source.directory(open_store(str(tmp_path))))
        assert isinstance(checkpoint, DcpCheckpoint)
        assert isinstance(checkpoint.meta.tensors, EntryColumns) == columns
        assert len(checkpoint.tensors) == 4


@pytest.mark.parametrize("what", ["place", "name", "path"])
def test_what_stands_there_twice_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(large(40), 4)
    old, new = {
        "place": (b"model.layers.34.weight", b"model.layers.35.weight"),  # of an item
        "name": (b"model.layers.34.weight", b"model.layers.35.weight"),  # of a tensor
        "path": (b"__1_0.distcp", b"../../passwd"),
    }[what]
    at = data.rindex(old) if what == "place" else data.index(old)
    data = data[:at] + new + data[at + len(old) :]
    assert bulk(data) is None
    monkeypatch.setattr(dcp_markers, "LARGE", 0)
    (tmp_path / ".metadata").write_bytes(data)
    checked = pytest.raises(UnsafeError) if what != "name" else contextlib.nullcontext()
    with checked:
        Dcp().open(Source.directory(open_store(str(tmp_path))))


def test_a_call_inside_a_run_is_found() -> None:
    # A size of a record in the middle is dropped, and os.system("x") called in its place.
    size = b"M,\x01K\x07\x86\x94\x85\x94R\x94"
    at = SEED.index(size, len(SEED) // 3)
    called = b"0\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R"
    data = SEED[: at + len(size)] + called + SEED[at + len(size) :]
    data = data[:3] + (len(data) - 11).to_bytes(8, "little") + data[11:]
    assert bulk(SEED) is not None
    assert bulk(data) is None
    with pytest.raises(UnsafeError, match=r"os\.system"):
        general(data)


def test_a_frame_that_ends_inside_an_opcode_is_left() -> None:
    # One reader drops a frame's head, another takes it for an argument: they must not differ.
    at = SEED.index(b"M,\x01", len(SEED) // 3) + 1
    first = SEED[11:at]
    second = SEED[at:]
    data = SEED[:3] + len(first).to_bytes(8, "little") + first
    data += b"\x95" + len(second).to_bytes(8, "little") + second
    assert bulk(data) is None


def framed(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(b"\x95" + len(p).to_bytes(8, "little") + p for p in parts)


def test_a_frame_that_begins_inside_a_number_is_left() -> None:
    # The number is spelled as an item begins: what looks like a record there is none.
    metadata = large(6)
    index = _memo_index(pickle.dumps(metadata, 4), "MetadataIndex") + 1  # the class is next
    head = b"h" + bytes([index]) + b")\x81\x94}\x94("
    list(metadata.storage_data.values())[4].offset = int.from_bytes(head, "little")
    data = pickle.dumps(metadata, 4)
    assert data.count(head) > 4
    check(data)
    at = data.index(b"\x8a\x08" + head) + 2
    cut = framed(data[11:at], data[at:])
    assert bulk(cut) is None
    with pytest.raises(CorruptError):
        general(cut)


def _memo_index(data: bytes, text: str) -> int:
    """Return where a pickle memoises a text first."""
    count, last = 0, None
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            if last == text:
                return count
            count += 1
        last = argument
    raise AssertionError(text)


def test_as_many_frames_as_no_pickler_writes_are_left() -> None:
    places = [place for _, _, place in pickletools.genops(SEED) if place and place > 2]
    parts = [SEED[at:end] for at, end in itertools.pairwise([*places, len(SEED)])]
    assert plain(general(framed(*parts))) == plain(general(SEED))
    assert bulk(framed(*parts)) is None


@pytest.mark.parametrize("index", [(1 << 32) - 1, (1 << 32) - 9, 1 << 31])
def test_what_is_taken_from_beyond_any_memo_is_left(index: int) -> None:
    layouts = list(re.finditer(rb"\)\x81\x94\((?:h.|j....)(h.|j....)\x89", SEED, re.DOTALL))
    begin, end = layouts[len(layouts) // 2].span(1)
    data = framed(SEED[11:begin] + b"j" + index.to_bytes(4, "little") + SEED[end:])
    assert bulk(data) is None
    with pytest.raises(CorruptError):
        general(data)


def test_one_chunk_of_two_tensors_is_left() -> None:
    metadata = large(20)
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([2]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
    )
    metadata.state_dict_metadata = {"a": entry, "b": entry, **metadata.state_dict_metadata}
    for name in "ab":
        metadata.storage_data[MetadataIndex(name, torch.Size([0]), 0)] = _StorageInfo(name, 0, 1)
    data = pickle.dumps(metadata, 4)
    assert bulk(data) is None
    with pytest.raises(UnsafeError, match="two places"):
        general(data)


def test_keys_that_are_no_names_are_not_hashed() -> None:
    # A tuple that is nested a million deep would end the process.
    metadata = large(20)
    metadata.planner_data = {("a",): 1} | metadata.planner_data
    assert bulk(pickle.dumps(metadata, 4)) is None

    class Key:
        hashed = 0

        def __hash__(self) -> int:
            Key.hashed += 1
            return 0

    take_members(DcpMetadata(), {"mcore_data": {Key(): {}}})
    assert Key.hashed == 1  # by the dict that holds it


def test_members_are_not_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    find = dcp_bulk._next

    def count(data: bytearray, at: int, size: int, *members: bytes) -> int:
        looked.append(at)
        return find(data, at, size, *members)

    monkeypatch.setattr(dcp_bulk, "_next", count)
    body = b"\x8c\x01t\x8c\x15TensorStorageMetadata\x94\x93\x94" + b")\x81" * 1000 + b"."
    assert bulk(framed(body)) is None
    assert not looked


def test_what_is_kept_of_a_rest_is_bounded() -> None:
    size = 400_000
    walk = Walk(bytearray(b"\x80\x04]" + b"\x94" * size + b"." + bytes(PADDING)), size + 4)
    with pytest.raises(DeclinedError):
        walk.walk(lambda at: None, lambda text, at: None)
    assert len(walk.kept) < size // 4


def test_a_long_text_is_not_written_out_many_times() -> None:
    metadata = large(20)
    long = "l" * 30_000
    metadata.planner_data = {name: (name[:1],) for name in ("p", "r", long, "s")}
    metadata.more = [long]  # type: ignore[attr-defined]
    check(pickle.dumps(metadata, 4))
    metadata.more *= 1000  # type: ignore[attr-defined]
    assert bulk(pickle.dumps(metadata, 4)) is None


def test_one_key_of_many_paths_is_one_text() -> None:
    found = bulk(pickle.dumps(large(20, own="ü."), 4))
    assert found is not None
    assert len({id(path[0]) for path in found.paths.values()}) < 4


def test_a_parse_that_takes_too_much_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> DcpMetadata:
        raise MemoryError

    monkeypatch.setattr(dcp_bulk, "_parse", parse)
    assert bulk(SEED) is None
