from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.discovery import candidates
from ftckpt.discovery.roots import Candidate, Root
from ftckpt.discovery.select import Selection, SelectionRules, select
from ftckpt.discovery.tiers import Tier, select_tiers, select_waiting
from ftckpt.errors import DeniedError, ExitCode, NotFoundError, UnavailableError
from ftckpt.storage.source import Source
from tests.builders.small_format import MARKER, Small, check, read, write
from tests.campaign import examples


def chosen(root: Path, rules: SelectionRules = SelectionRules()) -> Selection:  # noqa: B008  (frozen)
    return select(read(root), check, rules)


def name_of(found: Selection) -> str:
    assert found.path is not None, found.message
    return found.path.rpartition("/")[2]


def test_the_newest_that_passes_is_chosen(tmp_path: Path) -> None:
    write(tmp_path, "step-9", 9)
    write(tmp_path, "step-10", 10)
    found = chosen(tmp_path)
    assert (found.code, name_of(found), found.step) == (ExitCode.OK, "step-10", 10)
    assert (found.skipped, found.format) == ((), "small")


def test_a_limit_of_none_is_said_of_one(tmp_path: Path) -> None:
    write(tmp_path, "step-9", 9, "CORRUPT")
    write(tmp_path, "step-8", 8)
    said = chosen(tmp_path, SelectionRules(max_fallback=0)).message
    assert said.startswith("the newest does not pass, and --max-fallback allows 0; the last: ")


def test_where_nothing_passes_the_way_out_is_named(tmp_path: Path) -> None:
    write(tmp_path, "step-9", 9, "INCOMPLETE")
    assert "--wait" in chosen(tmp_path).hint
    write(tmp_path, "step-8", 8, "CORRUPT")
    assert "ftckpt repair" in chosen(tmp_path).hint


def test_an_absent_step_names_the_nearest(tmp_path: Path) -> None:
    for step in (10, 20):
        write(tmp_path, f"step-{step}", step)
    with pytest.raises(NotFoundError) as caught:
        candidates.child_of_step(read(tmp_path), 15)
    assert caught.value.hint == "by name it has 10, 20"
    for step in (30, 40, 50, 60):
        write(tmp_path, f"step-{step}", step)
    with pytest.raises(NotFoundError) as caught:
        candidates.child_of_step(read(tmp_path), 57)
    assert caught.value.hint == "the nearest by name: 20, 30, 40, 50, 60"


def test_content_orders_not_names(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 50)
    write(tmp_path, "step-40", 40)
    write(tmp_path, "step-900", 30)
    found = chosen(tmp_path)
    assert (name_of(found), found.step) == ("step-1", 50)
    assert sorted(f.file or "" for f in found.findings) == ["step-1", "step-900"]
    assert {f.kind for f in found.findings} == {"step-name"}


def test_a_large_root_is_opened_newest_first(tmp_path: Path) -> None:
    for step in range(300):
        write(tmp_path, f"step-{step}", step)
    small = Small()
    found = select(read(tmp_path, small), check, SelectionRules())
    assert name_of(found) == "step-299"
    assert len(set(small.opened)) == candidates.BATCH


def test_a_wrong_name_in_a_large_root_does_not_win(tmp_path: Path) -> None:
    for step in range(200):
        write(tmp_path, f"step-{step}", step)
    write(tmp_path, "step-9999", 100)
    write(tmp_path, "best", 150)
    found = chosen(tmp_path)
    assert name_of(found) == "step-199"


def test_a_wrong_name_is_reached_in_its_turn(tmp_path: Path) -> None:
    # Everything newer than the liar's content is torn, over more than one batch.
    for step in range(200):
        write(tmp_path, f"step-{step}", step, "torn" if step > 50 else "good")
    write(tmp_path, "step-9999", 100)
    found = chosen(tmp_path)
    assert (name_of(found), found.step) == ("step-9999", 100)
    assert [s.step for s in found.skipped] == list(range(199, 99, -1))


@pytest.mark.parametrize("bad", ["torn", "damaged", "CORRUPT", "INCOMPLETE"])
def test_walks_back_over_damaged_and_unfinished(tmp_path: Path, bad: str) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, bad)
    said: list[str] = []
    found = select(read(tmp_path), check, SelectionRules(), said.append)
    assert name_of(found) == "step-1"
    assert [s.path for s in found.skipped] == [f"{tmp_path}/step-2"]
    assert found.skipped[0].code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE)
    assert len(said) == 1
    assert "step-2" in said[0]


