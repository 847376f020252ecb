"""Hash cached files where they lie, without copying them, by processes that may die of it.

Reading a cached file is a copy, and half as much again as hashing what was copied. A mapped file
is hashed in place, but a file that is truncated meanwhile, or a disk that fails, then kills
whoever touches it (SIGBUS). So small processes of their own touch it (`mapped_worker`), and
whatever becomes of them, the caller can still read, and learns there what is wrong.

It is done only where it pays and changes nothing:
- every page of the range is cached (cachestat, Linux 6.5): what is not is read as ever, and does
  not stay in the page cache;
- the page cache holds it in pieces of 2 MiB, as it does what was written in large pieces; mapping
  4 KiB at a time was slower than reading;
- there is so much of it that starting processes, some 8 ms, does not matter;
- nobody asked for a rate.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from . import mapped_worker
from .pagecache import has_cachestat, is_cached

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ftckpt.limits import RateLimit
    from ftckpt.store import Reader, Store

# Fewer bytes than this are read before processes for them have been started.
WORTH = 1 << 30
# So many ranges in a row that are better read mean that the others are too.
ENOUGH = 4
# What the interpreter itself may need of the environment.
_NEEDED = ("LD_LIBRARY_PATH",)
# So many descriptors are left to others, besides those that our processes and readers need.
SPARE = 64
# How long an answer about one range of memory may take, in seconds, before it is read instead.
PATIENCE = 10.0


class MappedHashing:
    """A few processes that hash ranges of cached files; any thread may ask."""

    def __init__(self, jobs: int) -> None:
        """Start nothing yet.

        Args:
            jobs: how many processes there may be.
        """
        self._lock = Lock()
        self._jobs = jobs
        self._startable = jobs
        self._closed = False
        self._refused = 0
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._started: list[_Worker] = []

    def digest(self, reader: Reader, offset: int, length: int) -> bytes | None:
        """Return the XXH3-128 of a range, 16 bytes, or None where the caller is to read it.

        Args:
            reader: of the file.
            offset: first byte.
            length: number of bytes.
        """
        fd = reader.fileno()
        if fd is None or offset % mapped_worker.HUGE or length < 2 * mapped_worker.HUGE:
            return None
        if self._refused >= ENOUGH or not is_cached(fd, offset, length):
            return None
        worker = self._worker()
        if worker is None:
            return None
        try:
            answer = worker.ask(fd, offset, length)
        except OSError:  # dead or deaf; no other is started in its place
            worker.close()
            return None
        self._idle.put(worker)
        if self._closed:
            self._close_idle()
        if not answer[0]:
            self._refused += 1
            return None
        self._refused = 0
        return answer[1:]

    def close(self) -> None:
        """End the processes, whatever they do; who waits for one reads instead."""
        with self._lock:
            self._closed = True
        for worker in self._started:
            worker.kill()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _worker(self) -> _Worker | None:
        """Return a process that has nothing to do, a new one if need be; None where none can be."""
        with suppress(Empty):
            return self._idle.get_nowait()
        with self._lock:
            if self._closed or not self._startable:
                return None
            if not _has_descriptors(2 * self._jobs + SPARE):
                self._startable = 0
                return None
            self._startable -= 1
            try:
                worker = _Worker()
            except OSError:  # no more processes, memory or descriptors
                self._startable = 0
                return None
            self._started.append(worker)
            return worker


class _Worker:
    """One process and the line to it; one thread at a time asks."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        import xxhash

        where = str(Path(xxhash.__file__).parent.parent)
        script = str(mapped_worker.__file__)
        # Its standard output is not the line: what is loaded into every process may write there.
        self._line, theirs = socket.socketpair()
        self._line.settimeout(PATIENCE)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", script, where, str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Who collects crashes keeps the environment, and there are secrets in ours.
                    env={name: os.environ[name] for name in _NEEDED if name in os.environ},
                    # Ctrl-C is for us; and a thread that asks just then is not to be told nonsense.
                    start_new_session=True,
                )
        except OSError:
            self._line.close()
            raise

    def ask(self, fd: int, offset: int, length: int) -> bytes:
        """Return the answer of `mapped_worker`, without the request that it repeats.

        Raises:
            OSError: it has died, does not answer, or answers something else.
        """
        file = os.fstat(fd)
        text = f"{fd} {file.st_dev} {file.st_ino} {offset} {length}".encode()
        request = text.ljust(mapped_worker.REQUEST)
        # One that has died since is no reason for a SIGPIPE, which a host may not ignore.
        self._line.send(request, socket.MSG_NOSIGNAL)
        answer = self._line.recv(mapped_worker.ANSWER)
        if len(answer) != mapped_worker.ANSWER or not answer.startswith(request):
            raise BrokenPipeError
        return answer[mapped_worker.REQUEST :]

    def kill(self) -> None:
        """Kill it; a thread that waits for its answer hears that it has died."""
        self._process.kill()

    def close(self) -> None:
        """Kill it and let go of it; nobody may be asking."""
        self.kill()
        # What hangs in the kernel does not even die; it is not waited for.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._line.close()


@contextmanager
def mapped_hashing(
    store: Store,
    nbytes: int,
    jobs: int,
    executor: Executor | None = None,
    limiter: RateLimit | None = None,
) -> Iterator[MappedHashing | None]:
    """Have files hashed where they lie for as long as the block runs, or None where they cannot be.

    Args:
        store: where they are.
        nbytes: how much there is to hash.
        jobs: how many processes there may be.
        executor: what asks, where that is not threads of this process.
        limiter: bounds the rate of reading; nothing bounds that of mapping.
    """
    here = store.traits.local and executor is None and limiter is None
    if not here or nbytes < WORTH or not _is_possible():
        yield None
        return
    hashing = MappedHashing(jobs)
    try:
        yield hashing
    finally:
        hashing.close()


def _is_possible() -> bool:
    """Say whether this system tells what is cached, and our own program is the interpreter."""
    program = os.path.basename(sys.executable or "")
    frozen = getattr(sys, "frozen", False)  # then it is whatever was packed, of whatever name
    return program.startswith("python") and not frozen and has_cachestat()


def _has_descriptors(number: int) -> bool:
    """Say whether this process may still open so many: what takes the last ones fails readers."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return True
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd")) + number <= allowed
    return False
