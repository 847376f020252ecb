"""The Python API: functions with the words of the verbs and the formats put in.

With `__main__` the one door of the core that looks up to `ftckpt.formats`. The arguments of a
function are the flags of its verb, with the same defaults; a size, rate or time is a number
(bytes, bytes a second, seconds) or the text that the flag takes. Every function takes `stores` (how
to reach object stores) and, where work can be long, a `counter` that is told of it. Nothing here
prints, a verdict is returned, and a failure is an error of `ftckpt.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checking import cat, diff, du, inspect, seal, verify
    from .choosing import latest
    from .deltas import delta_info, delta_pack, delta_rebase, delta_unpack
    from .learning import families, incidents
    from .marking import pin, pins, tag, unpin, untag
    from .opening import open_checkpoint
    from .opening import open_checkpoint as open  # noqa: A004
    from .promoting import promote
    from .replaying import replay_audit, replay_compare, replay_run
    from .replicating import copy, repair, sync
    from .restarting import restart
    from .retaining import gc, gc_purge, gc_undelete
    from .surveying import doctor, ls, status
    from .transferring import convert, reshard

__all__ = [
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

# The module of this package that has each function: a verb loads what it needs and no more.
HOMES = {
    "cat": "checking",
    "diff": "checking",
    "du": "checking",
    "inspect": "checking",
    "seal": "checking",
    "verify": "checking",
    "latest": "choosing",
    "pin": "marking",
    "pins": "marking",
    "tag": "marking",
    "unpin": "marking",
    "untag": "marking",
    "families": "learning",
    "incidents": "learning",
    "open_checkpoint": "opening",
    "delta_info": "deltas",
    "delta_pack": "deltas",
    "delta_rebase": "deltas",
    "delta_unpack": "deltas",
    "promote": "promoting",
    "copy": "replicating",
    "repair": "replicating",
    "sync": "replicating",
    "replay_audit": "replaying",
    "replay_compare": "replaying",
    "replay_run": "replaying",
    "restart": "restarting",
    "gc": "retaining",
    "gc_purge": "retaining",
    "gc_undelete": "retaining",
    "doctor": "surveying",
    "ls": "surveying",
    "status": "surveying",
    "convert": "transferring",
    "reshard": "transferring",
    "open": "opening.open_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        home, _, own = HOMES[name].partition(".")
        return getattr(import_module(f"ftckpt.api.{home}"), own or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
