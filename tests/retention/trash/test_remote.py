"""Dropping, undoing and reclaiming in an object store, killed anywhere and meddled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ftckpt.discovery.resolve import open_runs
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    ExitCode,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsafeError,
)
from ftckpt.own_files import MANIFEST, TRANSFER
from ftckpt.retention.apply.outcome import Applied, Purged, Undeleted
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.run import apply
from ftckpt.retention.locks.remote import RemoteLock
from ftckpt.retention.policy import Policy
from ftckpt.retention.records import pins
from ftckpt.retention.scan import classify
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.trash.tombstone import Tombstone
from ftckpt.storage.store import Entry
from tests.builders.small_format import MARKER, Small
from tests.retention.remote_roots import (
    DAY,
    HOUR,
    KEEP_2,
    NOW,
    TimedStore,
    keys,
    kill_points,
    names,
    newest,
    place_of,
    planned,
    save,
    saves,
)


@pytest.fixture
def store() -> TimedStore:
    return filled()


def applied(store: TimedStore, policy: Policy = KEEP_2, **more: Any) -> Applied:
    plan = planned(store, policy, now=store.now).plan
    return apply(plan, place_of(store), [Small()], actor="alice", now=lambda: store.now, **more)


def undeleted(store: TimedStore, *which: str) -> Undeleted:
    return undelete(place_of(store), [Small()], which, actor="alice", now=lambda: store.now)


def purged(store: TimedStore) -> Purged:
    return purge(place_of(store), [Small()], actor="cron", now=lambda: store.now)


def trash(store: TimedStore) -> list[str]:
    return [key.rpartition("/")[2] for key in keys(store) if "/trash/" in key]


def content(store: TimedStore) -> dict[str, bytes]:
    """Return everything that is not ftckpt's own."""
    return {k: store.read(k) for k in keys(store) if ".ftckpt/" not in k}


