"""Processes that hash mapped files for `mapped`, and may die of it.

Run as a script, without `site` and by a path of its own, so that it starts in a few milliseconds:
it imports nothing but what it needs. It is given a few lines, sockets that keep messages apart, and
forks itself so that each has a process, which says `READY` there. A message on a line is then up to
`MOST` requests, and the message that comes back as many answers, in order. A request is five
numbers as text in `REQUEST` bytes: a descriptor of the parent, the device and inode behind it,
offset and length. Its answer is `ANSWER` bytes: the request again, so that no answer is taken for
that of another; then 1 and the digest, or 0 where the range is better read. The end of its line
ends a process.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys

READY = b"ready"
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


def share(lines: list[int]) -> int:
    """Fork until each line has a process; return the line of the one that runs on here.

    Args:
        lines: descriptors; each stays open in one process alone, or its end would not be seen.

    Raises:
        OSError: no more processes can be made; those that there are serve their lines.
    """
    mine, *others = lines
    while others:
        line = others.pop()
        if not os.fork():
            for other in (mine, *others):
                os.close(other)
            return line
        os.close(line)
    return mine


def serve(parent: int, line: int) -> None:
    """Answer requests of the process `parent` until there are no more.

    Args:
        parent: its number; descriptors are of this process.
        line: descriptor of the socket, which keeps messages apart.
    """
    os.write(line, READY)
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
    """Serve the parent that started this script: arguments are where xxhash is, it, the lines."""
    # The end of a process that dies of a file is no matter for a debugger.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    where, parent, *lines = sys.argv[1:]
    sys.path.append(where)
    import xxhash  # noqa: F401 - while there is one of us to do it

    serve(int(parent), share([int(line) for line in lines]))


if __name__ == "__main__":
    main()
