"""Packing, end to end: every type and layout, refusals, kills at every change, other machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftckpt.delta.pack.build
import ftckpt.digests.blocks
import ftckpt.manifest
import ftckpt.manifest.parse
import ftckpt.transfer.staging.local
import ftckpt.transfer.write.blocks
import ftckpt.transfer.write.files
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.delta import NAME, DeltaIndex, content_digest
from ftckpt.delta.index.objects import RecordFile
from ftckpt.delta.index.parse import parse_index
from ftckpt.delta.pack.assemble import Packable, PackOptions
from ftckpt.delta.pack.report import Method
from ftckpt.delta.pack.run import pack
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    IncompleteError,
    NoResourceError,
    NotFoundError,
    RefusedError,
)
from ftckpt.formats.catalog import formats
from ftckpt.formats.delta import Delta
from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
from ftckpt.formats.ranks.writer import RanksWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.megatron_files import write as write_megatron
from tests.builders.megatron_model import Job
from tests.builders.raw_checkpoint import placed
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.writers import write
from tests.delta.packs import STORES, forget, opened, pack_places, save_steps, tensors_of
from tests.killing import kill_points

SMALL = [
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8",
    "int16", "int32", "int64", "uint64", "bool", "complex64", "complex128",
]  # fmt: skip


class Upon:
    """The format `delta` with a base that is open already."""

    name = "delta"

    def __init__(self, base: Checkpoint | None) -> None:
        self._base = base

    def recognise(self, listing: Any) -> Any:
        return Delta(formats).recognise(listing)

    def open(self, source: Source) -> DeltaCheckpoint:
        found = Delta(formats).open(source)
        found._base = self._base
        return found


@st.composite
def pairs_of_checkpoints(draw: st.DrawFn) -> tuple[Checkpoint, Checkpoint]:
    """Draw a base and a target of the same tensors, changed here and there, each cut anew."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = DTYPES[draw(st.sampled_from(SMALL))]
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        count = int(np.prod(shape))
        raw = random.integers(0, 256, count * dtype.itemsize, np.uint8)
        other = raw ^ (random.random(raw.size) < draw(st.sampled_from([0, 0.05, 1]))).astype("u1")
        for state, data in ((before, raw), (after, other)):
            whole = np.frombuffer(data.tobytes(), raw_dtype(dtype.itemsize)).reshape(shape)
            state[f"t{number}"] = dtype, whole
    lost = draw(st.sampled_from(["", "t0"]))
    before.pop(lost, None)
    return placed(draw, before, "pack-base"), placed(draw, after, "pack-target")


