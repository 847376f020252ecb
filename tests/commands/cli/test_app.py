from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.amounts import duration
from ftckpt.commands.cli import app, render, verbs
from ftckpt.commands.cli import watchdog as ending
from ftckpt.commands.cli.derive import COMMON, STORAGE
from ftckpt.commands.cli.invocation import Result
from ftckpt.commands.cli.render import (
    human_bytes,
    human_count,
    human_duration,
    json_text,
    printable,
    table,
)
from ftckpt.errors import ExitCode, FtckptError, UsageError
from tests.workers.forked import run

DATA = Path(__file__).parents[2] / "data"

# Verbs that only exist in the process of a test: what a verb can do to the app.
FAKE = """
import sys, types
from ftckpt import errors
from ftckpt.commands.cli import app, environment, verbs
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode

def command(invocation: Invocation) -> Result | None:
    "A verb of a test."
    invocation.report(target="here", number=float("nan"))
{body}

module = types.ModuleType("ftckpt.commands.fake")
module.command, module.EXAMPLES, module.CODES = command, (), {{}}
sys.modules["ftckpt.commands.fake"] = module
verbs.VERBS["fake"] = "A verb of a test"
app.main()
"""


def ftckpt(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(arguments, os.environ | environment)


def fake_script(body: str) -> str:
    return FAKE.format(body="\n".join("    " + line for line in body.splitlines()))


def fake(body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", fake_script(body), "fake", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the result record of the one JSON document on stdout."""

    def refuse(token: str) -> None:
        raise AssertionError(f"a bare {token} in JSON")

    document = json.loads(done.stdout, parse_constant=refuse)
    record = document["result"]
    assert record["code"] == done.returncode
    assert record["name"] == ExitCode(done.returncode).name
    assert isinstance(record, dict)
    return record


def test_errors_become_their_exit_code() -> None:
    for error in FtckptError.__subclasses__():
        code = app.verdict(error("what, where", hint="do this"))
        assert code == Result(error.exit_code, "what, where", "do this")
    assert app.verdict(MemoryError()).code is ExitCode.NO_RESOURCE
    unmapped = ImportError("libblas.so: failed to map segment from shared object")
    assert app.verdict(unmapped).code is ExitCode.NO_RESOURCE
    assert app.verdict(ImportError("no module named x")).code is ExitCode.INTERNAL
    assert app.verdict(KeyError("x")).code is ExitCode.INTERNAL


def test_an_error_is_a_sentence_and_a_hint() -> None:
    done = fake('raise errors.CorruptError("it is bad", hint="do this")')
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "ftckpt: it is bad\nhint: do this\n"


def test_a_bug_is_never_a_verdict() -> None:
    done = fake('raise KeyError("x")', "--json")
    record = result_of(done)
    assert done.returncode == 1
    assert "a bug in ftckpt" in record["message"]
    assert "--debug" in record["hint"]
    assert "Traceback" not in done.stderr
    assert "Traceback" in fake('raise KeyError("x")', "--debug").stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('raise errors.UnsafeError("no")', 7),
        ("raise MemoryError", 12),
        ("open('/nowhere/at/all')", 1),
        ("import errno; raise OSError(errno.EACCES, 'no', 'file')", 11),
        ("import errno; raise OSError(errno.ENOSPC, 'no')", 12),
        ("raise ZeroDivisionError", 1),
        ('return Result(ExitCode.DIFFERENT, "they differ")', 3),
        ("return None", 0),
        ("sys.exit('out')", 1),
    ],
)
def test_json_ends_in_a_result_in_every_case(body: str, code: int) -> None:
    done = fake(body, "--json")
    assert done.returncode == code
    result_of(done)
    document = json.loads(done.stdout)
    assert document["schema"] == "ftckpt.fake/1"
    assert (document["target"], document["number"]) == ("here", "NaN")


@pytest.mark.parametrize(
    "arguments",
    [
        ("latest", "--json"),
        ("latest", "--json", "--no-such-flag", "x"),
        ("latest", "--json", "x", "--level", "nonsense"),
        ("latest", "--json", "x", "--max-fallback", "-1"),
        ("latest", "--json", "x", "--timeout", "soon"),
        ("nosuchverb", "--json"),
        ("--json",),
    ],
)
def test_usage_errors_are_json_too(arguments: tuple[str, ...]) -> None:
    done = ftckpt(*arguments)
    assert done.returncode == 2
    assert result_of(done)["message"]


