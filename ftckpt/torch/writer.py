"""A writer of DCP around another one, whose checkpoints are sealed when they are finished.

Seal a checkpoint that has just been written, without ending the training if that fails.

Seal the saves of trainers that call `dcp.save` with a path and make no writer.
"""

from __future__ import annotations

import functools
import os
import posixpath
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from ftckpt.own_files import MANIFEST

from .files import HashingFiles, Path, WrittenFile

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from ftckpt.manifest.seal import SealReport

    from .files import WorkersRecords


T = TypeVar("T")


class SealWarning(UserWarning):
    """A checkpoint was saved and could not be sealed."""


def barrier() -> None:
    """Wait for every rank, where there are several."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()


def seal_after(
    path: Path, *, written: Mapping[str, WrittenFile] | None = None, strict: bool = False
) -> SealReport | None:
    """Seal a checkpoint that this process has just finished; call it on one rank, after a barrier.

    Files without known digests are read once more. Known are those in `written`, and those that
    ranks hashed which saved without collectives (`ftckpt.manifest.rank_digests`); if one of
    those ranks left none, nothing is sealed. Nothing is verified: the seal says what was written,
    or what the files hold now.

    Args:
        path: directory, file or URL of the checkpoint.
        written: digests of its files by their relative paths.
        strict: raise what hinders the seal; otherwise it is a `SealWarning` and the answer None.

    Raises:
        FtckptError: `strict`, and it is not whole, or the manifest could not be written.
    """
    place = os.fspath(path)

    def seal() -> SealReport:
        from ftckpt.manifest import FileDigest, rank_digests
        from ftckpt.manifest import seal as sealing
        from ftckpt.operations.opening import open_checkpoint

        checkpoint = open_checkpoint(place)
        left = rank_digests.left_in(checkpoint.source)
        left.require_all()
        own = written or {}
        known = left.files | {n: FileDigest(n, file.size, file.blocks) for n, file in own.items()}
        report = sealing.seal(checkpoint, force=True, known=list(known.values()))
        left.remove()
        return report

    return guarded(seal, place, strict=strict)


def guarded(do: Callable[[], T], place: str, *, strict: bool, stacklevel: int = 3) -> T | None:
    """Do what must not end a training: a failure is a warning, unless `strict`."""
    try:
        return do()
    except Exception as error:
        if strict:
            raise
        hint = getattr(error, "hint", "")
        told = f"{place} is not sealed: {error or type(error).__name__}"
        warnings.warn(f"{told} ({hint})" if hint else told, SealWarning, stacklevel=stacklevel)
        return None


class SealingWriter(StorageWriter):
    """Any file-based `StorageWriter` of DCP, whose checkpoints are sealed when they are finished.

    The files are the same bytes as without it. Every rank hashes what it writes; DCP's own gather
    brings the digests to the coordinator, which publishes the manifest last. A save that was cut
    short has no manifest. A manifest of an earlier save in the same place is removed before the
    first byte is written.

    A save without collectives has no coordinator. Where it is of one process, that one seals;
    where it is of several, each leaves its digests, and `seal_after` on one of them seals.

    Args:
        writer: `FileSystemWriter`, `FsspecWriter`, `HuggingFaceStorageWriter`, or another that
            writes through a `fs` of torch's `FileSystemBase`; or `FileSystemWriterAsync` of
            Megatron or NVRx, which writes in other processes.
        strict: raise what hinders the seal, instead of a warning.
        wait: do not seal when the writer has finished, because more files follow; `seal` does.

    Raises:
        TypeError: the writer has no such `fs`.
    """

    def __init__(self, writer: StorageWriter, *, strict: bool = False, wait: bool = False) -> None:
        fs = getattr(writer, "fs", None)
        if not isinstance(fs, FileSystemBase):
            raise TypeError(f"{type(writer).__name__} does not write through a FileSystemBase")
        # A writer that is wrapped for each of its saves is not wrapped ever deeper.
        self._files = fs if isinstance(fs, HashingFiles) else HashingFiles(fs)
        inner: Any = writer
        inner.fs = self._files  # its writes go through ours
        self._writer = inner
        self._strict = strict
        self._wait = wait
        self._together = True
        self._rank = 0
        self._unseals = True
        self._gathered: dict[str, WrittenFile] = {}
        self._records: WorkersRecords | None = None

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
        self._rank = kwargs.get("rank") or 0
        self._unseals = is_coordinator or not self._together
        self._files.written.clear()  # of an earlier save with this writer
        self._gathered = {}
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Prepare this rank's plan, and remove an earlier save's seal.

        That is before the first byte and after the inner writer may have refused to overwrite; and
        not in `prepare_global_plan`, which plans of Megatron and NVRx pass over.
        """
        prepared = cast("SavePlan", self._writer.prepare_local_plan(plan))
        if self._unseals:
            self._guarded(self._remove_seal)
        return prepared

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prepare the plan of all ranks, on the coordinator."""
        return cast("list[SavePlan]", self._writer.prepare_global_plan(plans))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; the future's list carries their digests."""
        writing: Future[list[WriteResult]] = self._writer.write_data(plan, planner)
        return writing.then(lambda done: _Results(done.value(), self._files.written))

    def get_save_function_and_args(self) -> tuple[Any, Any, Any]:
        """Return what an asynchronous writer's workers do; they hash what they write."""
        import xxhash  # noqa: F401  # in this process, so that forked workers import nothing

        from .files import WorkersRecords, recorded

        self._drop_records()
        opener = getattr(self._writer, "open_file", None)
        records = self._guarded(WorkersRecords)
        if records is not None and opener is not None:
            self._writer.open_file = records.opens(opener)
        try:
            save, stage, arguments = self._writer.get_save_function_and_args()
        finally:
            if opener is not None:
                self._writer.open_file = opener
        self._records = records
        if save is not None and records is not None and opener is None:
            save = recorded(save, records.opens())
        return save, stage, arguments

    def retrieve_write_results(self) -> Any:
        """Return what an asynchronous writer's workers wrote, with digests; or their failure."""
        try:
            results = self._writer.retrieve_write_results()
            written = self._records.take() if self._records is not None else {}
        finally:
            self._drop_records()
        return _Results(results, written) if isinstance(results, list) else results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on the coordinator, and publish the manifest last."""
        self._writer.finish(metadata, results)
        self._gathered = {path: file for one in results for path, file in digests_of(one).items()}
        if not self._wait:
            self.seal()

    def seal(self) -> None:
        """Seal what was saved: `finish` does it, or the coordinator's trainer where it waits."""
        self._guarded(self._seal)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Say that it is never chosen by a path alone."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return the inner writer's."""
        return cast("StorageMeta | None", self._writer.storage_meta())

    @property
    def place(self) -> str:
        """The directory or URL of the checkpoint."""
        return os.fspath(self._path)

    @property
    def _path(self) -> Path:
        """The same as the inner writer spells it: older torch joins nothing else."""
        # Hugging Face's writer keeps its shards below the directory that it consolidates into.
        path: Path = getattr(self._writer, "consolidated_output_path", None) or self._writer.path
        return path

    def _remove_seal(self) -> None:
        path = self._files.concat_path(self._path, MANIFEST)
        if self._files.exists(path):
            self._files.rm_file(path)
        from ftckpt.manifest import rank_digests

        if self._together:
            rank_digests.remove_all(self.place)
        else:
            rank_digests.remove(self.place, self._rank)

    def _seal(self) -> None:
        place = self.place
        start = place.rstrip("/") + "/"
        known = {
            posixpath.normpath(path[len(start) :]): file
            for path, file in (self._gathered | self._files.written).items()
            if path.startswith(start)
        }
        world = _world()
        if self._together or world == 1:
            seal_after(place, written=known, strict=True)
            return
        from ftckpt.manifest import rank_digests

        rank_digests.leave(place, self._rank, known, world)

    def _drop_records(self) -> None:
        if self._records is not None:
            self._records.remove()
            self._records = None

    def _guarded(self, do: Callable[[], Any]) -> Any:
        return guarded(do, self.place, strict=self._strict, stacklevel=4)


