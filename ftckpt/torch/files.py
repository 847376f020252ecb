"""Hash files while they are written, through torch's own interface for files."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase

from ftckpt.extents import BLOCK

if TYPE_CHECKING:
    import io

Path = str | os.PathLike[str]

# Bytes of a write from which another thread hashes it while this one writes.
_APART = 1 << 18


class WrittenFile(NamedTuple):
    """Size and digests of one file, by the bytes that were written to it.

    Attributes:
        size: bytes.
        blocks: XXH3-128 of each 64 MiB block, put together (`ftckpt.digests.blocks`).
    """

    size: int
    blocks: bytes


class HashingFiles(FileSystemBase):
    """A filesystem of torch's that hashes what is written through it.

    Attributes:
        written: path -> what was written there, once its stream has ended well.
    """

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs: Any = fs
        self.written: dict[str, WrittenFile] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_fs":
            raise AttributeError(name)
        return getattr(self._fs, name)

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; one that is written from its beginning is hashed."""
        self.written.pop(os.fspath(path), None)
        with self._fs.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = HashingStream(stream)
            try:
                yield cast("io.IOBase", hashing)
            finally:
                hashing.end()
        file = hashing.file()
        if file is not None:
            self.written[os.fspath(path)] = file

    def concat_path(self, path: Path, suffix: str) -> Path:
        """Join a path and a name."""
        return cast("Path", self._fs.concat_path(path, suffix))

    def rename(self, path: Path, new_path: Path) -> None:
        """Rename a file, and what is known of it."""
        self._fs.rename(path, new_path)
        file = self.written.pop(os.fspath(path), None)
        if file is not None:
            self.written[os.fspath(new_path)] = file

    def init_path(self, path: Path) -> Path:
        """Prepare the filesystem for a path."""
        return cast("Path", self._fs.init_path(path))

    def mkdir(self, path: Path) -> None:
        """Make a directory."""
        self._fs.mkdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Say that it is never chosen by a path alone."""
        return False

    def exists(self, path: Path) -> bool:
        """Whether a file exists."""
        return bool(self._fs.exists(path))

    def rm_file(self, path: Path) -> None:
        """Remove a file, and what is known of it."""
        self._fs.rm_file(path)
        self.written.pop(os.fspath(path), None)


class HashingStream:
    """A stream that is written from front to back, hashed by blocks on the way.

    Another thread hashes a large write while this one hands it on, and both wait for each other:
    the buffer is the caller's. Where no thread can be started, this one hashes. Nothing that goes
    wrong with a hash fails the write: the file is unknown then.
    """

    def __init__(self, stream: Any) -> None:
        import xxhash

        self._stream = stream
        self._new = xxhash.xxh3_128
        self._state = xxhash.xxh3_128()
        self._thread: Executor | None = None
        self._alone = False  # no thread could be started
        self._size = 0
        self._blocks: list[bytes] = []
        self._known = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        """Write bytes, and hash those that were taken."""
        view = self._bytes_of(data) if self._known else None
        if view is None:
            return cast("int", self._stream.write(data))
        hashing = self._begin(view) if len(view) >= _APART else None
        try:
            taken = self._stream.write(data)
        finally:
            if hashing is not None:
                hashing.result()
        if hashing is None:
            self._follow(view)
        if taken != len(view) and taken is not None:
            self._known = False  # a raw stream took a part: its end is not what was hashed
        return len(view) if taken is None else cast("int", taken)

    def seek(self, *where: Any) -> int:
        """Move; what is written elsewhere than at the end is not followed."""
        self._known = False
        return cast("int", self._stream.seek(*where))

    def truncate(self, *size: Any) -> int:
        """Cut the file; it is not followed any more."""
        self._known = False
        return cast("int", self._stream.truncate(*size))

    def end(self) -> None:
        """Let the thread go."""
        if self._thread is not None:
            self._thread.shutdown()

    def file(self) -> WrittenFile | None:
        """Return what was written; None if it is not known."""
        if not self._known:
            return None
        last = [self._state.digest()] if self._size % BLOCK else []
        return WrittenFile(self._size, b"".join((*self._blocks, *last)))

    def _bytes_of(self, data: Any) -> memoryview | None:
        try:
            return memoryview(data).cast("B")
        except Exception:  # such as an array without elements, which a file takes
            self._known = False
            return None

    def _begin(self, view: memoryview) -> Future[None] | None:
        """Hash in another thread; None if there is none to be had, as when the script has ended.

        `ThreadPoolExecutor` takes nothing then, and an asynchronous save may still be writing.
        """
        if self._alone:
            return None
        try:
            from ftckpt.workers.threads import DaemonThreads

            self._thread = self._thread or DaemonThreads(1)
            return self._thread.submit(self._follow, view)
        except Exception:
            self._alone = True  # what was submitted may still lie there: never that executor again
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            return None

    def _follow(self, view: memoryview) -> None:
        try:
            self._add(view)
        except Exception:
            self._known = False

    def _add(self, view: memoryview) -> None:
        while len(view):
            part = view[: BLOCK - self._size % BLOCK]
            self._state.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK == 0:
                self._blocks.append(self._state.digest())
                self._state = self._new()
