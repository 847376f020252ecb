"""Pins, tags, leases and the log: small objects that several people write at once."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from ftckpt.discovery.roots import Root
from ftckpt.errors import NotFoundError, UnsafeError, UsageError
from ftckpt.retention.locks import leases
from ftckpt.retention.records import log, pins, tags
from ftckpt.retention.scan.entries import Lease, Pin
from ftckpt.storage.memory import MemoryStore
from tests.builders.small_format import read, write

NOW = 1_700_000_000.0
_numbers = itertools.count()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A root of three checkpoints, one with a name that is hard to spell."""
    names = ("step-1", "step-2", "step 3%2F..é")
    if request.param == "memory":
        store = MemoryStore(f"memory://retention-records-{next(_numbers)}")
        for name in names:
            store.put(f"{name}/marker", b'{"step": 1, "state": "good"}')
        return read(store.url)
    for name in names:
        write(tmp_path, name, 1)
    return read(tmp_path)


def test_pins_come_back_and_go(root: Root) -> None:
    pins.pin(root, "step-1", owner="alice@host", reason="figure 3", now=NOW)
    pins.pin(root, "step 3%2F..é", owner="../bob", reason="odd", now=NOW + 1)
    pins.pin(root, "step-1", owner="bob", reason="me too", now=NOW)
    assert set(pins.pins(root)) == {
        Pin("step-1", "alice@host", "figure 3", NOW),
        Pin("step-1", "bob", "me too", NOW),
        Pin("step 3%2F..é", "../bob", "odd", NOW + 1),
    }
    pins.pin(root, "step-1", owner="bob", reason="a better one", now=NOW)
    assert Pin("step-1", "bob", "a better one", NOW) in pins.pins(root)
    assert [p.owner for p in pins.unpin(root, "step-1", owner="bob")] == ["bob"]
    assert [p.owner for p in pins.unpin(root, "step-1")] == ["alice@host"]
    with pytest.raises(NotFoundError, match=r"step-1 of .* is not pinned"):
        pins.unpin(root, "step-1")
    assert len(pins.pins(root)) == 1


def test_what_is_not_there_cannot_be_pinned(root: Root) -> None:
    with pytest.raises(NotFoundError, match="step-9"):
        pins.pin(root, "step-9", owner="me", reason="why", now=NOW)
    with pytest.raises(UsageError):
        pins.pin(root, "step-1", owner="", reason="why", now=NOW)


