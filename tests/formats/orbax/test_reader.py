"""Training states that Orbax itself saved (tests/data/orbax), and what it restored from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

import ftckpt
import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode
from ftckpt.formats.orbax import Orbax
from ftckpt.formats.orbax.checkpoint import OrbaxCheckpoint
from ftckpt.formats.safetensors import Safetensors
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from tests.conformance.formats import FormatTests, Made, Truth, open_path

DATA = Path(__file__).parents[2] / "data" / "orbax"
CONTENT = VerifyOptions(level=Level.CONTENT)
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U32": "uint32", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
# Places of the samples that are roots.
_STEPS = {"manager": "manager/30", "old/manager": "old/manager/30", "second": "second/5"}
_ITEMS = ("", "state")
SAMPLES = (
    "everything", "everything_zarr3", "raw", "sharded", "sharded_zarr3", "adamw", "multi",
    "files", "edges", "edges_zarr3", "processes", "manager", "old/processes", "old/manager",
    "codecs", "codecs_zarr3", "second", "older/processes", "older/everything_zarr3",
)  # fmt: skip


def place_of(name: str) -> Path:
    return DATA / _STEPS.get(name, name)


def restored(name: str) -> dict[str, Truth]:
    """Return what Orbax restored, by the path in the tree."""
    raw = (DATA / f"{name}.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:start])
    return {
        key.removeprefix("state."): Truth(
            _TYPES[one["dtype"]],
            tuple(one["shape"]),
            raw[start + one["data_offsets"][0] : start + one["data_offsets"][1]],
        )
        for key, one in header.items()
        if key != "__metadata__"
    }


class _Real(FormatTests):
    format = Orbax()
    samples: tuple[str, ...] = ()

    def make(self, root: Path) -> list[Made]:
        made = []
        for name in self.samples:
            path = root / name.replace("/", "-")
            shutil.copytree(place_of(name), path)
            checkpoint = open_path(self.format, path)
            keys = {info.stored_name or info.name: key for key, info in checkpoint.tensors.items()}
            made.append(Made(path, {keys[stored]: one for stored, one in restored(name).items()}))
        return made

    def victims(self, path: Path) -> list[str]:
        checkpoint = open_path(self.format, path)
        held = {p.extent.file for t in checkpoint.tensors.values() for p in t.pieces}
        return sorted({checkpoint.source.stored(file) for file in held})


class TestOrbax(_Real):
    samples = (
        "everything", "everything_zarr3", "raw", "sharded", "sharded_zarr3", "adamw", "multi",
        "processes", "manager", "old/processes", "old/manager", "older/processes",
    )  # fmt: skip


class TestShards(_Real):
    samples = ("edges_zarr3",)
    # Opening reads the indexes of shards, and a shard of a file ends where the file does.
    truncated = frozenset({"truncated-file", "bad-crc", "out-of-bounds"})


@pytest.mark.parametrize("name", SAMPLES)
def test_every_array_is_what_orbax_restores(name: str) -> None:
    checkpoint = open_path(Orbax(), place_of(name))
    truth = restored(name)
    paths = checkpoint.paths if isinstance(checkpoint, OrbaxCheckpoint) else {}
    found = {".".join(path): key for key, (item, path) in paths.items() if item in _ITEMS}
    assert found.keys() == truth.keys()
    for stored, (dtype, shape, data) in truth.items():
        info = checkpoint.tensors[found[stored]]
        assert (info.dtype.name, info.shape) == (dtype, shape), stored
        assert read_tensor(checkpoint, info.key) == data, stored
    assert verify(checkpoint, VerifyOptions(level=Level.VALUES)).code in (
        ExitCode.OK, ExitCode.UNVERIFIED,
    )  # fmt: skip
    assert set(checkpoint.members()) == set(checkpoint.source.entries)


@pytest.mark.parametrize("name", ["files", "edges", "codecs"])
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_chunk_that_was_cut_is_damage(name: str, keep: int, tmp_path: Path) -> None:
    """Nothing but decoding it shows that a file of its own was cut."""
    victims = [p for p in sorted(place_of(name).rglob("*.*")) if p.name[0].isdecimal()]
    for victim in (victims[0], victims[-1]):
        copy = tmp_path / victim.parent.name
        shutil.copytree(place_of(name), copy)
        target = copy / victim.relative_to(place_of(name))
        target.write_bytes(victim.read_bytes()[:keep])
        report = verify(open_path(Orbax(), copy), VerifyOptions())
        assert report.code is ExitCode.CORRUPT, report.message
        assert any(str(f.file).endswith(victim.name) for f in report.findings)
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["files", "codecs", "codecs_zarr3"])
def test_a_conversion_finds_what_it_cannot_decode(name: str, tmp_path: Path) -> None:
    """It does not decode chunks before it reads them: reading is the check."""
    copy = tmp_path / "copy"
    shutil.copytree(place_of(name), copy)
    checkpoint = open_path(Orbax(), copy)
    piece = next(p for t in checkpoint.tensors.values() for p in t.pieces if p.packed)
    victim = copy / piece.extent.file
    victim.write_bytes(victim.read_bytes()[:-6])
    with pytest.raises(CorruptError):
        api.convert(str(copy), str(tmp_path / "out"), "safetensors")
    assert not (tmp_path / "out").exists()


def test_states_of_optax_are_kinds() -> None:
    adamw = open_path(Orbax(), DATA / "adamw")
    assert {"dense.kernel", "exp_avg:dense.kernel", "exp_avg_sq:embed.table"} <= set(adamw)
    assert "optimizer:opt_state.1.0.count" in adamw
    assert adamw.step == 3
    multi = open_path(Orbax(), DATA / "multi")
    assert {"exp_avg:dense.bias", "optimizer:embed.table.momentum_buffer"} <= set(multi)
    assert "exp_avg:embed.table" not in multi
    assert multi.step == 2


def test_one_training_state_among_several_trees() -> None:
    """Orbax's second interface saves every dictionary as a tree."""
    step = open_path(Orbax(), DATA / "second" / "5")
    assert set(step) == {"w", "extra:state:step", "extra:data:offset"}
    assert step.load_object("metrics") == {"loss": 1.0}
    assert step.step == 5


