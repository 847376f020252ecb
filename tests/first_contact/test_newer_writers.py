"""A record, a version or a field of another form is a newer writer's (13), never damage."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch

from ftckpt.errors import ExitCode, NewerWriterError, UnsafeError
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.metadata import parse_metadata
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.torch_files.table import TABLE
from tests.builders.archives import extract
from tests.conformance.formats import open_path
from tests.faults.cli import here
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
from tests.formats.dcp.writing import save

DATA = Path(__file__).parents[1] / "data" / "first_contact"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with step-5 from torch 2.13, and step-10 and step-15 from 2.15."""
    extract(DATA / "torch-2.15-dcp.tar.xz", tmp_path)
    return tmp_path / "mix"


def of_a_later_torch(step: Path) -> None:
    """Give each TensorProperties of a save a seventh value."""
    data = bytearray((step / ".metadata").read_bytes())
    end = b"t\x94b"  # TUPLE, MEMOIZE, BUILD
    (length,) = struct.unpack_from("<Q", data, 3)
    count = data.count(end)
    assert count == 8
    struct.pack_into("<Q", data, 3, length + count)  # of the frame
    (step / ".metadata").write_bytes(bytes(data).replace(end, b"N" + end))


def test_saves_of_torch_2_15_are_read(root: Path) -> None:
    for step in ("step-10", "step-15"):
        assert here("verify", root / step, "--level", "content").code == ExitCode.OK
    found = here("latest", root, "--level", "content")
    assert found.code == ExitCode.OK
    assert found.document["path"] == str(root / "step-15")


@pytest.mark.parametrize("module", [META, SHARDED])
@pytest.mark.parametrize("strides", [None, (3, 1), (1, 4)])
def test_strides_are_a_sixth_value(module: str, strides: tuple[int, ...] | None) -> None:
    entry = tensor(size(4, 3), [chunk(size(0, 0), size(4, 3))], properties=module)
    known = entry.state["properties"]
    entry.state["properties"] = known._replace(state=(*known.state, strides))
    storage = Pairs([(index("w", size(0, 0)), stored("__0_0.distcp", 0, 2000))])
    meta = parse_metadata(pickled(metadata({"w": entry}, storage)), ".metadata")
    assert meta.tensors["w"].dtype.name == "float32"


def test_the_strides_of_the_job_are_not_those_of_the_bytes(tmp_path: Path) -> None:
    # Each item is a stream with strides of its own: of a transposed tensor, too.
    weight = torch.arange(12.0).reshape(3, 4).t()
    step = save({"w": weight}, tmp_path / "step-1")
    data = bytearray((step / ".metadata").read_bytes())
    (length,) = struct.unpack_from("<Q", data, 3)
    struct.pack_into("<Q", data, 3, length + len(b"K\x01K\x04\x86"))
    assert data.count(b"t\x94b") == 1
    (step / ".metadata").write_bytes(bytes(data).replace(b"t\x94b", b"K\x01K\x04\x86t\x94b"))
    checkpoint = open_path(Dcp(), step)
    assert here("verify", step, "--level", "content").code == ExitCode.OK
    out = tmp_path / "out"
    assert here("convert", step, out, "--to", "safetensors").code == ExitCode.OK
    from safetensors.torch import load_file

    assert len(checkpoint.tensors) == 1
    assert torch.equal(load_file(out / "model.safetensors")["w"], weight)


def test_a_later_one_stops_latest_and_is_kept_by_gc(root: Path) -> None:
    of_a_later_torch(root / "step-15")
    found = here("verify", root / "step-15")
    assert found.code == ExitCode.UNSUPPORTED
    assert found.kinds == {"newer-writer"}
    (said,) = {f["message"] for f in found.document["findings"]}
    assert "expected 5 or 6 values, found 7 values" in said
    found = here("latest", root, "--level", "content")
    assert found.code == ExitCode.UNSUPPORTED
    assert "found 7 values" in found.told
    plan = here(
        "gc", root, "--keep-last", "1", "--min-survivors", "1", "--delete-corrupt", "--apply"
    )
    assert plan.code == ExitCode.OK
    assert (root / "step-15").is_dir()


