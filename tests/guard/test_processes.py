"""Processes: none outlives its guard, none is lost, none stays a zombie."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.guard.decisions import Limits, exit_code
from ftckpt.guard.supervise import MARK, GuardedCommand, Whom
from ftckpt.replay.processes import end_marked
from tests import campaign
from tests.guard.light_job import Job, quick
from tests.guard.test_guard import alive, sleepers
from tests.test_docs import validate


def until(so: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def started(*words: str, token: str = "t") -> GuardedCommand:
    return GuardedCommand(words, dict(os.environ), token)


def ended(command: GuardedCommand) -> int:
    while command.status is None:
        assert select.select([command.fileno()], [], [], 60)[0], "in vain"
        command.read()
    return exit_code(command.status)


def test_the_code_of_a_command_is_that_of_a_shell() -> None:
    assert ended(started("sh", "-c", "exit 3")) == 3
    assert ended(started("sh", "-c", "kill -9 $$")) == 137
    assert ended(started("/nowhere")) == 127
    assert ended(started("/etc/hostname")) == 126


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    script = f"setsid sleep 311 & (trap '' TERM; echo > {tmp_path}/up; sleep 312) & "
    command = started("sh", "-c", script + f"until [ -e {tmp_path}/up ]; do sleep 0.01; done")
    assert ended(command) == 0
    assert not sleepers("sleep 311")
    assert not sleepers("sleep 312")


def test_orphans_are_no_zombies() -> None:
    # Each inner shell leaves a child that ends later, when its parent is gone.
    command = started("sh", "-c", "for i in 1 2 3; do (sleep 0.1 & exit 0); done; sleep 0.4; ps x")
    assert ended(command) == 0
    states = subprocess.run(
        ["ps", "-o", "state=", "--ppid", str(command.keeper)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Z" not in states.stdout


def test_signals_reach_the_command_its_group_or_the_ranks(tmp_path: Path) -> None:
    trap = "trap 'echo {0} >> {1}/got' USR1; echo > {1}/{0}; while :; do sleep 0.02; done"
    rank = trap.format("rank", tmp_path)
    outer = trap.format("outer", tmp_path)
    script = f'LOCAL_RANK=0 sh -c "{rank}" & {outer}'
    both = {"outer", "rank"}
    for whom, got in ((Whom.COMMAND, {"outer"}), (Whom.RANKS, {"rank"}), (Whom.GROUP, both)):
        for name in ("rank", "outer", "got"):
            (tmp_path / name).unlink(missing_ok=True)
        command = started("sh", "-c", script)
        until(lambda: (tmp_path / "rank").exists() and (tmp_path / "outer").exists())
        command.send(signal.SIGUSR1, whom)
        until(lambda: (tmp_path / "got").exists())
        until(lambda got=got: set((tmp_path / "got").read_text().split()) == got)  # type: ignore[misc]
        command.end()
        assert not alive(command.pid)


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = started("sh", "-c", "kill -HUP $$; exit 4")
        assert ended(command) == 4
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert ended(started("sh", "-c", "kill -HUP $$; exit 4")) == 129
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended(started("sh", "-c", "kill -PIPE $$; exit 4")) == 141


def test_the_keeper_is_killed_and_nothing_is_left() -> None:
    command = started("sh", "-c", "sleep 321 & sleep 322", token="mark-321")
    until(lambda: sleepers("sleep 322"))
    os.kill(command.keeper, signal.SIGKILL)
    assert ended(command) == 137
    assert not sleepers("sleep 321")
    assert not sleepers("sleep 322")
    assert not alive(command.pid)


def test_marked_processes_are_found_wherever_they_are() -> None:
    other = subprocess.Popen(
        ["sh", "-c", "setsid sleep 331 & exit 0"], env=os.environ | {MARK: "mark-331"}
    )
    other.wait()
    until(lambda: sleepers("sleep 331"))
    assert end_marked(MARK, "mark-33") == set()
    assert sleepers("sleep 331")
    assert end_marked(MARK, "mark-331") == set()
    assert not sleepers("sleep 331")


def forked(work: Callable[[], Any]) -> int:
    """Run a guard in a fork of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work().code
        finally:
            os._exit(code)
    return child