def test_chunks_of_the_fill_value_are_shown(tmp_path: Path) -> None:
    """Orbax of 2024 did not store them, and only the nodes of OCDBT tell them from lost ones."""
    place = place_of("older/everything_zarr3")
    checkpoint = open_path(Orbax(), place)
    assert read_tensor(checkpoint, "zeros") == bytes(64)
    report = verify(checkpoint, VerifyOptions())
    assert report.code is ExitCode.OK
    [note] = [f for f in report.findings if f.kind == "fill-value"]
    assert "1 chunk of zeros" in note.message
    out = tmp_path / "out"
    api.convert(checkpoint, str(out), "safetensors")
    assert read_tensor(open_path(Safetensors(), out), "zeros") == bytes(64)
    # One process's keys that are not merged are lost chunks.
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    shutil.copytree(DATA / "sharded_zarr3" / "ocdbt.process_0", copy / "ocdbt.process_1")
    report = ftckpt.verify(str(copy))
    assert report.code is ExitCode.CORRUPT
    assert "lacks" in report.message


def test_an_item_that_is_gone_is_missing(tmp_path: Path) -> None:
    copy = tmp_path / "30"
    shutil.copytree(DATA / "manager" / "30", copy)
    file = copy / "_CHECKPOINT_METADATA"
    said = json.loads(file.read_text())
    handlers = said["item_handlers"] | {"descriptor": "orbax.DescriptorHandler"}
    file.write_text(json.dumps(said | {"item_handlers": handlers}))
    assert ftckpt.verify(str(copy)).code is ExitCode.OK  # Orbax names it without writing it
    shutil.rmtree(copy / "data")
    assert ftckpt.verify(str(copy)).code is ExitCode.CORRUPT


