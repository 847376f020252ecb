"""What is thinned of random histories: never what a run goes on from, or what somebody holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ftckpt.errors import UsageError
from ftckpt.own_files import WEIGHTS
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.policy.protections import group_entries
from ftckpt.retention.policy.rules import MILESTONES
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from tests import campaign
from tests.retention.history import History

DAY = 86400.0


def policy_of(choose: Random) -> Policy:
    fields: dict[str, Any] = {
        "keep_last": choose.choice((None, 1, 3)),
        "keep_every": choose.choice((20, 100, 500)),
        "keep_daily": choose.choice((None, 5)),
        "keep_tags": choose.choice(((), ("milestone",))),
        "min_survivors": choose.choice((1, 2, 4)),
        choose.choice(("thin_after", "thin_beyond")): choose.choice((1, 3, 20)),
    }
    if "thin_after" in fields:
        fields["thin_after"] = choose.choice((0.0, DAY, 10 * DAY))
    return Policy(**fields)


def after(plan: RetentionPlan) -> list[RootEntry]:
    """Return what lies in the root when a plan was carried out."""
    return [
        replace(
            d.entry, name=d.entry.name + WEIGHTS, thinned=d.entry.name, pins=(), leases=(),
            pointers=(), verified=False,
        ) if d.thin else d.entry
        for d in plan.keep
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(campaign.examples(60, 3000)))
def test_what_is_thinned(seed: int) -> None:
    choose = Random(seed)
    history = History(choose)
    history.advance(choose.randrange(5, 60))
    policy = policy_of(choose)
    entries = [e for e in history.entries if not (e.entry_class is EntryClass.COMMITTED
                                                 and not e.checked)]  # fmt: skip
    plan = decide(entries, policy, history.now)
    for decision in plan.thin:
        entry = decision.entry
        assert decision.keep
        assert entry.entry_class is EntryClass.COMMITTED
        assert not any((entry.pins, entry.pointers, entry.leases, entry.named))
        assert not entry.thinned
        assert {r.rule for r in decision.reasons} <= {*MILESTONES, "thin"}
        assert not any(entry.name in other.entry.bases for other in plan.keep)
    gone = {d.entry.name for d in (*plan.thin, *plan.drop)}
    for stretch in group_entries(entries, history.now).stretches:
        whole = [e for e in stretch if not e.thinned]
        if any(e.name in {d.entry.name for d in plan.thin} for e in whole):
            assert sum(e.name not in gone for e in whole) >= policy.min_survivors
            assert max(whole, key=lambda e: e.age_order).name not in gone
    # Deciding again keeps every one of them, and thins nothing that it would not have thinned.
    again = decide(after(plan), policy, history.now)
    assert not {d.entry.name for d in again.drop if d.entry.thinned}
    assert not again.drop or plan.broken


def test_numbers_that_are_none() -> None:
    with pytest.raises(UsageError, match="--thin-after"):
        Policy(keep_last=1, thin_beyond=0)
    with pytest.raises(UsageError, match="--thin-after"):
        Policy(keep_last=1, thin_after=-1.0)
