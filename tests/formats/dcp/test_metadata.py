"""Metadata of every age and dialect parses; hostile and damaged metadata is refused, cheaply."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, FtckptError, NewerWriterError, UnsafeError
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.checks import check_names
from ftckpt.formats.dcp.metadata import DcpMetadata, parse_metadata
from ftckpt.inspection import inspect
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.campaign import examples
from tests.formats.dcp.pickling import (
    META,
    Called,
    Global,
    Pairs,
    Thing,
    chunk,
    index,
    metadata,
    pickled,
    size,
    stored,
    tensor,
)
from tests.formats.dcp.writing import DATA

FILE = "__0_0.distcp"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
OLD = "torch.distributed._shard.checkpoint"


def parse(data: bytes) -> DcpMetadata:
    return parse_metadata(data, ".metadata")


def plain(**more: Any) -> Thing:
    entries = {"model.w": tensor(size(4, 3), [chunk(size(0, 0), size(4, 3))])}
    storage = Pairs([(index("model.w", size(0, 0), 0), stored(FILE, 0, 2000))])
    return metadata(entries, storage, **{"planner": {"model.w": ("model", "w")}, **more})


def check_plain(meta: DcpMetadata) -> None:
    entry = meta.tensors["model.w"]
    assert (entry.size, entry.dtype.name) == ((4, 3), "float32")
    (part,) = entry.chunks
    assert (part.offsets, part.sizes) == ((0, 0), (4, 3))
    assert part.item is not None
    assert (part.item.path, part.item.offset, part.item.length) == (FILE, 0, 2000)
    assert part.item.transforms == ()
    assert meta.opaque == ()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol(protocol: int) -> None:
    meta = parse(pickled(plain(version="1.0.0"), protocol))
    check_plain(meta)
    assert meta.version == "1.0.0"
    assert meta.paths == {"model.w": ("model", "w")}


def test_tensor_properties_of_torch_2_0_to_2_2() -> None:
    entry = tensor(size(4, 3), [chunk(size(0, 0), size(4, 3))], properties=SHARDED)
    storage = Pairs([(index("model.w", size(0, 0)), stored(FILE, 0, 2000))])
    check_plain(parse(pickled(metadata({"model.w": entry}, storage))))


def test_module_paths_of_torch_1() -> None:
    module = f"{OLD}.metadata"
    entry = tensor(
        size(4, 3), [chunk(size(0, 0), size(4, 3), module)], module=module, properties=SHARDED
    )
    key = index("model.w", size(0, 0), 0, module)
    storage = Pairs([(key, stored(FILE, 0, 2000, f"{OLD}.filesystem"))])
    check_plain(parse(pickled(metadata({"model.w": entry}, storage, module=module))))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "WindowsPath"])
def test_the_writers_own_path_is_not_used(module: str, name: str) -> None:
    path = Called(module, name, ("/", "cluster", "run7"))
    meta = parse(
        pickled(
            plain(
                storage_meta=Thing(
                    META, "StorageMeta", {"checkpoint_id": path, "save_id": "an-id", "modules": []}
                )
            )
        )
    )
    check_plain(meta)
    assert meta.save_id == "an-id"


def test_megatrons_plans_are_tolerated() -> None:
    planner = "torch.distributed.checkpoint.planner"
    item = Thing(
        planner, "WriteItem", {"index": index("w"), "type": Called(planner, "WriteItemType", (1,))}
    )
    plan = Thing(planner, "SavePlan", {"items": [item], "storage_data": None})
    meta = parse(pickled(plain(all_local_plans=[plan], mcore_data={"w": {}})))
    check_plain(meta)
    assert meta.extras == ("all_local_plans", "mcore_data")


def test_megatrons_own_metadata_class() -> None:
    module = "megatron.core.dist_checkpointing.strategies.torch"
    check_plain(parse(pickled(plain(module=module, name="MCoreMetadata"))))


def test_no_planner_data() -> None:
    meta = parse(pickled(plain(planner=None)))
    check_plain(meta)
    assert meta.paths == {}


def test_a_path_that_is_none_is_found_where_no_other_is_left() -> None:
    # One bit makes a tuple of one a tuple of three: it takes the next entry, `dcp.load` fails.
    odd = {"model.w": (("model", "w"), "n", "n")}
    meta = parse(pickled(plain(planner={**odd, "model.v": ("model", "v")})))
    assert [found.kind for found in check_names(meta, ".metadata")] == ["bad-metadata"]
    meta = parse(pickled(plain(planner=odd)))  # where all are of another form, it is a later one
    assert [found.kind for found in check_names(meta, ".metadata")] == ["newer-writer"]
    for planner in (None, {}, {"plans": {"hidden": 1}}):  # a dialect's, or none
        assert not list(check_names(parse(pickled(plain(planner=planner))), ".metadata"))


def test_a_path_of_what_is_not_there_is_told_of() -> None:
    paths = {"model.w": ("model", "w"), "model.gone": ("model", "gone")}
    meta = parse(pickled(plain(planner=paths)))
    for save_id, kinds in (("", []), ("an id", ["state-unknown"])):
        meta.save_id = save_id
        found = [f.kind for f in check_names(meta, ".metadata") if f.tensor == "model.gone"]
        assert found == kinds


def test_planner_data_may_say_more_than_there_is() -> None:
    said = {"model.w": ("model", "w"), "gone": ("gone",), "plans": {"hidden": 1}}
    check_plain(parse(pickled(plain(planner=said))))


def test_an_object_without_a_state() -> None:
    storage = Pairs([(index("n"), stored(FILE, 0, 10))])
    meta = parse(pickled(metadata({"n": Thing(META, "BytesStorageMetadata", None)}, storage)))
    assert meta.objects["n"] is not None


def test_a_hint_that_is_wrong_is_only_a_hint() -> None:
    chunks = [chunk(size(0), size(2)), chunk(size(2), size(2))]
    storage = Pairs(
        [
            (index("w", size(2), 0), stored(FILE, 10, 10)),
            (index("w", size(0), 99), stored(FILE, 0, 10)),
        ]
    )
    meta = parse(pickled(metadata({"w": tensor(size(4), chunks)}, storage)))
    assert [c.item and c.item.offset for c in meta.tensors["w"].chunks] == [0, 10]


def test_empty_shards_of_several_ranks_share_an_item() -> None:
    chunks = [chunk(size(0), size(3)), chunk(size(3), size(0)), chunk(size(3), size(0))]
    storage = Pairs(
        [
            (index("w", size(0), 0), stored(FILE, 0, 10)),
            (index("w", size(3), 1), stored(FILE, 10, 10)),
        ]
    )
    meta = parse(pickled(metadata({"w": tensor(size(3), chunks)}, storage)))
    first, second, third = meta.tensors["w"].chunks
    assert second.item is third.item is not None
    assert first.item is not second.item


# --- hostile ------------------------------------------------------------------------------------


def storage_of(*pairs: Any) -> Pairs:
    return Pairs(list(pairs))


KEY = index("w", size(0), 0)
ENTRY = tensor(size(4), [chunk(size(0), size(4))])
DEEP: Any = ()
for _ in range(200):
    DEEP = (DEEP,)
HOSTILE: dict[str, tuple[Any, type[FtckptError], str]] = {
    "path climbs": (
        metadata({"w": ENTRY}, storage_of((KEY, stored("../x", 0, 1)))),
        UnsafeError, "unsafe-path"),
    "path is absolute": (
        metadata({"w": ENTRY}, storage_of((KEY, stored("/etc/passwd", 0, 1)))),
        UnsafeError, "unsafe-path"),
    "path is a number": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(7, 0, 1)))),
        NewerWriterError, "newer-writer"),
    "negative offset": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(FILE, -1, 1)))),
        CorruptError, "bad-metadata"),
    "negative length": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(FILE, 0, -1)))),
        CorruptError, "bad-metadata"),
    "offset beyond any file": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(FILE, 1 << 63, 1)))),
        CorruptError, "bad-metadata"),
    "offset is text": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(FILE, "0", 1)))),
        NewerWriterError, "newer-writer"),
    "two places for one piece": (
        metadata({"w": ENTRY}, storage_of((KEY, stored(FILE, 0, 1)),
                                          (index("w", size(0), 5), stored(FILE, 1, 1)))),
        UnsafeError, "bad-metadata"),
    "two places for one object": (
        metadata({"n": Thing(META, "BytesStorageMetadata", None)},
                 storage_of((index("n"), stored(FILE, 0, 1)), (index("n"), stored(FILE, 1, 1)))),
        UnsafeError, "bad-metadata"),
    "two places for nothing": (
        metadata({}, storage_of((index("n"), stored(FILE, 0, 1)),
                                (index("n"), stored(FILE, 1, 1)))),
        UnsafeError, "bad-metadata"),
    "transforms are a number": (
        metadata({"w": ENTRY},
                 storage_of((KEY, stored(FILE, 0, 1, transform_descriptors=7)))),
        NewerWriterError, "newer-writer"),
    "transforms are bytes": (
        metadata({"w": ENTRY},
                 storage_of((KEY, stored(FILE, 0, 1, transform_descriptors=[b"stream.zstd"])))),
        NewerWriterError, "newer-writer"),
    "key is no index": (
        metadata({"w": ENTRY}, storage_of(("w", stored(FILE, 0, 1)))),
        NewerWriterError, "newer-writer"),
    "value is no place": (
        metadata({"w": ENTRY}, storage_of((KEY, "there"))), NewerWriterError, "newer-writer"),
    "storage is a list": (metadata({"w": ENTRY}, [1]), NewerWriterError, "newer-writer"),
    "entries are a list": (metadata([ENTRY], {}), NewerWriterError, "newer-writer"),
    "entries are missing": (Thing(META, "Metadata", {"x": 1}), NewerWriterError, "newer-writer"),
    "entry is text": (metadata({"w": "tensor"}, {}), NewerWriterError, "newer-writer"),
    "name is a number": (metadata({7: ENTRY}, {}), NewerWriterError, "newer-writer"),
    "name of an item is a tuple": (
        metadata({}, storage_of((index((1,), size(0)), stored(FILE, 0, 1)))),
        NewerWriterError, "newer-writer"),
    "size is negative": (metadata({"w": tensor(size(-1), [])}, {}), CorruptError, "bad-metadata"),
    "size is text": (
        metadata({"w": tensor(Called("torch", "Size", (("4",),)), [])}, {}),
        CorruptError, "bad-metadata"),
    "size is a list": (
        metadata({"w": tensor([4], [])}, {}), NewerWriterError, "newer-writer"),
    "size is huge": (
        metadata({"w": tensor(size(1 << 40, 1 << 40), [])}, {}), CorruptError, "bad-metadata"),
    "size is longer than a number is": (
        metadata({"w": tensor(size(1 << 20000), [])}, {}), CorruptError, "bad-metadata"),
    "too many dimensions": (
        metadata({"w": tensor(size(*[1] * 100), [])}, {}), CorruptError, "bad-metadata"),
    "size is nested": (metadata({"w": tensor(DEEP, [])}, {}), CorruptError, "bad-metadata"),
    "offset is nested": (
        metadata({"w": ENTRY}, storage_of((index("w", DEEP), stored(FILE, 0, 1)))),
        CorruptError, "bad-metadata"),
    "chunks are a dict": (
        metadata({"w": tensor(size(4), {})}, {}), NewerWriterError, "newer-writer"),
    "chunk is text": (
        metadata({"w": tensor(size(4), ["a"])}, {}), NewerWriterError, "newer-writer"),
    "chunk has no state": (
        metadata({"w": tensor(size(4), [Thing(META, "ChunkStorageMetadata", {})])}, {}),
        NewerWriterError, "newer-writer"),
    "no element type": (
        metadata({"w": tensor(size(4), [], Global("torch", "Size"))}, {}),
        NewerWriterError, "newer-writer"),
    "not metadata": ({"a": 1}, CorruptError, "bad-metadata"),
    "another class of metadata": (
        Thing(META, "MetadataV2", {}), NewerWriterError, "newer-writer"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_metadata_that_is_refused(what: str) -> None:
    value, error, kind = HOSTILE[what]
    with pytest.raises(error) as caught:
        parse(pickled(value))
    assert (caught.value.kind, caught.value.file) == (kind, ".metadata")
    assert len(caught.value.message) < 500


def test_a_deep_path_is_dropped() -> None:
    check_plain(parse(pickled(plain(planner={"model.w": ("model", DEEP)}))))


def test_offsets_nested_a_million_deep_do_not_kill_the_process() -> None:
    # BUILD a chunk whose offsets are ((((…)))): hashing it recurses in C.
    head = pickled(metadata({}, {}))[:-1]
    deep = b")" + b"\x85" * 1_000_000
    build = b"}(X\x07\0\0\0offsets" + deep + b"X\x05\0\0\0sizes)ub"
    data = head + f"c{META}\nChunkStorageMetadata\n".encode() + b")\x81" + build + b"0."
    with pytest.raises(CorruptError):
        parse(data)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_code_in_the_metadata_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for data in (
        pickle.dumps(Canary(canary)),
        pickled(plain()) + pickle.dumps(Canary(canary)),
        pickled(plain(more=Called("os", "system", (f"touch {canary}",)))),
        pickled(plain(more=Called("builtins", "eval", (f"open({str(canary)!r}, 'w')",)))),
    ):
        with pytest.raises(UnsafeError):
            parse(data)
    assert not canary.exists()


def test_a_second_pickle_is_not_ignored() -> None:
    with pytest.raises(UnsafeError):
        parse(pickled(plain()) + pickled(plain()))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_metadata_that_was_cut(keep: float) -> None:
    data = (DATA / "fsdp2" / "step-3" / ".metadata").read_bytes()
    with pytest.raises(CorruptError):
        parse(data[: int(len(data) * keep)])


SEED = (DATA / "hsdp" / "step-3" / ".metadata").read_bytes()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(SEED)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        how = draw(st.sampled_from(["set", "flip", "insert", "delete", "copy"]))
        if how == "set":
            data[at] = draw(st.integers(0, 255))
        elif how == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 9))]
        else:
            start = draw(st.integers(0, len(data) - 1))
            data[at:at] = data[start : start + draw(st.integers(1, 40))]
        if not data:
            data = bytearray(b".")
    return bytes(data)


@settings(max_examples=examples(75, 1200), deadline=None)
@given(mutated())
def test_mutated_metadata_opens_or_is_refused(data: bytes) -> None:
    store = open_store("memory://mutated")
    for file in (DATA / "hsdp" / "step-3").iterdir():
        store.put(file.name, file.read_bytes())
    store.put(".metadata", data)
    try:
        checkpoint = Dcp().open(Source.directory(store))
        for found in checkpoint.check():
            assert len(found.message) < 10_000
        inspect(checkpoint)
    except FtckptError:
        pass