@pytest.mark.parametrize(
    "code", ["UNVERIFIED", "UNAVAILABLE", "DENIED", "NO_RESOURCE", "UNSUPPORTED"]
)
def test_stops_where_the_newest_may_be_good(tmp_path: Path, code: str) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, code)
    found = chosen(tmp_path)
    assert (found.code, found.path) == (ExitCode[code], None)


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        ("UNVERIFIED", SelectionRules(skip_unverified=True)),
        ("UNSAFE", SelectionRules()),
    ],
)
def test_walks_over_what_is_allowed(tmp_path: Path, code: str, rules: SelectionRules) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, code)
    assert name_of(chosen(tmp_path, rules)) == "step-1"


def test_a_flag_stops_at_an_unsafe_one(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, "UNSAFE")
    assert chosen(tmp_path, SelectionRules(stop_at_unsafe=True)).code is ExitCode.UNSAFE
    found = chosen(tmp_path)
    assert name_of(found) == "step-1"
    assert [one.code for one in found.skipped] == [ExitCode.UNSAFE]
    tiers = select_tiers([Tier("a", read(tmp_path))], check, SelectionRules())
    assert name_of(tiers.chosen) == "step-1"
    stopped = select_tiers([Tier("a", read(tmp_path))], check, SelectionRules(stop_at_unsafe=True))
    assert stopped.chosen.code is ExitCode.UNSAFE


def test_unsafe_ones_alone_are_no_first_start(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1, "UNSAFE")
    assert chosen(tmp_path).code is ExitCode.UNSAFE


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], ExitCode.MISSING),
        (["damaged", "CORRUPT"], ExitCode.CORRUPT),
        (["torn", "INCOMPLETE"], ExitCode.INCOMPLETE),
        (["torn", "damaged", "torn"], ExitCode.CORRUPT),
    ],
)
def test_nothing_good(tmp_path: Path, states: list[str], code: ExitCode) -> None:
    for step, state in enumerate(states):
        write(tmp_path, f"step-{step}", step, state)
    found = chosen(tmp_path)
    assert (found.code, found.path, len(found.skipped)) == (code, None, len(states))


def test_a_step_without_any_content_is_unfinished(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "logs").mkdir()
    found = chosen(tmp_path)
    assert name_of(found) == "step-1"
    assert found.skipped[0].code is ExitCode.INCOMPLETE
    assert found.foreign == ("logs",)


@pytest.mark.parametrize(
    "name", ["tmp-checkpoint-5", "step-5.tmp", "step-5.partial", "step-5.ftckpt-tmp-1"]
)
def test_staging_is_never_chosen(tmp_path: Path, name: str) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, name, 5)
    found = chosen(tmp_path)
    assert name_of(found) == "step-1"
    assert (found.skipped[0].step, found.skipped[0].code) == (5, ExitCode.INCOMPLETE)


def test_of_equal_steps_the_one_named_after_it(tmp_path: Path) -> None:
    write(tmp_path, "last", 7)
    write(tmp_path, "step-7", 7)
    assert name_of(chosen(tmp_path)) == "step-7"


def test_of_equal_steps_without_such_a_name_the_one_named_latest(tmp_path: Path) -> None:
    for number in (0, 3, 12):  # a trainer that numbers its saves and records no new step
        write(tmp_path, f"checkpoint_{number}", 7)
    assert name_of(chosen(tmp_path)) == "checkpoint_12"


def test_names_order_where_content_is_silent(tmp_path: Path) -> None:
    write(tmp_path, "step-3", None)
    write(tmp_path, "step-20", None)
    write(tmp_path, "unknown", None)
    assert name_of(chosen(tmp_path)) == "step-20"


def test_step_at_most(tmp_path: Path) -> None:
    write(tmp_path, "step-10", 10)
    write(tmp_path, "step-20", 20)
    write(tmp_path, "wrong", 15)
    write(tmp_path, "silent", None)
    assert name_of(chosen(tmp_path, SelectionRules(step_at_most=19))) == "wrong"
    assert name_of(chosen(tmp_path, SelectionRules(step_at_most=10))) == "step-10"
    # One that shows no step may be newer. A fresh start beside newer saves is never 9.
    assert chosen(tmp_path, SelectionRules(step_at_most=9)).code is ExitCode.REFUSED


def test_max_fallback(tmp_path: Path) -> None:
    for step, state in enumerate(["good", "torn", "damaged"]):
        write(tmp_path, f"step-{step}", step, state)
    assert name_of(chosen(tmp_path, SelectionRules(max_fallback=2))) == "step-0"
    found = chosen(tmp_path, SelectionRules(max_fallback=1))
    assert (found.code, found.path) == (ExitCode.CORRUPT, None)
    assert chosen(tmp_path, SelectionRules(max_fallback=0)).code is ExitCode.CORRUPT