def _world() -> int:
    """Return the number of ranks of this job."""
    from torch import distributed

    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


class _Results(list[Any]):
    """What a rank wrote, in DCP's own words, with the digests of its files beside it."""

    def __init__(self, results: Iterable[WriteResult], written: Mapping[str, WrittenFile]) -> None:
        super().__init__(results)
        self.written = dict(written)


def digests_of(results: list[WriteResult]) -> Mapping[str, WrittenFile]:
    """Return the digests that a rank's results carry, by path; none if it has no sealing writer."""
    return results.written if isinstance(results, _Results) else {}


def seal_dcp(*, strict: bool = False) -> None:
    """Let `dcp.save` and `dcp.async_save` seal from now on; call it on every rank, once.

    For trainers that call them as `torch.distributed.checkpoint.save`, like torchtitan. A save with
    a path gets a `SealingWriter`, and a writer that is given is wrapped in one if it can be.

    Args:
        strict: as in `SealingWriter`.
    """
    from torch.distributed import checkpoint as dcp

    for name in ("save", "async_save"):
        call = getattr(dcp, name)
        if not hasattr(call, "_ftckpt_seals"):
            setattr(dcp, name, _sealing(call, strict=strict))


def _sealing(call: Any, *, strict: bool) -> Any:
    @functools.wraps(call)
    def saves(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("storage_writer")
        writer = _chosen(kwargs.get("checkpoint_id")) if given is None else given
        if not isinstance(writer, SealingWriter) and isinstance(
            getattr(writer, "fs", None), FileSystemBase
        ):
            if given is not None and isinstance(given, AsyncStager) and call.__name__ != "save":
                kwargs["async_stager"] = kwargs.get("async_stager") or given  # as without us
            kwargs["storage_writer"] = SealingWriter(writer, strict=strict)
        return call(*args, **kwargs)

    saves._ftckpt_seals = True  # type: ignore[attr-defined]
    return saves


def _chosen(path: Any) -> Any:
    """Return the writer that torch chooses for a path, or None."""
    kinds: list[Any] = [FileSystemWriter]
    try:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        kinds.append(FsspecWriter)
    except Exception:
        pass
    return next((kind(path) for kind in kinds if path and kind.validate_checkpoint_id(path)), None)