def test_gc_drops_none_where_all_are_of_a_later_one(root: Path) -> None:
    for step in ("step-10", "step-15"):
        of_a_later_torch(root / step)
    here("gc", root, "--keep-last", "1", "--min-survivors", "1", "--delete-corrupt", "--apply")
    assert {p.name for p in root.glob("step-*")} == {"step-5", "step-10", "step-15"}


def test_one_step_of_two_names_orders_nothing(root: Path) -> None:
    # The optimizer of step-10 and step-15 has made one step since the job began.
    assert here("latest", root).document["path"] == str(root / "step-15")
    here("gc", root, "--keep-last", "1", "--min-survivors", "1", "--apply")
    assert [p.name for p in root.glob("step-*")] == ["step-15"]


def test_the_optimizers_count_orders_nothing_although_a_name_agrees(root: Path) -> None:
    shutil.copytree(root / "step-15", root / "step-1")  # now one name says what they all hold
    assert here("latest", root).document["path"] == str(root / "step-15")


# --- torch.save ---------------------------------------------------------------------------------


def parse(value: object) -> object:
    return load(pickled(value), file="x.pt", table=TABLE).value


@pytest.mark.parametrize("name", ["_rebuild_tensor_v4", "_rebuild_of_tomorrow"])
def test_a_record_that_a_later_torch_builds(name: str) -> None:
    with pytest.raises(NewerWriterError, match=f"found torch._utils.{name}"):
        parse(Called("torch._utils", name, (1,)))


def test_an_argument_more() -> None:
    with pytest.raises(NewerWriterError, match=r"expected storage, .*, found 8 values"):
        parse(Called("torch._utils", "_rebuild_tensor_v2", (None,) * 8))


def test_a_class_that_a_later_torch_builds() -> None:
    entry = Thing(META, "StridedChunkStorageMetadata", {"offsets": size(0)})
    with pytest.raises(NewerWriterError, match=r"found torch\.distributed.*StridedChunk"):
        parse_metadata(pickled(metadata({"w": entry}, {})), ".metadata")


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch", "load"), ("torch.distributed", "launch"), ("torch.distributed.run", "Main"),
     ("torch.distributed.checkpoint.state_dict_loader", "load"), ("torch._utils", "_import")],
)  # fmt: skip
def test_what_no_checkpoint_needs_is_still_unsafe(module: str, name: str) -> None:
    with pytest.raises(UnsafeError):
        parse(Called(module, name, ("x",)))


# --- metadata -----------------------------------------------------------------------------------

ITEM = ("__0_0.distcp", 0, 10)
NEWER = {
    "a chunk has a member more": {"w": tensor(size(4), [Thing(META, "ChunkStorageMetadata", {
        "offsets": size(0), "sizes": size(4), "strides": (1,)})])},
    "a tensor has a member more": {"w": tensor(size(4), [])._replace(state={
        **tensor(size(4), []).state, "codec": "zstd"})},
    "an element type": {"w": tensor(size(4), [], Global("torch", "float2_e1m0"))},
    "a kind of entry": {"w": Thing("torch.distributed.checkpoint.metadata",
                                   "BytesStorageMetadata", None), "v": "text"},
}  # fmt: skip


@pytest.mark.parametrize("what", NEWER)
def test_metadata_of_another_form(what: str) -> None:
    with pytest.raises(NewerWriterError, match=r"expected .*, found"):
        parse_metadata(pickled(metadata(NEWER[what], {})), ".metadata")


def test_a_place_with_a_member_more() -> None:
    storage = Pairs([(index("w", size(0)), stored(*ITEM, encrypted=True))])
    with pytest.raises(NewerWriterError, match=r"found .*'encrypted'"):
        parse_metadata(pickled(metadata({}, storage)), ".metadata")