def test_every_model_of_a_step_must_pass(tmp_path: Path) -> None:
    write(tmp_path / "global_step_1", "actor", 1)
    write(tmp_path / "global_step_1", "critic", 1)
    write(tmp_path / "global_step_2", "actor", 2)
    write(tmp_path / "global_step_2", "critic", 2, "CORRUPT")
    assert name_of(chosen(tmp_path)) == "global_step_1"


class WithWeights(Small):
    """Its checkpoints hold an empty tensor."""

    def open(self, source: Source) -> Checkpoint:
        checkpoint = super().open(source)
        weight = TensorInfo("model", "w", Kind.PARAM, (0,), DTYPES["float32"], ())
        checkpoint.tensors = {weight.key: weight}
        return checkpoint


def weighed(root: Path) -> Selection:
    return select(read(root, WithWeights()), check, SelectionRules())


def test_a_step_that_lacks_a_model_of_the_trackers_step_was_not_finished(tmp_path: Path) -> None:
    # verl saves actor, critic and the tracker in this order.
    for step in (1, 2):
        write(tmp_path / f"global_step_{step}", "actor", step)
    write(tmp_path / "global_step_1", "critic", 1)
    assert name_of(weighed(tmp_path)) == "global_step_2"  # nothing says that it needs one
    assert [f.kind for f in weighed(tmp_path).findings] == ["state-unknown"]
    assert name_of(chosen(tmp_path)) == "global_step_1"  # without weights it is being written
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("1")
    found = chosen(tmp_path)
    assert name_of(found) == "global_step_1"
    assert found.skipped[0].code is ExitCode.INCOMPLETE
    assert "lacks critic" in found.skipped[0].message
    assert [c.path for c in found.pending] == ["global_step_2"]
    tiers = select_tiers([Tier("a", read(tmp_path))], check, SelectionRules())
    assert name_of(tiers.chosen) == "global_step_1"
    tracker.write_text("2")  # the run goes on without a critic
    assert name_of(weighed(tmp_path)) == "global_step_2"


def test_a_model_that_a_user_added_to_one_step_is_missing_in_none(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"global_step_{step}", "actor", step)
        write(tmp_path / f"global_step_{step}", "critic", step)
    write(tmp_path / "global_step_2", "merged_hf", 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert name_of(chosen(tmp_path)) == "global_step_3"
    shutil.rmtree(tmp_path / "global_step_3" / "critic")
    found = chosen(tmp_path)
    assert name_of(found) == "global_step_2"
    assert "lacks critic, which" in found.skipped[0].message


@pytest.mark.parametrize(
    "name", ["step-9.bad", "step-9_old", "step-9-backup2", "old-step-9", "BAD_global_step_9"]
)
def test_what_somebody_has_put_aside_is_not_taken(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, 9)
    found = chosen(tmp_path)
    assert (found.code, found.path) == (ExitCode.UNVERIFIED, None)
    assert "is put aside" in found.message
    assert candidates.newest_child(read(tmp_path)).candidate.path == name  # there is no other
    write(tmp_path, "step-8", 8)
    assert name_of(chosen(tmp_path)) == "step-8"
    assert candidates.newest_child(read(tmp_path)).candidate.path == "step-8"


@pytest.mark.parametrize("state", ["good", "damaged", "torn", "UNSAFE"])
def test_what_is_put_aside_stops_nothing_and_is_no_fallback(tmp_path: Path, state: str) -> None:
    write(tmp_path, "step-9.bad", 9, state)
    write(tmp_path, "step-8", 8)
    small = Small()
    found = select(read(tmp_path, small), check, SelectionRules(max_fallback=0))
    assert (name_of(found), found.skipped) == ("step-8", ())
    assert "step-9.bad" not in small.opened
    tiers = select_tiers([Tier("a", read(tmp_path))], check, SelectionRules(max_fallback=0))
    assert name_of(tiers.chosen) == "step-8"


@pytest.mark.parametrize("name", ["step-9-copy", "warm-up-9", "best-step-9", "bad", "baddata-9"])
def test_other_names_are_taken_for_what_they_hold(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, 9)
    write(tmp_path, "step-8", 8)
    assert name_of(chosen(tmp_path)) == name


def test_an_unreachable_newest_stops_also_where_only_listing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, f"step-{step}", step)
    recognise = Root.recognise

    def failing(step: int) -> None:
        def one(self: Root, candidate: Candidate) -> object:
            if candidate.step == step:
                raise UnavailableError(f"{candidate.path} does not answer")
            return recognise(self, candidate)

        monkeypatch.setattr(Root, "recognise", one)

    failing(2)
    assert chosen(tmp_path).code is ExitCode.UNAVAILABLE
    failing(1)  # an older one that is not needed
    assert name_of(chosen(tmp_path)) == "step-2"


