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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from ftckpt.errors import FtckptError

from . import mapped_worker
from .pagecache import has_cachestat, is_cached

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ftckpt.limits import RateLimit
    from ftckpt.store import Store

# Fewer bytes than this are read before processes for them have been started.
WORTH = 1 << 30
# So many ranges in a row that are better read mean that the others are too.
ENOUGH = 4
# What the interpreter itself may need of the environment.
_NEEDED = ("LD_LIBRARY_PATH",)
# So many descriptors are left to others, besides those that our processes and readers need.
SPARE = 64
# How long an answer may take, in seconds, before the ranges in memory are read instead.
PATIENCE = 10.0


Range = tuple[str, int, int]
"""The path of a file in its store, the first byte, and the number of bytes."""


class MappedHashing:
    """A few processes that hash ranges of cached files; any thread may ask."""

    def __init__(self, store: Store, jobs: int) -> None:
        """Start nothing yet.

        Args:
            store: where the files are.
            jobs: how many processes there may be.
        """
        self.closed = False
        # Whether what was asked for last was hashed so: a guess at what comes next.
        self.useful = True
        # How many ranges may be asked for at once. Each thread opens as many files for it, and each
        # process takes another descriptor.
        self.most = max(1, min(mapped_worker.MOST, (_descriptors() - SPARE) // max(1, jobs) - 1))
        self._store = store
        self._lock = Lock()
        self._jobs = self._startable = max(1, jobs)
        self._refused = 0
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._started: list[_Worker] = []

    def digests(self, ranges: Sequence[Range]) -> list[bytes | None]:
        """Return the XXH3-128 of each range, 16 bytes, or None where the caller is to read it.

        Args:
            ranges: up to `most`.
        """
        found: list[bytes | None] = [None] * len(ranges)
        with ExitStack() as opened:
            wanted = self._wanted(ranges, opened)
            answers = self._ask(list(wanted.values())) if wanted else []
        for number, answer in zip(wanted, answers, strict=False):
            self._refused = 0 if answer else self._refused + 1
            found[number] = answer
        self.useful = any(found)
        return found

    def _wanted(self, ranges: Sequence[Range], opened: ExitStack) -> dict[int, bytes]:
        """Open the files of those ranges that may be mapped; return what to ask of each."""
        wanted: dict[int, bytes] = {}
        for number, (path, offset, length) in enumerate(ranges):
            if self._refused >= ENOUGH:
                break
            if offset % mapped_worker.HUGE or length < 2 * mapped_worker.HUGE:
                continue
            with suppress(FtckptError, OSError):  # reading will say what it is
                fd = opened.enter_context(self._store.open(path)).fileno()
                if fd is not None and is_cached(fd, offset, length):
                    wanted[number] = _request(fd, offset, length)
        return wanted

    def _ask(self, requests: Sequence[bytes]) -> list[bytes | None]:
        """Return the answers to requests, or none where no process answers."""
        worker = self._worker()
        if worker is None:
            return []
        try:
            answers = worker.ask(requests)
        except OSError:  # dead or deaf; no other is started in its place
            worker.close()
            return []
        self._idle.put(worker)
        if self.closed:
            self._close_idle()
        return answers

    def close(self) -> None:
        """End the processes, whatever they do; nobody waits for one any more."""
        with self._lock:
            self.closed = True
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
            if self.closed or not self._startable:
                return None
            if _descriptors() < self._jobs + SPARE:
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


def _request(fd: int, offset: int, length: int) -> bytes:
    """Return a request of `mapped_worker`."""
    file = os.fstat(fd)
    text = f"{fd} {file.st_dev} {file.st_ino} {offset} {length}"
    return text.encode().ljust(mapped_worker.REQUEST)


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
        # Messages of the line are kept apart, so that one call sends or takes all of one.
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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

    def ask(self, requests: Sequence[bytes]) -> list[bytes | None]:
        """Return the digest that answers each request of `mapped_worker`, or None.

        Raises:
            OSError: it has died, does not answer, or answers something else.
        """
        # One that has died since is no reason for a SIGPIPE, which a host may not ignore.
        self._line.send(b"".join(requests), socket.MSG_NOSIGNAL)
        width, head = mapped_worker.ANSWER, mapped_worker.REQUEST
        message = self._line.recv(len(requests) * width + 1)
        answers = [message[start : start + width] for start in range(0, len(message), width)]
        if len(message) % width or [answer[:head] for answer in answers] != list(requests):
            raise BrokenPipeError
        return [answer[head + 1 :] if answer[head] else None for answer in answers]

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
    hashing = MappedHashing(store, jobs)
    try:
        yield hashing
    finally:
        hashing.close()


def _is_possible() -> bool:
    """Say whether this system tells what is cached, and our own program is the interpreter."""
    program = os.path.basename(sys.executable or "")
    frozen = getattr(sys, "frozen", False)  # then it is whatever was packed, of whatever name
    return program.startswith("python") and not frozen and has_cachestat()


def _descriptors() -> int:
    """Return how many more this process may open: what takes the last ones fails readers."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return sys.maxsize
    with suppress(OSError):
        return allowed - len(os.listdir("/proc/self/fd"))
    return 0
