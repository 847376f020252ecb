"""Repairs on this machine: what is damaged comes from a replica, and nothing is lost meanwhile."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import (
    CorruptError,
    ExistsError,
    IncompleteError,
    RefusedError,
    UnsupportedError,
    UnverifiedError,
)
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.replication.swap_in_place import ExchangeStaging
from ftckpt.storage.local import folders
from ftckpt.storage.local.folders import exchange
from ftckpt.storage.local.store import LocalReader
from ftckpt.transfer.request.example import require_unchanged
from tests.commands.golden import RUN
from tests.delta.packs import pack_places, save_steps
from tests.killing import kill_points
from tests.replication.replicas import (
    INSIDE,
    VICTIM,
    KilledError,
    contents,
    copied,
    flip,
    repaired,
    require_good,
    sealed,
    state,
)

OTHER = "__0_0.distcp"


@pytest.fixture
def replica(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "replica"
    copied(source, path)
    return path


def _kept(path: Path) -> list[Path]:
    folder = path.parent / ".ftckpt" / "damaged"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_nothing_to_repair_changes_nothing(source: Path, replica: Path) -> None:
    before = state(source.parent)
    report = repaired(source, replica)
    assert (report.sound, report.done, report.fetched) == (True, False, 0)
    assert state(source.parent) == before


def test_only_the_bad_blocks_come_from_the_replica(
    source: Path, replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(source)
    good = (source / OTHER).stat().st_ino
    flip(source / VICTIM, INSIDE)
    flip(source / VICTIM, 0)
    damaged = contents(source)
    read: list[tuple[int, int]] = []
    real = LocalReader.readinto

    def readinto(self: LocalReader, offset: int, view: memoryview) -> None:
        if self._path.startswith(f"{replica}/") and len(view) > 1000 and MANIFEST not in self._path:
            read.append((offset, len(view)))
        real(self, offset, view)

    with monkeypatch.context() as patch:
        patch.setattr(LocalReader, "readinto", readinto)
        report = repaired(source, replica)
    assert sorted(read) == [(0, 4096), (INSIDE // 4096 * 4096, 4096)]
    assert [(b.file, b.number, b.why) for b in report.blocks] == [
        (VICTIM, 0, "differs"),
        (VICTIM, INSIDE // 4096, "differs"),
    ]
    assert (report.fetched, report.files, report.proven) == (2 * 4096, 1, True)
    assert contents(source) == whole
    assert (source / OTHER).stat().st_ino == good  # not written again
    require_good(source)
    (kept,) = _kept(source)
    assert str(kept) == report.kept
    assert contents(kept) == damaged
    assert sorted(os.listdir(source.parent)) == [".ftckpt", "step-2"]


def _shorten(source: Path) -> None:
    os.truncate(source / VICTIM, 5000)


def _lengthen(source: Path) -> None:
    with (source / VICTIM).open("ab") as file:
        file.write(b"more")


def _lose_the_index(source: Path) -> None:
    (source / ".metadata").unlink()


def _lose_the_manifest(source: Path) -> None:
    (source / MANIFEST).unlink()
    flip(source / VICTIM, INSIDE)


def _lose_manifest_and_index(source: Path) -> None:
    (source / MANIFEST).unlink()
    (source / ".metadata").unlink()


def _spoil_the_manifest(source: Path) -> None:
    flip(source / MANIFEST, 300)


DAMAGE = [
    _shorten,
    _lengthen,
    _lose_the_index,
    _lose_the_manifest,
    _lose_manifest_and_index,
    _spoil_the_manifest,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_is_lost_is_mended(
    source: Path, replica: Path, damage: Callable[[Path], None]
) -> None:
    (source / "notes.md").write_text("kept, though it belongs to nobody")
    (source / "link").symlink_to("notes.md")
    whole = contents(source)
    damage(source)
    report = repaired(source, replica)
    assert report.done
    assert not report.sound
    assert contents(source) == whole
    assert os.readlink(source / "link") == "notes.md"
    require_good(source)
    assert repaired(source, replica).sound


def test_a_dry_run_lists_and_fetches_nothing(source: Path, replica: Path) -> None:
    flip(source / VICTIM, INSIDE)
    before = state(source.parent)
    report = repaired(source, replica, dry_run=True)
    assert (len(report.blocks), report.bytes_damaged, report.done) == (1, 4096, False)
    assert state(source.parent) == before


def test_damaged_in_both_changes_nothing_and_a_third_replica_goes_on(
    source: Path, replica: Path, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    copied(source, third)
    for path in (source, replica):
        flip(path / VICTIM, INSIDE)
    flip(source / OTHER, 5000)
    before = contents(source)
    with pytest.raises(CorruptError, match="1 block cannot be had from") as caught:
        repaired(source, replica)
    assert (caught.value.file, caught.value.offset) == (VICTIM, INSIDE // 4096 * 4096)
    assert contents(source) == before
    report = repaired(source, third)
    assert report.taken_over > 4096
    require_good(source)


def test_a_replica_that_is_damaged_elsewhere_serves(source: Path, replica: Path) -> None:
    flip(source / VICTIM, INSIDE)
    flip(replica / OTHER, 5000)
    (replica / ".metadata").unlink()
    repaired(source, replica)
    require_good(source)


@pytest.mark.parametrize("sealing", ["both", "source", "replica", "neither"])
def test_another_step_is_no_replica(source: Path, tmp_path: Path, sealing: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(RUN / "step-1", other)
    if sealing in ("both", "replica"):
        sealed(other)
    if sealing in ("replica", "neither"):
        (source / MANIFEST).unlink()
    flip(source / VICTIM, INSIDE)
    before = state(source.parent)
    with pytest.raises(RefusedError, match="is not a replica of"):
        repaired(source, other)
    assert state(source.parent) == before


def _shards(path: Path, kind: str, last: float) -> Path:
    """Write a model of four files without a step, of which the last has another value."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    places = {}
    stem, write = {
        "bin": ("pytorch_model", torch.save), "safetensors": ("model", save_file)
    }[kind]  # fmt: skip
    for number in range(1, 5):
        name = f"{stem}-0000{number}-of-00004.{kind}"
        tensor = torch.full((64,), last if number == 4 else 0.5)
        write({f"layers.{number}.w": tensor}, path / name)  # type: ignore[operator]
        places[f"layers.{number}.w"] = name
    index = {"metadata": {"total_size": 4 * 256}, "weight_map": places}
    suffix = "safetensors.index.json" if kind == "safetensors" else "bin.index.json"
    (path / f"{stem}.{suffix}").write_text(json.dumps(index))
    return path


