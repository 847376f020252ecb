"""The lease on a root in an object store: one holder, no clock of theirs, and an end by itself."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import pytest

from ftckpt.discovery.roots import Root
from ftckpt.errors import DeniedError, FtckptError, RefusedError, UnsupportedError
from ftckpt.retention.locks.remote import FOLDER, RemoteLock
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.store import Entry
from tests.servers.faults import Fault, fault_proxy
from tests.servers.places import QUICK
from tests.servers.s3 import BUCKET, S3Service

_numbers = itertools.count()
WHERE = f".ftckpt/{FOLDER}"


class Clocked(MemoryStore):
    """A store whose clock the test moves."""

    now = 1_000_000.0

    def stat(self, path: str) -> Entry:
        return self._timed(super().stat(path))

    def children(self, path: str = "") -> list[Entry]:
        return [self._timed(entry) for entry in super().children(path)]

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self._times[path] = self.now

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        self._times[path] = self.now

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._times: dict[str, float] = {}

    def _timed(self, entry: Entry) -> Entry:
        return entry._replace(mtime=self._times.get(entry.path))


def root_on(store: Any, base: str = "") -> Root:
    return Root(store, base, (), (), (), lambda _: None)


@pytest.fixture
def store() -> Clocked:
    return Clocked(f"memory://lock-{next(_numbers)}")


class Holder:
    """A gc with a clock of its own."""

    def __init__(self, store: Any, name: str = "alice") -> None:
        self.time = 0.0
        self.lock = RemoteLock(root_on(store), name, seconds=600, clock=lambda: self.time)


def names(store: Any) -> list[str]:
    return [entry.path for entry in store.walk("")]


def test_taken_and_given_back(store: Clocked) -> None:
    holder = Holder(store)
    holder.lock.acquire()
    assert names(store) == [f"{WHERE}/1.json"]
    holder.lock.check()
    holder.lock.release()
    assert store._space.objects == {}


def test_a_second_is_refused_and_told_by_whom(store: Clocked) -> None:
    Holder(store, "alice@node7").lock.acquire()
    with pytest.raises(RefusedError, match="alice@node7") as refused:
        Holder(store).lock.acquire()
    assert "ends in 602 s" in refused.value.hint
    assert names(store) == [f"{WHERE}/1.json"]


def test_a_killed_holder_keeps_nobody_away_for_long(store: Clocked) -> None:
    Holder(store).lock.acquire()
    store.now += 601
    with pytest.raises(RefusedError):
        Holder(store).lock.acquire()
    store.now += 2
    Holder(store).lock.acquire()
    assert names(store) == [f"{WHERE}/2.json"]  # what had ended is swept away


@pytest.mark.parametrize("wrong", [3600.0, -3600.0, 86400.0, -1e9])
def test_the_clock_of_a_machine_has_no_say(
    store: Clocked, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    Holder(store).lock.acquire()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + wrong)
    with pytest.raises(RefusedError):
        Holder(store).lock.acquire()


def test_who_was_stopped_for_too_long_stops(store: Clocked) -> None:
    first, second = Holder(store), Holder(store, "bob")
    first.lock.acquire()
    store.now += 700
    second.lock.acquire()
    with pytest.raises(RefusedError, match="another gc has taken it"):
        first.lock.check()  # its own clock stood still: the machine was asleep
    first.time += 700
    with pytest.raises(RefusedError, match="another gc has taken it"):
        first.lock.check()
    first.lock.release()
    second.lock.check()
    second.lock.release()
    with pytest.raises(RefusedError):
        second.lock.check()


def test_one_that_has_ended_and_nobody_took_is_taken_up_again(store: Clocked) -> None:
    # As of a place of several runs, of which one took long.
    holder = Holder(store)
    holder.lock.acquire()
    store.now += 5000
    holder.time += 5000
    holder.lock.check()
    with pytest.raises(RefusedError):
        Holder(store, "bob").lock.acquire()
    holder.lock.check()


def test_it_is_not_taken_up_again_where_another_comes_between(
    store: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Holder(store), Holder(store, "bob")
    first.lock.acquire()
    store.now += 700
    first.time += 700
    put = store.put

    def meanwhile(path: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put", put)
        second.lock.acquire()
        put(path, data)

    monkeypatch.setattr(store, "put", meanwhile)
    with pytest.raises(RefusedError, match="another gc has taken it"):
        first.lock.check()
    first.lock.release()
    second.lock.check()


def test_who_comes_between_and_after_gives_way(
    store: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Holder(store), Holder(store, "bob")
    first.lock.acquire()
    store.now += 700
    first.time += 700
    create = store.create

    def meanwhile(path: str, data: bytes) -> None:
        if path.endswith("/2.json"):
            first.lock.check()
        create(path, data)

    monkeypatch.setattr(store, "create", meanwhile)
    with pytest.raises(RefusedError, match="alice"):
        second.lock.acquire()
    first.lock.check()


def test_work_that_lasts_prolongs_it(store: Clocked) -> None:
    holder = Holder(store)
    holder.lock.acquire()
    for _ in range(20):
        store.now += 250
        holder.time += 250
        holder.lock.check()
        with pytest.raises(RefusedError):
            Holder(store, "bob").lock.acquire()
    holder.lock.release()
    Holder(store, "bob").lock.acquire()


def test_two_who_saw_different_numbers_do_not_both_hold(
    store: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A third has given number 1 back between the two looks: one goes on from 1, the other from 0.
    late, early = Holder(store, "late"), Holder(store, "early")
    create = store.create

    def meanwhile(path: str, data: bytes) -> None:
        if path.endswith("/1.json") and b"late" in data:
            store._times[f"{WHERE}/2.json"] = store.now
            MemoryStore.create(store, f"{WHERE}/2.json", early.lock._record)
        create(path, data)

    monkeypatch.setattr(store, "create", meanwhile)
    with pytest.raises(RefusedError, match="early"):
        late.lock.acquire()
    assert names(store) == [f"{WHERE}/2.json"]


def test_a_service_that_lets_two_win_is_survived(store: Clocked) -> None:
    first, second = Holder(store), Holder(store, "bob")
    first.lock.acquire()
    second.lock._number, second.lock._until = 1, 600.0
    store.put(f"{WHERE}/1.json", second.lock._record)
    with pytest.raises(RefusedError, match="another gc has taken it"):
        first.lock.check()
    first.lock.release()
    second.lock.check()


def test_a_damaged_lease_lasts_as_long_as_one_can(store: Clocked) -> None:
    store.put(f"{WHERE}/4.json", b"{")
    store.now += 1700
    with pytest.raises(RefusedError):
        Holder(store).lock.acquire()
    store.now += 103
    Holder(store).lock.acquire()
    assert names(store) == [f"{WHERE}/5.json"]


@pytest.mark.parametrize("said", ["1e99", '"x"', "NaN", "-5", "9" * 400])
def test_what_is_no_duration_lasts_as_long_as_one_can(store: Clocked, said: str) -> None:
    store.put(f"{WHERE}/4.json", b'{"holder": "x", "seconds": %s}' % said.encode())
    store.now += 1700
    with pytest.raises(RefusedError):
        Holder(store).lock.acquire()
    store.now += 103
    Holder(store).lock.acquire()


def test_probes_of_killed_runs_are_swept_and_nothing_else(store: Clocked) -> None:
    store.put(f"{WHERE}/.ftckpt-tmp-probe-1", b"")
    store.put(f"{WHERE}/notes.txt", b"mine")
    store.now += 7200
    store.put(f"{WHERE}/.ftckpt-tmp-probe-2", b"")
    Holder(store).lock.acquire()
    assert names(store) == [
        f"{WHERE}/.ftckpt-tmp-probe-2", f"{WHERE}/1.json", f"{WHERE}/notes.txt"
    ]  # fmt: skip


def test_a_store_without_conditions_is_refused_and_left_alone(store: Clocked) -> None:
    store.put("step-1/x", b"1")
    store.traits = store.traits._replace(conditional_put=False)
    with pytest.raises(UnsupportedError):
        Holder(store).lock.acquire()
    assert names(store) == ["step-1/x"]


def race(url: str, racers: int) -> tuple[int, int]:
    """Let so many try to take a lease at once; return how many got it, and how many still hold."""
    locks = [RemoteLock(root_on(open_store(url, QUICK)), f"racer {n}") for n in range(racers)]
    barrier = threading.Barrier(racers)
    got: list[RemoteLock] = []
    failed: list[FtckptError] = []

    def acquire(lock: RemoteLock) -> None:
        lock._probe()  # the first probes of a store take long, and are behind us then
        barrier.wait()
        try:
            lock.acquire()
        except FtckptError as error:
            failed.append(error)
        else:
            got.append(lock)

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) + len(failed) == racers
    assert {type(error) for error in failed} <= {RefusedError}
    return len(got), sum(_holds(lock) for lock in got)


def _holds(lock: RemoteLock) -> bool:
    try:
        lock.check()
    except RefusedError:
        return False
    return True


@pytest.mark.s3
class TestServices:
    def test_of_racing_gcs_one_holds_on_swift(self, s3_url: str) -> None:
        # Swift lets several creates of one key win: all but the last stop before they change it.
        for number in range(3):
            _, holding = race(f"{s3_url}/{number}", 4)
            assert holding <= 1

    def test_on_swift(self, s3_url: str) -> None:
        store = open_store(s3_url, QUICK)
        first = RemoteLock(root_on(store), "alice")
        first.acquire()
        first.check()
        with pytest.raises(RefusedError, match="alice"):
            RemoteLock(root_on(store), "bob").acquire()
        record = json.loads(store.read(f"{WHERE}/1.json"))
        assert (record["holder"], record["seconds"]) == ("alice", 600)
        first.release()
        second = RemoteLock(root_on(store), "bob")
        second.acquire()
        second.release()

    def test_a_lost_answer_does_not_lock_us_out(self, swift: S3Service, s3_url: str) -> None:
        with fault_proxy(swift.endpoint) as proxy:
            store = open_store(s3_url, QUICK._replace(endpoint=proxy.endpoint))
            proxy.faults = [
                Fault(r"^PUT .*/1\.json", cut="lose"),
                Fault(r"^PUT .*probe", status=503),
            ]
            lock = RemoteLock(root_on(store), "alice")
            lock.acquire()
            lock.check()
            lock.release()

    def test_without_permission_to_write_it_is_denied(self, swift: S3Service, s3_url: str) -> None:
        with fault_proxy(swift.endpoint) as proxy:
            store = open_store(s3_url, QUICK._replace(endpoint=proxy.endpoint))
            proxy.faults = [Fault("^PUT", 1 << 30, status=403, code="AccessDenied")]
            with pytest.raises(DeniedError):
                RemoteLock(root_on(store), "alice").acquire()

    def test_a_lookalike_that_ignores_conditions_is_refused(
        self, rclone: S3Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rclone.enter(monkeypatch)
        store = open_store(f"s3://{BUCKET}/root", QUICK)
        store.put("step-1/x", b"1")
        with pytest.raises(UnsupportedError, match="ignores conditions"):
            RemoteLock(root_on(store), "alice").acquire()
        assert names(store) == ["step-1/x"]

    def test_of_racing_gcs_one_gets_it_on_ceph(
        self, radosgw: S3Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        radosgw.enter(monkeypatch)
        for number in range(5):
            got, holding = race(f"s3://{BUCKET}/race-{number}", 8)
            assert got == holding <= 1