def test_usage_errors_say_what_was_meant() -> None:
    done = ftckpt("seal", "first", "of a path")
    assert (done.returncode, done.stdout) == (2, "")
    assert "more arguments than seal takes: of a path" in done.stderr
    assert "hint: leave @7 out" in ftckpt("inspect", str(DATA / "run" / "step-1@7")).stderr
    assert ftckpt().returncode == 2
    assert ftckpt().stderr.startswith(ftckpt("--help").stdout) == (ftckpt("--help").stdout != "")


def test_short_forms_are_taken() -> None:
    assert ftckpt("-h").stdout == ftckpt("--help").stdout != ""
    assert ftckpt("-V").stdout == ftckpt("version").stdout == ftckpt("--version").stdout != ""


def test_json_after_a_double_dash_is_a_path() -> None:
    done = ftckpt("latest", "--", "--json")
    assert (done.returncode, done.stdout) == (15, "")


def test_version_and_help_topics() -> None:
    done = ftckpt("--version")
    assert (done.returncode, done.stdout) == (0, "ftckpt 0.1.0\n")
    topic = ftckpt("help", "exit-codes").stdout
    for code in ExitCode:
        assert f" {int(code)} " in topic
        assert code.name in topic
    assert "FTCKPT_ENDPOINT" in ftckpt("help", "environment").stdout
    assert ftckpt("help", "latest").stdout == ftckpt("latest", "--help").stdout
    assert ftckpt("help", "nothing").returncode == 2
    assert "delta unpack  Write" in ftckpt("help", "delta").stdout
    assert "FTCKPT_RETRY_SECONDS" in ftckpt("help", "environment").stdout


def test_help_ends_in_examples_and_codes() -> None:
    text = ftckpt("latest", "--help").stdout
    assert text.index("Options:") < text.index("Examples:") < text.index("Exit codes:")
    assert "130" in text
    assert text.isascii()


def test_options_from_the_environment_are_used_and_shown(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / "empty")
    done = ftckpt("latest", path, FTCKPT_RETRY_SECONDS="5", FTCKPT_JSON="1")
    document = json.loads(done.stdout)
    assert document["environment"] == {"FTCKPT_RETRY_SECONDS": "5", "FTCKPT_JSON": "1"}
    assert ftckpt("latest", path, FTCKPT_RETRY_SECONDS="nonsense").returncode == 2
    done = ftckpt("latest", path, FTCKPT_JSON="0")
    assert (done.returncode, done.stdout) == (15, "")
    done = ftckpt("latest", FTCKPT_JSON="yes")  # a usage error, in JSON all the same
    assert result_of(done)["code"] == 2


def test_common_and_storage_options_alone_have_variables() -> None:
    for verb in verbs.VERBS:
        for param in verbs.load(verb).params:
            common = param.name in COMMON | STORAGE
            assert bool(param.envvar) is common, (verb, param.name)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("hang", ["time.sleep(600)", "pool.submit(time.sleep, 600).result()"])
def test_signals_end_it_even_where_threads_hang(
    number: signal.Signals, code: int, hang: str
) -> None:
    body = (
        "import time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        f"    {hang}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", fake_script(body), "fake", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.2)  # a signal just before a wait begins is seen when it ends
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)  # far less than the thread hangs
    assert process.returncode == code
    assert json.loads(stdout)["result"]["code"] == code
    assert "Traceback" not in stderr


# Each keeps the interpreter for ever inside C code: no handler and no thread of Python runs.
_IN_C = {
    "here": "ready()\nhash(endless)",
    "in a thread": "ready()\n"
    "threading.Thread(target=hash, args=(endless,)).start()\n"
    "threading.Event().wait()",
    "after the handler": "try:\n"
    "    ready()\n"
    "    while True: time.sleep(0.01)\n"
    "finally: hash(endless)",
}


