"""Seal a checkpoint that has just been written, without ending the training if that fails."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from .files import Path, WrittenFile

if TYPE_CHECKING:
    from ftckpt.manifest.seal import SealReport

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
