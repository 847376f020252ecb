"""Decide which checkpoints of a root to keep, and why.

`decide` is pure: entries (`RootEntry`), a `Policy` and the time give a `RetentionPlan`. `prepare`
reads a root; `apply`, `purge` and `undelete` change it.
"""

from __future__ import annotations

from ftckpt.retention.apply.outcome import Applied, Purged, Thinned, Undeleted
from ftckpt.retention.apply.prepare import Prepared, prepare, remember
from ftckpt.retention.apply.purge import purge
from ftckpt.retention.apply.run import apply
from ftckpt.retention.apply.undelete import trashed, undelete
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.policy.plan import BrokenFloor, Decision, Reason, RetentionPlan
from ftckpt.retention.scan.entries import (
    EntryClass,
    EntryContents,
    Lease,
    Pin,
    RootEntry,
    SharedFile,
)
from ftckpt.retention.scan.entry import no_bases, recorded_bases

from .policy import DeleteLimit, Metric, Policy
from .trash import Trash, Trashed

__all__ = [
    "Applied",
    "BrokenFloor",
    "Decision",
    "DeleteLimit",
    "EntryClass",
    "EntryContents",
    "Lease",
    "Metric",
    "Pin",
    "Policy",
    "Prepared",
    "Purged",
    "Reason",
    "RetentionPlan",
    "RootEntry",
    "SharedFile",
    "Thinned",
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
