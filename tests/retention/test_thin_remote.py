"""Thinning in object stores: a tombstone is the one act that shows the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.checkpoint import Topology
from ftckpt.discovery import resolve as opening
from ftckpt.discovery.select import SelectionRules, select
from ftckpt.errors import ExitCode
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest import Manifest, ThinnedFrom
from ftckpt.own_files import MANIFEST, TRANSFER
from ftckpt.retention.apply.outcome import Thinned
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.thin import thin
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.storage import StoreOptions
from ftckpt.transfer.write.files import digest_of_bytes
from tests.builders.small_format import MARKER, Small, check
from tests.retention.carrying import DAY
from tests.retention.remote_roots import TimedStore, kill_points, place_of, saves
from tests.retention.thinning import gc, save, shown
from tests.retention.thinning import place_of as place_at
from tests.servers.s3 import upload_tree

POLICY = Policy(keep_last=2, keep_every=1, thin_beyond=2)
WEIGHTS = "step-1.ftckpt-weights"


def made() -> TimedStore:
    store = TimedStore()
    saves(store, (1, 3, 4))
    return store


def take(found: ScannedEntry, path: str, record: ThinnedFrom) -> int:
    """Write weights as a transfer to an object store does: its manifest is the last act."""
    store = found.root.store
    data = store.read(f"{found.place.path}/{MARKER}")
    store.put(f"{path}/{TRANSFER}", b"{}")
    store.put(f"{path}/{MARKER}", data)
    digests = [digest_of_bytes(MARKER, data)]
    manifest = Manifest("small", record.step, Topology(), digests, thinned=record)
    store.put(f"{path}/{MANIFEST}", manifest.dump())
    store.delete([f"{path}/{TRANSFER}"])
    return len(data)


def thinned(store: TimedStore) -> Thinned:
    place = place_of(store)
    plan = prepare(place, [Small()], POLICY, store.now, weigh=lambda found: 1).plan
    return thin(plan, place, [Small()], take, actor="tester", now=lambda: store.now)


def seen(store: TimedStore) -> dict[int | None, list[str]]:
    root = opening.open_root(place_of(store), [Small()])
    found: dict[int | None, list[str]] = {}
    for child in root.children():
        found.setdefault(child.candidate.step, []).append(child.candidate.path)
    return found


def test_killed_at_any_change_a_reader_finds_one_checkpoint_of_each_step() -> None:
    tried = 0
    for store in kill_points(made, thinned):
        tried += 1
        assert {step: len(names) for step, names in seen(store).items()} == {1: 1, 3: 1, 4: 1}
        store.now += 3600  # the lease of the killed one is over
        assert thinned(store).code is ExitCode.OK
        assert seen(store) == {1: [WEIGHTS], 3: ["step-3"], 4: ["step-4"]}
        newest = select(opening.open_root(place_of(store), [Small()]), check, SelectionRules())
        assert newest.step == 4
    assert tried > 8, "hardly anything was tried"


def test_it_comes_back_whole_and_goes_for_good() -> None:
    store = made()
    assert thinned(store).code is ExitCode.OK
    assert seen(store)[1] == [WEIGHTS]
    place = place_of(store)
    back = undelete(place, [Small()], ["step-1"], actor="tester", now=lambda: store.now)
    assert back.code is ExitCode.OK
    assert seen(store)[1] == ["step-1"]
    store.now += 60
    assert thinned(store).code is ExitCode.OK
    store.now += 2 * DAY
    purged = purge(place, [Small()], actor="tester", now=lambda: store.now)
    assert purged.code is ExitCode.OK
    assert seen(store) == {1: [WEIGHTS], 3: ["step-3"], 4: ["step-4"]}
    assert not [e.path for e in store.walk("") if e.path.startswith("step-1/")]


def test_damaged_weights_go_to_the_trash_and_are_made_anew_after_it() -> None:
    for store in kill_points(made, thinned):
        path = f"{WEIGHTS}/{MARKER}"
        if not any(e.path == f"{WEIGHTS}/{MANIFEST}" for e in store.walk("")):
            continue
        if seen(store)[1] == ["step-1"]:
            break
    data = store.read(path)
    store.delete([path])
    store.put(path, bytes(len(data)))
    for _ in range(2):  # the second run finds them in the trash
        store.now += 3600
        assert list(thinned(store).failed) == ["step-1"]
        assert seen(store)[1] == ["step-1"]
    store.now += 2 * DAY
    purge(place_of(store), [Small()], actor="tester", now=lambda: store.now)
    assert seen(store)[1] == ["step-1"]
    assert thinned(store).code is ExitCode.OK
    assert seen(store)[1] == [WEIGHTS]
    assert store.read(path) == data


@pytest.mark.s3
def test_on_a_real_service(tmp_path: Path, s3_url: str) -> None:
    import time

    now = time.time() + 60
    for step in (100, 300, 400):
        save(tmp_path, step)
    upload_tree(tmp_path, s3_url)
    plan, done = gc(s3_url, now=now)
    assert [d.entry.name for d in plan.thin] == ["step-100"]
    assert done.code is ExitCode.OK
    assert shown(s3_url)[100] == ["step-100.ftckpt-weights"]
    target = opening.open_target(f"{s3_url}@100", FORMATS, StoreOptions())
    assert target.root is not None
    place = place_at(s3_url)
    undelete(place, FORMATS, ["step-100"], actor="tester", now=lambda: now)
    assert shown(s3_url)[100] == ["step-100"]