def test_an_unreadable_name_without_step_may_be_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "other", 2)

    def denied(self: Small, source: object) -> object:
        raise DeniedError("no")

    monkeypatch.setattr(Small, "open", denied)
    assert chosen(tmp_path).code is ExitCode.DENIED


def test_pointers_are_hints(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2)
    write(tmp_path, "step-3", 3, "torn")
    (tmp_path / "latest").write_text("step-3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "latest_universal").write_text("step-9")
    found = chosen(tmp_path)
    assert name_of(found) == "step-2"
    assert [(p.name, p.agrees) for p in found.pointers] == [
        ("latest", False),
        ("latest_checkpointed_iteration.txt", True),
        ("latest_universal", False),
    ]
    assert [(f.kind, f.file) for f in found.findings] == [
        ("pointer-disagrees", "latest"),
        ("pointer-dangling", "latest_universal"),
    ]


_STATES = st.sampled_from(["good", "torn", "damaged", "CORRUPT", "UNSAFE", "UNVERIFIED"])


@settings(
    max_examples=examples(20, 160), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(states=st.dictionaries(st.integers(0, 500), _STATES, max_size=12))
def test_the_choice_follows_from_the_states(
    tmp_path_factory: pytest.TempPathFactory, states: dict[int, str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    for step, state in states.items():
        write(root, f"step-{step}", step, state)
    expected: int | None = None
    code = (
        ExitCode.CORRUPT
        if {"damaged", "CORRUPT"} & set(states.values())
        else (ExitCode.INCOMPLETE if states else ExitCode.MISSING)
    )
    for step in sorted(states, reverse=True):
        if states[step] == "good":
            expected, code = step, ExitCode.OK
            break
        if states[step] == "UNVERIFIED":
            code = ExitCode.UNVERIFIED
            break
        if states[step] == "UNSAFE":  # walked over, and worse than what else is wrong
            code = ExitCode.UNSAFE
    found = chosen(root)
    assert (found.code, found.step) == (code, expected)


class Clock:
    """Time that passes only in `sleep`, with things that happen at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, object]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            do = self.events.pop(0)[1]
            assert callable(do)
            do()


def waited(
    root: Path, clock: Clock, timeout: float, said: list[str], quiet: list[str] | None = None
) -> Selection:
    return select_waiting(
        lambda: read(root),
        check,
        SelectionRules(),
        timeout,
        said.append,
        say=None if quiet is None else quiet.append,
        sleep=clock.sleep,
        clock=clock,
    )


@pytest.mark.parametrize("staged", [False, True])
def test_wait_takes_the_save_in_flight_when_it_commits(tmp_path: Path, staged: bool) -> None:
    write(tmp_path, "step-1", 1)
    clock = Clock()
    write(tmp_path, "step-2.tmp" if staged else "step-2", 2, "good" if staged else "torn")

    def commit() -> None:
        if staged:
            (tmp_path / "step-2.tmp").rename(tmp_path / "step-2")
        else:
            (tmp_path / "step-2" / MARKER).write_text('{"step": 2, "state": "good"}')

    clock.events = [(20.0, commit)]
    said: list[str] = []
    found = waited(tmp_path, clock, 100, said)
    assert (name_of(found), found.skipped) == ("step-2", ())
    assert 20 <= clock.now < 60
    assert said[0].startswith("waiting for ")


def test_wait_gives_up_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, "torn")
    clock, said, quiet = Clock(), list[str](), list[str]()
    found = waited(tmp_path, clock, 30, said, quiet)
    assert name_of(found) == "step-1"
    assert clock.now == 30
    assert [line.split()[0] for line in quiet] == ["waiting"]
    assert not any(line.startswith("waiting") for line in said)
    assert "in vain" in said[-1]
    assert any("skipped (INCOMPLETE)" in line for line in said)


def test_wait_does_not_wait_for_older_or_damaged_ones(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1, "torn")
    write(tmp_path, "step-2", 2)
    write(tmp_path, "step-3", 3, "damaged")
    clock, said = Clock(), list[str]()
    assert name_of(waited(tmp_path, clock, 30, said)) == "step-2"
    assert clock.now == 0


def test_wait_verifies_what_passed_only_once(tmp_path: Path) -> None:
    write(tmp_path, "step-1", 1)
    write(tmp_path, "step-2", 2, "torn")
    clock = Clock()
    clock.events = [(5.0, lambda: (tmp_path / "step-2" / "data").unlink())]
    seen: list[str] = []

    def counted(checkpoint: object, root: object) -> tuple[ExitCode, str]:
        seen.append("x")
        return ExitCode.OK, ""

    found = select_waiting(
        lambda: read(tmp_path), counted, SelectionRules(), 9, sleep=clock.sleep, clock=clock
    )
    assert name_of(found) == "step-1"
    assert seen == ["x"]