def test_a_number_as_the_name_of_a_replica_is_no_step(tmp_path: Path) -> None:
    damaged = _shards(tmp_path / "a" / "checkpoint-200", "safetensors", 2.0)
    other = sealed(_shards(tmp_path / "replicas" / "1", "safetensors", 2.0))
    victim = min(damaged.glob("*.safetensors"))
    raw = victim.read_bytes()
    victim.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert repaired(damaged, other).done
    assert victim.read_bytes() == raw


def test_names_of_two_steps_are_no_replicas(tmp_path: Path) -> None:
    damaged = _shards(tmp_path / "a" / "checkpoint-200", "safetensors", 2.0)
    other = sealed(_shards(tmp_path / "b" / "checkpoint-100", "safetensors", 1.0))
    before = state(damaged.parent)
    with pytest.raises(RefusedError, match="their names say step 200 and step 100"):
        repaired(damaged, other)
    assert state(damaged.parent) == before
    assert repaired(damaged, other.rename(tmp_path / "b" / "checkpoint-200")).done


def test_a_record_that_is_whole_is_no_damage(tmp_path: Path) -> None:
    damaged = _shards(tmp_path / "a", "bin", 2.0)
    other = sealed(_shards(tmp_path / "b", "bin", 1.0))
    before = state(damaged)
    with pytest.raises(RefusedError, match=r"00004\.bin differs and is not damage"):
        repaired(damaged, other)
    assert state(damaged) == before


