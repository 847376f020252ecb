"""The operations of ftckpt: each is one function, and both the shell and Python call it.

An operation's module holds the function with its parameters, what its report is, its exit codes
and its examples (`definition.operation`). `ftckpt.X` is the function; `ftckpt.commands` derives
its command line from it and renders its report.
"""

from __future__ import annotations

# The operations of each module: a caller loads what it needs and nothing more.
MODULES = {
    "checking": ("scrub", "seal", "verify"),
    "choosing": ("latest",),
    "comparing": ("diff",),
    "estimating": ("plan_compress", "plan_elastic", "plan_risk"),
    "learning": ("incidents",),
    "guarding": ("guard",),
    "loading": ("load",),
    "looking": ("cat", "du", "inspect"),
    "marking": ("pin", "tag"),
    "opening": ("open_checkpoint",),
    "packing": ("delta_info", "delta_pack", "delta_rebase", "delta_unpack"),
    "planning": ("plan", "plan_sweep"),
    "promoting": ("promote",),
    "replaying": ("replay_audit", "replay_compare", "replay_run"),
    "replicating": ("copy", "repair", "sync"),
    "restarting": ("restart",),
    "retaining": ("gc", "gc_purge", "gc_undelete", "rm"),
    "surveying": ("doctor", "ls", "status"),
    "tables": ("families",),
    "transferring": ("convert", "reshard"),
}
HOMES = {name: home for home, names in MODULES.items() for name in names}