def test_all_who_pin_at_once_succeed(root: Root) -> None:
    def pin(number: int) -> None:
        pins.pin(root, "step-1", owner=f"user{number}", reason="race", now=NOW)

    threads = [threading.Thread(target=pin, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {p.owner for p in pins.pins(root)} == {f"user{n}" for n in range(8)}


@pytest.mark.parametrize("text", [b"{", b"[]", b"[" * 100_000, b"\xff", b"x" * (70 << 10)])
def test_a_damaged_pin_still_holds(root: Root, text: bytes) -> None:
    root.store.put(".ftckpt/pins/step-1/me.json", text)
    root.store.put(".ftckpt/pins/stray", b"{}")
    assert pins.pins(root) == (Pin("step-1", "me", "the record of the pin is damaged", None),)


def test_tags(root: Root) -> None:
    assert tags.tags(root) == {}
    tags.tag(root, "step-1", "milestone", owner="me", now=NOW)
    tags.tag(root, "step-1", "a/b", owner="me", now=NOW)
    assert tags.tags(root) == {"step-1": ("a/b", "milestone")}
    tags.untag(root, "step-1", "a/b")
    assert tags.tags(root) == {"step-1": ("milestone",)}
    with pytest.raises(NotFoundError):
        tags.untag(root, "step-1", "a/b")
    with pytest.raises(UsageError):
        tags.tag(root, "step-1", " ", owner="me", now=NOW)


def test_a_lease_holds_until_it_ends(root: Root) -> None:
    lease = leases.take(root, "step-1", holder="node7:1", now=NOW, seconds=60)
    assert leases.live(root, NOW + 59) == (Lease("step-1", "node7:1", NOW + 60),)
    assert leases.live(root, NOW + 60) == ()
    leases.take(root, "step-1", holder="node7:1", now=NOW + 50, seconds=60)
    assert leases.live(root, NOW + 60) == (Lease("step-1", "node7:1", NOW + 110),)
    leases.release(root, lease)
    assert leases.live(root, NOW) == ()
    for seconds in (0, leases.LONGEST + 1):
        with pytest.raises(UsageError):
            leases.take(root, "step-1", holder="x", now=NOW, seconds=seconds)


def test_a_damaged_lease_ends_as_late_as_any(root: Root) -> None:
    root.store.put(".ftckpt/leases/step-1/x.json", b'{"expires": true}')
    written = root.store.stat(".ftckpt/leases/step-1/x.json").mtime
    assert written is not None
    assert len(leases.live(root, written + leases.LONGEST - 1)) == 1
    assert leases.live(root, written + leases.LONGEST + 1) == ()


def test_the_log_is_appended_to(root: Root) -> None:
    assert log.read(root) == []
    assert log.last_applied(root) is None
    log.append(root, log.APPLIED, NOW, {"who": "cron", "dropped": ["step-1"]})
    log.append(root, "pinned", NOW + 9, {"entry": "é"})
    log.append(root, log.APPLIED, NOW + 5, {"dropped": []})
    assert [e["time"] for e in log.read(root)] == [NOW, NOW + 5, NOW + 9]
    assert log.read(root)[0]["dropped"] == ["step-1"]
    assert log.last_applied(root) == NOW + 5


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    root = read(tmp_path)
    log.append(root, log.APPLIED, NOW, {})
    with (tmp_path / ".ftckpt/log.jsonl").open("a") as file:
        file.write('[1]\n{"time": "noon"}\n{"schema": "ftckpt.log/1", "ti')
    assert [e["time"] for e in log.read(root)] == [NOW]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    root = read(tmp_path)
    log.append(root, log.APPLIED, NOW, {})
    with (tmp_path / ".ftckpt/log.jsonl").open("a") as file:
        file.write('{"schema": "ftckpt.log/1", "ti')
    log.append(root, log.PURGED, NOW + 1, {})
    log.append(root, log.PURGED, NOW + 2, {})
    assert [e["time"] for e in log.read(root)] == [NOW, NOW + 1, NOW + 2]


@pytest.mark.parametrize("time", ["1e300", "NaN", "Infinity", "true", '"noon"'])
def test_an_event_without_a_time_is_none(tmp_path: Path, time: str) -> None:
    write(tmp_path, "step-1", 1)
    log.append(read(tmp_path), log.APPLIED, NOW, {})
    with (tmp_path / ".ftckpt/log.jsonl").open("a") as file:
        file.write(f'{{"event": "applied", "time": {time}}}\n')
    assert log.last_time(read(tmp_path)) == NOW


def test_the_log_does_not_follow_a_link(tmp_path: Path) -> None:
    write(tmp_path / "root", "step-1", 1)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "root/.ftckpt").mkdir()
    (tmp_path / "root/.ftckpt/log.jsonl").symlink_to(outside)
    with pytest.raises(UnsafeError):
        log.append(read(tmp_path / "root"), log.APPLIED, NOW, {})
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("own", [".ftckpt", ".ftckpt/pins", ".ftckpt/pins/step-1"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_records_are_neither_read_nor_written_behind_a_link(
    tmp_path: Path, own: str, kind: str
) -> None:
    place, outside = tmp_path / "root" / own, tmp_path / "outside"
    write(tmp_path / "root", "step-1", 1)
    root = read(tmp_path / "root")
    outside.mkdir()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside) if kind == "link" else place.touch()
    with pytest.raises(UnsafeError, match="it was not made by ftckpt"):
        pins.pin(root, "step-1", owner="me", reason="x", now=NOW)
    for entry in (None, "step-1"):
        if kind == "link" or entry or not own.endswith("step-1"):
            with pytest.raises(UnsafeError, match="it was not made by ftckpt"):
                pins.pins(root, entry)
    assert list(outside.iterdir()) == []


def test_records_lie_where_the_document_says(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    pins.pin(read(tmp_path), "step-1", owner="alice@host", reason="figure 3", now=NOW)
    text = (tmp_path / ".ftckpt/pins/step-1/alice@host.json").read_text()
    assert json.loads(text) == {
        "schema": "ftckpt.pins/1",
        "entry": "step-1",
        "owner": "alice@host",
        "reason": "figure 3",
        "time": NOW,
    }
