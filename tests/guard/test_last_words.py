"""The end of what a command prints, from wherever its stderr goes."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from pathlib import Path

import pytest

from ftckpt.guard.supervise import LastWords, last_lines, tells_of_a_full_disk

SCRIPT = "echo before >&2; seq 1 9999 >&2; echo 'the end' >&2"


def run(stderr: int, script: str = SCRIPT) -> str:
    words = LastWords(stderr)
    process = subprocess.Popen(
        ["sh", "-c", script], stderr=stderr if words.descriptor is None else words.descriptor
    )
    words.started()
    process.wait()
    return words.text()


@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
def test_a_file_is_read_where_the_command_wrote(tmp_path: Path, flags: int) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_bytes(b"of the attempt before\n")
    file = os.open(path, os.O_WRONLY | flags)
    os.lseek(file, 0, os.SEEK_END)
    text = run(file)
    assert last_lines(text).endswith("9998 | 9999 | the end")
    assert last_lines(run(file, "echo 'the next' >&2")) == "the next"
    assert run(file, "true") == ""
    os.close(file)


def test_what_goes_into_a_pipe_arrives_there_too() -> None:
    source, sink = os.pipe()
    seen: list[bytes] = []
    with open(source, "rb") as file:
        reader = threading.Thread(target=lambda: seen.append(file.read()))
        reader.start()
        text = run(sink)
        os.close(sink)
        reader.join()
    assert last_lines(text).endswith("9998 | 9999 | the end")
    assert seen[0].startswith(b"before\n1\n2\n")
    assert seen[0].endswith(b"9999\nthe end\n")


def test_a_pipe_that_nobody_reads_does_not_stop_the_command() -> None:
    source, sink = os.pipe()
    os.close(source)
    assert last_lines(run(sink)).endswith("the end")
    os.close(sink)


def test_a_terminal_stays_the_commands_own() -> None:
    master, slave = pty.openpty()
    words = LastWords(slave)
    assert words.descriptor is None
    assert words.text() == ""
    os.close(master)
    os.close(slave)
    assert LastWords(slave).text() == ""  # closed


def test_lines_are_few_short_and_printable() -> None:
    text = "a\n\n  b\x00\u202e\r50%\r\n" + "x" * 999 + "\nc\nd\n"
    assert last_lines(text) == "b?? | 50% | " + "x" * 300 + " | c | d"
    assert last_lines("") == ""


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("RuntimeError: [enforce fail at inline_container.cc] Disk quota exceeded", True),
        ("OSError: [Errno 122]", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)  # fmt: skip
def test_what_tells_of_a_full_disk(text: str, full: bool) -> None:
    assert tells_of_a_full_disk(text) is full