@given(pairs_of_checkpoints(), st.booleans(), st.sampled_from([1, 2, 3]))
@settings(
    max_examples=examples(25, 240), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_every_type_and_layout_comes_back(
    states: tuple[Checkpoint, Checkpoint], based: bool, level: int
) -> None:
    before, target = states
    base = before if based else None
    out = open_store("memory://pack-out/delta", STORES)
    out.delete([entry.path for entry in _entries(out)])
    report = pack(
        Packable(checkpoint=target),
        None if base is None else Packable(checkpoint=base),
        out.url,
        RecordFile(),
        Upon(base),
        same_objects=SameObject,
        options=PackOptions(level=level),
        store_options=STORES,
    )
    made = Upon(base).open(Source.directory(out))
    wanted = tensors_of(target)
    assert tensors_of(made) == wanted
    assert report.proof is not None
    assert {key: tensor.digest for key, tensor in _by_key(made.index).items()} == {
        key: digest_tensor(target, info) for key, info in target.tensors.items()
    }
    if base is not None and made.index.base is not None:
        digests = {key: digest_tensor(base, info) for key, info in base.tensors.items()}
        assert made.index.base.content == content_digest(digests)
    assert sum(share.bytes_in for share in report.methods.values()) == sum(
        map(len, wanted.values())
    )
    assert sum(share.bytes_in for share in report.components.values()) == report.bytes_in
    assert report.bytes_out == sum(e.size for e in _entries(out) if "manifest" not in e.path)


def _entries(store: Any) -> Iterable[Any]:
    try:
        return list(store.walk(""))
    except NotFoundError:
        return []


def _by_key(index: DeltaIndex) -> dict[str, Any]:
    return {tensor.key: tensor for tensor in index.tensors}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_steps(tmp_path_factory.mktemp("run"), 3)


def test_equal_bytes_each_time_with_any_number_of_threads(
    steps: list[Path], tmp_path: Path
) -> None:
    made = []
    for jobs in (1, 4):
        folder = tmp_path / str(jobs)
        folder.mkdir()
        report = pack_places(steps[0], steps[1], folder / "out", jobs=jobs)
        made.append({p.name: p.read_bytes() for p in (folder / "out").iterdir()})
        assert report.methods[Method.EQUAL].ratio is None
        assert report.methods[Method.PREDICTED].bytes_in > 0
    places = [one.pop(name) for one in made for name in ("ftckpt.manifest.json", NAME)]
    assert made[0] == made[1]
    first, second = (parse_index(place) for place in (places[1], places[3]))
    assert first.rows == second.rows
    assert first.tensors == second.tensors


def test_the_result_is_sealed_and_nothing_else_is_written(
    steps: list[Path], tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for step in steps for path in step.rglob("*")}
    report = pack_places(steps[0], steps[1], tmp_path / "out", check=True)
    assert os.listdir(tmp_path) == ["out"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    found = opened(tmp_path / "out")
    checked = verify(found, VerifyOptions(level=Level.CONTENT, require_content=True))
    assert (checked.code, checked.evidence) == (0, "manifest"), checked.message
    assert (found.format, found.source_format) == ("delta", "safetensors")
    assert found.step == opened(steps[1]).step
    assert report.files == len(list((tmp_path / "out").iterdir())) - 1
    assert tensors_of(found) == tensors_of(opened(steps[1]))


def test_what_is_there_stays(steps: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ExistsError):
        pack_places(steps[0], steps[1], tmp_path / "out")
    for inside in (steps[0], steps[1]):
        with pytest.raises(RefusedError, match="inside the source"):
            pack_places(steps[0], steps[1], inside / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    from ftckpt.manifest.seal import seal

    one, two = save_steps(tmp_path, 2)
    for victim in (one, two):
        seal(opened(victim))
        path = victim / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
        with pytest.raises(CorruptError, match="nothing was written"):
            pack_places(one, two, tmp_path / "out", check=True)
        data[-9] ^= 4
        path.write_bytes(data)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_a_missing_or_changed_base_is_found_before_a_byte_is_written(tmp_path: Path) -> None:
    one, two, three = save_steps(tmp_path, 3)
    pack_places(one, two, tmp_path / "delta")
    whole = (one / "model.safetensors").read_bytes()
    forget(one)
    for base, target in ((tmp_path / "delta", three), (None, tmp_path / "delta")):
        with pytest.raises(NotFoundError, match=r"step[ -]1"):
            pack_places(base, target, tmp_path / "out")
    save_steps(tmp_path / "other", 1, rows=41)
    os.rename(tmp_path / "other" / "step-1", one)
    with pytest.raises(CorruptError) as caught:
        pack_places(tmp_path / "delta", three, tmp_path / "out")
    assert caught.value.kind == "wrong-base"
    assert whole != (one / "model.safetensors").read_bytes()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.ftckpt-staging").exists()


def test_a_source_that_changes_meanwhile_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = save_steps(tmp_path, 2)
    real = ftckpt.transfer.staging.local.LocalStaging.source
    for victim in (one, two):

        def touched(*args: Any, path: Path = victim / "model.safetensors") -> Source:
            os.utime(path, (1, 1))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(ftckpt.transfer.staging.local.LocalStaging, "source", touched)
            with pytest.raises(IncompleteError, match=r"model\.safetensors changed"):
                pack_places(one, two, tmp_path / f"out-{victim.name}")
        assert not (tmp_path / f"out-{victim.name}").exists()


def test_a_full_disk_is_known_by_the_sample(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    room = 16 << 20  # what manifest and journal need

    def little(path: Any) -> Any:
        found = real(path)
        return type("Found", (), {"f_bavail": room + 900, "f_frsize": 1, "f_bsize": found.f_bsize})

    monkeypatch.setattr(os, "statvfs", little)
    with pytest.raises(NoResourceError, match="are free"):
        pack_places(None, steps[1], tmp_path / "out")
    monkeypatch.undo()
    assert pack_places(None, steps[1], tmp_path / "out").proof is not None


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several data files, and several blocks in each, from little data."""
    modules: tuple[Any, ...] = (
        ftckpt.digests.blocks,
        ftckpt.manifest,
        ftckpt.manifest.parse,
        ftckpt.delta.pack.build,
        ftckpt.transfer.write.blocks,
        ftckpt.transfer.write.files,
        ftckpt.transfer.staging.local,
    )
    for module in modules:
        monkeypatch.setattr(module, "BLOCK", 4096)
    monkeypatch.setattr(ftckpt.delta.pack.build, "LEAST", 12_000)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_fills_up_costs_only_the_rerun(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 8:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NoResourceError, match="No space left"):
        pack_places(steps[0], steps[1], tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(os, "pwrite", real)
    report = pack_places(steps[0], steps[1], tmp_path / "out")
    assert report.taken_over > 0
    assert tensors_of(opened(tmp_path / "out")) == tensors_of(opened(steps[1]))


@pytest.mark.usefixtures("small_files")
def test_killed_at_every_change_it_is_absent_or_whole(steps: list[Path], tmp_path: Path) -> None:
    destination = tmp_path / "out"
    wanted = tensors_of(opened(steps[1]))
    points = taken = 0
    for point in kill_points(lambda: _run(steps, destination, 1)):
        points = point
        if destination.exists():
            assert tensors_of(opened(destination)) == wanted
            forget(destination)
        elif point % 5 == 0:  # the others go on from what the last one has left
            taken += bool(pack_places(steps[0], steps[1], destination).taken_over)
            assert tensors_of(opened(destination)) == wanted
            assert os.listdir(tmp_path) == ["out"]
            forget(destination)
    assert tensors_of(opened(destination)) == wanted
    assert os.listdir(tmp_path) == ["out"]
    assert points > 30
    assert taken > 2


def _run(steps: list[Path], destination: Path, jobs: int) -> None:
    pack_places(steps[0], steps[1], destination, jobs=jobs)


@pytest.mark.usefixtures("small_files")
def test_what_was_made_and_then_damaged_is_made_anew(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ftckpt.transfer.staging.local.LocalStaging, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            pack_places(steps[0], steps[1], tmp_path / "out")
    state = tmp_path / ".out.ftckpt-staging" / "state"
    files = sorted(state.glob("*.blocks"))
    assert len(files) > 2
    data = bytearray(files[1].read_bytes())
    data[5] ^= 1
    files[1].write_bytes(data)
    with pytest.raises(RefusedError, match="another transfer"):
        pack_places(steps[0], steps[2], tmp_path / "out")
    report = pack_places(steps[0], steps[1], tmp_path / "out")
    whole = sum(path.stat().st_size for path in (tmp_path / "out").glob("[!f]*"))
    assert report.taken_over == whole - len(data)
    assert tensors_of(opened(tmp_path / "out")) == tensors_of(opened(steps[1]))


def test_a_chain_of_ten_names_each_base_by_content(tmp_path: Path) -> None:
    places = save_steps(tmp_path / "run", 11, rows=12, optimizer=False)
    (tmp_path / "deltas").mkdir()
    base = places[0]
    contents: list[str] = []
    for place in places[1:]:
        out = tmp_path / "deltas" / place.name
        report = pack_places(base, place, out)
        index = parse_index((out / NAME).read_bytes())
        assert index.base is not None
        assert not contents or index.base.content == contents[-1]
        assert index.base.path == (f"../{base.name}" if contents else f"../../run/{base.name}")
        contents.append(report.content)
        base = out
    assert tensors_of(opened(base)) == tensors_of(opened(places[-1]))
    plain = pack_places(None, places[-1], tmp_path / "plain")
    assert plain.content == contents[-1]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    import torch

    weight = torch.randn(50, 40)
    state = {"embed.weight": weight, "lm_head.weight": weight, "other": torch.randn(3)}
    for name in ("one.pt", "two.pt"):
        torch.save(state, tmp_path / name)
        weight += 0.01
    report = pack_places(tmp_path / "one.pt", tmp_path / "two.pt", tmp_path / "out")
    found = opened(tmp_path / "out")
    assert dict(found.aliases) == {"lm_head.weight": "embed.weight"}
    assert tensors_of(found) == tensors_of(opened(tmp_path / "two.pt"))
    assert report.components["model.param"].bytes_in == weight.nbytes + 12
    assert verify(found, VerifyOptions(level=Level.CONTENT)).code == 0


def test_a_tied_name_that_is_no_tensor_of_its_own_stays(tmp_path: Path) -> None:
    """Megatron's last stage has the embedding again, and its state under numbers of its own."""
    source = write_megatron(tmp_path / "in", Job(pp=2, tied=True, optimizer="masters")).path
    before = opened(source)
    (alias,) = before.aliases
    assert alias not in before.tensors
    pack_places(None, source, tmp_path / "whole")
    pack_places(source, source, tmp_path / "upon")
    pack_places(tmp_path / "whole", tmp_path / "upon", tmp_path / "chain")
    for name in ("whole", "upon", "chain"):
        found = opened(tmp_path / name)
        assert dict(found.aliases) == dict(before.aliases)
        own = before.aliases[alias]
        held = dict(tensors_of(found))
        assert held.pop(alias) == held[own]
        assert held == tensors_of(before)
        assert verify(found, VerifyOptions(level=Level.CONTENT)).code == 0
        ranks = write(RanksWriter(), found, tmp_path / f"ranks-{name}", dp=2)
        assert set(ranks.tensors) == set(found.tensors)


def test_other_names(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    values = np.arange(3000, dtype=np.float32)
    for name, key in (("one", "old.weight"), ("two", "new.weight")):
        (tmp_path / name).mkdir()
        save_file({key: values}, tmp_path / name / "model.safetensors")
    alone = pack_places(tmp_path / "one", tmp_path / "two", tmp_path / "a")
    named = pack_places(
        tmp_path / "one", tmp_path / "two", tmp_path / "b", renamed={"new.weight": "old.weight"}
    )
    assert Method.EQUAL not in alone.methods
    assert named.methods.keys() == {Method.EQUAL}
    assert tensors_of(opened(tmp_path / "b")) == tensors_of(opened(tmp_path / "two"))


@pytest.mark.s3
def test_a_base_on_s3_and_a_delta_there(steps: list[Path], s3_url: str, tmp_path: Path) -> None:
    store = open_store(f"{s3_url}/step-1", STORES)
    for path in sorted(p for p in steps[0].rglob("*") if p.is_file()):
        store.put(path.relative_to(steps[0]).as_posix(), path.read_bytes())
    pack_places(f"{s3_url}/step-1", steps[1], tmp_path / "out")
    assert tensors_of(opened(tmp_path / "out")) == tensors_of(opened(steps[1]))
    pack_places(f"{s3_url}/step-1", steps[1], f"{s3_url}/step-2")
    assert tensors_of(opened(f"{s3_url}/step-2")) == tensors_of(opened(steps[1]))
    index = parse_index(open_store(f"{s3_url}/step-2", STORES).read(NAME))
    assert index.base is not None
    assert index.base.path == "../step-1"


@pytest.mark.s3
def test_on_s3_a_killed_run_goes_on(
    steps: list[Path], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ftckpt.transfer.staging.remote as remote

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteStaging, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            pack_places(steps[0], steps[1], f"{s3_url}/out")
    with pytest.raises(IncompleteError, match=r"written last|transfer"):
        opened(f"{s3_url}/out")
    report = pack_places(steps[0], steps[1], f"{s3_url}/out")
    assert report.taken_over > 0
    assert tensors_of(opened(f"{s3_url}/out")) == tensors_of(opened(steps[1]))


def test_real_steps_upon_each_other_for_other_ranks(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.run import TransferOptions, transfer

    root = real_set("dcp_fsdp2_nested", "", tmp_path_factory)
    content = Content.of(opened(root / "step-3"))
    form, writer = format_and_writer("dcp")
    transfer(
        content, writer.layout(content, LayoutRequest(dp=8)), str(tmp_path / "eight"), form,
        single=False, same_objects=SameObject, options=TransferOptions(), store_options=STORES,
    )  # fmt: skip
    assert len(list((tmp_path / "eight").glob("*.distcp"))) == 8
    report = pack_places(tmp_path / "eight", root / "step-4", tmp_path / "out", check=True)
    assert report.ratio is not None
    assert report.ratio > 3
    assert report.objects == len(opened(root / "step-4").objects)
    found = opened(tmp_path / "out")
    assert tensors_of(found) == tensors_of(opened(root / "step-4"))
    assert found.topology.world_size == 4