class TestDropping:
    def test_what_is_dropped_is_no_checkpoint_and_loses_no_byte(self, store: TimedStore) -> None:
        before = content(store)
        done = applied(store)
        assert done.code is ExitCode.OK
        assert [d.entry.name for d in done.dropped] == ["step-1", "step-2", "step-3"]
        gone = {f"step-{n}/{MARKER}" for n in (1, 2, 3)}
        assert content(store) == {k: v for k, v in before.items() if k not in gone}
        assert [name.partition("~")[2] for name in trash(store)] == ["step-1", "step-2", "step-3"]
        assert not [key for key in keys(store) if "/lock/" in key]

    def test_it_is_trash_to_the_next_plan(self, store: TimedStore) -> None:
        applied(store)
        found = planned(store).found
        classes = {name: f.entry.entry_class for name, f in found.items()}
        assert [c for n, c in classes.items() if n.startswith("step-")] == [
            EntryClass.COMMITTED
        ] * 2
        (first, *_) = [f for f in found.values() if f.entry.entry_class is EntryClass.TRASH]
        assert first.entry.contents is not None
        assert (first.entry.step, first.entry.contents.files) == (1, 2)
        assert planned(store).plan.drop == ()
        assert not planned(store).plan.broken

    def test_where_no_small_file_commits_it_the_tombstone_alone_drops_it(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(classify, "LARGEST", 50)
        store.now = NOW - 9 * DAY
        store.put(f"step-0/{MARKER}", b'{"step": 0, "state": "good"}' + b" " * 50)
        store.now = NOW
        before = content(store)
        policy = Policy(keep_last=5)
        assert [d.entry.name for d in applied(store, policy).dropped] == ["step-0"]
        assert content(store) == before
        assert {c.path for c in planned(store).roots[""].candidates} >= {"step-0"}
        assert newest(store) == "step-5"
        for step in range(1, 6):
            store.delete([f"step-{step}/{MARKER}"])
        assert newest(store) is None
        undeleted(store, "step-0")
        assert newest(store) == "step-0"

    def test_freed_at_once_where_that_is_wanted(self, store: TimedStore) -> None:
        done = applied(store, purge_now=True)
        assert done.code is ExitCode.OK
        assert done.freed == sum(d.frees or 0 for d in done.dropped) > 0
        assert names(store) == {"step-4", "step-5"}
        assert trash(store) == []

    def test_a_marker_that_cannot_be_removed_leaves_it_standing(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = content(store)
        monkeypatch.setattr(store, "erase", _refusing(store, DeniedError("locked")))
        done = applied(store)
        assert done.code is ExitCode.DENIED
        assert content(store) == before
        assert trash(store) == []
        assert newest(store) == "step-5"

    def test_a_marker_that_is_said_to_be_gone_and_is_not(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = content(store)
        monkeypatch.setattr(store, "erase", lambda entries: [None] * len(entries))
        done = applied(store)
        assert done.code is ExitCode.UNAVAILABLE
        assert content(store) == before
        assert trash(store) == []

    def test_what_is_saved_between_the_looks_stays(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = store.create

        def meanwhile(path: str, data: bytes) -> None:
            if "~step-1" in path:
                store.put(f"step-1/{MARKER}", b'{"step": 1, "state": "good", "again": 1}')
            create(path, data)

        monkeypatch.setattr(store, "create", meanwhile)
        done = applied(store)
        assert done.code is ExitCode.PARTIAL
        assert isinstance(done.failed["step-1"], RefusedError)
        assert store.read(f"step-1/{MARKER}").endswith(b'"again": 1}')

    def test_several_runs_at_one_place(self) -> None:
        store = TimedStore()
        for run in ("alpha/", "beta/"):
            saves(store, range(1, 5), run)
        before = content(store)
        assert applied(store).code is ExitCode.OK
        gone = {f"{run}/step-{n}/{MARKER}" for run in ("alpha", "beta") for n in (1, 2)}
        assert before.keys() - content(store).keys() == gone
        assert len([key for key in keys(store) if key.startswith("alpha/.ftckpt/trash/")]) == 2
        assert undeleted(store, "alpha/step-1").code is ExitCode.OK
        store.now += 2 * DAY
        assert len(purged(store).erased) == 3
        left = {key.rpartition("/")[0] for key in content(store) if key.endswith(MARKER)}
        assert left == {
            "alpha/step-1",
            *(f"{r}/step-{n}" for r in ("alpha", "beta") for n in (3, 4)),
        }
        assert not [key for key in keys(store) if "/trash/" in key]


class TestUndoing:
    def test_all_comes_back_as_it_was(self, store: TimedStore) -> None:
        before = content(store)
        applied(store)
        done = undeleted(store, "1", "step-2", "step-3")
        assert done.code is ExitCode.OK
        assert content(store) == before
        assert trash(store) == []

    def test_what_was_saved_again_is_not_replaced(self, store: TimedStore) -> None:
        applied(store)
        store.now += HOUR
        save(store, "step-1", 7)
        before = content(store)
        done = undeleted(store, "step-1")
        assert done.code is ExitCode.REFUSED
        assert content(store) == before

    def test_a_marker_that_was_put_back_may_have_another_etag(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As where each put is encrypted anew. The run that put it back was killed then.
        before = content(store)
        applied(store)
        store.put(f"step-1/{MARKER}", before[f"step-1/{MARKER}"])
        walk = store.walk

        def salted(path: str = "") -> list[Entry]:
            return [
                e._replace(etag="salted") if e.path == f"step-1/{MARKER}" else e for e in walk(path)
            ]

        monkeypatch.setattr(store, "walk", salted)
        assert undeleted(store, "step-1").code is ExitCode.OK
        assert len(trash(store)) == 2
        assert {k: v for k, v in before.items() if k.startswith("step-1/")} == {
            k: v for k, v in content(store).items() if k.startswith("step-1/")
        }

    def test_what_is_not_whole_does_not_come_back(self, store: TimedStore) -> None:
        applied(store)
        store.delete(["step-1/deep/data"])
        done = undeleted(store, "step-1")
        assert "not whole any more" in done.failed["step-1"].message
        assert f"step-1/{MARKER}" not in content(store)

    def test_what_lies_beside_it_by_now_does_not_matter(self, store: TimedStore) -> None:
        applied(store)
        store.now += HOUR
        store.put("step-1/metrics.json", b"{}")
        assert undeleted(store, "step-1").code is ExitCode.OK
        assert f"step-1/{MARKER}" in content(store)


class TestReclaiming:
    def test_after_a_day_and_not_before(self, store: TimedStore) -> None:
        applied(store)
        store.now += DAY - 60
        assert purged(store).erased == ()
        store.now += 120
        done = purged(store)
        assert done.code is ExitCode.OK
        assert [t.name for t in done.erased] == ["step-1", "step-2", "step-3"]
        assert names(store) == {"step-4", "step-5"}
        assert trash(store) == []

    def test_only_what_was_listed_goes(self, store: TimedStore) -> None:
        store.put("step-10/data", b"a name that begins alike")
        store.put("notes", b"somebody's")
        applied(store)
        store.now += 2 * DAY
        purged(store)
        assert names(store) == {"step-4", "step-5", "step-10", "notes"}

    def test_a_step_that_was_saved_again_is_no_trash(self, store: TimedStore) -> None:
        # The run was set back, and reaches the same step with the same bytes.
        applied(store)
        store.now += HOUR
        for step in (1, 2):
            save(store, f"step-{step}", step)
        before = content(store)
        assert (
            planned(store, now=store.now).found["step-1"].entry.entry_class is EntryClass.COMMITTED
        )
        for step in (3, 4, 5):
            store.delete([f"step-{step}/{MARKER}"])
        assert newest(store) == "step-2"
        store.now += 2 * DAY
        done = purged(store)
        assert [t.name for t in done.erased] == ["step-3"]
        assert {e.exit_code for e in done.failed.values()} == {ExitCode.REFUSED}
        assert {k: v for k, v in content(store).items() if k in before} == content(store)
        assert {n for n in names(store) if n in ("step-1", "step-2")} == {"step-1", "step-2"}
        assert trash(store) == []  # said once
        assert purged(store).code is ExitCode.OK

    def test_what_somebody_names_by_now_stays(self, store: TimedStore) -> None:
        applied(store)
        root = planned(store).roots[""]
        store.put("latest", b"step-1")
        with pytest.raises(NotFoundError, match="was dropped"):
            pins.pin(root, "step-2", owner="alice", reason="figure 3", now=NOW)
        store.put(".ftckpt/pins/step-2/alice.json", b'{"owner": "alice", "reason": "figure 3"}')
        store.now += 2 * DAY
        done = purged(store)
        assert [t.name for t in done.erased] == ["step-3"]
        assert {r.rule for r in done.held.values()} == {"pointer", "pinned"}

    def test_what_was_put_beside_it_holds_it(self, store: TimedStore) -> None:
        applied(store)
        store.now += HOUR
        store.put("step-1/metrics.json", b"{}")
        store.now += 2 * DAY
        done = purged(store)
        assert done.code is ExitCode.PARTIAL
        (error,) = done.failed.values()
        assert "step-1/metrics.json was written after it was dropped" in error.message
        assert undeleted(store, "step-1").code is ExitCode.OK  # the tombstone alone had its marker

    def test_keys_that_are_refused_are_said_and_tried_again(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied(store)
        store.now += 2 * DAY
        with monkeypatch.context() as patch:
            patch.setattr(store, "erase", _refusing(store, DeniedError("held"), "step-2/deep"))
            done = purged(store)
        assert done.code is ExitCode.PARTIAL
        assert [t.name for t in done.erased] == ["step-1", "step-3"]
        (error,) = done.failed.values()
        assert isinstance(error, DeniedError)
        assert "step-2/deep/data" in content(store)
        assert newest(store) == "step-5"
        (left,) = trash(store)
        assert "!step-2" in left
        refused = undeleted(store, "step-2")
        assert isinstance(refused.failed["step-2"], RefusedError)
        assert purged(store).code is ExitCode.OK
        assert names(store) == {"step-4", "step-5"}

    def test_keys_that_are_said_to_be_gone_and_are_not(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied(store)
        store.now += 2 * DAY
        with monkeypatch.context() as patch:
            patch.setattr(store, "erase", lambda entries: [None] * len(entries))
            done = purged(store)
        assert {type(e) for e in done.failed.values()} == {UnavailableError}
        assert len(trash(store)) == 3
        assert purged(store).code is ExitCode.OK

    @pytest.mark.parametrize("change", [lambda d: d[:-9], lambda d: d.replace(b"deep", b"deeq")])
    def test_by_a_damaged_tombstone_nothing_is_done(
        self, store: TimedStore, change: Callable[[bytes], bytes]
    ) -> None:
        applied(store)
        path = next(key for key in keys(store) if "~step-1" in key)
        store.put(path, change(store.read(path)))
        before = content(store)
        assert isinstance(undeleted(store, "step-1").failed["step-1"], CorruptError)
        store.now += 2 * DAY
        done = purged(store)
        assert [t.name for t in done.erased] == ["step-2", "step-3"]
        assert {k: v for k, v in before.items() if k.startswith("step-1/")}.items() <= content(
            store
        ).items()

    def test_a_tombstone_of_another_name_is_not_followed(self, store: TimedStore) -> None:
        applied(store)
        one, other = (next(k for k in keys(store) if f"~step-{n}" in k) for n in (1, 2))
        store.put(one, store.read(other))
        store.now += 2 * DAY
        done = purged(store)
        assert isinstance(done.failed[one], UnsafeError)
        assert "step-1/data" in content(store)

    @pytest.mark.parametrize("where", ["files", "more files", "versions", "markers"])
    def test_keys_outside_its_entry_stop_it_before_anything_is_touched(
        self, store: TimedStore, where: str
    ) -> None:
        """Who may put a key, and delete none, had the newest checkpoint deleted by a purge."""
        applied(store)
        path = next(key for key in keys(store) if "~step-1" in key)
        store.now += 2 * DAY
        others = store.walk("step-5")
        own = Tombstone.parse(store.read(path), path, "step-1").files
        changes: dict[str, dict[str, Any]] = {
            "files": {"files": tuple(others)},
            "more files": {"files": (*own, *others)},
            "versions": {"versions": tuple(others)},
            "markers": {"markers": {"step-5/planted": b"evil"}},
        }
        plant(store, path, **changes[where])
        before = content(store)
        assert undeleted(store, "step-1").failed["step-1"].exit_code is ExitCode.UNSAFE
        assert content(store) == before
        assert purged(store).failed == {}  # its name says two days; the store says today
        store.now += 2 * DAY
        done = purged(store)
        assert isinstance(done.failed[path], UnsafeError)
        assert done.code is ExitCode.UNSAFE
        kept = {key: data for key, data in before.items() if key[:6] in ("step-1", "step-5")}
        assert kept.items() <= content(store).items()
        assert newest(store) == "step-5"

    def test_one_about_the_records_of_the_root_is_refused(self, store: TimedStore) -> None:
        applied(store)
        (root,) = open_runs(place_of(store), [Small()])
        pins.pin(root, "step-5", owner="bob", reason="paper", now=NOW)
        path = next(key for key in keys(store) if "~step-1" in key)
        planted = path.replace("~step-1", "~.ftckpt")
        store.put(planted, store.read(path))
        plant(store, planted, name=".ftckpt", files=store.walk(".ftckpt/pins"), markers={})
        store.now += 2 * DAY
        assert isinstance(purged(store).failed[planted], UnsafeError)
        assert store.walk(".ftckpt/pins")

    @pytest.mark.parametrize(
        ("there", "here"),
        [
            ("step-1", "runs/alpha/step-1"),
            ("runs/alpha/step-1", "step-1"),
            ("a/step-1", "a/step-1"),
        ],
    )
    def test_a_store_that_was_opened_above_or_below_spells_the_same_keys(
        self, there: str, here: str
    ) -> None:
        files = (Entry(f"{there}/data", 5, NOW, etag="x"), Entry(f"{there}/{MARKER}", 1, NOW))
        made = Tombstone(
            "step-1", True, NOW, "alice", ("old",), files, (), {f"{there}/{MARKER}": b"m"}
        )
        read = Tombstone.parse(made.dump(), "tombstone", here)
        assert [file.path for file in read.files] == [f"{here}/data", f"{here}/{MARKER}"]
        assert read.markers == {f"{here}/{MARKER}": b"m"}


def plant(store: TimedStore, path: str, **change: Any) -> None:
    """Put a tombstone with other content, and the digest of it."""
    store.put(path, replace(Tombstone.parse(store.read(path), path, "step-1"), **change).dump())


class TestATransferThatWasUnderWay:
    """It was dropped after a day of silence, and its parts or its command went on."""

    PLACE = "step-9"

    def begun(self, store: TimedStore) -> None:
        store.now = NOW - 3 * DAY
        for name in (MARKER, "data"):
            store.put(f"{self.PLACE}/{name}", b'{"step": 9, "state": "good"}')
        store.put(f"{self.PLACE}/{TRANSFER}", b"{}\n")
        store.now = NOW

    def finish(self, store: TimedStore) -> None:
        store.put(f"{self.PLACE}/{MANIFEST}", b"{}")
        store.delete([f"{self.PLACE}/{TRANSFER}"])

    def dropped(self, store: TimedStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(classify, "LARGEST", 0)  # its data are larger than any marker
        self.begun(store)
        found = planned(store, now=store.now).found[self.PLACE]
        assert found.entry.entry_class is EntryClass.ABANDONED
        assert self.PLACE in [d.entry.name for d in applied(store).dropped]

    def test_it_is_a_checkpoint_once_it_is_finished(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.dropped(store, monkeypatch)
        store.now += HOUR
        self.finish(store)
        before = content(store)
        found = planned(store, now=store.now).found[self.PLACE]
        assert found.entry.entry_class is not EntryClass.TRASH
        store.now += 2 * DAY
        done = purged(store)
        assert [e.exit_code for e in done.failed.values()] == [ExitCode.REFUSED]
        kept = {k: v for k, v in before.items() if k.startswith(self.PLACE)}
        assert kept.items() <= content(store).items()
        assert not [name for name in trash(store) if name.endswith(self.PLACE)]

    def test_undelete_has_it_back_once_it_is_finished(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.dropped(store, monkeypatch)
        store.now += HOUR
        self.finish(store)
        before = content(store)
        assert undeleted(store, self.PLACE).code is ExitCode.OK
        assert not [name for name in trash(store) if name.endswith(self.PLACE)]
        kept = {k: v for k, v in before.items() if k.startswith(self.PLACE)}
        assert kept.items() <= content(store).items()

    def test_it_may_end_while_it_is_reclaimed(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.dropped(store, monkeypatch)
        store.now += 2 * DAY
        real = type(store).erase
        first = iter([True])

        def erase(self: TimedStore, doomed: Sequence[Entry]) -> Any:
            if any(e.path.endswith(TRANSFER) for e in doomed) and next(first, False):
                TestATransferThatWasUnderWay().finish(self)
            return real(self, doomed)

        monkeypatch.setattr(TimedStore, "erase", erase)
        before = {k for k in content(store) if k.startswith(self.PLACE)}
        assert [e.exit_code for e in purged(store).failed.values()] == [ExitCode.REFUSED]
        assert before <= content(store).keys()
        assert not [name for name in trash(store) if name.endswith(self.PLACE)]

    def test_it_is_reclaimed_where_nobody_goes_on(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.dropped(store, monkeypatch)
        store.now += 2 * DAY
        assert purged(store).code is ExitCode.OK
        assert self.PLACE not in names(store)


def filled() -> TimedStore:
    made = TimedStore()
    saves(made, range(1, 6))
    return made


def dropped() -> TimedStore:
    made = filled()
    applied(made)
    return made


def expired() -> TimedStore:
    made = dropped()
    made.now += 2 * DAY
    return made


class TestKilled:
    """Killed at every change: what is kept is whole, and the next run finishes by itself."""

    def test_while_dropping(self) -> None:
        before = content(filled())
        points = 0
        for store in kill_points(filled, applied):
            points += 1
            assert newest(store) == "step-5"
            standing = content(store)
            assert standing.items() <= before.items()
            for key in before.keys() - standing.keys():
                name, _, file = key.partition("/")
                assert (name in ("step-1", "step-2", "step-3"), file) == (True, MARKER)
                assert any(f"~{name}" in tomb for tomb in trash(store))
            assert applied(store).code is ExitCode.OK
            assert len(trash(store)) == 3
            assert undeleted(store, "step-1", "step-2", "step-3").code is ExitCode.OK
            assert content(store) == before
        assert points > 8

    def test_while_undoing(self) -> None:
        before = content(filled())
        points = 0

        def undo(store: TimedStore) -> None:
            assert undeleted(store, "step-1", "step-2", "step-3").code is ExitCode.OK

        for store in kill_points(dropped, undo):
            points += 1
            standing = content(store)
            assert standing.items() <= before.items()
            assert {k for k in before if k not in standing} <= {
                f"step-{n}/{MARKER}" for n in (1, 2, 3)
            }
            undo(store)
            assert content(store) == before
            assert trash(store) == []
        assert points > 8

    def test_while_reclaiming(self) -> None:
        kept = {k: v for k, v in content(filled()).items() if k[5] in "45"}
        points = 0
        for store in kill_points(expired, purged):
            points += 1
            assert newest(store) == "step-5"
            assert kept.items() <= content(store).items()
            found = planned(store, now=store.now).found.values()
            classes = {f.entry.entry_class for f in found if f.entry.name.startswith("step-")}
            assert classes == {EntryClass.COMMITTED}  # what is half gone is trash, nothing else
            assert purged(store).code is ExitCode.OK
            assert content(store) == kept
            assert trash(store) == []
        assert points > 15

    def test_while_freeing_at_once(self) -> None:
        kept = {k: v for k, v in content(filled()).items() if k[5] in "45"}

        def free(store: TimedStore) -> None:
            assert applied(store, purge_now=True).code is ExitCode.OK

        for store in kill_points(filled, free):
            assert newest(store) == "step-5"
            assert kept.items() <= content(store).items()
            free(store)
            store.now += 2 * DAY
            assert purged(store).code is ExitCode.OK
            free(store)  # a drop that was killed before its marker went is one no more
            assert content(store) == kept


class TestLocks:
    @pytest.mark.parametrize("do", [applied, lambda s: undeleted(s, "step-1"), purged])
    def test_a_second_gc_is_refused(
        self, store: TimedStore, do: Callable[[TimedStore], object]
    ) -> None:
        applied(store, Policy(keep_last=3))
        RemoteLock(planned(store).roots[""], "bob@node7").acquire()
        before = content(store)
        with pytest.raises(RefusedError, match=r"another gc is at work .* bob@node7"):
            do(store)
        assert content(store) == before

    def test_a_lock_that_is_lost_ends_it(
        self, store: TimedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # After the first entry the machine sleeps, and another gc takes the root over.
        before = content(store)
        stat = store.stat

        def sleeping(path: str) -> Entry:
            if path == f"step-1/{MARKER}" and trash(store):
                store.now += 3600
                monkeypatch.setattr(store, "stat", stat)
                RemoteLock(planned(store, now=store.now).roots[""], "bob").acquire()
            return stat(path)

        monkeypatch.setattr(store, "stat", sleeping)
        done = applied(store)
        assert done.code in (ExitCode.PARTIAL, ExitCode.REFUSED)
        assert {type(e) for e in done.failed.values()} == {RefusedError}
        standing = content(store)
        assert {k for k in before if k not in standing} <= {f"step-1/{MARKER}"}
        assert set(done.failed) >= {"step-2", "step-3"}


def _refusing(
    store: TimedStore, error: FtckptError, prefix: str = ""
) -> Callable[[Sequence[Entry]], list[FtckptError | None]]:
    """Return an `erase` that refuses keys of a prefix."""
    erase = type(store).erase

    def refuse(entries: Sequence[Entry]) -> list[FtckptError | None]:
        return [error if e.path.startswith(prefix) else erase(store, [e])[0] for e in entries]

    return refuse
