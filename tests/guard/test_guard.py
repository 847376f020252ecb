"""A guarded job: what it starts from, and how it ends."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery import root_marker
from ftckpt.errors import ExitCode, FtckptError, MissingError, RefusedError, UnavailableError
from ftckpt.guard.decisions import Limits, OnHang
from ftckpt.guard.notices import Notice
from ftckpt.guard.terms import GuardSettings
from ftckpt.operations.choosing import read_root
from ftckpt.retention.records import pins
from ftckpt.storage import StoreOptions
from ftckpt.storage.local import writable
from tests import campaign
from tests.guard.light_job import Job, quick


def at_once(when: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    """Do something as soon as something is so."""

    def wait() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError, ValueError):  # a line that is being written
                if when():
                    break
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    if state[0] == "Z":
        assert state[1] == "1", f"{pid} is a zombie"  # init collects it in its own time
        return False
    return True


def sleepers(words: str) -> list[int]:
    """Return the processes of a command line."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            found += [int(place.name)] if line == words else []
    return found


def test_a_fresh_start_and_the_end_of_the_training(job: Job) -> None:
    ended = job.run()
    assert (ended.code, ended.own, ended.restarts) == (0, ExitCode.OK, 0)
    assert job.starts() == [0]
    assert job.logged()[0]["event"] == "start"
    assert job.logged("ended")[0]["ending"] == "done"
    assert job.logged("finished")[0]["code"] == 0


def test_it_starts_from_the_newest_that_passes_and_names_what_it_passes_over(job: Job) -> None:
    job.have(1, 2, 3)
    job.flip(3)
    assert job.run(4).code == 0
    assert job.starts() == [2]
    (start,) = job.logged("start")
    assert start["path"].endswith("step-2")
    assert "step-3: CORRUPT" in start["skipped"][0]
    assert any("step-3" in line for line in job.said)


def test_a_damaged_newest_is_mended_from_a_tier(job: Job, tmp_path: Path) -> None:
    job.have(1, 2, 3)
    shutil.copytree(job.root, tmp_path / "tier")
    job.flip(3)
    assert job.run(4, choice={"tiers": [str(tmp_path / "tier")]}).code == 0
    assert job.starts() == [3]
    (start,) = job.logged("start")
    assert [Path(one).name for one in start["repaired"]] == ["step-3"]
    assert job.events("start")[0]["good"] == [1, 2, 3]


def test_a_tier_that_is_damaged_too_mends_nothing(job: Job, tmp_path: Path) -> None:
    job.have(1, 2)
    job.flip(2)
    shutil.copytree(job.root, tmp_path / "tier")
    assert job.run(3, choice={"tiers": [str(tmp_path / "tier")]}).code == 0
    assert job.starts() == [1]
    assert any("not mended" in line for line in job.said)


def test_a_save_without_a_seal_stops_it_unless_it_may_be_passed_over(job: Job) -> None:
    job.have(1, 2)
    (job.root / "step-2" / "ftckpt.manifest.json").unlink()
    ended = job.run()
    assert (ended.own, job.starts()) == (ExitCode.UNVERIFIED, [])
    assert "--skip-unverified" in ended.hint
    assert job.run(3, choice={"skip_unverified": True}).code == 0
    assert job.starts() == [1]


