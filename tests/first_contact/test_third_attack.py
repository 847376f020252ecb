"""A third attack: what is called trash and is none."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from ftckpt.discovery import series
from ftckpt.errors import ExitCode, UsageError
from ftckpt.guard.journal import GuardJournal, of_place
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import MANIFEST
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.document import _digest, dump_plan, load_plan
from ftckpt.retention.policy.protections import group_entries
from ftckpt.retention.scan.check_cache import read_passed, write_passed
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.trash import BESIDE, trash_name
from ftckpt.retention.trash import local as local_trash
from ftckpt.retention.trash.tombstone import Tombstone
from ftckpt.transfer.write.files import digest_of_bytes
from tests.builders.checkpoints import save_dcp
from tests.builders.small_format import MARKER, read
from tests.first_contact.lines import printed
from tests.first_contact.test_second_attack import ends_within
from tests.retention import carrying, remote_roots, thinning
from tests.retention.remote_roots import DAY, TimedStore, keys, names, newest, saves
from tests.retention.trash.test_remote import purged


def planted(store: TimedStore, name: str, *, age: float, erasing: bool, marker: bool) -> str:
    """Put a tombstone as somebody does who may put keys and delete none."""
    files = store.walk(name)
    dropped = store.now - age
    record = Tombstone(
        name=name,
        directory=True,
        time=dropped,
        actor="eve",
        reasons=(),
        files=tuple(files),
        versions=(),
        markers={f.path: store.read(f.path) for f in files if marker and MARKER in f.path},
    )
    path = f".ftckpt/trash/{trash_name(name, dropped, erasing=erasing)}"
    store.put(path, record.dump())
    return path


def filled() -> TimedStore:
    store = TimedStore()
    saves(store, range(1, 6))
    return store


@pytest.mark.parametrize("marker", [True, False])
@pytest.mark.parametrize("erasing", [True, False])
@pytest.mark.parametrize("age", [0.0, 9 * DAY])
def test_a_tombstone_frees_nothing_that_was_never_dropped(
    age: float, erasing: bool, marker: bool
) -> None:
    """Its own keys are all that a planted tombstone needs, and its name says how old it is."""
    store = filled()
    before = {key: store.read(key) for key in keys(store)}
    for step in range(1, 6):
        planted(store, f"step-{step}", age=age, erasing=erasing, marker=marker)
    for _ in range(3):
        purged(store)
        assert before.items() <= {key: store.read(key) for key in keys(store)}.items()
        store.now += 2 * DAY
    assert newest(store) == "step-5"


def test_the_last_of_a_run_stays_even_where_its_marker_went() -> None:
    """As where its successor was removed by hand, or no format knows a marker of it."""
    store = filled()
    for step in (4, 5):
        planted(store, f"step-{step}", age=0, erasing=False, marker=True)
        store.delete([f"step-{step}/{MARKER}"])
    store.now += 2 * DAY
    done = purged(store)
    assert (done.code, done.erased) == (ExitCode.OK, ())
    assert {reason.rule for reason in done.held.values()} == {"last"}
    remote_roots.save(store, "step-6", 6)
    assert [t.name for t in purged(store).erased] == ["step-4", "step-5"]
    assert names(store) == {"step-1", "step-2", "step-3", "step-6"}


def test_a_purge_counts_from_when_the_store_got_the_tombstone() -> None:
    store = filled()
    planted(store, "step-1", age=9 * DAY, erasing=False, marker=True)
    store.delete([f"step-1/{MARKER}"])
    assert purged(store).erased == ()
    store.now += DAY
    assert [t.name for t in purged(store).erased] == ["step-1"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four saves, of which `step-1` and `step-2` lie in the trash."""
    root = tmp_path / "root"
    root.mkdir()
    for step in (1, 2, 3, 4):
        carrying.save(root, f"step-{step}", step)
    carrying.apply_to(root)
    return root


@pytest.mark.parametrize("how", ["gone", "damaged", "older"])
def test_a_purge_frees_none_without_a_good_successor(root: Path, how: str) -> None:
    for step in (3, 4):
        place = root / f"step-{step}"
        match how:
            case "gone":
                shutil.rmtree(place)
            case "damaged":
                (place / MARKER).write_bytes(b"{")
            case "older":
                os.rename(place, root / f"step-{step - 3}")
                (root / f"step-{step - 3}" / MARKER).write_text(
                    f'{{"step": {step - 3}, "state": "good"}}'
                )
    later = carrying.NOW + 2 * carrying.DAY
    done = carrying.purge_in(root, later)
    held = {path.rpartition("~")[2]: reason.rule for path, reason in done.held.items()}
    if how == "older":  # step-1 of the trash has a successor of its own name
        assert held == {"step-2": "last"}
    else:
        assert (held, done.erased) == ({"step-1": "last", "step-2": "last"}, ())
    carrying.save(root, "step-9", 9)
    assert carrying.purge_in(root, later).held == {}


