"""Seal checkpoints inside the training process.

    import torch.distributed.checkpoint as dcp
    from ftckpt.torch import SealingWriter

    dcp.save(state, storage_writer=SealingWriter(dcp.FileSystemWriter("/ckpt/step-1000")))

The writer hashes bytes while they are written, so a seal costs no second read. A failure to seal is
a warning and leaves an unsealed checkpoint: it never ends a training, unless `strict` is set.
Importing this module imports torch and nothing else that is heavy.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.storage import StorageWriter

from .extents import BLOCK
from .own_files import MANIFEST

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from .manifest.seal import SealReport

T = TypeVar("T")
Path = str | os.PathLike[str]

# Bytes of a write from which another thread hashes it while this one writes.
_APART = 1 << 18


class SealWarning(UserWarning):
    """A checkpoint was saved and could not be sealed."""


class WrittenFile(NamedTuple):
    """Size and digests of one file, by the bytes that were written to it.

    Attributes:
        size: bytes.
        blocks: XXH3-128 of each 64 MiB block, put together (`ftckpt.digests.blocks`).
    """

    size: int
    blocks: bytes


class SealingWriter(StorageWriter):
    """Any file-based `StorageWriter` of DCP, whose checkpoints are sealed when they are finished.

    The files are the same bytes as without it. Every rank hashes what it writes; DCP's own gather
    brings the digests to the coordinator, which publishes the manifest last. A save that was cut
    short has no manifest. A manifest of an earlier save in the same place is removed before the
    first byte is written.

    Saves without collectives have no coordinator: they stay unsealed, with a warning.

    Args:
        writer: `FileSystemWriter`, `FsspecWriter`, `HuggingFaceStorageWriter`, or another that
            writes through a `fs` of torch's `FileSystemBase`.
        strict: raise what hinders the seal, instead of a warning.

    Raises:
        TypeError: the writer has no such `fs`.
    """

    def __init__(self, writer: StorageWriter, *, strict: bool = False) -> None:
        fs = getattr(writer, "fs", None)
        if not isinstance(fs, FileSystemBase):
            raise TypeError(f"{type(writer).__name__} does not write through a FileSystemBase")
        self._files = _HashingFiles(fs)
        inner: Any = writer
        inner.fs = self._files  # its writes go through ours
        self._writer = inner
        self._strict = strict
        self._together = True

    def __getattr__(self, name: str) -> Any:
        # Pickled for `async_save` in a process, it is asked before it has its attributes.
        if name.startswith("__") or name == "_writer":
            raise AttributeError(name)
        return getattr(self._writer, name)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Begin a new save, at another place if one is given."""
        self._files.written.clear()
        self._writer.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank's writer."""
        self._together = kwargs.get("use_collectives", True)
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Prepare this rank's plan."""
        return cast("SavePlan", self._writer.prepare_local_plan(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prepare the plan of all ranks, on the coordinator, and remove an earlier save's seal."""
        prepared = cast("list[SavePlan]", self._writer.prepare_global_plan(plans))
        self._guarded(self._remove_seal)
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; the future's list carries their digests."""
        writing: Future[list[WriteResult]] = self._writer.write_data(plan, planner)
        return writing.then(lambda done: _Results(done.value(), self._files.written))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on the coordinator, and publish the manifest last."""
        self._writer.finish(metadata, results)
        written = {path: file for one in results for path, file in digests_of(one).items()}
        self._guarded(lambda: self._seal(written | self._files.written))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Say that it is never chosen by a path alone."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return the inner writer's."""
        return cast("StorageMeta | None", self._writer.storage_meta())

    @property
    def _place(self) -> str:
        # Hugging Face's writer keeps its shards below the directory that it consolidates into.
        place: Path = getattr(self._writer, "consolidated_output_path", None) or self._writer.path
        return os.fspath(place)

    def _remove_seal(self) -> None:
        path = self._files.concat_path(self._place, MANIFEST)
        if self._files.exists(path):
            self._files.rm_file(path)

    def _seal(self, written: Mapping[str, WrittenFile]) -> None:
        from .errors import UnsupportedError

        place = self._place
        if not self._together:
            raise UnsupportedError(
                f"{place} was saved without collectives, so no rank knows when it is whole",
                hint=f"ftckpt seal {place}",
            )
        start = place.rstrip("/") + "/"
        known = {path[len(start) :]: f for path, f in written.items() if path.startswith(start)}
        seal_after(place, written=known, strict=True)

    def _guarded(self, do: Callable[[], None]) -> None:
        _guarded(do, self._place, strict=self._strict)


def barrier() -> None:
    """Wait for every rank, where there are several."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()


class _Results(list[Any]):
    """What a rank wrote, in DCP's own words, with the digests of its files beside it."""

    def __init__(self, results: Iterable[WriteResult], written: Mapping[str, WrittenFile]) -> None:
        super().__init__(results)
        self.written = dict(written)


def digests_of(results: list[WriteResult]) -> Mapping[str, WrittenFile]:
    """Return the digests that a rank's results carry, by path; none if it has no sealing writer."""
    return results.written if isinstance(results, _Results) else {}


def seal_after(
    path: Path, *, written: Mapping[str, WrittenFile] | None = None, strict: bool = False
) -> SealReport | None:
    """Seal a checkpoint that this process has just finished; call it on one rank, after a barrier.

    Files without known digests are read once more. Nothing is verified: the seal says what the
    files hold now.

    Args:
        path: directory, file or URL of the checkpoint.
        written: digests of its files by their relative paths.
        strict: raise what hinders the seal; otherwise it is a `SealWarning` and the answer None.

    Raises:
        FtckptError: `strict`, and it is not whole, or the manifest could not be written.
    """
    place = os.fspath(path)

    def seal() -> SealReport:
        from .api import open_checkpoint
        from .manifest import FileDigest
        from .manifest import seal as sealing

        known = [FileDigest(name, f.size, f.blocks) for name, f in (written or {}).items()]
        return sealing.seal(open_checkpoint(place), force=True, known=known)

    return _guarded(seal, place, strict=strict)


def _guarded(do: Callable[[], T], place: str, *, strict: bool) -> T | None:
    """Do what must not end a training: a failure is a warning, unless `strict`."""
    try:
        return do()
    except Exception as error:
        if strict:
            raise
        hint = getattr(error, "hint", "")
        told = f"{place} is not sealed: {error or type(error).__name__}"
        warnings.warn(f"{told} ({hint})" if hint else told, SealWarning, stacklevel=4)
        return None


class _HashingFiles(FileSystemBase):
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
            hashing = _HashingStream(stream)
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


class _HashingStream:
    """A stream that is written from front to back, hashed by blocks on the way.

    Another thread hashes a large write while this one hands it on, and both wait for each other:
    the buffer is the caller's.
    """

    def __init__(self, stream: Any) -> None:
        import xxhash

        self._stream = stream
        self._new = xxhash.xxh3_128
        self._state = xxhash.xxh3_128()
        self._thread: ThreadPoolExecutor | None = None
        self._size = 0
        self._blocks: list[bytes] = []
        self._known = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        """Write bytes, and hash those that were taken."""
        view = memoryview(data).cast("B")
        if len(view) < _APART:
            taken = self._stream.write(data)
            self._add(view)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "ftckpt-seal")
            hashing = self._thread.submit(self._add, view)
            try:
                taken = self._stream.write(data)
            finally:
                hashing.result()
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

    def _add(self, view: memoryview) -> None:
        while len(view):
            part = view[: BLOCK - self._size % BLOCK]
            self._state.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK == 0:
                self._blocks.append(self._state.digest())
                self._state = self._new()
