"""The files that were packed come back byte for byte, whatever wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import ftckpt.digests.blocks
import ftckpt.manifest
import ftckpt.manifest.parse
import ftckpt.transfer.staging.local
import ftckpt.transfer.write.blocks
import ftckpt.transfer.write.files
from ftckpt.delta.original_files import Original, original_of, rest_of
from ftckpt.discovery.candidates import newest_child
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.resolve import open_target
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.delta import pack as delta_records
from ftckpt.formats.delta import prove_original as delta_original_proof
from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
from ftckpt.formats.delta.original import OriginalWriter, format_of, same_objects_there
from ftckpt.formats.delta.prove_original import OriginalProof
from ftckpt.formats.delta.reader import PLAIN_REST, original_places
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.prove.against_digests import DigestProof
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.run import TransferOptions, TransferReport, transfer
from ftckpt.workers import Work
from tests.builders.checkpoints import copy, flip
from tests.builders.raw_checkpoint import RawCheckpoint, checkpoints
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.counting import Added
from tests.delta.packs import STORES, forget, opened, pack_places, save_steps, tensors_of
from tests.killing import kill_points

DCP = Path(__file__).parents[1] / "data" / "dcp"
SETS = [
    "accelerate_fsdp1",
    "dcp_2d_tpfsdp",
    "ds_pp2dp2_z1_bf16",
    "ds_z3_w2_fp32",
    "hf_llama",
    "hf4_llama_bin",
    "lightning_ddp",
    "mcore0161_tp2dp2_dpreshard",
    "mcore_torch_tp2dp2_distopt_bf16",
    "mcore_torchdist_tp2pp2",
    "verl_fsdp",
]


def unpack(delta: Path, out: Path, **options: Any) -> TransferReport:
    """Write a delta's original files, as the verb does."""
    found = opened(delta)
    assert isinstance(found, DeltaCheckpoint)
    writer, content = OriginalWriter(found), Content.of(found)
    return transfer(
        content,
        writer.layout(content, LayoutRequest()),
        str(out),
        format_of(found),
        single=writer.single,
        same_objects=same_objects_there,
        options=TransferOptions(Work(threads=2), **options),
        store_options=STORES,
        prover=OriginalProof(writer),
    )


def _bytes(place: Path, names: Any = None) -> Mapping[str, bytes]:
    if place.is_file():
        return {"": place.read_bytes()}
    found = {str(p.relative_to(place)): p for p in place.rglob("*") if p.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if not name.startswith("ftckpt.manifest") and (names is None or name in names)
    }


