"""Choose the milestones that keep their weights alone.

A milestone is a checkpoint that stays only because a rule over the whole history keeps it: the
nearest to a multiple, the latest of a day, one of the best, one with a tag. What is kept to go on
from (the newest, `--keep-last`, `--keep-within`) and what somebody holds (a pin, a pointer, a
lease, a delta based on it) keeps everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.amounts import shown_duration
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry

from .plan import Reason
from .protections import EntryGroup

MILESTONES = frozenset(
    {
        "keep-every", "keep-hourly", "keep-daily", "keep-weekly", "keep-monthly", "keep-best",
        "keep-tag",
    }
)  # fmt: skip


def thin(
    policy: Policy, runs: Mapping[str, EntryGroup], reasons: Mapping[str, Sequence[Reason]]
) -> dict[str, Reason]:
    """Return what is to be thinned, and why; and what would be, and why it stays whole.

    Each run and stretch keeps `min_survivors` good checkpoints that are whole: of its milestones
    the newest stay whole for that.

    Args:
        policy: says which are old enough.
        runs: the entries of every group.
        reasons: for each entry why it stays; nothing for one that goes.
    """
    found: dict[str, Reason] = {}
    if not policy.thins:
        return found
    for run in runs.values():
        for stretch in run.stretches:
            found |= _of_stretch(policy, stretch, reasons)
    return found


def _of_stretch(
    policy: Policy, stretch: Sequence[RootEntry], reasons: Mapping[str, Sequence[Reason]]
) -> dict[str, Reason]:
    whole = [e for e in stretch if not e.thinned]
    old = [
        (entry, why)
        for entry in whole
        if reasons[entry.name]
        and all(reason.rule in MILESTONES for reason in reasons[entry.name])
        and (why := _old(policy, entry, whole))
    ]
    good = sum(e.checked and bool(reasons[e.name]) for e in whole)
    found: dict[str, Reason] = {}
    for entry, why in old:  # the oldest first
        if entry.whole:
            found[entry.name] = Reason("whole", entry.whole)
        elif good > policy.min_survivors or not entry.checked:
            found[entry.name] = Reason("thin", why)
            good -= entry.checked
    return found


def _old(policy: Policy, entry: RootEntry, whole: Sequence[RootEntry]) -> str:
    """Return why an entry is old enough; "" if it is not, or nobody knows how old it is."""
    if entry.entry_class is not EntryClass.COMMITTED:
        return ""
    newest = max((e.time for e in whole if e.time is not None), default=None)
    after, number = policy.thin_after, policy.thin_beyond
    if after is not None:
        if entry.time is None or newest is None or newest - entry.time <= after:
            return ""
        return f"saved {shown_duration(newest - entry.time)} before the latest"
    assert number is not None
    later = {e.step for e in whole if e.step is not None and e.step > (entry.step or 0)}
    if len(later) < number:
        return ""
    if entry.time is not None:
        moment = entry.time, entry.step or 0
        since = {e.step for e in whole if e.time is not None and (e.time, e.step or 0) > moment}
        if len(since) < number:
            return ""
    return f"not among the {number} newest"
