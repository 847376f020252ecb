"""Random histories against the oracle and the invariants; `--campaign full` tries 100,000."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from ftckpt.errors import RefusedError
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from tests.retention import oracle
from tests.retention.history import START, History, any_policy, asked_by, one_more_rule, thing_of

_SHORT, _FULL, _CHUNKS = 1_000, 100_000, 10


@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_histories(chunk: int, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("campaign") == "full"
    number = (_FULL if full else _SHORT) // _CHUNKS
    for seed in range(chunk * number, (chunk + 1) * number):
        try:
            live_through(Random(seed))
        except AssertionError as error:
            error.add_note(f"history {seed}")
            raise


def live_through(choose: Random) -> None:
    """Live one history, with a plan now and then, each carried out where no floor is broken."""
    runs = [History(choose)]
    if choose.random() < 0.2:
        runs = [History(choose, "a/"), History(choose, "b/")]
    policy = any_policy(choose)
    last_run: dict[str, float] = {}
    for _ in range(choose.choice((1, 2, 3))):
        for run in runs:
            run.advance(choose.choice((3, 8, 20)))
        now = max(run.now for run in runs)
        entries = [e for run in runs for e in run.entries]
        plan = decide(entries, policy, now, last_run=last_run)
        check_plan(plan, entries, policy, now, last_run, choose)
        if not plan.broken:
            gone = {d.entry.name for d in plan.drop}
            for run in runs:
                run.drop(gone & set(run.by_name))
            last_run = {run.group: now for run in runs}


def check_plan(
    plan: RetentionPlan,
    entries: Sequence[RootEntry],
    policy: Policy,
    now: float,
    last_run: dict[str, float],
    choose: Random,
) -> None:
    dropped = {d.entry.name for d in plan.drop}
    things, asked = [thing_of(e) for e in entries], asked_by(policy)
    words = oracle.verdicts(things, asked, now)
    assert {d.entry.name: {r.rule for r in d.reasons} for d in plan.keep} == {
        name: held for name, held in words.items() if held
    }
    assert dropped == {name for name, held in words.items() if not held}
    last = min(last_run.values(), default=None)
    assert {b.floor for b in plan.broken} == oracle.broken(things, dropped, asked, now, last)
    check_survivors(plan, policy, now)
    check_order(plan)
    shuffled = choose.sample(list(entries), len(entries))
    assert decide(shuffled, policy, now, last_run=last_run) == plan
    again = decide([d.entry for d in plan.keep], policy, now)
    assert not again.drop, "what a plan keeps, the next one keeps"
    more = decide(entries, one_more_rule(choose, policy), now)
    assert {d.entry.name for d in more.drop} <= dropped, "one more rule lets go of more"


def check_survivors(plan: RetentionPlan, policy: Policy, now: float) -> None:
    """What must never be lost, said once more by what a user would miss."""
    kept = {d.entry.name for d in plan.keep}
    everything = [d.entry for d in plan.decisions]
    for entry in everything:
        kind = entry.entry_class
        named = entry.named and kind is EntryClass.COMMITTED
        held = entry.pins or entry.pointers or entry.leases or named
        never = (EntryClass.STAGING, EntryClass.FOREIGN, EntryClass.TRASH)
        damaged = kind is EntryClass.CORRUPT and not policy.delete_corrupt
        future = kind is EntryClass.COMMITTED and entry.time is not None and entry.time > now
        if held or kind in never or damaged or future:
            assert entry.name in kept
        if entry.name in kept:
            assert not {b for b in entry.bases if b not in kept} & {e.name for e in everything}
    for group in {e.group for e in everything}:
        run = [e for e in everything if e.group == group]
        counted = [e for e in run if oracle.counts(thing_of(e), now)]
        newest = max(counted, key=lambda e: e.age_order, default=None)
        verified = [e for e in counted if e.verified]
        best = max(verified, key=lambda e: e.age_order, default=None)
        assert {e.name for e in (newest, best) if e is not None} <= kept


def check_order(plan: RetentionPlan) -> None:
    """No base goes before what is built on it."""
    place = {name: i for i, name in enumerate(plan.order)}
    bases = {d.entry.name: d.entry.bases for d in plan.drop}
    assert set(place) == set(bases)
    for name, below in bases.items():
        for base in below:
            # Saves that were written over can be built on each other; then no order is right.
            if base in place and not _reaches(base, name, bases):
                assert place[name] < place[base]


def _reaches(name: str, wanted: str, bases: dict[str, tuple[str, ...]]) -> bool:
    seen, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one == wanted:
            return True
        if one not in seen:
            seen.add(one)
            waiting += bases.get(one, ())
    return False


def test_the_histories_try_every_word_and_every_floor() -> None:
    seen: set[str] = set()
    for seed in range(600):
        choose = Random(seed)
        run, policy = History(choose), any_policy(choose)
        run.advance(25)
        plan = decide(run.entries, policy, run.now)
        seen |= {r.rule for d in plan.decisions for r in d.reasons} | {b.floor for b in plan.broken}
    assert seen >= {
        *("keep-last", "keep-every", "keep-hourly", "keep-daily", "keep-weekly", "keep-monthly"),
        *("keep-within", "keep-best", "keep-tag", "newest", "newest-verified", "pointer", "pinned"),
        *(
            "not-of-the-series",
            "lease",
            "base",
            "future",
            "step-jump",
            "no-step",
            "no-time",
            "named",
            "foreign",
        ),
        *("corrupt", "staging", "trash", "unfinished", "expired", "abandoned", "put-aside"),
        *("--min-survivors", "--max-delete"),
    }


@pytest.mark.parametrize("missed", [0, 1, 5, 48])
def test_missed_runs_recover_without_hands(missed: int) -> None:
    # 55 days, a save every 22 minutes, a plan every hour; now and then some plans are missed.
    policy = Policy(keep_last=3, keep_every=20_000)
    entries: dict[str, RootEntry] = {}
    last_run: dict[str, float] = {}
    now, step, skip = START, 0, 0
    for hour in range(55 * 24):
        for _ in range(3 if hour % 3 else 2):
            now, step = now + 1320, step + 150
            entries[f"step-{step}"] = RootEntry(
                f"step-{step}", "", EntryClass.COMMITTED, step, now, checked=True
            )
        skip = missed if hour % 101 == 100 and hour < 1200 else skip - 1
        if skip >= 0 and missed:
            continue
        plan = decide(entries.values(), policy, now, last_run=last_run)
        plan.require()
        for decision in plan.drop:
            del entries[decision.entry.name]
        last_run = {"": now}
    milestones = {min(s, key=lambda x: (abs(x - m), -x)) for m, s in _reached(step)}
    newest = {step - 150 * back for back in range(3)}
    assert {e.step for e in entries.values()} == milestones | newest


def _reached(step: int) -> list[tuple[int, range]]:
    return [(m, range(150, step + 1, 150)) for m in range(20_000, step + 1, 20_000)]


def test_the_oracle_counts_weeks_as_the_calendar_does() -> None:
    week = oracle.PERIODS["weekly"]
    days = [86400.0 * day + 7 for day in range(15_000, 24_000)]
    for one, other in pairwise(days):
        same = oracle.iso_week(one) == oracle.iso_week(other)
        assert (week(one) == week(other)) is same


def test_a_policy_without_a_rule_keeps_all_and_is_refused() -> None:
    run = History(Random(1))
    run.advance(20)
    plan = decide(run.entries, Policy(), run.now)
    assert not plan.drop
    assert {b.floor for b in plan.broken} == {"--keep-last"}
    with pytest.raises(RefusedError) as refused:
        plan.require()
    assert refused.value.hint == "--keep-last 3 --keep-every 1000"
    dataclasses.replace(plan, broken=()).require()
