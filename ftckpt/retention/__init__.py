"""Retention: what of a root to keep, and why.

Deciding is pure: `decide` takes what was found (`RootEntry`), a `Policy` and the time, and returns
a `Plan`. Reading a root (`prepare`) and carrying a plan out are separate.
"""

from __future__ import annotations

from .deciding import decide
from .entries import Contents, EntryClass, Lease, Pin, RootEntry, SharedFile
from .plan import BrokenFloor, Decision, Plan, Reason
from .policy import DeleteLimit, Metric, Policy
from .preparing import Prepared, prepare, remember

__all__ = [
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
    "Reason",
    "RootEntry",
    "SharedFile",
    "decide",
    "prepare",
    "remember",
]