def forged(root: Path, name: str, *, erasing: bool) -> Path:
    to = root / (BESIDE + trash_name(name, carrying.NOW - 9 * carrying.DAY, erasing=erasing))
    os.rename(root / name, to)
    return to


@pytest.mark.parametrize("erasing", [True, False])
def test_a_name_that_looks_like_trash_is_not_enough_in_a_shared_root(
    root: Path, erasing: bool
) -> None:
    """Who may write the root may rename a directory in it, though not delete what it holds."""
    there = forged(root, "step-3", erasing=erasing)
    root.chmod(0o2775)
    later = carrying.NOW + 2 * carrying.DAY
    done = carrying.purge_in(root, later)
    assert [reason.rule for reason in done.held.values()] == ["stranger"]
    assert (there / MARKER).exists()
    root.chmod(0o1777)  # there only its owner can rename it
    assert carrying.purge_in(root, later).held == {}
    assert not there.exists()


def test_what_gc_drops_beside_its_place_is_signed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.chmod(0o2775)
    opened = local_trash.LocalTrash._trash_folder

    def full(trash: local_trash.LocalTrash, *, make: bool = False) -> AbstractContextManager[int]:
        if make:
            raise OSError(errno.ENOSPC, "there is no space")
        return opened(trash)

    monkeypatch.setattr(local_trash.LocalTrash, "_trash_folder", full)
    for step in (5, 6):
        carrying.save(root, f"step-{step}", step)
    mode = (root / "step-3").stat().st_mode
    carrying.apply_to(root)
    monkeypatch.undo()
    (three,) = (path for path in root.iterdir() if path.name.endswith("~step-3"))
    assert three.stat().st_mode != mode
    carrying.undelete_in(root, "step-3")
    assert (root / "step-3").stat().st_mode == mode
    done = carrying.purge_in(root, carrying.NOW + 2 * carrying.DAY)
    assert "step-4" in {thing.name for thing in done.erased}
    assert done.held == {}


