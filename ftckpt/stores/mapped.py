"""Hash cached files where they lie, without copying them, by processes that may die of it.

Reading a cached file is a copy, and half as much again as hashing what was copied. A mapped file
is hashed in place, but a file that is truncated meanwhile, or a disk that fails, then kills
whoever touches it (SIGBUS). So small processes of their own touch it (`mapped_processes`), and
whatever becomes of them, the caller can still read, and learns there what is wrong.

It is done only where it pays and changes nothing:
- every page of the range is cached (cachestat, Linux 6.5): what is not is read as ever, and does
  not stay in the page cache;
- the page cache holds it in pieces of 2 MiB, as it does what was written in large pieces; mapping
  4 KiB at a time was slower than reading;
- there is so much of it that starting processes does not matter; until they answer, it is read;
- nobody asked for a rate.
"""

from __future__ import annotations

import os
import resource
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from ftckpt.errors import FtckptError

from . import mapped_worker
from .mapped_processes import Line, Processes
from .pagecache import has_cachestat, is_cached

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ftckpt.limits import RateLimit
    from ftckpt.store import Store

# Fewer bytes than this are read before processes for them have been started.
WORTH = 1 << 30
# So many ranges in a row that are better read mean that the others are too.
ENOUGH = 4
# So many descriptors are left to others, besides those that our processes and readers need.
SPARE = 64
# How long who asks waits, in seconds, for processes that are being started; meanwhile it can read.
WAIT = 0.0


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
        self.useful = False
        # How many ranges may be asked for at once. Each thread opens as many files for it, and each
        # process takes another descriptor.
        self.most = max(1, min(mapped_worker.MOST, (_descriptors() - SPARE) // max(1, jobs) - 1))
        self._store = store
        self._lock = Lock()
        self._jobs = max(1, jobs)
        self._refused = 0
        self._processes: Processes | None = None
        self._starting: list[Line] = []
        self._idle: SimpleQueue[Line] = SimpleQueue()
        self._startable = True

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
        line = self._line()
        if line is None:
            return []
        try:
            answers = line.ask(requests)
        except OSError:  # dead or deaf; no other is started in its place
            line.close()
            return []
        self._idle.put(line)
        if self.closed:
            self._close_idle()
        return answers

    def close(self) -> None:
        """End the processes, whatever they do; nobody waits for one any more."""
        with self._lock:
            self.closed = True
            starting, self._starting = self._starting, []
        if self._processes is not None:
            self._processes.end()
        for line in starting:
            line.close()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _line(self) -> Line | None:
        """Return the line to a process that has nothing to do, or None where there is none yet."""
        with suppress(Empty):
            return self._idle.get_nowait()
        # Who comes while another starts them reads.
        if not self._lock.acquire(timeout=WAIT):
            return None
        try:
            if self.closed:
                return None
            if self._startable:
                self._startable = False
                self._start()
            self._look()
        finally:
            self._lock.release()
        with suppress(Empty):
            return self._idle.get_nowait()
        return None

    def _start(self) -> None:
        if _descriptors() < 2 * self._jobs + SPARE:
            return
        with suppress(OSError):  # no more processes, memory or descriptors
            self._processes = Processes(self._jobs)
            self._starting = list(self._processes.lines)

    def _look(self) -> None:
        """See which of the processes that are being started have come so far, or have died."""
        looking = select.poll()
        lines = {line.fileno(): line for line in self._starting}
        for number in lines:
            looking.register(number, select.POLLIN)
        for number, _ in looking.poll(WAIT * 1000) if lines else ():
            line = lines.pop(number)
            if line.is_served():
                self._idle.put(line)
            else:
                line.close()
        self._starting = list(lines.values())


def _request(fd: int, offset: int, length: int) -> bytes:
    """Return a request of `mapped_worker`."""
    file = os.fstat(fd)
    text = f"{fd} {file.st_dev} {file.st_ino} {offset} {length}"
    return text.encode().ljust(mapped_worker.REQUEST)


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
