"""Seal the saves of trainers that call `dcp.save` with a path and make no writer."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager

from .writer import SealingWriter


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