def test_strings_items_and_the_mesh() -> None:
    assert open_path(Orbax(), DATA / "everything").load_object("word") == "a string"
    step = open_path(Orbax(), DATA / "manager" / "30")
    assert step.load_object("data") == {"epoch": 1, "offset": 240, "shards": ["a", "b"]}
    assert step.topology.world_size == 8
    assert "data 4, model 2" in step.topology.evidence
    assert open_path(Orbax(), DATA / "processes").topology.world_size == 4


def test_the_newest_step_that_was_finished(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(DATA / "manager", root)
    assert ftckpt.latest(str(root)).step == 30
    (root / "30").rename(root / "30.orbax-checkpoint-tmp")
    found = ftckpt.latest(str(root))
    assert (found.code, found.step) == (ExitCode.OK, 20)
    opened = ftckpt.verify(str(root / "30.orbax-checkpoint-tmp"))
    assert opened.code is ExitCode.INCOMPLETE
    node = next((root / "20" / "state" / "d").iterdir())
    node.write_bytes(node.read_bytes()[:-1] + b"\0")
    assert ftckpt.latest(str(root)).code is not ExitCode.OK


def test_a_time_that_was_never_written_is_an_unfinished_save(tmp_path: Path) -> None:
    copy = tmp_path / "30"
    shutil.copytree(DATA / "old" / "manager" / "30", copy)
    file = copy / "_CHECKPOINT_METADATA"
    metadata = json.loads(file.read_text())
    (copy / "commit_success.txt").unlink(missing_ok=True)
    assert ftckpt.verify(str(copy)).code is ExitCode.OK
    file.write_text(json.dumps(metadata | {"commit_timestamp_nsecs": None}))
    assert ftckpt.verify(str(copy)).code is ExitCode.INCOMPLETE


def test_a_step_whose_items_alone_are_marked_is_unfinished(tmp_path: Path) -> None:
    copy = tmp_path / "run" / "30"
    shutil.copytree(DATA / "manager" / "30", copy)
    (copy / "commit_success.txt").unlink()
    assert ftckpt.verify(str(copy)).code is ExitCode.INCOMPLETE
    assert ftckpt.latest(str(copy.parent)).code is not ExitCode.OK
    (copy / "state" / "commit_success.txt").unlink()
    (copy / "data" / "commit_success.txt").unlink()
    assert ftckpt.verify(str(copy)).code is ExitCode.OK  # Orbax of 2025 wrote none


def test_what_no_checksum_covers_is_named() -> None:
    report = verify(open_path(Orbax(), DATA / "everything"), CONTENT)
    assert report.code is ExitCode.UNVERIFIED
    assert "not-covered" in {f.kind for f in report.findings}
    # A large array lies outside the nodes, and Orbax writes no checksum of it.
    report = verify(open_path(Orbax(), DATA / "everything"), VerifyOptions())
    assert report.code is ExitCode.OK
    assert "none covers the rest" in report.message


class _Counted:
    """Reads of each range, over a source."""

    def __init__(self, path: Path) -> None:
        self.source = Source.directory(open_store(str(path)))
        self.ranges: list[tuple[str, int]] = []
        store = self.source.store
        read_many, opened = store.read_many, store.open

        def many(extents: Any) -> Any:
            self.ranges += [(e.file, e.offset) for e in extents]
            return read_many(extents)

        def one(path: str) -> Any:
            self.ranges.append((path, -1))
            return opened(path)

        store.read_many = many  # type: ignore[method-assign]
        store.open = one  # type: ignore[method-assign]


def test_no_node_is_read_twice() -> None:
    counted = _Counted(DATA / "sharded_zarr3")
    checkpoint = Orbax().open(counted.source)
    assert checkpoint.tensors
    assert len(set(counted.ranges)) == len(counted.ranges)


def _edit_json(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        target = path / file
        target.write_text(json.dumps(change(json.loads(target.read_text()))))

    return damage


def _zarray(**members: Any) -> Callable[[Path], None]:
    return _edit_json("params.whole/.zarray", lambda value: value | members)


def _leaf(kind: str) -> Callable[[Any], Any]:
    def change(value: Mapping[str, Any]) -> Any:
        first = next(iter(value["tree_metadata"].values()))
        first["value_metadata"]["value_type"] = kind
        return value

    return change


def _named(path: str) -> Callable[[Any], Any]:
    def change(value: Mapping[str, Any]) -> Any:
        first = next(iter(value["tree_metadata"].values()))
        first["key_metadata"] = [{"key": path, "key_type": 2}]
        return value

    return change


def _bomb(path: Path) -> None:
    (path / "params.whole" / "0.0").write_bytes(zstandard.compress(bytes(400 << 20)))


def _lose(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _leave_out(path: Path) -> None:
    _edit_json("_METADATA", lambda v: v | {"store_array_data_equal_to_fill_value": False})(path)
    _lose("params.whole/0.0")(path)


HOSTILE: dict[str, tuple[Callable[[Path], Any], set[int]]] = {
    "big-endian": (_zarray(dtype=">f4"), {13}),
    "four bits": (_zarray(dtype="int4"), {13}),
    "blosclz": (_zarray(compressor={"id": "blosc", "cname": "blosclz"}), {13}),
    "a codec of the future": (_zarray(compressor={"id": "later"}), {13}),
    "a codec that is no name": (_zarray(compressor={"id": {}}), {13}),
    "another codec than was used": (_zarray(compressor={"id": "gzip", "level": 1}), {4}),
    "blosc that is none": (_zarray(compressor={"id": "blosc", "cname": "lz4"}), {4, 13}),
    "filters": (_zarray(filters=[{"id": "delta"}]), {13}),
    "column order": (_zarray(order="F"), {13}),
    "a member of the future": (_zarray(later=1), {13}),
    "a version of the future": (_zarray(zarr_format=4), {13}),
    "a negative size": (_zarray(shape=[-5, 3]), {4}),
    "a chunk of nothing": (_zarray(chunks=[0, 3]), {4}),
    "axes that differ": (_zarray(chunks=[5]), {4}),
    "a shape beyond all": (_zarray(shape=[1 << 40, 1 << 40]), {4}),
    "a grid of nothing": (_zarray(shape=[0, 1 << 60], chunks=[1, 1]), {0, 4}),
    "a grid beyond all": (_zarray(shape=[1 << 30, 1 << 30], chunks=[1, 1]), {4}),
    "deep": (lambda p: (p / "params.whole/.zarray").write_text("[" * 9999), {4, 7}),
    "no metadata": (_lose("params.whole/.zarray"), {4}),
    "no chunk": (_lose("params.whole/0.0"), {4}),
    "no tree": (_lose("_METADATA"), {4, 13}),
    "a leaf of an unknown kind": (_edit_json("_METADATA", _leaf("my.Type")), {13}),
    "an array too many": (
        lambda p: shutil.copytree(p / "params.whole", p / "params.more"),
        {4},
    ),
    "a leaf that climbs": (_edit_json("_METADATA", _named("../../etc/passwd")), {4, 7}),
    "a leaf without a name": (_edit_json("_METADATA", _named("")), {4}),
    "two leaves of one name": (_edit_json("_METADATA", _named("params.whole")), {4}),
    "a bomb": (_bomb, {4}),
    "values in a msgpack": (lambda p: (p / "checkpoint").write_bytes(b"\x80"), {13}),
    "an array beside chunks that are left out": (_leave_out, {13}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata(name: str, tmp_path: Path) -> None:
    damage, codes = HOSTILE[name]
    copy = tmp_path / "step-30"
    shutil.copytree(DATA / "files", copy)
    damage(copy)
    assert int(ftckpt.verify(str(copy)).code) in codes