def computing(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_PROC = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc here")


def keep_in_c(where: str) -> subprocess.Popen[str]:
    """Start a verb that C code keeps, or will keep once its handler was called."""
    body = (
        "import threading, time\n"
        "endless = ()\n"
        "for _ in range(80): endless = (endless, endless)\n"
        "def ready(): print('ready', file=sys.stderr, flush=True)\n" + _IN_C[where]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", fake_script(body), "fake", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    if where != "after the handler":
        wait_for_c(process)
    return process


def wait_for_c(process: subprocess.Popen[str]) -> None:
    """Nothing but the C code computes for so long."""
    before = computing(process.pid)
    while process.poll() is None and computing(process.pid) < before + 0.2:
        time.sleep(0.02)


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> None:
    stdout, stderr = process.communicate(timeout=60)
    # A shell sees 128 and the number, as it does where Python could end it.
    assert process.returncode == -number
    assert json.loads(stdout)["result"]["code"] == 128 + number
    assert "Traceback" not in stderr


@_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", _IN_C)
def test_signals_end_it_where_c_code_keeps_the_interpreter(
    number: signal.Signals, where: str
) -> None:
    process = keep_in_c(where)
    process.send_signal(number)
    ended_by(process, number)


@_PROC
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_busy_machine_that_delivers_late_changes_no_exit_code(number: signal.Signals) -> None:
    """A signal that waits to be delivered swallows the next: two at once may be one."""
    process = keep_in_c("after the handler")
    process.send_signal(number)
    wait_for_c(process)
    process.send_signal(signal.SIGSTOP)  # as if it had no turn
    end = time.monotonic() + 60
    while process.poll() is None and not is_pending(process.pid, number):
        assert time.monotonic() < end, "the watchdog sends nothing"
        time.sleep(0.02)
    time.sleep(0.2)  # far longer than a delivery takes
    process.send_signal(signal.SIGCONT)
    ended_by(process, number)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Say whether a signal waits to be delivered to a process."""
    with open(f"/proc/{pid}/status") as file:
        waiting = next(line.split()[1] for line in file if line.startswith("ShdPnd:"))
    return bool(int(waiting, 16) >> (number - 1) & 1)


def test_what_watches_a_process_ends_with_it() -> None:
    """It would hold the output open: its reader would wait for ever."""
    body = "import os, signal\nprint('ready', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    done = fake(body)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n")


_AWAY = (
    "class Away:\n"
    "    def find_spec(self, name, *_):\n"
    "        if name == '{name}':\n"
    "            raise OSError(5, 'Input/output error', '/opt/ftckpt/x.py')\n"
    "sys.meta_path.insert(0, Away())\n"
)


def test_modules_that_cannot_be_read_are_storage_and_no_bug() -> None:
    done = fake(
        _AWAY.format(name="ftckpt.discovery.resolve") + "import ftckpt.discovery.resolve", "--json"
    )
    assert result_of(done)["code"] == 10
    assert "/opt/ftckpt/x.py" in done.stderr
    body = "from ftckpt.commands import nothing_of_that_name"
    assert result_of(fake(body, "--json"))["code"] == 1  # a name that never was is a bug
    body = "raise ModuleNotFoundError('No module named x', name='ftckpt.discovery.resolve')"
    assert result_of(fake(body, "--json"))["code"] == 10


def test_modules_that_cannot_be_read_at_the_start_are_storage_and_no_bug() -> None:
    script = (
        "import sys\nfrom ftckpt.__main__ import main\n"
        + _AWAY.format(name="ftckpt.commands.cli.app")
        + "sys.argv[1:] = ['verify', 'x', '--json']\n"
        + "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result_of(done)["code"] == 10
    assert "Traceback" not in done.stderr


def test_a_thread_that_cannot_be_started_is_a_lack_of_resources() -> None:
    body = (
        "import threading\n"
        'def refuse(*_, **__): raise RuntimeError("can\'t start new thread")\n'
        "threading._start_new_thread = threading._start_joinable_thread = refuse\n"
        "threading.Thread(target=print).start()"
    )
    assert result_of(fake(body, "--json"))["code"] == 12


def test_without_room_for_another_process_it_works_as_well() -> None:
    body = (
        "import os\n"
        "from ftckpt.commands.cli import watchdog\n"
        "def refuse(): raise BlockingIOError(11, 'no more processes')\n"
        "os.fork = refuse\n"
        "watchdog.start(print)\n"
    )
    assert fake(body).returncode == 0


def test_a_signal_in_a_callback_is_not_lost() -> None:
    """What is raised there goes nowhere: the process went on, with a traceback on stderr."""
    done = fake(
        "import os, signal, weakref\n"
        'thing = type("Thing", (), {})()\n'
        "callback = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
        "del thing",
        "--json",
    )
    assert (done.returncode, done.stderr) == (143, "")
    assert result_of(done)["code"] == 143


def test_ctrl_c_before_anything_is_imported_leaves_no_traceback() -> None:
    script = (
        "import os, signal, sys\n"
        "from ftckpt.__main__ import main\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'ftckpt.commands.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def handlers() -> list[object]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    return [*map(signal.getsignal, numbers), sys.unraisablehook]


@pytest.mark.parametrize("arguments", [["--version"], ["no-such-verb"]])
def test_a_run_in_this_process_puts_signal_handlers_back(arguments: list[str]) -> None:
    before = handlers()
    with pytest.raises(SystemExit):
        app.main(arguments)
    assert handlers() == before


def test_a_signal_that_was_swallowed_ends_nothing_later() -> None:
    before, words = handlers(), list[ExitCode]()
    with ending.signals_caught(words.append):
        assert handlers() != before
        with pytest.raises(ending.SignalError):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert (handlers(), words) == (before, [])


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    body = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + fake_script(body)
    done = subprocess.run([sys.executable, "-c", script, "fake"], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "command",
    ["help exit-codes", "--help", "help environment --json", "nosuchverb --json", "--version"],
)
def test_a_closed_pipe_is_141_and_silent(command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "ftckpt", *command.split()],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert process.returncode == 141
    assert b"Traceback" not in process.stderr
    assert b"BrokenPipe" not in process.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["help exit-codes --json", "--help", "verify --help"])
def test_a_full_disk_under_stdout_is_12(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 12
    assert done.stderr.startswith("ftckpt: cannot write to standard output: ")
    assert "Traceback" not in done.stderr


def test_closed_streams_and_no_home() -> None:
    command = [sys.executable, "-m", "ftckpt", "help", "exit-codes"]
    done = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], timeout=60, check=False)
    assert done.returncode == 0
    environment = {k: v for k, v in os.environ.items() if k != "HOME"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_any_name_can_be_printed_in_any_locale(tmp_path: Path) -> None:
    name = os.fsdecode("r\u00fcn".encode() + b"\xff\x1b[31m")
    (tmp_path / name).mkdir()
    path = os.path.join(tmp_path, name)
    for more in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}):
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", "latest", path],
            capture_output=True,
            env=os.environ | more,
            timeout=60,
            check=False,
        )
        assert done.returncode == 15
        assert b"\x1b" not in done.stderr
        assert b"\\xff" in done.stderr
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", "latest", path, "--json"],
            capture_output=True,
            env=os.environ | more,
            timeout=60,
            check=False,
        )
        assert done.stdout.isascii()
        assert json.loads(done.stdout)["target"].endswith("\\xff\x1b[31m")


def test_json_is_plain_data() -> None:
    from ftckpt.findings import finding

    text = json_text(
        {
            "inf": float("-inf"),
            "code": ExitCode.CORRUPT,
            "lone": "\ud800\udcff",
            "finding": finding("nan", "here", tensor="w"),
            "result": Result(ExitCode.OK, "m"),
            "set": {2, 1},
            "raw": (b"\x00",),
            "keys": {1: None},
        }
    )
    document = json.loads(text)
    assert document["inf"] == "-Infinity"
    assert document["code"] == "CORRUPT"
    assert document["lone"] == "\\ud800\\xff"
    assert document["finding"]["tensor"] == "w"
    assert document["result"] == {"code": "OK", "message": "m", "hint": ""}
    assert (document["set"], document["raw"], document["keys"]) == ([1, 2], ["00"], {"1": None})


def test_quantities_as_text() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 TiB",
    ]
    assert [human_count(n) for n in (950, 1200, 7_000_000_000)] == ["950", "1.2 K", "7.0 B"]
    assert [human_duration(s) for s in (0.085, 4.2, 185, 7620, 273600)] == [
        "85 ms",
        "4.2 s",
        "3 min 05 s",
        "2 h 07 min",
        "3 d 04 h",
    ]
    assert printable("a\x1b[0m\u202eb\n\udcff") == "a\\x1b[0m\\u202eb\\x0a\\xff"
    assert table(("name", "size>"), [("a", 5), ("two\nlines", 12345)]).splitlines() == [
        "name           size",
        "------------  -----",
        "a                 5",
        "two\\x0alines  12345",
    ]
    assert [duration(t, "-") for t in ("90s", "1.5h", "2 d", "250ms", "0")] == [
        90,
        5400,
        172800,
        0.25,
        0,
    ]
    for wrong in ("", "soon", "90", "-5", "5 parsecs", "1e999"):
        with pytest.raises(UsageError):
            duration(wrong, "--timeout")


def test_every_exit_code_has_a_meaning() -> None:
    assert set(render.MEANINGS) == set(ExitCode)
    assert ending.GRACE < 2
