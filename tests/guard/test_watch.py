"""Which saves are new, and when one that does not pass is called damaged."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from ftckpt.discovery.roots import Candidate, Child, Root
from ftckpt.errors import ExitCode, UnavailableError
from ftckpt.guard import watch
from ftckpt.guard.attempt import CommandAttempt, HangWatch
from ftckpt.guard.supervise import TICK
from ftckpt.guard.terms import GuardSettings, StartPoint
from ftckpt.guard.watch import CheckedSave, NewSave, SaveWatcher, new_saves, shown
from ftckpt.operations.choosing import read_root
from ftckpt.operations.opening import STORES
from ftckpt.own_files import MANIFEST, WEIGHTS
from ftckpt.storage import open_store
from tests.builders.checkpoints import save_dcp
from tests.guard.light_job import Job
from tests.guard.test_processes import until


def listed(job: Job) -> Root:
    return read_root(str(job.root), STORES)


def names(job: Job, before: object = None) -> list[str]:
    known = before if isinstance(before, dict) else {}
    return [one.name for one in new_saves(listed(job), known)]


def test_only_committed_saves_are_new_in_the_order_of_their_steps(job: Job) -> None:
    job.have(2, 10, 1)
    assert names(job) == ["step-1", "step-2", "step-10"]
    before = dict(shown(listed(job)))
    assert names(job, before) == []
    save_dcp(job.root / "step-11", step=11)
    (job.root / "step-11" / ".metadata").rename(job.root / "metadata")  # still being written
    shutil.copytree(job.supply / "step-12", job.root / "step-12.tmp")
    (job.root / "step-9").mkdir()
    assert names(job, before) == []
    (job.root / "metadata").rename(job.root / "step-11" / ".metadata")
    assert names(job, before) == ["step-11"]


def test_a_save_that_somebody_puts_aside_is_no_new_one(job: Job) -> None:
    job.have(1, 2)
    before = dict(shown(listed(job)))
    (job.root / "step-2").rename(job.root / "step-2.bad")
    assert names(job, before) == []


def test_a_save_of_the_same_name_is_new_again(job: Job) -> None:
    job.have(1, 2)
    before = dict(shown(listed(job)))
    shutil.rmtree(job.root / "step-2")
    shutil.copytree(job.supply / "step-2", job.root / "step-2")
    os.utime(job.root / "step-2", (1, 1))
    assert names(job, before) == ["step-2"]


def watched(job: Job, verdicts: list[ExitCode]) -> list[NewSave | CheckedSave]:
    """Return what a watcher tells of one new save whose verdicts are given."""
    told: list[NewSave | CheckedSave] = []
    left = iter(verdicts)

    def verify(path: str) -> tuple[ExitCode, str]:
        return next(left), path

    watcher = SaveWatcher(lambda: listed(job), {}, verify, told.append, every=0.01, settled=0.05)
    job.have(1)
    watcher.start()
    until(lambda: len(told) == 2)
    watcher.stop()
    return told


@pytest.mark.parametrize(
    ("verdicts", "result"),
    [
        ([ExitCode.OK], ExitCode.OK),
        ([ExitCode.CORRUPT, ExitCode.OK], ExitCode.OK),  # it was still being written
        ([ExitCode.CORRUPT, ExitCode.CORRUPT], ExitCode.CORRUPT),
        ([ExitCode.INCOMPLETE, ExitCode.CORRUPT], ExitCode.CORRUPT),
        ([ExitCode.UNVERIFIED], ExitCode.UNVERIFIED),
    ],
)
def test_one_that_does_not_pass_is_verified_again(
    job: Job, verdicts: list[ExitCode], result: ExitCode
) -> None:
    save, checked = watched(job, verdicts)
    assert isinstance(save, NewSave)
    assert isinstance(checked, CheckedSave)
    assert (save.name, save.step, checked.code) == ("step-1", 1, result)


def test_the_last_look_finds_what_was_saved_since_and_an_absent_store_is_no_failure(
    job: Job,
) -> None:
    told: list[NewSave | CheckedSave] = []
    watcher = SaveWatcher(lambda: listed(job), {}, lambda _: None, told.append, every=60.0)
    watcher.start()
    job.have(1)
    watcher.stop()
    assert [one.name for one in told if isinstance(one, NewSave)] == ["step-1"]

    def away() -> Root:
        raise UnavailableError("away")

    watcher = SaveWatcher(away, {}, lambda _: None, told.append, every=0.01)
    watcher.start()
    time.sleep(0.05)
    watcher.stop()
    assert len(told) == 1


def test_a_place_is_a_path(job: Job) -> None:
    job.have(3)
    (save,) = new_saves(listed(job), {})
    assert Path(save.path) == job.root / "step-3"


def watcher_of(job: Job, told: list[NewSave | CheckedSave], since: int | None) -> SaveWatcher:
    before = dict(shown(listed(job)))
    watcher = SaveWatcher(
        lambda: listed(job), before, lambda path: (ExitCode.OK, path), told.append,
        every=60.0, since=since,
    )  # fmt: skip
    watcher.note()
    return watcher


def names_of(told: list[NewSave | CheckedSave]) -> list[str]:
    return [one.name for one in told if isinstance(one, NewSave)]


def test_a_touched_directory_is_no_save(job: Job) -> None:
    job.have(3, 5, 7)
    told: list[NewSave | CheckedSave] = []
    watcher = watcher_of(job, told, since=5)
    for name in ("step-3", "step-5", "step-7"):
        os.utime(job.root / name, (1, 1))
    watcher.look()
    assert told == []
    file = job.root / "step-5" / "model.safetensors"  # the one that it started from, saved anew
    file.write_bytes(file.read_bytes())
    os.utime(job.root / "step-5", (2, 2))
    job.have(9)
    watcher.look()
    assert [one.name for one in told if isinstance(one, NewSave)] == ["step-5", "step-9"]


def test_what_is_older_than_the_last_known_good_one_never_becomes_it(job: Job) -> None:
    job.have(5)
    told: list[NewSave | CheckedSave] = []
    watcher = watcher_of(job, told, since=5)
    for number in (2, 9, 8):  # the first is copied back from elsewhere
        job.have(number)
        watcher.look()
        watcher._check()
    checked = [(one.save.step, one.newest) for one in told if isinstance(one, CheckedSave)]
    assert checked == [(2, False), (9, True), (8, False)]


def test_a_training_that_counts_from_zero_saves_too(job: Job) -> None:
    job.have(3, 5)
    told: list[NewSave | CheckedSave] = []
    watcher = watcher_of(job, told, since=5)
    job.have(1)
    watcher.look()
    assert names_of(told) == ["step-1"]
    os.utime(job.root / "step-3", (1, 1))
    watcher.look()
    assert len(told) == 1
    file = job.root / "step-3" / "model.safetensors"  # an old name, written over
    file.write_bytes(file.read_bytes())
    os.utime(job.root / "step-3", (2, 2))
    shutil.copytree(job.supply / "step-2", job.root / f"step-2{WEIGHTS}")  # gc thins beside it
    watcher.look()
    assert names_of(told) == ["step-1", "step-3"]


def test_an_old_save_that_there_was_no_time_to_note_counts_as_old(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "NOTING", -1.0)
    job.have(3, 5)
    told: list[NewSave | CheckedSave] = []
    watcher = watcher_of(job, told, since=5)
    for name in ("step-3", "step-5"):
        os.utime(job.root / name, (1, 1))
    job.have(2)
    watcher.look()
    assert names_of(told) == ["step-2"]


def test_what_is_written_under_its_old_name_in_a_bucket_is_a_save(job: Job) -> None:
    """A listing of an object store shows no time of a prefix."""
    job.have(1, 2)
    store = open_store("memory://guard-watch")

    def put(name: str, step: int) -> None:
        for file in sorted((job.root / f"step-{step}").iterdir()):
            store.put(f"{name}/{file.name}", file.read_bytes())

    def read() -> Root:
        return read_root(store.url, STORES)

    put("last", 1)
    store.put("step-2/model.safetensors", b"a save that was killed")
    told: list[NewSave | CheckedSave] = []
    watcher = SaveWatcher(
        read, shown(read()), lambda path: (ExitCode.OK, path), told.append, every=60.0, since=1
    )
    watcher.note()
    watcher.look()
    assert told == []
    put("last", 2)
    put("step-2", 2)
    watcher.look()
    assert told == []  # perhaps they are being written
    watcher.look()
    assert names_of(told) == ["last", "step-2"]
    for file in (".ftckpt/receipt.json", MANIFEST):
        store.put(f"last/{file}", b"{}")
    store.put("step-2/.ftckpt/receipt.json", b"{}")
    watcher.look()
    watcher.look()
    assert len(told) == 2
    store.put("step-2/notes.txt", b"written beside it")
    watcher.look()
    watcher.look()
    assert names_of(told) == ["last", "step-2", "step-2"]


def test_files_that_are_written_over_in_place_are_a_save(job: Job) -> None:
    shutil.copytree(job.supply / "step-3", job.root / "last")
    told: list[NewSave | CheckedSave] = []
    watcher = watcher_of(job, told, since=3)
    watcher.look()
    assert told == []
    times = os.stat(job.root / "last")
    for file in (job.supply / "step-5").iterdir():
        with (job.root / "last" / file.name).open("r+b") as old:
            old.write(file.read_bytes())
    assert os.stat(job.root / "last").st_mtime_ns == times.st_mtime_ns
    watcher.look()
    watcher.look()
    assert names_of(told) == ["last"]


class Ranks:
    """A bucket in which eight ranks write a save of one name."""

    def __init__(self, name: str) -> None:
        self.store = open_store(f"memory://guard-{name}")
        self.told: list[NewSave | CheckedSave] = []
        self.save(0, 0, "step-1")

    def read(self) -> Root:
        return read_root(self.store.url, STORES)

    def save(self, rank: int, number: int, name: str = "last") -> None:
        file = io.BytesIO()
        torch.save({"model": {"w": torch.full((8,), float(number))}}, file)
        self.store.put(f"{name}/model_rank_{rank}.pt", file.getvalue())

    def watcher(self) -> SaveWatcher:
        watcher = SaveWatcher(
            self.read, shown(self.read()), lambda path: (ExitCode.OK, path), self.told.append,
            every=60.0,
        )  # fmt: skip
        watcher.note()
        return watcher


@pytest.mark.parametrize("before", [True, False], ids=["written over", "new"])
def test_a_save_that_is_written_during_many_looks_is_one(before: bool) -> None:
    ranks = Ranks(f"many-{before}")
    for rank in range(8 * before):
        ranks.save(rank, 0)
    watcher = ranks.watcher()
    for number in (1, 2):
        for rank in range(8):
            ranks.save(rank, number)
            watcher.look()
        for _ in range(20):
            watcher.look()
        assert names_of(ranks.told) == ["last"] * number
    ranks.save(0, 3)
    watcher.look(ended=True)  # nobody writes any more
    assert names_of(ranks.told) == ["last"] * 3
    watcher.stop()
    assert len(ranks.told) == 3


def test_a_directory_that_never_settles_is_told_of_now_and_then() -> None:
    """Else a log in it would make a hang of a job that saves."""
    ranks = Ranks("restless")
    ranks.save(0, 0)
    watcher = ranks.watcher()
    for number in range(200):
        ranks.store.put("last/log.txt", b"x" * number)
        watcher.look()
    assert names_of(ranks.told) == ["last"] * 4


def test_a_name_that_becomes_a_checkpoint_is_a_save() -> None:
    ranks = Ranks("begins")
    ranks.store.put("last/notes.txt", b"no checkpoint")
    watcher = ranks.watcher()
    watcher.look()
    ranks.save(0, 1)
    for _ in range(3):
        watcher.look()
    assert names_of(ranks.told) == ["last"]


def test_what_does_not_change_is_listed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("lists")
    ranks.save(0, 1)
    for name in ("wandb", "plots"):
        ranks.store.put(f"{name}/a.txt", b"no checkpoint")
    watcher = ranks.watcher()
    ranks.store.put("logs/a.txt", b"since")
    asked: list[str] = []
    real = Root.recognise

    def recognise(self: Root, candidate: Candidate) -> Child | None:
        asked.append(candidate.path)
        return real(self, candidate)

    monkeypatch.setattr(Root, "recognise", recognise)
    for _ in range(100):
        watcher.look()
    assert 0 < len(asked) < 60
    assert "last" not in asked
    assert ranks.told == []


def test_a_save_that_is_told_of_again_is_one_save_of_the_usual_interval() -> None:
    hang = HangWatch(GuardSettings(settled=30.0), 0.0)
    # Sealed afterwards; under a fixed name; a copy under a fixed name, told of before or after it.
    for step, now in (
        (1, 0), (1, 90), (2, 100), (2, 101), (None, 200), (None, 201), (None, 300),
        (None, 400), (4, 401), (None, 415), (5, 500), (None, 515), (5, 620), (6, 700),
    ):  # fmt: skip
        hang.saved(NewSave(f"step-{step}", f"r/step-{step}", step), now)
    assert hang.saves == [0, 100, 200, 300, 400, 500, 620, 700]
    assert hang.fresh_at == 700


def test_a_job_that_is_saving_does_not_hang() -> None:
    """One that saves at every look into one directory is told of now and then only."""
    ranks = Ranks("saving")
    ranks.save(0, 0)
    watcher = ranks.watcher()
    hang = HangWatch(GuardSettings(every=15.0, max_age=60.0), 0.0)
    for number in range(1, 20):
        ranks.save(0, number)
        watcher.look()
        assert hang.look(15.0 * number, moving=watcher.moving) is None
    found = []
    for number in range(20, 30):
        watcher.look()
        found.append(hang.look(15.0 * number, moving=watcher.moving))
    assert [one.limit for one in found if one] == [60.0]  # it is told of once


def test_a_save_whose_files_come_long_after_each_other_is_one_save() -> None:
    ranks = Ranks("slow")
    for rank in range(8):
        ranks.save(rank, 0)
    watcher, hang = ranks.watcher(), HangWatch(GuardSettings(settled=30.0), 0.0)
    for number in (1, 2, 3):
        for rank in range(8):
            ranks.save(rank, number)
            for _ in range(8):
                watcher.look()
    for now, one in enumerate(ranks.told):
        assert isinstance(one, NewSave)
        hang.saved(one, 60.0 * now)
    assert len(ranks.told) == 24
    assert hang.saves == [0.0, 480.0, 960.0]


def test_a_save_that_went_before_it_was_verified_is_no_damage() -> None:
    tools = MagicMock()
    attempt = CommandAttempt(["true"], StartPoint(ExitCode.OK), 1, tools)
    save = NewSave("step-1", "r/step-1", 1, 1)
    attempt._take_verdict(CheckedSave(save, ExitCode.NOT_FOUND, "it does not exist", 1.0))
    tools.alarm.raise_.assert_not_called()
    tools.say.assert_called_once_with("guard: r/step-1 went before it was verified")
    attempt._take_verdict(CheckedSave(save, ExitCode.CORRUPT, "cut", 1.0))
    tools.alarm.raise_.assert_called_once()


@pytest.mark.parametrize("late", [True, False])
def test_a_follower_does_not_wake_without_pause_where_saves_are_late(late: bool) -> None:
    """The leader alone looks for hangs; it wakes when the next save is due."""
    tools = MagicMock(settings=GuardSettings(max_age=60.0), team=MagicMock(leads=not late))
    attempt = CommandAttempt(["true"], StartPoint(ExitCode.OK), 1, tools)
    attempt._command = MagicMock(status=None)
    attempt._hang.fresh_at -= 1000.0 if late else 59.5
    attempt._step()
    (seconds, _), _ = tools.events.wait.call_args
    assert seconds == TICK if late else 0.0 <= seconds <= 0.5
