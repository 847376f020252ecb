"""`ftckpt` on the PATH of the scripts that tests run: a small program that asks for a fork.

A script starts `ftckpt` many times, and each start imports for half a second and more. What stands
on its PATH here hands its words, directory, environment and streams over a socket to this process,
which lets the server of `forked` become the command.
"""

from __future__ import annotations

import array
import multiprocessing.process
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.workers.forked import FORKS, needs_a_start
from tests.workers.serving import serve_fds

_CLIENT = """\
#!{python} -IS
import _socket, posix, sys
link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
link.connect({place!r})
words = [word.encode("utf-8", "surrogateescape") for word in sys.argv[1:]]
told = b"\\0".join([posix.getcwdb(), b"%d" % len(words), *words,
                   *(b"=".join(pair) for pair in posix.environ.items())])
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
link.sendmsg([b"%08d" % len(told)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
link.sendall(told)
answer = link.recv(16)
if answer == b"start":
    posix.execv(sys.executable, [sys.executable, "-m", "ftckpt", *sys.argv[1:]])
sys.exit(int(answer) if answer else "tests/workers/command.py did not answer")
"""


_OF_OTHERS = ("PYTHONPATH",)  # it leads other programs of a script here, and the server is here
_STARTING = threading.Lock()
_ALL: Any = multiprocessing.process


class _Passed:
    """A descriptor that a child gets as it is, and not the file opened again."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


@contextmanager
def on_a_path() -> Iterator[Path]:
    """Yield a folder that holds `ftckpt`."""
    with tempfile.TemporaryDirectory(prefix="ftckpt-bin-") as name:
        folder = Path(name)
        place = str(folder / "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place)
            listening.listen(64)
            threading.Thread(target=_accept, args=(listening,), daemon=True).start()
            (folder / "ftckpt").write_text(_CLIENT.format(python=sys.executable, place=place))
            (folder / "ftckpt").chmod(0o755)
            yield folder


def _accept(listening: socket.socket) -> None:
    with suppress(OSError):  # it was closed: the session ends
        while True:
            link, _ = listening.accept()
            threading.Thread(target=_serve, args=(link,), daemon=True).start()


def _serve(link: socket.socket) -> None:
    with link:
        fds, told = _read(link)
        try:
            cwd, count, *rest = (os.fsdecode(one) for one in told.split(b"\0"))
            words, environment = rest[: int(count)], _pairs(rest[int(count) :])
            if needs_a_start(environment, _OF_OTHERS):
                link.sendall(b"start")
                return
            streams = [_Passed(fd) for fd in fds]
            process = FORKS.Process(target=serve_fds, args=(words, environment, cwd, streams))
            with _STARTING:
                process.start()
                # Else the start of another asks how this one ended, and takes the answer.
                _ALL._children.discard(process)
        finally:
            for fd in fds:
                os.close(fd)
        if link in wait([process.sentinel, link]):  # the one who asked was killed
            process.terminate()
        process.join()
        code = process.exitcode or 0
        process.close()
        with suppress(OSError):
            link.sendall(b"%d" % (code if code >= 0 else 128 - code))


def _read(link: socket.socket) -> tuple[list[int], bytes]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(3 * fds.itemsize)
    length, parts, _, _ = link.recvmsg(8, room)
    for _, _, data in parts:
        fds.frombytes(data)
    told = b""
    while len(told) < int(length):
        told += link.recv(int(length) - len(told))
    return list(fds), told


def _pairs(lines: list[str]) -> Mapping[str, str]:
    return dict(line.split("=", 1) for line in lines)
