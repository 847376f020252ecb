"""`ftckpt replay run` that is interrupted: nothing goes on behind it, and the next one takes over.

`--campaign full` interrupts twenty trials at random moments.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.golden import ftckpt
from tests.commands.replay.replaying import SCRIPT, replay
from tests.replay.test_running import alive


def test_an_interrupted_trial_goes_on(script: Path) -> None:
    trial = script.parent / "trial"
    command = [
        sys.executable, "-m", "ftckpt", "replay", "run", "--dir", str(trial), "--steps", "4",
        "--", sys.executable, str(script), "{checkpoint}",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"FAULT": ""}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    while not (trial / "baseline-1" / "outcome.json").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    kept = (trial / "baseline-1" / "outcome.json").stat().st_mtime_ns
    assert replay(script)["result"]["code"] == 0
    assert (trial / "baseline-1" / "outcome.json").stat().st_mtime_ns == kept
    # All of it is there now, so nothing runs; and another script is another trial.
    assert replay(script, fault="crash")["result"]["code"] == 0
    script.write_text(script.read_text() + "# changed\n")
    answer = replay(script)
    assert answer["result"]["code"] == 8
    assert "files that changed" in answer["result"]["message"]


# Starts the training in a session of its own and waits for it, as torchrun does.
LAUNCHER = """
import subprocess, sys
from pathlib import Path
process = subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)
with Path(__file__).with_name("pids").open("a") as file:
    print(process.pid, file=file)
sys.exit(process.wait())
"""


@contextmanager
def begun(*words: str | Path, fault: str) -> Iterator[subprocess.Popen[str]]:
    """Run `replay run` beside the test; it is killed where the test leaves it running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ftckpt", "replay", "run", *map(str, words)], text=True,
        env=os.environ | {"FAULT": fault}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_killed_run_has_left_is_ended_by_the_next(script: Path) -> None:
    trial, pids = script.parent / "trial", script.parent / "pids"
    launcher = script.parent / "launch.py"
    launcher.write_text(LAUNCHER)
    words: list[str | Path] = [
        "--dir", trial, "--steps", "4", "--", sys.executable, launcher, script, "{checkpoint}",
    ]  # fmt: skip
    output = trial / "baseline-1" / "output.txt"
    with begun(*words, fault="hang") as process:
        wait_for(lambda: output.exists() and "step 4" in output.read_text())
        second = ftckpt("replay", "run", *words)
        assert second.returncode == 8, second.stderr
        assert "another run is at work in" in second.stderr
        process.kill()
    left = int(pids.read_text().split()[-1])
    assert alive(left)
    done = ftckpt("replay", "run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended the training that a killed run had left there" in done.stderr
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a process to another's life")
def test_a_training_does_not_outlive_the_run_that_started_it(script: Path) -> None:
    words: list[str | Path] = [
        "--dir",
        script.parent / "trial",
        "--",
        sys.executable,
        script,
        "{checkpoint}",
    ]
    pid = script.parent / "pid"
    script.write_text(f"open({str(pid)!r}, 'w').write(str(__import__('os').getpid()))\n" + SCRIPT)
    output = script.parent / "trial" / "baseline-1" / "output.txt"
    with begun(*words, fault="hang") as process:
        wait_for(lambda: output.exists() and "step 4" in output.read_text())
        assert alive(int(pid.read_text()))
        process.kill()
        wait_for(lambda: not alive(int(pid.read_text())))


def test_whenever_it_is_interrupted_it_goes_on_to_the_same_verdict(
    script: Path, pytestconfig: pytest.Config
) -> None:
    rounds = 20 if pytestconfig.getoption("campaign") == "full" else 1
    choose = random.Random(7)
    for number in range(rounds):
        trial = script.parent / f"trial-{number}"
        words: list[str | Path] = [
            "--dir",
            trial,
            "--steps",
            "4",
            "--",
            sys.executable,
            script,
            "{checkpoint}",
        ]
        for patience in itertools.count():
            how = choose.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
            # A busy machine gets nothing done in a second, time after time.
            after = choose.uniform(0.1, 1.2) * 1.2**patience
            with begun(*words, fault="forgets") as process:
                try:
                    process.wait(after)
                except subprocess.TimeoutExpired:
                    process.send_signal(how)
                    process.wait(60)
                else:
                    break
        assert process.returncode == 3, number
        answer = replay(script, "--dir", str(trial), fault="forgets")
        assert answer["verdict"] == "state", answer["result"]
        assert [(c["component"], c["step"]) for c in answer["causes"]] == [("computation", 5)]


def test_half_a_trial_is_not_taken_for_another(script: Path) -> None:
    trial = script.parent / "trial"
    trial.mkdir()
    (trial / "trial.lock").touch()
    assert replay(script, "--runs", "1")["result"]["code"] == 0, "killed before it wrote anything"
    (trial / "trial.json").write_text('{"command": [')
    answer = replay(script)
    assert answer["result"]["code"] == 8
    assert "something else" in answer["result"]["message"]
