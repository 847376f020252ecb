"""Checkpoint operations for large-model training.

    import ftckpt

    checkpoint = ftckpt.open_checkpoint("s3://run7/ckpt/step-1000")
    report = ftckpt.verify(checkpoint)

What this module offers is what the command line does, without a screen: each is one
function, which its verb calls (`ftckpt.operations`). A size, rate or time is a number (bytes, bytes
a second, seconds) or the text that the flag takes, one string may stand for several, and a
`pathlib.Path` for a string. Nothing here prints, a verdict is returned, and a failure is an error
of `ftckpt.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .operations.checking import scrub, seal, verify
    from .operations.choosing import latest
    from .operations.comparing import diff
    from .operations.estimating import plan_compress, plan_elastic, plan_risk
    from .operations.learning import incidents
    from .operations.loading import load
    from .operations.looking import cat, du, inspect
    from .operations.marking import pin, tag
    from .operations.opening import open_checkpoint
    from .operations.opening import open_checkpoint as open  # noqa: A004
    from .operations.packing import delta_info, delta_pack, delta_rebase, delta_unpack
    from .operations.planning import plan, plan_sweep
    from .operations.promoting import promote
    from .operations.replaying import replay_audit, replay_compare, replay_run
    from .operations.replicating import copy, repair, sync
    from .operations.restarting import restart
    from .operations.retaining import gc, gc_purge, gc_undelete, rm
    from .operations.surveying import doctor, ls, status
    from .operations.tables import families
    from .operations.transferring import convert, reshard

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
    "plan",
    "plan_compress",
    "plan_elastic",
    "plan_risk",
    "plan_sweep",
    "promote",
    "repair",
    "replay_audit",
    "replay_compare",
    "replay_run",
    "reshard",
    "restart",
    "rm",
    "scrub",
    "seal",
    "status",
    "sync",
    "tag",
    "verify",
]


def __getattr__(name: str) -> Any:
    # The functions know every format; importing ftckpt alone must stay free of them.
    if name in __all__:
        from importlib import import_module

        from .operations import HOMES

        name = "open_checkpoint" if name == "open" else name
        return getattr(import_module(f"ftckpt.operations.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
