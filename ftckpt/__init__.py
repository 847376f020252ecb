"""Checkpoint operations for large-model training.

    import ftckpt

    checkpoint = ftckpt.open_checkpoint("s3://run7/ckpt/step-1000")
    report = ftckpt.verify(checkpoint)

What this module offers is what the command line does, without a screen: see `ftckpt.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .api import (
        cat,
        convert,
        copy,
        delta_info,
        delta_pack,
        delta_rebase,
        delta_unpack,
        diff,
        doctor,
        du,
        families,
        gc,
        gc_purge,
        gc_undelete,
        incidents,
        inspect,
        latest,
        ls,
        open,  # noqa: A004
        open_checkpoint,
        pin,
        pins,
        promote,
        repair,
        replay_audit,
        replay_compare,
        replay_run,
        reshard,
        restart,
        seal,
        status,
        sync,
        tag,
        unpin,
        untag,
        verify,
    )

__all__ = [
    "__version__",
    "cat",
    "convert",
    "copy",
    "delta_info",
    "delta_pack",
    "delta_rebase",
    "delta_unpack",
    "diff",
    "doctor",
    "du",
    "families",
    "gc",
    "gc_purge",
    "gc_undelete",
    "incidents",
    "inspect",
    "latest",
    "load",
    "ls",
    "open",
    "open_checkpoint",
    "pin",
    "pins",
    "promote",
    "repair",
    "replay_audit",
    "replay_compare",
    "replay_run",
    "reshard",
    "restart",
    "seal",
    "status",
    "sync",
    "tag",
    "unpin",
    "untag",
    "verify",
]


def __getattr__(name: str) -> Any:
    # The functions know every format; importing ftckpt alone must stay free of them.
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
