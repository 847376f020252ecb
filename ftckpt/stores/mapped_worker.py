"""A process that hashes mapped files for `mapped`, and may die of it.

Run as a script, without `site` and by a path of its own, so that it starts in a few milliseconds:
it imports nothing but what it needs. A message on the socket that is its input is up to `MOST`
requests, and the message that comes back as many answers, in order. A request is five numbers as
text in `REQUEST` bytes: a descriptor of its parent, the device and inode behind it, offset and
length. Its answer is `ANSWER` bytes: the request again, so that no answer is taken for that of
another; then 1 and the digest, or 0 where the range is better read. The end of its input ends it.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys

REQUEST = 128
ANSWER = REQUEST + 17
MOST = 8
# What a processor maps by one entry of its tables, on the machines where this is tried at all.
HUGE = 2 << 20

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
# How often the kernel may be entered to map as much as `HUGE`; by pages it is entered 32 times.
_FAULTS = 4


def digest(path: str, identity: tuple[int, int], offset: int, length: int) -> bytes | None:
    """Return the XXH3-128 of a range of a file, in canonical form, or None where reading is better.

    Args:
        path: of the file.
        identity: its device and inode; a `/proc` of other processes leads to other files.
        offset: where the range begins, a multiple of `HUGE`.
        length: of the range, at least twice `HUGE`.

    Raises:
        OSError: it cannot be opened, mapped, or brought into memory.
        ValueError: the file is shorter.
    """
    from xxhash import xxh3_128_digest

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != identity:
            return None
        mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
    finally:
        os.close(fd)
    with mapped:
        if not _is_huge(mapped, length // 2 // HUGE * HUGE):
            return None
        # What fails here is an error; what fails when it is touched is the end of the process.
        mapped.madvise(_POPULATE_READ)
        answer: bytes = xxh3_128_digest(mapped)
        return answer


def _is_huge(mapped: mmap.mmap, start: int) -> bool:
    """Say whether the page cache holds what is mapped at `start` in one piece."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mapped.madvise(_POPULATE_READ, start, HUGE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before <= _FAULTS


def serve(parent: int, line: int) -> None:
    """Answer requests of the process `parent` until there are no more.

    Args:
        parent: its number; descriptors are of this process.
        line: descriptor of the socket, which keeps messages apart.
    """
    while asked := os.read(line, MOST * REQUEST):
        requests = [asked[start : start + REQUEST] for start in range(0, len(asked), REQUEST)]
        os.write(line, b"".join(_answer(parent, request) for request in requests))


def _answer(parent: int, request: bytes) -> bytes:
    fd, device, inode, offset, length = map(int, request.split())
    try:
        found = digest(f"/proc/{parent}/fd/{fd}", (device, inode), offset, length)
    except (OSError, ValueError):  # reading will say what it is, and where
        found = None
    return request + (bytes(17) if found is None else b"\1" + found)


def main() -> None:
    """Serve the parent that started this script, which says where xxhash is installed."""
    # The end of a process that dies of a file is no matter for a debugger.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.append(sys.argv[1])
    serve(int(sys.argv[2]), 0)


if __name__ == "__main__":
    main()