def test_a_save_in_flight_is_waited_for_and_one_that_nobody_writes_is_not(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.operations import guarded
    from tests.builders.checkpoints import save_dcp

    monkeypatch.setattr(guarded, "QUIET", 3.0)  # a busy machine stops a thread for a second
    words = ["sh", "-c", f'basename "$FTCKPT_RESUME" >> "{job.log}"']
    job.have(1)
    step = save_dcp(job.root / "step-2", step=2)
    (step / ".metadata").rename(job.root / "kept")

    def write() -> None:
        for _ in range(10):
            time.sleep(0.1)
            (step / "growing").write_bytes(b"x" * time.monotonic_ns().bit_length())
            os.utime(step / "growing")
        (job.root / "kept").rename(step / ".metadata")

    writing = threading.Thread(target=write)
    writing.start()
    began = time.monotonic()
    assert job.run(words=words, choice={"timeout": 120.0}).code == 0
    writing.join()
    assert job.log.read_text() == "step-2\n"
    assert time.monotonic() - began < 60
    (step / ".metadata").unlink()
    began = time.monotonic()
    assert job.run(words=words, choice={"timeout": 120.0}).code == 0
    assert job.log.read_text() == "step-2\nstep-1\n"
    assert time.monotonic() - began < 60


def test_damage_is_never_a_fresh_start(job: Job) -> None:
    job.have(1, 2)
    job.flip(1)
    job.flip(2)
    ended = job.run()
    assert (ended.code, ended.own) == (4, ExitCode.CORRUPT)
    assert job.starts() == []


def test_lost_checkpoints_are_never_a_fresh_start(job: Job) -> None:
    """The log of an earlier guard, and its pin, tell of them."""
    job.have(1)
    assert job.run(2).code == 0
    started = len(job.starts())
    for place in job.root.glob("step-*"):
        shutil.rmtree(place)
    assert job.run().own is ExitCode.CORRUPT
    for known in ("pins", "verdicts"):
        shutil.rmtree(job.root / ".ftckpt" / known)
    ended = job.run()
    assert (ended.code, ended.own) == (4, ExitCode.CORRUPT)
    assert "all are gone" in ended.message
    assert len(job.starts()) == started


def test_a_place_that_may_not_be_the_root_is_never_a_fresh_start(job: Job) -> None:
    (job.root / ".ftckpt" / "root.json").unlink()
    assert job.run().own is ExitCode.MISSING
    shutil.rmtree(job.root)
    with pytest.raises(MissingError):
        job.run()
    assert job.starts() == []


def test_a_store_that_does_not_answer_is_never_a_fresh_start(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.operations import guarded

    real: Any = vars(guarded)["read_root"]
    calls = [0]

    def read(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:  # the first one finds the place of the lock
            raise UnavailableError("the store is away")
        return real(*args, **kwargs)

    monkeypatch.setattr(guarded, "read_root", read)
    job.have(1)
    ended = job.run()
    assert (ended.code, ended.own) == (10, ExitCode.UNAVAILABLE)
    assert job.starts() == []
    # It answers again in time: the job goes on.
    calls[0] = 0
    first, later = iter([True, False]), real

    def read_later(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 and next(first):
            raise UnavailableError("the store is away")
        return later(*args, **kwargs)

    monkeypatch.setattr(guarded, "read_root", read_later)
    assert job.run(2, quick(patience=30.0)).code == 0
    assert job.starts() == [1]


def test_a_crash_at_load_is_walked_back_from(job: Job) -> None:
    job.have(1, 2)
    faults = {n: {"load": 7} for n in (1, 2)}
    ended = job.run(3, faults=faults)
    assert (ended.code, ended.restarts) == (0, 2)
    assert job.starts() == [2, 2, 1]
    assert any("started from twice without a newer save" in line for line in job.said)
    # The next guard of the run remembers; a newer save has come since.
    assert job.run(3).code == 0
    assert job.starts() == [2, 2, 1, 3]


def test_every_good_checkpoint_failed_twice(job: Job) -> None:
    job.have(1, 2)
    faults = {n: {"load": 7 if n < 3 else 9} for n in range(1, 9)}  # each in its own way
    ended = job.run(3, quick(limits=Limits(8, 0.0, 0.0)), faults=faults)
    assert (ended.code, ended.own) == (8, ExitCode.REFUSED)
    assert not any("UNVERIFIED" in line for line in job.said)
    assert all("--retry-suspected" in line for line in job.said if "skipped (" in line)
    assert job.starts() == [2, 2, 1, 1]
    assert job.run(2).own is ExitCode.REFUSED  # it is remembered
    assert job.run(2, retry_suspected=True).code == 0
    assert job.starts()[4:] == [2]


def test_a_command_that_fails_alike_from_two_checkpoints_is_at_fault(job: Job) -> None:
    job.have(1, 2)
    faults = {n: {"load": 1, "words": "SyntaxError: invalid syntax"} for n in range(1, 9)}
    ended = job.run(3, faults=faults)
    assert (ended.code, ended.own, job.starts()) == (1, None, [2, 2, 1, 2])
    # The scheduler starts the same job again; then a person mends the command.
    assert job.run(3, faults=faults).code == 1
    assert job.run(3).code == 0
    assert job.starts()[4:] == [2] * 5


def test_an_alert_carries_what_the_command_printed_last(job: Job, tmp_path: Path) -> None:
    settings = quick(
        limits=Limits(1, 0.0, 0.0),
        on_alert=f'echo "$FTCKPT_ALERT_KIND $FTCKPT_ALERT" >> "{tmp_path}/alerts"',
    )
    words = "Traceback (most recent call last):\n  File x\n\x1b[31mValueError: bad batch\x1b[0m"
    job.run(3, settings, faults={n: {"load": 3, "words": words} for n in (1, 2)})
    told = sorted((tmp_path / "alerts").read_text().splitlines())
    assert [line.split()[0] for line in told] == ["failed", "restart"]
    assert all(line.endswith("| File x | ValueError: bad batch") for line in told)


def test_a_full_disk_is_said_and_blames_no_checkpoint(job: Job, tmp_path: Path) -> None:
    job.have(1, 2)
    words = "OSError: [Errno 28] No space left on device: '/ckpt/step-3/x'"
    for _ in range(3):
        ended = job.run(3, alerts_to(tmp_path / "alerts"), faults={1: {"load": 1, "words": words}})
        assert (ended.code, ended.own, ended.restarts) == (12, ExitCode.NO_RESOURCE, 0)
        assert "gc ROOT" in ended.hint
    assert (tmp_path / "alerts").read_text() == "disk-full\n" * 3
    assert job.run(3).code == 0
    assert job.starts() == [2] * 4


def test_a_root_that_takes_no_more_bytes_is_a_full_disk(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable, "full_because", lambda *_: "no space is left on the device")
    ended = job.run(faults={1: {"load": 1}})
    assert (ended.own, ended.restarts) == (ExitCode.NO_RESOURCE, 0)
    assert ended.message.endswith("is full: no space is left on the device")
    # One that has finished is not asked.
    assert job.run(2).code == 0


def test_a_suspected_one_does_not_hide_why_the_others_are_not_taken(job: Job) -> None:
    job.have(1, 2)
    (job.root / "step-1" / "ftckpt.manifest.json").unlink()
    ended = job.run(3, faults={n: {"load": 7} for n in (1, 2, 3)})
    assert (ended.own, job.starts()) == (ExitCode.UNVERIFIED, [2, 2])
    job.flip(2)
    assert job.run(3).own is ExitCode.UNVERIFIED


def test_restarts_have_an_end_and_the_code_is_the_commands(job: Job) -> None:
    faults = {n: {"load": 17} for n in range(1, 9)}
    ended = job.run(faults=faults)
    assert (ended.code, ended.own, ended.restarts) == (17, None, 3)
    assert job.starts() == [0] * 4
    job.have(1)
    ended = job.run(faults={n: {"kill": 1} for n in range(1, 9)}, settings=quick(limits=Limits(0)))
    assert (ended.code, ended.own) == (137, None)


def test_75_of_the_command_is_passed_on(job: Job) -> None:
    ended = job.run(faults={1: {"load": 75}})
    assert (ended.code, ended.own, ended.restarts) == (75, ExitCode.REQUEUE, 0)


def test_a_command_that_is_not_there(job: Job) -> None:
    ended = job.run(words=["/nowhere/train"], settings=quick(limits=Limits(0)))
    assert (ended.code, ended.own, ended.restarts) == (2, ExitCode.USAGE, 0)


def test_new_saves_are_verified_and_the_last_good_one_is_pinned(job: Job) -> None:
    faults = {1: {"pace": 0.15, "flip": 3, "exit_after": 3, "code": 5}}
    ended = job.run(4, quick(limits=Limits(0), settled=0.0), faults=faults)
    assert ended.code == 5
    told = {Path(one["path"]).name: one["name"] for one in job.logged("verified")}
    assert told["step-1"] == told["step-2"] == "OK"
    from ftckpt.operations.choosing import read_root
    from ftckpt.operations.opening import STORES

    held = pins.pins(read_root(str(job.root), STORES))
    assert [(one.entry, one.owner) for one in held] == [("step-2", "ftckpt-guard")]
    assert job.run(4).code == 0
    assert job.starts() == [0, 2]


def test_the_last_save_of_a_finished_training_is_verified(job: Job) -> None:
    assert job.run(2).code == 0
    assert 2 in [one["step"] for one in job.logged("verified") if one["name"] == "OK"]
    ended = job.run(4, faults={1: {"flip": 4}})
    assert (ended.code, ended.own) == (4, ExitCode.CORRUPT)
    assert "step-4" in ended.message
    assert job.logged("ended")[-1]["ending"] == "done"


def test_a_hang_is_told_killed_and_restarted(job: Job, tmp_path: Path) -> None:
    settings = quick(
        max_age=1.5, limits=Limits(2, 0.0, 0.0, OnHang.KILL), grace=0.3,
        on_alert=f'echo "$FTCKPT_ALERT_KIND $FTCKPT_ALERT" >> "{tmp_path}/alerts"',
        metrics=str(tmp_path / "guard.prom"),
    )  # fmt: skip
    ended = job.run(3, settings, faults={1: {"hang": 2, "ignore": ["SIGTERM"], "fork": 1}})
    assert (ended.code, ended.restarts) == (0, 1)
    assert job.starts() == [0, 2]
    assert [one["ending"] for one in job.logged("ended")] == ["hung", "done"]
    assert (tmp_path / "alerts").read_text().startswith("hang no save for")
    assert "ftckpt_guard_restarts{" in (tmp_path / "guard.prom").read_text()
    assert not sleepers("sleep 300")
    assert not sleepers("sleep 301")


def test_a_hang_that_is_only_told_goes_on(job: Job) -> None:
    ended = job.run(2, quick(max_age=0.2), faults={1: {"pace": 0.6}})
    assert (ended.code, ended.restarts) == (0, 0)
    assert job.logged("late")


def test_a_hang_may_end_the_job_for_the_scheduler(job: Job) -> None:
    settings = quick(max_age=0.3, limits=Limits(2, 0.0, 0.0, OnHang.EXIT), grace=0.3)
    ended = job.run(3, settings, faults={1: {"hang": 1}})
    assert (ended.code, ended.own) == (75, ExitCode.REQUEUE)


def test_stacks_of_what_hangs_are_dumped(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    spy = tmp_path / "bin" / "py-spy"
    spy.write_text('#!/bin/sh\necho "stack of $3"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    settings = quick(max_age=1.5, limits=Limits(0, 0.0, 0.0, OnHang.KILL), grace=0.3)
    job.run(3, settings, faults={1: {"hang": 1}})
    trainer = job.events("start")[0]["pid"]
    assert any(f"stack of {trainer}" in line for line in job.said)


def test_sigterm_is_passed_on_and_ends_the_guard(job: Job) -> None:
    faults = {1: {"hang": 2, "fork": 1}}
    at_once(lambda: len(job.events("saved")) == 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ended = job.run(3, faults=faults)
    assert (ended.code, ended.own, ended.restarts) == (143, ExitCode.TERMINATED, 0)
    assert job.logged("ended")[0]["code"] == 143
    assert not sleepers("sleep 300")


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(job: Job) -> None:
    faults = {1: {"hang": 1, "ignore": ["SIGTERM"]}}
    at_once(lambda: bool(job.events("saved")), lambda: os.kill(os.getpid(), signal.SIGTERM))
    ended = job.run(3, quick(grace=0.3), faults=faults)
    assert ended.code == 143
    assert job.logged("ended")[0]["code"] == 137
    assert not alive(job.events("start")[0]["pid"])


def test_sigint_while_it_waits_for_a_restart(job: Job) -> None:
    at_once(lambda: bool(job.logged("ended")), lambda: os.kill(os.getpid(), signal.SIGINT))
    ended = job.run(3, quick(limits=Limits(3, 30.0, 30.0)), faults={1: {"load": 3}})
    assert (ended.code, ended.own) == (130, ExitCode.INTERRUPTED)
    assert job.starts() == [0]


SAVES = """
import json, os, signal, sys, time
def save(*_):
    print(open(os.environ["FTCKPT_NOTICE"]).read(), flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGUSR1, save)
open(sys.argv[2], "w").close()
time.sleep(300)
"""


class Announced:
    """A source that announces once a file is there."""

    name = "test"

    def __init__(self, file: Path, seconds: float | None) -> None:
        self.file, self.seconds = file, seconds

    def ask(self) -> Notice | None:
        return Notice(self.name, self.seconds, "going away") if self.file.exists() else None


@pytest.mark.parametrize(
    ("code", "zero_is_done", "expected"), [(0, False, 75), (0, True, 0), (12, True, 75)]
)
def test_a_notice_becomes_the_save_signal(
    job: Job, tmp_path: Path, code: int, zero_is_done: bool, expected: int
) -> None:
    import sys

    ready, out = tmp_path / "ready", tmp_path / "out"
    with open(out, "wb") as output:
        settings = quick(
            sources=[Announced(ready, 120.0)], notice_every=0.02, zero_is_done=zero_is_done,
            output=output,
        )  # fmt: skip
        ended = job.run(
            words=[sys.executable, "-c", SAVES, str(code), str(ready)], settings=settings
        )
    assert ended.code == expected
    told = json.loads(out.read_text())
    assert told["source"] == "test"
    assert 0 < told["deadline"] - time.time() <= 120
    assert job.logged("notice")[0]["seconds"] == 120.0
    assert ended.restarts == 0


def test_a_notice_that_the_command_does_not_hear_ends_it_in_time(job: Job, tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    settings = quick(sources=[Announced(tmp_path / "now", 0.8)], notice_every=0.02, grace=0.2)
    began = time.monotonic()
    ended = job.run(3, settings, faults={1: {"hang": "load", "ignore": ["SIGUSR1", "SIGTERM"]}})
    assert (ended.code, ended.own) == (75, ExitCode.REQUEUE)
    assert time.monotonic() - began < 60


def test_a_signal_that_announces(job: Job) -> None:
    at_once(lambda: bool(job.events("saved")), lambda: os.kill(os.getpid(), signal.SIGUSR2))
    settings = quick(notice_signals=[signal.SIGUSR2])
    ended = job.run(3, settings, faults={1: {"hang": 1}})  # SIGUSR1 ends the trainer
    assert ended.code == 75
    assert job.logged("ended")[0]["code"] == 128 + signal.SIGUSR1


@pytest.mark.parametrize(("notices", "code"), [([signal.SIGTERM], 75), ([], 143)])
def test_a_signal_while_it_chooses_ends_it_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, notices: list[int], code: int
) -> None:
    from ftckpt.operations import guarded

    def slow(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(120)

    monkeypatch.setattr(guarded, "select", slow)
    began = time.monotonic()
    if notices:
        assert job.run(settings=quick(notice_signals=notices)).code == code
    else:
        with pytest.raises(SystemExit) as ended:
            job.run()
        assert ended.value.code == code
    assert time.monotonic() - began < 60
    assert job.starts() == []
    assert job.logged("finished")[0]["code"] == code


def test_a_second_guard_is_refused(job: Job) -> None:
    from ftckpt.guard.lock import held
    from ftckpt.operations.choosing import read_root
    from ftckpt.operations.opening import STORES

    root = read_root(str(job.root), STORES)
    with held(root, "somebody@elsewhere", wait=0.0, say=print):
        with pytest.raises(RefusedError, match=r"another guard is at work.*somebody@elsewhere"):
            job.run()
        assert job.starts() == []
    assert job.run().code == 0


def test_the_step_of_the_newest_save_for_ft_launcher(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "iteration"
    assert job.run(3, quick(iteration_file=str(file)), faults={1: {"pace": 0.1}}).code == 0
    assert file.read_text() == "3\n"


def expected(events: list[dict[str, Any]]) -> None:
    """Hold a campaign's own record against what a guard must do, by a second account of it."""
    vain: dict[int, int] = {}
    start: dict[str, Any] | None = None
    saved = False
    for event in events:
        assert event["event"] != "TWICE", "two trainings at one root"
        if event["event"] == "cleared":
            vain, start = {}, None
        elif event["event"] == "start":
            if start is not None and start["step"]:
                vain[start["step"]] = 0 if saved else vain.get(start["step"], 0) + 1
            allowed = [s for s in event["good"] if vain.get(s, 0) < 2]
            assert event["step"] == max(allowed, default=0), event
            assert event["step"] in (*event["good"], 0)
            start, saved = event, False
        elif event["event"] == "saved":
            saved = True
            vain.pop(event["step"], None)  # other files now


def test_killed_at_any_moment_it_goes_on_from_the_newest_good_one(job: Job) -> None:
    rounds = campaign.examples(24, 300)
    chance = random.Random(7)
    started, finished, refused = 0, 0, False
    while started < rounds:
        faults: dict[int, dict[str, Any]] = {}
        for attempt in range(1, rounds + 1):
            # A save has six operations: most attempts reach one, some none.
            fault: dict[str, Any] = {"kill": chance.randint(1, 30)}
            if chance.random() < 0.2:
                fault["flip"] = chance.randint(1, 12)
            if chance.random() < 0.1:
                fault["fork"] = 1
            faults[attempt] = fault
        before = len(job.starts())
        if refused:
            with open(job.log, "a") as log:
                log.write('{"event": "cleared"}\n')
        limits = Limits(rounds, 0.0, 0.0)
        ended = job.run(
            12, quick(limits=limits), faults=faults, choice={"skip_unverified": True},
            retry_suspected=refused,
        )  # fmt: skip
        started += len(job.starts()) - before
        expected(job.events())
        refused = ended.own is ExitCode.REFUSED
        if not refused:
            assert (ended.code, ended.own) == (0, ExitCode.OK)
            assert (job.root / "step-12").is_dir()
            finished += 1
            for step in job.root.glob("step-*"):  # another run of the same root
                if step.name != "step-1":
                    shutil.rmtree(step)
            with open(job.log, "a") as log:
                log.write('{"event": "cleared"}\n')
            refused = True
    assert finished
    assert not sleepers("sleep 300")
    assert not sleepers("sleep 301")
    for event in job.events("start"):
        assert not alive(event["pid"])


@pytest.mark.parametrize(
    ("words", "code"), [(["/nowhere/train"], 127), (["sh", "-c", "exit 126"], 126)]
)
def test_a_command_that_cannot_be_run_blames_no_checkpoint(
    job: Job, words: list[str], code: int
) -> None:
    job.have(1, 2)
    for _ in range(3):
        ended = job.run(words=words, settings=quick(limits=Limits(2, 0.0, 0.0)))
        assert (ended.code, ended.own, ended.restarts) == (2, ExitCode.USAGE, 0)
    assert {one["code"] for one in job.logged("ended")} == {code}
    assert job.run(3).code == 0
    assert job.starts() == [2]


def alerts_to(file: Path, **more: Any) -> GuardSettings:
    return quick(on_alert=f'echo "$FTCKPT_ALERT_KIND" >> "{file}"', **more)


def test_a_command_that_is_away_for_a_while_is_started_again(job: Job, tmp_path: Path) -> None:
    job.have(1, 2)
    told, tried = tmp_path / "alerts", tmp_path / "tried"
    script = f"echo >> {tried}; case $(wc -l < {tried}) in 1) exit 1;; [23]) exit 127;; esac"
    again = alerts_to(told, limits=Limits(3, 0.0, 0.0))
    ended = job.run(words=["sh", "-c", script], settings=again)
    assert (ended.code, ended.restarts) == (0, 3)
    assert [one["step"] for one in job.logged("start")] == [2, 2, 2, 2]  # it is not to blame
    script = script.replace("[23]", "*")
    told.unlink()
    tried.unlink()
    ended = job.run(words=["sh", "-c", script], settings=alerts_to(told, limits=Limits(1, 0.0)))
    assert (ended.code, ended.own, ended.restarts) == (127, None, 1)
    assert sorted(told.read_text().split()) == ["failed", "restart"]


def test_every_end_that_is_no_good_is_told(job: Job, tmp_path: Path) -> None:
    told = tmp_path / "alerts"
    ended = job.run(words=["/nowhere/train"], settings=alerts_to(told))
    assert (ended.code, told.read_text()) == (2, "failed\n")
    for words in (["true"], ["sh", "-c", "exit 75"]):
        job.run(words=words, settings=alerts_to(told))
    assert told.read_text() == "failed\n"
    job.root.rename(job.root.with_name("elsewhere"))
    with pytest.raises(FtckptError):
        job.run(words=["true"], settings=alerts_to(told))
    assert told.read_text() == "failed\nno-start\n"


def test_a_command_that_saved_and_then_ends_with_127_has_failed(job: Job) -> None:
    faults = {1: {"pace": 0.15, "exit_after": 2, "code": 127}}
    ended = job.run(3, quick(limits=Limits(0)), faults=faults)
    assert (ended.code, ended.own) == (127, None)


def test_the_last_look_at_a_store_that_is_away_has_an_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.have(1)
    away = job.log.with_name("away")
    words = ["sh", "-c", f'cp -r "{job.supply}/step-2" "{job.root}" && touch "{away}"']
    read = read_root

    def reads(path: str, *given: Any, **more: Any) -> Any:
        if away.exists():
            raise UnavailableError("the store does not answer")
        return read(path, *given, **more)

    monkeypatch.setattr("ftckpt.operations.guarded.read_root", reads)
    began = time.monotonic()
    told = job.log.with_name("alerts")
    ended = job.run(words=words, settings=alerts_to(told, patience=0.3, every=30.0))
    assert told.read_text() == "failed\n"
    assert (ended.code, ended.own) == (10, ExitCode.UNAVAILABLE)
    assert "not verified" in ended.message
    assert time.monotonic() - began < 60


def test_a_last_save_whose_header_is_cut_is_told(job: Job) -> None:
    job.have(1)
    save = f'cp -r "{job.supply}/step-2" "{job.root}"; rm "{job.root}"/step-2/ftckpt*'
    words = ["sh", "-c", f'{save}; truncate -s 20 "{job.root}/step-2/model.safetensors"']
    ended = job.run(words=words, settings=quick(settled=0.1))
    assert ended.own in (ExitCode.CORRUPT, ExitCode.INCOMPLETE)
    assert "step-2" in ended.message


def test_a_guard_of_the_directory_below_is_excluded_too(job: Job, tmp_path: Path) -> None:
    job.have(1)
    inner = job.root
    outer = tmp_path / "outer"
    outer.mkdir()
    job.root = inner.rename(outer / "checkpoint")
    root_marker.create_root(str(outer), StoreOptions())
    below = Job(job.supply, job.root, job.log)
    job.root = outer
    seen: list[BaseException | int] = []

    def second() -> None:
        try:
            seen.append(below.run(words=["true"]).code)
        except RefusedError as error:
            seen.append(error)

    begun = tmp_path / "begun"
    words = ["sh", "-c", f'touch "{begun}"; while ! [ -e "{tmp_path}/over" ]; do sleep 0.05; done']

    def release() -> None:
        second()
        (tmp_path / "over").touch()

    at_once(begun.exists, release)
    assert job.run(words=words).code == 0
    assert len(seen) == 1
    assert isinstance(seen[0], RefusedError)