def test_a_replica_that_was_never_sealed_serves(source: Path, replica: Path) -> None:
    (replica / MANIFEST).unlink()
    flip(source / VICTIM, INSIDE)
    repaired(source, replica)
    require_good(source)


def _record(plain: Path) -> int:
    from ftckpt.replication.trusted_manifest import record_evidence
    from tests.replication.replicas import opened

    return max(record_evidence(opened(plain), None).ranges(VICTIM))[0]


def test_neither_is_sealed_and_the_records_say_which_is_right(plain: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica"
    shutil.copytree(plain, replica)
    assert repaired(plain, replica).sound
    flip(plain / VICTIM, _record(replica))
    report = repaired(plain, replica)
    assert (report.evidence, len(report.blocks)) == ("crc32", 1)
    assert contents(replica).items() <= contents(plain).items()
    require_good(plain)


def test_neither_is_sealed_and_nothing_says_which_is_right(plain: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica"
    shutil.copytree(plain, replica)
    flip(plain / VICTIM, 976)  # the time in a directory entry: no CRC-32 covers it, no reader minds
    with pytest.raises(UnverifiedError, match="no evidence says which"):
        repaired(plain, replica)
    flip(replica / VICTIM, _record(plain))
    with pytest.raises(UnverifiedError, match="does not vouch for itself"):
        repaired(plain, replica)


@pytest.mark.parametrize("damage", [_shorten, _spoil_the_manifest])
def test_killed_at_every_change_the_name_stands_for_one_of_the_two(
    source: Path, replica: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = contents(source)
    damage(source)
    damaged = contents(source)
    spare = tmp_path / "spare"
    shutil.copytree(source, spare)
    points = 0
    for point in kill_points(lambda: void(repaired(source, replica))):
        points = point
        assert contents(source) in (whole, damaged)
        repaired(source, replica)
        assert contents(source) == whole
        assert sorted(os.listdir(source.parent)) == [".ftckpt", "step-2"]
        (kept,) = _kept(source)
        assert contents(kept) == damaged
        shutil.rmtree(source.parent)
        shutil.copytree(spare, source)
    assert points > 15


def test_killed_again_and_again_it_gets_through(source: Path, replica: Path) -> None:
    _shorten(source)
    flip(source / OTHER, 5000)
    damaged = contents(source)
    for _ in kill_points(lambda: void(repaired(source, replica)), each=True):
        pass
    require_good(source)
    (kept,) = _kept(source)
    assert contents(kept) == damaged


def _one_file(tmp_path: Path) -> Path:
    """A sealed checkpoint of one file in a directory of its own."""
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "root" / "model.safetensors"
    path.parent.mkdir()
    save_file({"w": np.arange(5000, dtype=np.float32)}, path)
    return sealed(path)


def test_one_file(tmp_path: Path) -> None:
    path, replica = _one_file(tmp_path), tmp_path / "copy.safetensors"
    copied(path, replica)
    whole = path.read_bytes()
    flip(path, 9000)
    assert repaired(path, replica).fetched == 4096
    assert path.read_bytes() == whole
    require_good(path)
    beside = path.with_name(path.name + SUFFIX)
    flip(beside, 100)
    assert repaired(path, replica).manifest
    require_good(path)
    assert len(_kept(path)) == 2
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    copied(path, f"{tmp_path}/third.safetensors")
    flip(path, 9000)
    shutil.copy(beside, tmp_path / f"link.safetensors{SUFFIX}")
    with pytest.raises((RefusedError, CorruptError), match="link"):
        repaired(link, replica)


def test_elsewhere_on_demand(source: Path, replica: Path, tmp_path: Path) -> None:
    whole = contents(source)
    flip(source / VICTIM, INSIDE)
    before = state(source.parent)
    mended = tmp_path / "mended"
    report = repaired(source, replica, to=str(mended))
    assert (report.url, report.kept, report.fetched) == (str(mended), "", 4096)
    assert state(source.parent) == before
    assert contents(mended) == whole
    again = repaired(source, replica, to=str(mended))
    assert (again.done, again.already_there, again.files) == (True, True, 0)
    (tmp_path / "out").mkdir()
    inside = repaired(source, replica, to=f"{tmp_path}/out/")
    assert inside.url == f"{tmp_path}/out/{source.name}"
    flip(mended / VICTIM, INSIDE)
    with pytest.raises(CorruptError, match="there already, and damaged"):
        repaired(source, replica, to=str(mended))
    with pytest.raises(ExistsError):
        repaired(source, replica, to=str(source))


def test_a_restart_leaves_the_damaged_manifest_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the note of what is shown next and the swap, then begun anew."""
    path = _one_file(tmp_path)
    copied(path, tmp_path / "copy.safetensors")
    whole = path.read_bytes()
    flip(path, 9000)

    def swap(one: str, other: str) -> None:
        if other == str(path):
            raise KilledError
        exchange(one, other)

    with monkeypatch.context() as patch:
        patch.setattr("ftckpt.replication.swap_in_place.exchange", swap)
        with pytest.raises(KilledError):
            repaired(path, tmp_path / "copy.safetensors")
    repaired(path, tmp_path / "copy.safetensors", restart=True)
    assert path.read_bytes() == whole
    require_good(path)


def test_two_at_once(source: Path, replica: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(source / VICTIM, INSIDE)
    refused: list[object] = []
    real = ExchangeStaging.publish

    def publish(*args: Any) -> None:
        with pytest.raises(RefusedError, match="another ftckpt") as caught:
            repaired(source, replica)
        refused.append(caught.value)
        real(*args)

    monkeypatch.setattr(ExchangeStaging, "publish", publish)
    repaired(source, replica)
    assert len(refused) == 1
    require_good(source)


def test_a_checkpoint_that_changes_meanwhile_is_let_be(
    source: Path, replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(source / VICTIM, INSIDE)

    def changed(*args: Any) -> None:
        (source / OTHER).write_bytes(b"the next save")
        require_unchanged(*args)

    monkeypatch.setattr("ftckpt.replication.repair.require_unchanged", changed)
    with pytest.raises(IncompleteError, match="changed"):
        repaired(source, replica)
    assert (source / OTHER).read_bytes() == b"the next save"


def test_nothing_is_mended_into_another_checkpoint(replica: Path, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    shutil.copytree(replica, sealed)
    base, target = save_steps(tmp_path / "steps", 2)
    pack_places(base, target, tmp_path / "steps" / "delta")
    delta, other = tmp_path / "steps" / "delta", tmp_path / "other"
    shutil.copytree(delta, other)
    for source, from_, place in ((replica, sealed, sealed), (delta, other, base)):
        with pytest.raises(RefusedError, match="lies inside"):
            repaired(source, from_, to=str(place / "mended"))
        assert not (place / "mended").exists()


def test_a_filesystem_that_cannot_swap_says_so_before_the_work(
    source: Path, replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(source / VICTIM, INSIDE)
    monkeypatch.setattr(folders, "renameat2", lambda *names: errno.EINVAL)
    with pytest.raises(UnsupportedError, match="cannot swap") as caught:
        repaired(source, replica)
    assert "--to" in caught.value.hint
    assert sorted(os.listdir(source.parent)) == ["step-2"]


def test_a_folder_that_is_a_link_gets_nothing(source: Path, replica: Path, tmp_path: Path) -> None:
    flip(source / VICTIM, INSIDE)
    (tmp_path / "elsewhere").mkdir()
    (source.parent / ".ftckpt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="is not a directory"):
        repaired(source, replica)
    assert os.listdir(tmp_path / "elsewhere") == []


def void(_: object) -> None:
    return