@pytest.mark.parametrize("name", SETS)
def test_every_file_of_every_framework(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = open_target(str(real_set(name, "", tmp_path_factory)), FORMATS, STORES)
    found = target.open() if target.root is None else None
    if found is None:
        assert target.root is not None
        found = open_part(target.root.store, newest_child(target.root).part)
    place = Path(found.source.url)
    pack_places(None, place, tmp_path / "delta")
    report = unpack(tmp_path / "delta", tmp_path / "out")
    assert report.proof is not None
    wanted = _bytes(place, None if place.is_file() else set(found.members()))
    assert wanted
    assert _bytes(tmp_path / "out") == wanted


@given(checkpoints())
@settings(
    max_examples=examples(25, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_whatever_lies_in_files_is_there_once(made: tuple[RawCheckpoint, dict[str, Any]]) -> None:
    checkpoint, _ = made
    original = original_of(checkpoint)
    assert original is not None
    assert Original.parse(original.dump()) == original
    gatherer = Gatherer(checkpoint)
    content = Content.of(checkpoint)
    for file in original.files:
        data = bytearray(file.size)
        covered = 0
        for offset, length in file.rest:
            data[offset : offset + length] = checkpoint.source.read(file.path, offset, length)
            covered += length
        for one in file.placed:
            view = memoryview(data)[one.offset : one.offset + one.nbytes]
            gatherer.fill(content.part(one.key, one.box), one.start, one.stop, view)
            covered += one.nbytes
        assert covered == file.size
        assert bytes(data) == checkpoint.source.read(file.path)
    assert sum(part.nbytes for part in rest_of(original)) == original.rest_bytes


W = [4, "w", [0], [2], 0, 2, 8]
GOOD = {"single": False, "files": [["a", 20, [W]]]}
LIES: dict[str, Any] = {
    "no object": [],
    "no list": {"single": False, "files": 3},
    "short row": {"single": False, "files": [["a", 20]]},
    "negative": {"single": False, "files": [["a", -1, []]]},
    "no number": {"single": False, "files": [["a", "20", []]]},
    "behind the end": {"single": False, "files": [["a", 11, [W]]]},
    "overlap": {"single": False, "files": [["a", 20, [W, [5, "w", [0], [1], 0, 1, 4]]]]},
    "twice": {"single": False, "files": [["a", 1, []], ["a", 1, []]]},
    "a file and a directory": {"single": False, "files": [["a", 1, []], ["a/b/c", 1, []]]},
    "a manifest": {"single": False, "files": [["ftckpt.manifest.json", 1, []]]},
    "two singles": {"single": True, "files": [["a", 1, []], ["b", 1, []]]},
}


@pytest.mark.parametrize("name", LIES)
def test_a_list_that_lies_is_damage(name: str) -> None:
    assert Original.parse(json.dumps(GOOD).encode()).files[0].path == "a"
    with pytest.raises(CorruptError) as caught:
        Original.parse(json.dumps(LIES[name]).encode())
    assert caught.value.kind == "bad-delta"


def test_a_name_that_climbs_is_refused() -> None:
    with pytest.raises(UnsafeError):
        Original.parse(json.dumps({"single": False, "files": [["../a", 0, []]]}).encode())


def test_a_delta_of_a_delta_keeps_the_files(tmp_path: Path) -> None:
    one, two = save_steps(tmp_path, 2)
    pack_places(one, two, tmp_path / "delta")
    pack_places(None, tmp_path / "delta", tmp_path / "whole")
    wanted = _bytes(two)
    forget(one)
    forget(two)
    unpack(tmp_path / "whole", tmp_path / "out")
    assert _bytes(tmp_path / "out") == wanted


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: tuple[Any, ...] = (
        ftckpt.digests.blocks,
        ftckpt.manifest,
        ftckpt.manifest.parse,
        ftckpt.transfer.write.blocks,
        ftckpt.transfer.write.files,
        ftckpt.transfer.staging.local,
    )
    for module in modules:
        monkeypatch.setattr(module, "BLOCK", 4096)


@pytest.mark.usefixtures("small_blocks")
def test_unpacking_that_is_killed_leaves_nothing_or_all(tmp_path: Path) -> None:
    one, two = save_steps(tmp_path / "run", 2)
    pack_places(one, two, tmp_path / "delta")
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    wanted, points, taken = _bytes(two), 0, 0

    def work() -> None:
        unpack(tmp_path / "delta", out)

    for point in kill_points(work):
        points = point
        if out.exists():
            assert _bytes(out) == wanted
        elif point % 4 == 0:
            taken += bool(unpack(tmp_path / "delta", out).taken_over)
        if out.exists():
            assert _bytes(out) == wanted
            forget(out)
    assert _bytes(out) == wanted
    assert os.listdir(out.parent) == ["out"]
    assert points > 15
    assert taken


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Return a checkpoint of which one replica differs from the main piece."""
    place = copy(DCP / "ranklocal" / "step-3", tmp_path / "apart")
    checkpoint = opened(place)
    (replica,) = (p for p in checkpoint.tensors["seen"].pieces if p.replica)
    extent = checkpoint.payload(replica).extent
    flip(place / extent.file, extent.offset)
    return place


def test_replicas_that_differ_come_back_as_they_were(apart: Path, tmp_path: Path) -> None:
    pack_places(None, apart, tmp_path / "delta")
    assert unpack(tmp_path / "delta", tmp_path / "out").proof is not None
    assert _bytes(tmp_path / "out") == _bytes(apart)


@pytest.mark.parametrize("task", [100, 1 << 20])
@pytest.mark.parametrize("plain", [True, False])
def test_every_byte_of_the_files_is_proven(
    apart: Path, plain: bool, task: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_original_proof, "_TASK", task)
    monkeypatch.setattr(delta_original_proof, "_MOST", 3)
    if plain:
        monkeypatch.setattr(delta_records, "MOST_IN_MEMORY", 0)
    pack_places(None, apart, tmp_path / "delta")
    found = opened(tmp_path / "delta")
    assert isinstance(found, DeltaCheckpoint)
    assert (PLAIN_REST in original_places(found.index)) is plain
    writer, content, counter = OriginalWriter(found), Content.of(found), Added()
    prove, result = OriginalProof(writer), opened(apart)
    proof = prove(content, result, same_objects_there, Work(counter=counter))
    assert proof.nbytes == content.nbytes
    assert counter.done == counter.total == sum(map(len, _bytes(apart).values()))
    (data,) = (file for file in writer.original.files if file.path == "__1_0.distcp")
    ends = [offset for start, length in data.rest for offset in (start, start + length - 1)]
    assert len(ends) > 2
    for offset in ends:
        flip(apart / data.path, offset)
        with pytest.raises(CorruptError):  # the reader sees some of them before
            prove(content, result, same_objects_there)
        flip(apart / data.path, offset)
    (replica,) = (p for p in result.tensors["seen"].pieces if p.replica)
    flip(apart / data.path, result.payload(replica).extent.offset + 1)
    with pytest.raises(CorruptError, match=r"of __1_0\.distcp are not what was packed") as caught:
        prove(content, result, same_objects_there)
    assert (caught.value.kind, caught.value.file) == ("failed-proof", data.path)


def test_a_result_with_other_bits_fails_the_proof(tmp_path: Path) -> None:
    one, two = save_steps(tmp_path, 2)
    pack_places(None, one, tmp_path / "delta")
    found = opened(tmp_path / "delta")
    assert isinstance(found, DeltaCheckpoint)
    digests = {tensor.key: tensor.digest for tensor in found.index.tensors}
    content = Content.of(opened(one))
    proof = DigestProof(digests)(content, opened(one), same_objects_there)
    assert (proof.tensors, proof.nbytes) == (
        len(digests),
        sum(map(len, tensors_of(found).values())),
    )
    with pytest.raises(CorruptError, match="has the digest") as caught:
        DigestProof(digests)(content, opened(two), same_objects_there)
    assert caught.value.kind == "failed-proof"
