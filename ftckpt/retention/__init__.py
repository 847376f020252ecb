"""Retention: what of a root to keep, and why.

Deciding is pure: `decide` takes what was found (`RootEntry`), a `Policy` and the time, and returns
a `Plan`. Reading a root (`prepare`) and carrying a plan out (`apply`, `purge`, `undelete`) are
separate.
"""

from __future__ import annotations

from .carrying_out import apply
from .deciding import decide
from .entries import Contents, EntryClass, Lease, Pin, RootEntry, SharedFile
from .found import no_bases, recorded_bases
from .outcome import Applied, Purged, Undeleted
from .plan import BrokenFloor, Decision, Plan, Reason
from .policy import DeleteLimit, Metric, Policy
from .preparing import Prepared, prepare, remember
from .purging import purge
from .trash import Trash, Trashed
from .undeleting import trashed, undelete

__all__ = [
    "Applied",
    "BrokenFloor",
    "Contents",
    "Decision",
    "DeleteLimit",
    "EntryClass",
    "Lease",
    "Metric",
    "Pin",
    "Plan",
    "Policy",
    "Prepared",
    "Purged",
    "Reason",
    "RootEntry",
    "SharedFile",
    "Trash",
    "Trashed",
    "Undeleted",
    "apply",
    "decide",
    "no_bases",
    "prepare",
    "purge",
    "recorded_bases",
    "remember",
    "trashed",
    "undelete",
]