def test_weights_of_a_stranger_do_not_take_the_place_of_a_milestone(tmp_path: Path) -> None:
    """A manifest beside planted weights says that a killed run has made them."""
    root = tmp_path / "root"
    for step in (100, 200, 300, 400):
        thinning.save(root, step)
    before = (root / "step-100/model.safetensors").read_bytes()
    honest = tmp_path / "honest"
    shutil.copytree(root, honest, copy_function=shutil.copy2)
    thinning.gc(honest)
    weights = root / "step-100.ftckpt-weights"
    shutil.copytree(honest / weights.name, weights)
    (file,) = weights.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + b"planted!")
    said = parse_manifest((weights / MANIFEST).read_bytes())
    digests = [digest_of_bytes(one.path, (weights / one.path).read_bytes()) for one in said.files]
    (weights / MANIFEST).write_bytes(replace(said, files=digests).dump())
    _, done = thinning.gc(root)
    assert "planted" not in str(done.failed)
    (left,) = weights.glob("*.safetensors")
    assert left.read_bytes()[-1024:] == before[-1024:]
    assert any("w is another" in note for note in done.notes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_the_part_of_a_stranger_does_not_speak_for_a_checkpoint(tmp_path: Path) -> None:
    """A root may be open to a group whose members cannot write what the trainer saved."""
    place = save_dcp(tmp_path / "step-7")
    work = ("verify", str(place), "--level", "content")
    for part in ("0/2", "1/2"):
        assert printed(*work, "--part", part).code == 0
    records = sorted((tmp_path / ".ftckpt" / "parts").glob("*/*-2.json"))
    assert len(records) == 2
    os.chown(records[1], 4711, -1)
    answer = printed(*work, "--finish")
    assert (answer.code, "was not written by the owner" in answer.err) == (8, True)
    assert printed(*work, "--part", "1/2").code == 8
    records[1].unlink()
    assert printed(*work, "--part", "1/2").code != 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_what_a_stranger_says_has_passed_is_looked_at(root: Path) -> None:
    folder = read(root)
    place = carrying.place_of(root)
    found = prepare(place, carrying.FORMATS, remote_roots.KEEP_2, carrying.NOW).found
    write_passed(folder, found.values())
    file = root / ".ftckpt" / "passed.json"
    assert read_passed(folder)
    os.chown(file, 4711, -1)
    assert read_passed(folder) == {}


def test_pairs_of_thousands_of_series_are_found_in_one_pass() -> None:
    """Of 8,000 names with one number in common each was compared with each."""
    words = ("model", "net", "optim", "ema", "unet", "lora", "opt", "gen", "disc", "state")
    entries = [
        RootEntry(f"{'-'.join(some)}-7.pt", "", EntryClass.COMMITTED, 7, 10.0, checked=True)
        for some in itertools.product(words, repeat=4)
    ]
    with ends_within(60):
        held = group_entries(entries, 20.0).held
    pairs = {name for name, reason in held.items() if reason.rule == "newest"}
    assert len(pairs) > 9000


def test_a_name_longer_than_any_store_has_is_of_no_series() -> None:
    assert series.place_of("G_" + "7" * 5000 + ".pth") is None
    assert series.place_of("G_7.pth") is not None


def test_a_config_of_many_megabytes_is_not_passed_over(tmp_path: Path) -> None:
    """It counted as absent, so that nothing that it says was held against the weights."""
    (tmp_path / "model.safetensors").write_bytes(thinning.safetensors(w=bytes(4)))
    (tmp_path / "config.json").write_bytes(b"{" + b" " * (16 << 20) + b"}")
    answer = printed("verify", str(tmp_path))
    assert (answer.code, "config.json has 16777218 bytes" in answer.err) == (7, True)


def test_thousands_of_lost_shards_are_told_in_seconds(tmp_path: Path) -> None:
    """Each finding was compared with each: 42 s for 5,000, and no end for 300,000."""
    files = {f"layers.{n}.w": f"model-{n:05d}-of-20000.safetensors" for n in range(20_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with ends_within(60):
        answer = printed("verify", str(tmp_path))
    assert (answer.code, "is missing (and" in answer.err) == (4, True)


@pytest.mark.parametrize("shape", [[1] * 65, [0] + [1 << 60] * 5000])
def test_a_tensor_of_more_dimensions_than_any_library_has(shape: list[int], tmp_path: Path) -> None:
    """With 200,000 of them verify did not end: every dimension was multiplied with every other."""
    data = b"" if 0 in shape else bytes(4)
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"w": tensor}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    answer = printed("verify", str(file))
    assert (answer.code, f"{len(shape)} dimensions" in answer.err) == (7, True)


def test_a_link_in_the_trash_does_not_come_back_as_a_checkpoint(root: Path) -> None:
    planted = root / ".ftckpt" / "trash" / trash_name("step-9", carrying.NOW)
    planted.symlink_to("/etc")
    done = carrying.undelete_in(root, "step-9")
    assert done.code is ExitCode.UNSAFE
    assert planted.is_symlink()
    assert not (root / "step-9").is_symlink()


@pytest.mark.parametrize("taken_by", ["step-8", "step-7"])
def test_gc_keeps_the_base_that_a_reader_finds(tmp_path: Path, taken_by: str) -> None:
    """Where another checkpoint had the place that a delta records, its true base was dropped."""
    for step in (6, 7):
        save_dcp(tmp_path / f"step-{step}", step=step)
    (tmp_path / "step-6").rename(tmp_path / taken_by.replace("7", "07"))
    base = tmp_path / taken_by.replace("7", "07")
    delta = tmp_path / "delta"
    packed = printed("delta", "pack", str(base), str(tmp_path / "step-7"), str(delta))
    assert packed.code == 0
    base.rename(tmp_path / "step-6")
    if taken_by == "step-7":
        (tmp_path / "step-7").rename(tmp_path / "step-07")
    delta.rename(tmp_path / "step-8")
    assert printed("delta", "info", str(tmp_path / "step-8")).code == 0
    plan = json.loads(printed("gc", str(tmp_path), "--keep-last", "1", "--json").out)["plan"]
    kept = {one["name"]: one["keep"] for one in plan["decisions"]}
    assert kept["step-6"], plan["decisions"]


@pytest.mark.parametrize(
    "change",
    [
        {"order": ["../../home"]},
        {"now": "committed"},
        {"decisions": {"a": 1}},
        {"policy": []},
        {"notes": [["x"]]},
        {"url": 7},
        {"frees": "many"},
        {"contents": {"files": []}},
        {"step": True},
    ],
)
def test_a_plan_of_other_types_is_no_plan(change: dict[str, object], root: Path) -> None:
    """Its digest needs no secret: a forged plan ended as a bug of ours."""
    for step in (5, 6):
        carrying.save(root, f"step-{step}", step)
    plan = carrying.plan_of(root)
    good = dump_plan(plan)
    assert plan.order
    assert load_plan(json.dumps(good).encode(), "plan.json") == plan
    forged = json.loads(json.dumps(good))
    del forged["plan"]
    place = forged if change.keys() <= forged.keys() else forged["decisions"][0]
    place.update(change)
    forged["plan"] = _digest(forged)
    with pytest.raises(UsageError, match="is not a plan of this version"):
        load_plan(json.dumps(forged).encode(), "plan.json")


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_a_guard_believes_no_stranger_about_earlier_starts(root: Path) -> None:
    told: list[str] = []
    place = of_place(read(root))
    GuardJournal(place, told.append).add("start", path="step-4")
    journal = GuardJournal(place, told.append)
    journal.load()
    assert [event["path"] for event in journal.events] == ["step-4"]
    os.chown(root / ".ftckpt" / "guard.jsonl", 4711, -1)
    journal.load()
    assert journal.events == []
    assert "does not count" in told[0]
