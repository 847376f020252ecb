"""What one run may hold in memory, and how many workers that carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ftckpt import amounts
from ftckpt.errors import NoResourceError

# Memory that a copy of this process takes for itself beside what its work holds: pages of the
# interpreter's, which are shared until an object on them is touched. Going through the tasks
# touches those of an index: of 100,000 tensors, which are most of what is held then, a quarter of
# all pages.
_OWN = 24 << 20
_TOUCHED = 2  # the share of what is held that becomes a copy's own, as a divisor
_DECODING = 2  # the share of the budget that is left where what is read is decoded, as a divisor
# More threads do not help beyond this number: each holds the interpreter's lock a sixth of its
# time.
MOST_THREADS = 5

# The command line's `--max-memory`. One run may be several processes.
_budget = 1 << 30
_processes = 1


def set_budget(nbytes: int) -> None:
    """Set what one run may hold, in bytes."""
    global _budget
    _budget = nbytes


def budget() -> int:
    """Return what one run may hold, in bytes."""
    return _budget


def divide(processes: int) -> None:
    """Note how many processes share the budget with this one."""
    global _processes
    _processes = processes


def share() -> int:
    """Return what this process may hold of the budget, in bytes."""
    return _budget // _processes


def held(*, mapped: bool = False) -> int:
    """Return how many bytes this process holds; 0 where nothing says it.

    Args:
        mapped: whether pages of files count, those of its libraries: the kernel can take them back,
            and counts them as the process's all the same.
    """
    try:
        with open("/proc/self/status", "rb") as status:
            fields = dict(line.split(b":", 1) for line in status if b":" in line)
        names = (b"RssAnon", b"RssFile") if mapped else (b"RssAnon",)
        return sum(int(fields[name].split()[0]) for name in names) << 10
    except (OSError, KeyError, ValueError):
        return 0


def demand(nbytes: int, what: str, *, decoding: bool = False) -> None:
    """Refuse a step that is known to need more than the budget, before it begins.

    Args:
        nbytes: what it needs.
        what: the step, as the subject of a sentence.
        decoding: see `thread_count`.

    Raises:
        NoResourceError: with the number that would be enough.
    """
    nbytes *= _DECODING if decoding else 1
    if nbytes > _budget:
        needed = -(-nbytes // (1 << 20))
        raise NoResourceError(
            f"{what} needs about {needed} MiB of memory and {_budget >> 20} MiB are allowed",
            hint=f"--max-memory {needed}MiB",
        )


def thread_count(
    wanted: int, each: int, *, reserved: int = 0, decoding: bool = False, mapped: bool = False
) -> int:
    """Return how many threads fit into the budget beside what is held already; 1 at least.

    Args:
        wanted: how many at most.
        each: bytes that one of them holds.
        reserved: bytes that are needed once: to read ahead, or for modules still to be imported.
        decoding: whether what they read is decoded, which takes its share of the budget.
        mapped: see `held`.
    """
    return max(1, min(wanted, _room(reserved, decoding=decoding, mapped=mapped) // each))


def process_count(wanted: int, each: int, *, reserved: int = 0, decoding: bool = False) -> int:
    """Return how many copies of this process do more than `wanted` threads; 0 where none do.

    Args:
        wanted: number of threads that fit into the budget.
        each: see `thread_count`.
        reserved: see `thread_count`.
        decoding: see `thread_count`.
    """
    count = min(wanted, _room(reserved, decoding=decoding) // (each + own_of_a_copy()))
    return count if count >= max(2, min(wanted, MOST_THREADS)) else 0


def own_of_a_copy() -> int:
    """Return the bytes that a copy of this process takes for itself, as things are now."""
    return max(_OWN, held() // _TOUCHED)


def _room(reserved: int, *, decoding: bool = False, mapped: bool = False) -> int:
    return _budget // (_DECODING if decoding else 1) - held(mapped=mapped) - reserved


@contextmanager
def bounded(size: amounts.Size) -> Iterator[int]:
    """Let what runs inside hold so much memory and no more, and yield it in bytes.

    What the machine or its limits have left is the most. The budget is one for the process.

    Args:
        size: in bytes, or a text: "1GiB".

    Raises:
        UsageError: the text is not a size.
    """
    from . import limits

    nbytes = amounts.size(size)
    available, before = limits.memory(), _budget
    set_budget(nbytes if available is None else min(nbytes, available))
    try:
        yield nbytes
    finally:
        set_budget(before)
