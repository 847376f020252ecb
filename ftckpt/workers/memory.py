"""Bound what one step may allocate, whatever the input says."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# A pickle of nine bytes can ask the interpreter for gigabytes (a memo index, a declared length).
# The C unpickler cannot be told a limit, so the process is given one while it works. The margin is
# for what the thread itself and the watchdog's take meanwhile: buffers, a TLS connection.
MARGIN = 256 << 20
# What another thread may take meanwhile, in addresses: its stack (8 MiB), the heap that the C
# library reserves for it (128 MiB, of which it gives half back), buffers of 2 x 16 MiB.
_THREAD = 168 << 20
# CUDA answers "out of memory" where addresses run out: a context's own pools, kernels that are
# loaded when they are first used, page-locked memory.
_CUDA = 4 << 30

# Addresses that importing numpy takes, measured; its OpenBLAS takes 40 MiB more for each processor.
_NUMPY = 88 << 20

_M_ARENA_MAX = -8  # <malloc.h>

_lock = threading.RLock()
_depth = 0
_limitless = 0
_saved: tuple[int, int] | None = None


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Let the process's address space grow by at most `nbytes` (and a margin) inside the block.

    Nested and concurrent blocks share the outermost bound. Where the system has no such limit,
    the block runs unbounded.

    Raises:
        MemoryError: from inside the block, instead of growing further.
    """
    global _depth, _saved  # one limit a process
    if _limitless:
        yield
        return
    with _lock:
        _depth += 1
        if _depth == 1:
            _saved = _lower(nbytes + MARGIN + _others())
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _saved is not None:
                _restore(_saved)
                _saved = None


@contextmanager
def in_a_job() -> Iterator[None]:
    """Leave the limits of this process as they are: it trains, and its other threads map memory.

    What a pickle may ask for is then held by the walk over its opcodes alone, which refuses a memo
    and bytes that its size can never fill.
    """
    global _limitless  # one limit a process
    with _lock:
        _limitless += 1
    try:
        with no_gc():
            yield
    finally:
        with _lock:
            _limitless -= 1


def spare_addresses() -> None:
    """Let libraries take no more than they need; before numpy is imported.

    OpenBLAS, of which next to nothing is used, is told to make no threads: they spin for a while
    after each call, as many as there are processors, and in each copy of this process again.

    Where the address space is limited (`ulimit -v`), all threads share one heap. The C library
    reserves 64 MiB of addresses for the heap of each thread, most of which is never memory
    (mallopt(3), M_ARENA_MAX): a few threads use up a limit that leaves room for the work. And where
    OpenBLAS has no room at all the import of numpy is an error instead of its exit.
    """
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # For the library alone: programs that are started are given what `os.environ` has.
        os.putenv("OPENBLAS_NUM_THREADS", "1")
    try:
        import resource

        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            return
        if not any(isinstance(one, _NumpyGuard) for one in sys.meta_path):
            sys.meta_path.insert(0, _NumpyGuard())
        import ctypes

        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    except (ImportError, OSError, AttributeError):  # another C library has no such heaps
        return


class _NumpyGuard:
    """Asked before modules are looked for: OpenBLAS ends the process where addresses run out."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Find nothing; raise MemoryError when numpy is imported without room for it."""
        if name == "numpy":
            import mmap

            try:
                mmap.mmap(-1, _NUMPY).close()
            except OSError as error:
                raise MemoryError("no room for numpy") from error


def _others() -> int:
    """Return how many addresses the other threads of this process may take meanwhile.

    Where there is one, it may start as many as there are processors.
    """
    count = threading.active_count() - 1
    torch: Any = sys.modules.get("torch")
    cuda = _CUDA if torch is not None and torch.cuda.is_initialized() else 0
    return cuda + (max(count, os.cpu_count() or 1) * _THREAD if count > 0 else 0)


def _lower(growth: int) -> tuple[int, int] | None:
    try:
        import resource

        with open("/proc/self/statm", "rb") as statm:
            pages = int(statm.read().split()[0])
        limit = pages * resource.getpagesize() + growth
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY and soft <= limit:
            return None
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        return None
    return soft, hard


def _restore(limits: tuple[int, int]) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the cycle collector out of a large allocation: 3-5 times faster."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
