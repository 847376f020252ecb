"""What follows from a survey: pure, on saves that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ftckpt.health import AlertKind, Status, Survey, SurveyedEntry, Thresholds, judge, metrics
from ftckpt.own_files import under_way
from ftckpt.retention.scan.entries import EntryClass, EntryContents, RootEntry, SharedFile

NOW = 1_000_000.0
EVERY = 1320.0
GIB = 1 << 30


def held(
    step: int | None,
    finished: float | None,
    *,
    took: float = 60.0,
    entry_class: EntryClass = EntryClass.COMMITTED,
    nbytes: int = GIB,
    shared: tuple[SharedFile, ...] = (),
) -> SurveyedEntry:
    contents = EntryContents(4, nbytes, nbytes - sum(s.size for s in shared), shared, finished, "f")
    entry = RootEntry(f"step-{step}", "", entry_class, step, finished, "dcp", contents=contents)
    began = None if finished is None else finished - took
    return SurveyedEntry(entry, f"/r/step-{step}", began, finished)


def saves(count: int, *, last: float = NOW - 60, took: Sequence[float] = ()) -> list[SurveyedEntry]:
    times = [last - EVERY * (count - 1 - i) for i in range(count)]
    return [held((i + 1) * 500, times[i], took=took[i] if took else 60.0) for i in range(count)]


def of(
    members: Sequence[SurveyedEntry],
    thresholds: Thresholds | None = None,
    *,
    tier: Sequence[SurveyedEntry] | None = None,
    free: int | None = None,
    dangling: tuple[tuple[str, str], ...] = (),
) -> Status:
    survey = Survey("/r", tuple(members), None, dangling, free)
    tiers = {} if tier is None else {"/r": Survey("s3://b/r", tuple(tier), None, (), None)}
    return judge("/r", [survey], NOW, thresholds or Thresholds(), tiers)


def kinds(found: Status) -> list[AlertKind]:
    return [alert.kind for alert in found.alerts]


def test_a_regular_run_is_well() -> None:
    found = of(saves(20))
    (run,) = found.runs
    assert found.alerts == ()
    assert run.newest is not None
    assert run.newest.entry.step == 10000
    assert run.age_s == 60
    assert (run.rhythm.median_s, run.rhythm.jitter_s, run.rhythm.every_steps) == (EVERY, 0, 500)
    assert run.growth == pytest.approx(GIB * 86400 / EVERY)
    assert run.nbytes == {EntryClass.COMMITTED: 20 * GIB}
    assert (run.writing.last_s, run.writing.now_s, run.writing.before_s) == (60, 60, 60)


@pytest.mark.parametrize(("age", "alarm"), [(2 * EVERY - 1, False), (2 * EVERY + 1, True)])
def test_twice_the_interval_is_late(age: float, alarm: bool) -> None:
    assert (kinds(of(saves(20, last=NOW - age))) == [AlertKind.STALE]) is alarm


def test_what_is_expected_counts_more_than_what_is_measured() -> None:
    late = of(saves(20, last=NOW - 700), Thresholds(expected_s=300))
    assert kinds(late) == [AlertKind.STALE]
    assert kinds(of(saves(20, last=NOW - 5000), Thresholds(expected_s=3000))) == []


def test_of_one_save_nothing_is_late_unless_something_is_expected() -> None:
    one = saves(1, last=NOW - 10 * EVERY)
    assert kinds(of(one)) == []
    assert kinds(of(one, Thresholds(expected_s=EVERY))) == [AlertKind.STALE]


def test_after_a_restart_from_an_earlier_step_the_last_save_counts() -> None:
    again = [*saves(5, last=NOW - 3 * EVERY), held(1700, NOW - 30)]
    (run,) = of(again).runs
    assert run.newest is not None
    assert run.newest.entry.step == 2500
    assert run.last is not None
    assert run.last.entry.step == 1700
    assert run.age_s == 30


def test_a_time_in_the_future_is_no_age_and_hides_whether_the_run_is_late() -> None:
    found = of([*saves(3), held(9000, NOW + 7200)])
    assert found.runs[0].age_s is None
    assert kinds(found) == [AlertKind.CLOCK]
    assert "2 h in the future" in found.alerts[0].message
    assert kinds(of([*saves(3), held(9000, NOW + 200)])) == []


def test_a_store_without_times_is_told_as_such() -> None:
    (run,) = of([held(s, None) for s in (1, 2, 3)]).runs
    assert (run.age_s, run.rhythm.median_s, run.writing.last_s) == (None, None, None)
    assert run.rhythm.reason


def test_slower_writing_is_seen_when_the_newest_few_are_slower() -> None:
    slow = of(saves(20, took=[60.0] * 15 + [120.0] * 5))
    assert kinds(slow) == [AlertKind.SLOW]
    assert kinds(of(saves(20, took=[60.0] * 19 + [900.0]))) == [], "one slow save is no change"
    assert kinds(of(saves(20, took=[0.1] * 15 + [0.3] * 5))) == [], "nobody minds tenths"
    assert kinds(of(saves(8, took=[60.0] * 3 + [120.0] * 5))) == [], "too few to compare with"


def test_unfinished_saves_pile_up() -> None:
    ended = saves(5, last=NOW - 1000)
    one = held(3000, NOW - 500, entry_class=EntryClass.STAGING)
    two = held(3001, NOW - 100, entry_class=EntryClass.STAGING)
    old = [held(i, NOW - 90000, entry_class=EntryClass.ABANDONED) for i in (11, 12, 13)]
    assert kinds(of([*ended, one])) == []
    assert kinds(of([*ended, one, two])) == [AlertKind.UNFINISHED]
    assert kinds(of([*ended, *old[:2]])) == []
    assert kinds(of([*ended, *old])) == [AlertKind.UNFINISHED]


def test_a_copy_that_was_killed_is_not_a_trainer_that_fails() -> None:
    def copy(step: int, age: float, kind: EntryClass) -> SurveyedEntry:
        one = held(step, NOW - age, entry_class=kind)
        return replace(one, entry=replace(one.entry, why=under_way(one.url)))

    ended = saves(5, last=NOW - 1000)
    running = [copy(3000, 500, EntryClass.STAGING), copy(3001, 100, EntryClass.STAGING)]
    assert kinds(of([*ended, *running])) == []
    found = of([*ended, copy(11, 90000, EntryClass.ABANDONED)])
    assert kinds(found) == [AlertKind.UNFINISHED]
    assert found.alerts[0].message.startswith("1 copy to here stopped more than a day ago: ")
    assert "ftckpt copy" in found.alerts[0].hint
    assert "trainer" not in found.alerts[0].hint


def test_nothing_finished_is_the_first_thing_to_say() -> None:
    begun = [held(1, NOW - 50, entry_class=EntryClass.STAGING)]
    assert kinds(of(begun)) == [AlertKind.EMPTY]


def test_damage_and_pointers_to_nothing_are_alerts() -> None:
    bad = held(700, NOW - 5000, entry_class=EntryClass.CORRUPT)
    found = of([*saves(5), bad], dangling=(("latest", "step-9"),))
    assert kinds(found) == [AlertKind.CORRUPT, AlertKind.POINTER]
    assert "step-700" in found.alerts[0].message
    assert "'step-9'" in found.alerts[1].message


@pytest.mark.parametrize(("free", "alarm"), [(2 * GIB, False), (2 * GIB - 1, True), (0, True)])
def test_two_more_saves_must_fit(free: int, alarm: bool) -> None:
    assert (kinds(of(saves(5), free=free)) == [AlertKind.SPACE]) is alarm


def test_the_second_tier_may_be_behind_by_a_little() -> None:
    ours = saves(10)
    (run,) = of(ours, tier=ours[:-2]).runs
    assert run.durable is not None
    assert [h.entry.step for h in run.durable.missing] == [4500, 5000]
    assert run.durable.newest is not None
    assert run.durable.newest.entry.step == 4000
    assert run.alerts == ()
    assert kinds(of(ours, tier=ours[:-4])) == [AlertKind.NOT_DURABLE]
    assert kinds(of(ours, tier=[])) == [AlertKind.NOT_DURABLE]
    assert kinds(of(ours, tier=ours[-2:])) == [], "what the second tier has dropped is no alarm"


def test_a_save_that_is_half_copied_is_not_durable() -> None:
    ours = saves(3)
    half = replace(ours[2], entry=replace(ours[2].entry, entry_class=EntryClass.STAGING))
    (run,) = of(ours, tier=[*ours[:2], half]).runs
    assert run.durable is not None
    assert [h.entry.step for h in run.durable.unfinished] == [1500]


def test_a_file_of_several_names_counts_once() -> None:
    file = SharedFile("1:7", GIB, 2, 1)
    (run,) = of([held(1, NOW - 9, shared=(file,)), held(2, NOW - 3, shared=(file,))]).runs
    assert run.nbytes == {EntryClass.COMMITTED: GIB}


def test_metrics_are_well_formed() -> None:
    survey = Survey('/r "odd"\\\n', tuple(saves(6)), None, (), 5 * GIB)
    text = metrics(judge('/r "odd"\\\n', [survey], NOW, Thresholds()))
    assert text.endswith("\n")
    assert '{root="/r \\"odd\\"\\\\\\n"} 1\n' in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    names = [line.partition("{")[0] for line in samples]
    for name in set(names):
        first = names.index(name)
        assert set(names[first : first + names.count(name)]) == {name}, "one family stands together"
        assert f"# TYPE {name} gauge" in text
    assert len(samples) == len({line.rpartition(" ")[0] for line in samples})
    for line in samples:
        float(line.rpartition(" ")[2])
