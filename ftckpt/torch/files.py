"""Hash files while they are written, through torch's own interface for files.

Hash what the workers of Megatron's and NVRx's asynchronous writers write.

`FileSystemWriterAsync` writes in another process, which opens its files with `open`, or with the
`open_file` that it was given. Both are replaced by `RecordingOpen`, which leaves the digest of each
file in a temporary directory; the rank takes them from there when the workers are done. A worker
that dies leaves none.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
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


class RecordingOpen:
    """An `open` that leaves the digest of each file which it wrote in a directory.

    It is sent to workers, so it can be pickled.

    Args:
        place: the directory.
        inner: what opens.
    """

    def __init__(self, place: str, inner: Callable[..., Any] = builtins.open) -> None:
        self.place = place
        self._open = inner

    def __call__(self, path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does; one that is written from its beginning is hashed."""
        stream = self._open(path, mode, *args, **kwargs)
        if mode != "wb":
            return stream
        return _RecordedFile(stream, os.fspath(path), self._record_of(path))

    def _record_of(self, path: Path) -> str:
        import xxhash

        # The last one to write a file speaks for it, and no name is too long.
        name = xxhash.xxh3_128_hexdigest(os.fspath(path).encode("utf-8", "surrogateescape"))
        return os.path.join(self.place, f"{name}.json")


class _RecordedFile(HashingStream):
    """A file whose digest is kept when it has been closed and nothing has failed."""

    def __init__(self, stream: Any, path: str, record: str) -> None:
        super().__init__(stream)
        self._path = path
        self._record = record
        self._failed = False
        with suppress(OSError):
            os.remove(record)

    def __enter__(self) -> _RecordedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    def close(self) -> None:
        """Close the file, and keep its digest."""
        self.end()
        if self._stream.closed:
            return
        self._stream.close()
        file = None if self._failed else self.file()
        if file is not None:
            with suppress(OSError):  # an unknown file is read once more
                _write(self._record, self._path, file)


class WorkersRecords:
    """The digests that the workers of one save leave, in a directory of its own."""

    def __init__(self) -> None:
        self._place = tempfile.mkdtemp(prefix="ftckpt-seal-")

    def opens(self, inner: Callable[..., Any] = builtins.open) -> RecordingOpen:
        """Return the `open` for the workers."""
        return RecordingOpen(self._place, inner)

    def take(self) -> dict[str, WrittenFile]:
        """Return what was left, by path."""
        found: dict[str, WrittenFile] = {}
        try:
            names = os.listdir(self._place)
        except OSError:  # something cleaned up: the files are read once more
            return found
        for name in names:
            with suppress(OSError, ValueError, KeyError, TypeError):
                with open(os.path.join(self._place, name), encoding="utf-8") as file:
                    said = json.load(file)
                blocks = bytes.fromhex(said["blocks"])
                found[str(said["path"])] = WrittenFile(int(said["size"]), blocks)
        return found

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._place, ignore_errors=True)


def recorded(save: Callable[..., Any], opens: RecordingOpen) -> Callable[..., Any]:
    """Return a writer's save function which keeps digests of what it writes; it can be pickled."""
    inner = save
    while isinstance(inner, partial):
        inner = inner.func
    # Decorated functions name the module in which they were written.
    return partial(_run, save, inner.__module__, opens)


def _run(
    save: Callable[..., Any], module: str, opens: RecordingOpen, *given: Any, **more: Any
) -> Any:
    """Save with another `open`: the module's own name for it, in this process and its children."""
    space = vars(sys.modules[module])
    before = space.get("open")
    space["open"] = opens
    try:
        return save(*given, **more)
    finally:
        if before is None:
            del space["open"]
        else:
            space["open"] = before


def _write(record: str, path: str, file: WrittenFile) -> None:
    said = {"path": path, "size": file.size, "blocks": file.blocks.hex()}
    with open(f"{record}.tmp", "w", encoding="utf-8") as out:
        json.dump(said, out)
    os.replace(f"{record}.tmp", record)
