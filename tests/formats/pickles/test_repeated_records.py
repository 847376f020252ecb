"""Many records of one metadata: read alike however they are spelled, and weighed as one by one."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.metadata import DcpMetadata, parse_metadata, take_members
from ftckpt.formats.pickles import keys as pickle_keys
from ftckpt.formats.pickles import repeated_records as pickle_runs
from ftckpt.formats.pickles.keys import Checked, check_keys
from ftckpt.formats.pickles.repeated_records import PickleRun, find_run
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.campaign import examples

Truth = list[tuple[str, tuple[int, ...], str, list[Any]]]


@pytest.fixture(autouse=True)
def every_pickle_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_keys, "_LARGE", 0)
    monkeypatch.setattr(pickle_keys, "_SMALL", -1)


def parse(data: bytes) -> DcpMetadata:
    return parse_metadata(data, ".metadata")


def exactly(data: bytes) -> Checked:
    """Walk a pickle opcode by opcode."""
    return pickle_keys._walked(data, pickle_keys._Walk())


def check(metadata: Metadata, data: bytes) -> None:
    """Compare what is read with what torch's own objects say."""
    found = parse(data)
    assert check_keys(data) == exactly(data)
    said: Truth = []
    stored = metadata.storage_data
    objects = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            objects[name] = info(stored[MetadataIndex(name)])
            continue
        chunks = [
            (
                tuple(c.offsets),
                tuple(c.sizes),
                info(stored[MetadataIndex(name, c.offsets)]),
            )
            for c in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        said.append((name, tuple(entry.size), dtype, chunks))
    read = [
        (name, e.size, e.dtype.name, [(c.offsets, c.sizes, item_of(c.item)) for c in e.chunks])
        for name, e in found.tensors.items()
    ]
    assert read == said
    assert {name: item_of(item) for name, item in found.objects.items()} == objects
    assert found.paths == metadata.planner_data


def info(stored: _StorageInfo) -> Any:
    return (stored.relative_path, stored.offset, stored.length)


def item_of(item: Any) -> Any:
    return item and (item.path, item.offset, item.length)


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


@settings(
    max_examples=examples(50, 600),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(saved(), st.sampled_from([2, 4, 5]))
def test_any_metadata_of_torchs_classes(metadata: Metadata, protocol: int) -> None:
    check(metadata, pickle.dumps(metadata, protocol))


def large(tensors: int = 1200, *, own: str = "", copied: bool = True) -> Metadata:
    """Metadata of more than a batch of the pickler, in several frames."""
    state: dict[str, Any] = {}
    planner: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(tensors):
        name = f"model.layers.{number}.{own}weight"
        planner[name] = ("model", name[6:]) if number % 8 else ("a", *name.split("."))
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


@pytest.mark.parametrize("own", ["", "ü.", "\u201c."])
@pytest.mark.parametrize("copied", [False, True])
def test_batches_and_frames(own: str, copied: bool) -> None:
    metadata = large(own=own, copied=copied)
    data = pickle.dumps(metadata, 4)
    assert data.count(b"\x95") > 4
    check(metadata, data)


# --- runs ---------------------------------------------------------------------------------------


def simulate(part: bytes) -> tuple[int, int]:
    """Return how many values opcodes leave on the stack, and how many they memoise."""
    depth = memos = 0
    marks: list[int] = []
    for opcode, _, _ in pickletools.genops(part + b"."):
        name = opcode.name
        if name == "MARK":
            marks.append(depth)
        elif name in ("SETITEMS", "APPENDS"):
            depth = marks.pop()
        elif name == "TUPLE":
            depth = marks.pop() + 1
        elif name == "MEMOIZE":
            memos += 1
        elif name != "STOP":
            depth += len(opcode.stack_after) - len(opcode.stack_before)
    return depth, memos


def runs_of(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, PickleRun]]:
    """Return where a walk met runs."""
    runs: list[tuple[int, PickleRun]] = []

    def spy(data: bytes, at: int) -> PickleRun | None:
        found = find_run(data, at)
        if found is not None:
            runs.append((at, found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(pickle_runs, "find_run", spy)
        pickle_keys._Walk(runs=True).walk(data)
    return runs


# The last makes names of 148 bytes: their length looks like MEMOIZE, as do some numbers of others.
@pytest.mark.parametrize("own", ["", "ö\u0494.", "o" * (148 - len("model.layers.123.weight"))])
@pytest.mark.parametrize("copied", [False, True])
def test_a_run_does_what_its_opcodes_do(
    copied: bool, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(large(copied=copied, own=own), 4)
    runs = runs_of(data, monkeypatch)
    assert sum(run.end - at for at, run in runs) > len(data) * 0.6
    kinds = set()
    for at, run in runs:
        pushed, memos = simulate(data[at : run.end])
        assert run.pushed == pushed
        assert run.memoised == memos if run.exact else run.memoised >= memos
        kinds.add((run.paths, run.exact))
    assert kinds == {(False, True), (False, False), (True, True)}


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


@settings(
    max_examples=examples(short=300, full=6000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutated())
def test_mutated_metadata_is_weighed_as_opcode_by_opcode(data: bytes) -> None:
    found = outcome(data, runs=True)
    # Where it is refused it is walked again.
    # What a run makes in passing is not suspected of collisions, and may be there.
    assert found == "UnsafeError" or found[:3] == outcome(data, runs=False)[:3]


def outcome(data: bytes, *, runs: bool) -> Checked | str:
    try:
        return pickle_keys._walked(data, pickle_keys._Walk(runs=runs))
    except (UnsafeError, MemoryError) as error:
        return type(error).__name__


def test_a_path_that_is_used_as_a_key_is_weighed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second name of a run is taken from where the path before it was memoised.
    begin = next(at for at, run in runs_of(SEED, monkeypatch) if run.paths)
    path = pickle_runs._KEYED.match(SEED, begin)
    assert path is not None
    met = [o.name for o, _, at in pickletools.genops(SEED) if (at or 0) < path.end()]
    before = met.count("MEMOIZE")
    ref = pickle_runs._REF
    name = re.compile(ref, re.DOTALL).match(SEED, path.end())
    assert name is not None
    slot = b"j" + (before - 1).to_bytes(4, "little")
    data = framed(SEED[11 : path.end()] + slot + SEED[name.end() :])
    with pytest.raises(UnsafeError, match="key"):
        pickle_keys._walked(data, pickle_keys._Walk(runs=True))
    assert check_keys(data) == exactly(data)  # a path of three texts is light


def test_paths_that_hold_each_other_are_no_keys() -> None:
    """Sixty paths, each holding the one before twice: the last of them as a key takes for ever."""
    metadata = large(3)
    path: Any = ("a", "b")
    metadata.planner_data = {}
    for number in range(60):
        metadata.planner_data[f"n{number}"] = path
        path = (path, path)
    data = pickle.dumps(metadata, 4)
    assert check_keys(data) == exactly(data)
    last = last_path(data)
    bomb = framed(data[11:-1] + b"0}j" + last.to_bytes(4, "little") + b"Ns.")
    with pytest.raises(UnsafeError, match="key"):
        check_keys(bomb)


def last_path(data: bytes) -> int:
    """Return the slot that the last tuple of two was memoised in."""
    count, last, found = 0, "", -1
    for opcode, argument, _ in pickletools.genops(data):
        if argument == "storage_data":
            break
        if opcode.name == "MEMOIZE":
            if last == "TUPLE2":
                found = count
            count += 1
        last = opcode.name
    return found


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["place", "path"])
def test_what_stands_there_twice_is_refused(what: str, tmp_path: Path) -> None:
    data = pickle.dumps(large(40), 4)
    old, new = {
        "place": (b"model.layers.34.weight", b"model.layers.35.weight"),  # of an item
        "path": (b"__1_0.distcp", b"../../passwd"),
    }[what]
    at = data.rindex(old) if what == "place" else data.index(old)
    (tmp_path / ".metadata").write_bytes(data[:at] + new + data[at + len(old) :])
    with pytest.raises((UnsafeError, CorruptError)):
        Dcp().open(Source.directory(open_store(str(tmp_path))))


def test_a_call_inside_a_run_is_found() -> None:
    # A size of a record in the middle is dropped, and os.system("x") called in its place.
    size = b"M,\x01K\x07\x86\x94\x85\x94R\x94"
    at = SEED.index(size, len(SEED) // 3)
    called = b"0\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R"
    data = framed(SEED[11 : at + len(size)] + called + SEED[at + len(size) :])
    with pytest.raises(UnsafeError, match=r"os\.system"):
        parse(data)


def framed(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(b"\x95" + len(p).to_bytes(8, "little") + p for p in parts)


def test_a_frame_for_each_opcode_changes_nothing() -> None:
    places = [place for _, _, place in pickletools.genops(SEED) if place and place > 2]
    parts = [SEED[at:end] for at, end in itertools.pairwise([*places, len(SEED)])]
    check(large(60), framed(*parts))


@pytest.mark.parametrize("index", [(1 << 32) - 1, (1 << 32) - 9, 1 << 31])
def test_what_is_taken_from_beyond_any_memo_is_damage(index: int) -> None:
    layouts = list(re.finditer(rb"\)\x81\x94\((?:h.|j....)(h.|j....)\x89", SEED, re.DOTALL))
    begin, end = layouts[len(layouts) // 2].span(1)
    data = framed(SEED[11:begin] + b"j" + index.to_bytes(4, "little") + SEED[end:])
    with pytest.raises(CorruptError):
        parse(data)


def test_one_chunk_of_two_tensors_is_refused() -> None:
    metadata = large(20)
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([2]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
    )
    metadata.state_dict_metadata = {"a": entry, "b": entry, **metadata.state_dict_metadata}
    for name in "ab":
        metadata.storage_data[MetadataIndex(name, torch.Size([0]), 0)] = _StorageInfo(name, 0, 1)
    with pytest.raises(UnsafeError, match="two places"):
        parse(pickle.dumps(metadata, 4))


def test_keys_that_are_no_names_are_not_hashed() -> None:
    class Key:
        hashed = 0

        def __hash__(self) -> int:
            Key.hashed += 1
            return 0

    take_members(DcpMetadata(), {"mcore_data": {Key(): {}}})
    assert Key.hashed == 1  # by the dict that holds it
