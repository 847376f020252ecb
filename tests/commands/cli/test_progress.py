"""How progress is shown: a bar that fits, lines in a log, records for programs, answers."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.cli import progress
from ftckpt.commands.cli.invocation import Invocation, ProgressChoice
from ftckpt.commands.cli.progress import ProgressCounter, ProgressForm
from ftckpt.commands.cli.terminal import coloured
from tests.commands.golden import RUN, ftckpt

GIB = 1 << 30


class Clock:
    """A time that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", made)
    return made


def at_half(
    clock: Clock, label: str = "copying", form: ProgressForm = ProgressForm.SILENT
) -> ProgressCounter:
    """Return a counter in the middle of 3 GiB, at 0.5 GiB a second."""
    counter = ProgressCounter(io.StringIO(), form, verb="copy", errors=lambda: 2)
    counter.start(label, 3 * GIB)
    counter.files(40)
    for _ in range(3):
        clock.now += 1
        counter.add(GIB // 2)
        counter.file_done()
    return counter


def test_a_log_gets_a_line_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    counter = ProgressCounter(stream)
    counter.start("reading", 1000 << 20)
    for _ in range(100):
        clock.now += 1
        counter.add(1 << 20)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "reading: 30.0 MiB of 1000.0 MiB (3 %), 1.0 MiB/s, 16 min 10 s left"
    assert "\x1b" not in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", stream)
    for silent in (Invocation(quiet=True), Invocation(json=True)):
        silent.counter.start("reading", 100)
        clock.now += 100
        silent.counter.add(50)
        silent.close()
    assert stream.getvalue().splitlines() == lines


@pytest.mark.parametrize("label", ["copying", "digesting the rest of the base"])
@pytest.mark.parametrize("width", [40, 60, 79, 120, 200])
def test_the_bar_fits_and_says_what_is_left(clock: Clock, label: str, width: int) -> None:
    line = at_half(clock, label).bar(clock.now, width)
    assert len(line) <= width
    assert line.endswith("3.0 s left")
    assert "50 %" in line
    assert line.startswith(label if width > 40 else label[:20])
    if width >= 79 and label == "copying":
        assert "1.5 GiB of 3.0 GiB  512.0 MiB/s" in line
        done, left = re.findall(r"\[(#+)(\.+)\]", line)[0]
        assert abs(len(done) - len(left)) <= 1


def test_a_stall_shows_and_what_was_taken_over_is_forgotten(clock: Clock) -> None:
    counter = at_half(clock)
    assert counter.record(clock.now)["rate"] == GIB / 2
    for _ in range(60):
        clock.now += 1
        counter._show()  # what the thread does once a second
    stalled = counter.record(clock.now)
    assert (stalled["rate"], stalled["eta"]) == (0.0, None)
    assert "left" not in counter.bar(clock.now, 80)


def test_a_record_has_every_field(clock: Clock) -> None:
    counter = at_half(clock, form=ProgressForm.LINES)
    assert counter.record(clock.now) == {
        "schema": "ftckpt.progress/1", "verb": "copy", "phase": "copying", "unit": "bytes",
        "done": 3 * GIB // 2, "total": 3 * GIB, "rate": GIB / 2, "eta": 3.0,
        "files_done": 3, "files": 40, "errors": 2, "seconds": 3.0,
    }  # fmt: skip
    assert counter.answer() == (
        "copying: 1.5 GiB of 3.0 GiB (50 %), 512.0 MiB/s, 3.0 s left, 3 of 40 files, 2 errors"
    )
    counter.start("tensors", None, "tensors")
    unknown = counter.record(clock.now)
    assert unknown["unit"] == "tensors"
    assert {unknown[one] for one in ("total", "rate", "eta", "files", "files_done")} == {None}


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_json_is_a_record_for_each_stage_and_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_A_RECORD", 0.05)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run = Invocation(verb="verify", progress=ProgressChoice.JSON, json=True, quiet=True)
    run.counter.start("reading", 100)
    run.counter.add(50)
    time.sleep(0.3)  # nothing is counted meanwhile, and that is told too
    run.counter.start("proving", 10, "tensors")
    run.counter.add(10)
    run.close()
    told = records(stream.getvalue())
    phases = [one["phase"] for one in told]
    assert phases[0] == "reading"
    assert phases.count("reading") >= 4
    assert (phases[-1], told[-1]["done"], told[-1]["unit"]) == ("proving", 10, "tensors")
    assert [one["verb"] for one in told] == ["verify"] * len(told)


def test_a_verb_tells_its_stages(tmp_path: Path) -> None:
    done = ftckpt("copy", RUN / "step-1", tmp_path / "out", "--progress", "json", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["result"]["code"] == 0
    told = {one["phase"]: one for one in records(done.stderr)}
    assert told["copying"]["files"] == 3
    assert told["copying"]["total"] > 60_000


def test_the_crc_check_knows_its_end(tmp_path: Path) -> None:
    done = ftckpt("verify", RUN / "step-1", "--progress", "json")
    told = next(one for one in records(done.stderr) if one["phase"] == "checking CRC-32")
    size = sum(file.stat().st_size for file in (RUN / "step-1").iterdir())
    assert told["total"] == size
    last = records(done.stderr)[-1]
    assert 0.8 * size < last["done"] <= size


def on_a_terminal(*words: str, **environment: str) -> str:
    """Return what a command line shows on a terminal of 80 columns, stdout and stderr."""
    parent, child = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, *words], stdout=child, stderr=child,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"} | environment,
    )  # fmt: skip
    os.close(child)
    shown = b""
    try:
        while more := os.read(parent, 65536):
            shown += more
    except OSError:  # the other end is closed: the end of the output
        pass
    os.close(parent)
    done.wait(timeout=60)
    return shown.decode()