def test_the_training_dies_with_its_guard(job: Job) -> None:
    """Killed with -9: the command, its orphans and its daemons are gone before the lock is free."""
    guard = forked(lambda: job.run(3, faults={1: {"hang": 2, "fork": 1}}))
    until(lambda: len(job.events("saved")) == 2)
    trainer = job.events("start")[0]["pid"]
    until(lambda: sleepers("sleep 300") and sleepers("sleep 301"))  # the daemon starts by itself
    os.kill(guard, signal.SIGKILL)
    os.waitpid(guard, 0)
    ended = job.run(3, wait_lock=60.0)  # waits for the keeper to end everything
    assert not alive(trainer)
    assert not sleepers("sleep 300")
    assert not sleepers("sleep 301")
    assert (ended.code, job.starts()) == (0, [0, 2])


def test_what_outlives_guard_and_keeper_is_ended_by_the_next_guard(job: Job) -> None:
    guard = forked(lambda: job.run(3, faults={1: {"hang": 2, "fork": 1}}))
    until(lambda: len(job.events("saved")) == 2)
    (start,) = job.logged("start")
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(guard)], capture_output=True, text=True, check=True
    )
    keeper = max(map(int, children.stdout.split()))
    os.kill(guard, signal.SIGSTOP)  # neither may end the tree
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    os.waitpid(guard, 0)
    until(lambda: not alive(job.events("start")[0]["pid"]))  # by the kernel
    assert sleepers("sleep 300")
    assert sleepers("sleep 301")
    assert job.run(3, wait_lock=60.0).code == 0
    assert not sleepers("sleep 300")
    assert not sleepers("sleep 301")
    assert job.starts() == [0, 2]
    told = [one for one in job.logged("ended") if one["token"] == start["token"]]
    assert [one["ending"] for one in told] == [None]


def test_without_a_lock_the_command_of_a_living_guard_is_left_alone(job: Job) -> None:
    guard = forked(lambda: job.run(3, faults={1: {"hang": 1}}, no_lock=True))
    until(lambda: job.events("saved"))
    trainer = job.events("start")[0]["pid"]
    assert job.run(words=["true"], no_lock=True).code == 0
    assert alive(trainer)
    os.kill(guard, signal.SIGTERM)
    os.waitpid(guard, 0)
    assert not alive(trainer)


def test_a_second_guard_is_refused_while_one_works(job: Job) -> None:
    from ftckpt.errors import RefusedError

    guard = forked(lambda: job.run(3, faults={1: {"hang": 1}}))
    until(lambda: job.events("saved"))
    with pytest.raises(RefusedError) as refused:
        job.run(3)
    assert refused.value.exit_code is ExitCode.REFUSED
    os.kill(guard, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) == 143
    assert job.starts() == [0]


def test_guards_killed_at_any_moment(job: Job) -> None:
    chance = random.Random(11)
    for _ in range(campaign.examples(6, 150)):
        faults = {n: {"pace": 0.01, "kill": chance.randint(3, 40), "fork": 1} for n in range(1, 9)}
        guard = forked(
            lambda faults=faults: job.run(  # type: ignore[misc]
                12, quick(limits=Limits(8, 0.0, 0.0)), faults=faults, wait_lock=60.0,
                choice={"skip_unverified": True}, retry_suspected=True,
            )
        )  # fmt: skip
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)
    ended = job.run(12, wait_lock=60.0, choice={"skip_unverified": True}, retry_suspected=True)
    assert ended.code == 0
    events = job.events()
    assert not [one for one in events if one["event"] == "TWICE"]
    for event in events:
        if event["event"] == "start":
            # The newest that was intact, unless the guard passed over it because it failed twice.
            assert event["step"] in (*event["good"], 0)
            assert not alive(event["pid"])
    assert not sleepers("sleep 300")
    assert not sleepers("sleep 301")


def test_a_guard_on_the_command_line(job: Job, tmp_path: Path) -> None:
    """The real program: output of the command on stdout, one JSON document under --json."""
    import json

    job.have(1, 2)
    job.flip(2)
    line = [sys.executable, "-m", "ftckpt", "guard", str(job.root), "--every", "0.05s"]
    words = ["sh", "-c", 'echo "$FTCKPT_RESUME $FTCKPT_STEP $1"; exit 6', "sh", "{}"]
    done = subprocess.run(
        [*line, "--max-restarts", "0", "--", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 6, done.stderr
    assert done.stdout == f"{job.root}/step-1 1 {job.root}/step-1\n"
    assert "step-2" in done.stderr
    done = subprocess.run(
        [*line, "--json", "--max-restarts", "0", "--", *job.words(4)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    validate(document)
    assert (done.returncode, document["result"]["name"]) == (0, "OK"), done.stderr
    assert (document["step"], document["restarts"]) == (1, 0)
    assert [one["event"] for one in document["decisions"]][:1] == ["start"]
