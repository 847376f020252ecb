"""Seal each checkpoint that Megatron-Core saves: Megatron-LM, and what else calls it."""

from __future__ import annotations

import functools
import posixpath
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as strategies

from ftckpt.torch import SealingWriter

# ModelOpt saves its state as a checkpoint inside another one, which its seal is to cover.
_INSIDE = ("modelopt_state",)


class SealMegatron:
    """Seal what `dist_checkpointing.save` writes as `torch_dist`, asynchronously or not.

    Make one on every rank before the first save, and keep nothing else in mind: the workers hash
    what they write, and rank 0 publishes the manifest after Megatron's own `metadata.json`, before
    the tracker names the step. It stands in for the names by which Megatron makes its writer
    (its own, or NVRx's) and saves; the files are the same bytes. A failure is a warning
    (`ftckpt.torch.SealWarning`).

    Args:
        strict: raise what hinders a seal, which ends the training.
        hold: do not seal when Megatron-Core has finished, because more files follow; `seal` does.
    """

    def __init__(self, *, strict: bool = False, hold: bool = False) -> None:
        self._strict = strict
        self._finished: list[SealingWriter] = []
        names: Any = strategies
        if hasattr(names, "FileSystemWriterAsync"):
            names.FileSystemWriterAsync = self._sealing(names.FileSystemWriterAsync)
        if hasattr(names, "get_async_strategy"):
            names.get_async_strategy = self._choosing(names.get_async_strategy)
        if not hold:
            saves = self._saving(dist_checkpointing.save)
            for place in (dist_checkpointing, serialization):
                place.save = saves

    def seal(self) -> None:
        """Seal what this rank has finished since the last time; only rank 0 finishes any."""
        finished, self._finished = self._finished, []
        for writer in finished:
            if posixpath.basename(writer.place.rstrip("/")) not in _INSIDE:
                writer.seal()

    def _sealing(self, kind: Any) -> Any:
        """Return a class whose instances are Megatron's writer in a `SealingWriter`."""
        finished, strict = self._finish, self._strict

        class Sealed(kind):  # type: ignore[misc]  # its signature is asked for
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                inner = kind(*args, **kwargs)
                if isinstance(inner, SealingWriter):  # by another `SealMegatron`
                    return inner
                return _Writer(inner, strict=strict, finished=finished)

        return Sealed

    def _choosing(self, choose: Any) -> Any:
        @functools.wraps(choose)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            strategy, found = choose(*args, **kwargs)
            if isinstance(found, dict) and "FileSystemWriterAsync" in found:
                kind = found["FileSystemWriterAsync"]
                found = {**found, "FileSystemWriterAsync": self._sealing(kind)}
            return strategy, found

        return chosen

    def _saving(self, save: Any) -> Any:
        @functools.wraps(save)
        def saves(*args: Any, **kwargs: Any) -> Any:
            request = save(*args, **kwargs)  # ends with a barrier, after `metadata.json`
            if request is None:
                self.seal()
            else:
                request.add_finalize_fn(self.seal)
            return request

        return saves

    def _finish(self, writer: SealingWriter) -> None:
        self._finished.append(writer)


class _Writer(SealingWriter):
    """Tells of a finished save, which is not sealed yet: Megatron writes `metadata.json` after."""

    def __init__(self, writer: Any, *, strict: bool, finished: Any) -> None:
        super().__init__(writer, strict=strict, wait=True)
        self._tell = finished

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the metadata, on the coordinator."""
        super().finish(metadata, results)
        self._tell(self)