def test_a_bar_goes_away_and_lines_stand_above_it() -> None:
    script = (
        "import time\n"
        "from ftckpt.commands.cli import progress\n"
        "from ftckpt.commands.cli.invocation import Invocation\n"
        "progress.SECONDS_BEFORE_BAR = 0.0\n"
        "run = Invocation()\n"
        "run.counter.start('reading', 100)\n"
        "run.counter.add(50)\n"
        "time.sleep(0.3)\n"
        "run.say('a [red]remark[/red]')\n"
        "time.sleep(0.3)\n"
        "run.print('the answer')\n"
        "run.close()\n"
    )
    shown = on_a_terminal("-c", script)
    assert shown.count("reading  \x1b[") >= 2  # a bar in the terminal's colours
    assert "\u2501" in shown
    assert "\r\x1b[Ka [red]remark[/red]\r\n" in shown
    assert shown.endswith("\r\x1b[Kthe answer\r\n")


def test_a_signal_is_answered_and_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(bytes(64 << 20))
    script = (
        "import os, signal, sys, time\n"
        "from ftckpt.commands.cli.app import main\n"
        "from ftckpt.commands import seal\n"
        "from ftckpt.digests import blocks as digests\n"
        "real = digests.hash_or_fail\n"
        "def slow(block):\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(0.5)\n"
        "    return real(block)\n"
        "import ftckpt.verification.blocks as blocks\n"
        "blocks.hash_or_fail = slow\n"
        "sys.argv = ['ftckpt', *sys.argv[1:]]\n"
        "main()\n"
    )
    shutil.copytree(RUN / "step-1", tmp_path / "step-1")
    assert ftckpt("seal", tmp_path / "step-1").returncode == 0
    run = subprocess.Popen(
        [sys.executable, "-c", script, "verify", str(tmp_path / "step-1"), "--jobs", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    answers = 0
    while run.poll() is None and not (tmp_path / "ready").exists():
        time.sleep(0.02)  # before it is asked it must be able to answer
    while run.poll() is None and answers < 3:
        run.send_signal(signal.SIGUSR1)
        answers += 1
        time.sleep(0.2)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert out.startswith("ok: ")
    lines = [line for line in err.splitlines() if ": " in line]
    assert len(lines) == answers > 0
    assert any(line.startswith("checking digests: ") for line in lines), err


def test_an_error_is_said_once_in_one_terminal_and_twice_apart(here: Path) -> None:
    file = here / "run/step-1/__0_1.distcp"
    data = bytearray(file.read_bytes())
    data[15_000] ^= 1
    file.write_bytes(data)
    words = ("-m", "ftckpt", "verify", str(here / "run/step-1"))
    shown = on_a_terminal(*words, NO_COLOR="1")
    assert shown.count("has the CRC-32") == 1
    assert "ftckpt: CORRUPT (exit code 4): see the error above" in shown
    assert "hint: " in shown
    apart = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert apart.stdout.count("has the CRC-32") == apart.stderr.count("has the CRC-32") == 1


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("-m", "ftckpt", "verify", str(RUN / "step-1"))
    assert "\x1b[32mok\x1b[0m: " in on_a_terminal(*words)
    assert "\x1b[36mnote\x1b[0m: " in on_a_terminal(*words)
    assert "\x1b[" not in on_a_terminal(*words, NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(*words, TERM="dumb")
    assert "\x1b[" not in ftckpt(*words[2:]).stdout
    assert "\x1b[31mftckpt\x1b[0m: " in on_a_terminal("-m", "ftckpt", "latest", "/no/where")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    table = "step  class\n----  -------\n   1  CORRUPT\n   2  STAGING\nthe job is CORRUPT"
    assert coloured(Terminal(), table) == (
        "\x1b[1mstep  class\x1b[0m\n----  -------\n   1  \x1b[31mCORRUPT\x1b[0m\n"
        "   2  \x1b[33mSTAGING\x1b[0m\nthe job is CORRUPT"
    )
