"""What a guard decides, without any process."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.guard.decisions import (
    Circumstances,
    CommandEnd,
    GuardAttempt,
    Limits,
    OnHang,
    attempts,
    ending_of,
    exit_code,
    filled,
    hang_limit,
    suspects,
    unended,
    usual_interval,
    what_next,
)

FAILED, HUNG, PREEMPTED = CommandEnd.FAILED, CommandEnd.HUNG, CommandEnd.PREEMPTED


@pytest.mark.parametrize(
    ("code", "what", "ending"),
    [
        (0, Circumstances(), CommandEnd.DONE),
        (1, Circumstances(), CommandEnd.FAILED),
        (75, Circumstances(), CommandEnd.PREEMPTED),
        (0, Circumstances(noticed=True), CommandEnd.PREEMPTED),
        (0, Circumstances(noticed=True, zero_is_done=True), CommandEnd.DONE),
        (1, Circumstances(noticed=True, zero_is_done=True), CommandEnd.PREEMPTED),
        (137, Circumstances(noticed=True, stopped_by=signal.SIGTERM), CommandEnd.PREEMPTED),
        (137, Circumstances(noticed=True, stopped_by=signal.SIGINT), CommandEnd.STOPPED),
        (0, Circumstances(stopped_by=signal.SIGTERM), CommandEnd.STOPPED),
        (137, Circumstances(hung=True), CommandEnd.HUNG),
        (137, Circumstances(hung=True, stopped_by=signal.SIGTERM), CommandEnd.STOPPED),
    ],
)
def test_why_a_command_ended(code: int, what: Circumstances, ending: CommandEnd) -> None:
    assert ending_of(code, what) is ending


def test_a_wait_status_is_shown_as_a_shell_shows_it() -> None:
    assert exit_code(3 << 8) == 3
    assert exit_code(int(signal.SIGKILL)) == 137


def died(name: str, times: int, code: int = 1, seconds: float = 3.0) -> list[GuardAttempt]:
    return [GuardAttempt(name, FAILED, False, code, seconds)] * times


def vain(times: int) -> list[GuardAttempt]:
    return [GuardAttempt("x", FAILED, False)] * times


@pytest.mark.parametrize(
    ("ending", "code", "history", "again", "result"),
    [
        (CommandEnd.DONE, 0, vain(1), False, 0),
        (PREEMPTED, 12, vain(1), False, 75),
        (FAILED, 12, vain(1), True, 12),
        (FAILED, 12, vain(3), True, 12),
        (FAILED, 12, vain(4), False, 12),
        (HUNG, 137, vain(1), True, 137),
    ],
)
def test_what_follows(
    ending: CommandEnd, code: int, history: list[GuardAttempt], again: bool, result: int
) -> None:
    found = what_next(ending, code, history, Limits(restarts=3), 0)
    assert (found.again, found.code) == (again, result)


def test_a_command_that_cannot_be_run_is_tried_again_once_it_has_run() -> None:
    gone = CommandEnd.UNSTARTED
    assert what_next(gone, 127, vain(1), Limits(restarts=3), 0)[:2] == (False, 2)
    assert what_next(gone, 127, vain(2), Limits(restarts=3), 0).again
    assert what_next(gone, 126, vain(4), Limits(restarts=3), 0)[:2] == (False, 126)
    assert not suspects([GuardAttempt("x", gone, False)] * 5)


def test_a_signal_or_a_policy_decides_what_follows() -> None:
    assert what_next(CommandEnd.STOPPED, 0, vain(1), Limits(), signal.SIGTERM).code == 143
    assert what_next(HUNG, 137, vain(1), Limits(on_hang=OnHang.EXIT), 0)[:2] == (False, 75)
    assert not what_next(FAILED, 1, vain(1), Limits(restarts=0), 0).again


def test_the_wait_doubles_until_a_save_is_made() -> None:
    limits = Limits(restarts=100, first=10, longest=60)

    def delay(history: list[GuardAttempt]) -> float:
        return what_next(FAILED, 1, history, limits, 0).delay

    assert [delay(vain(n)) for n in (1, 2, 3, 4, 99)] == [10, 20, 40, 60, 60]
    saved = [*vain(5), GuardAttempt("y", FAILED, True)]
    assert delay(saved) == 10
    assert delay([*saved, *vain(2)]) == 20


@pytest.mark.parametrize(
    ("history", "suspected"),
    [
        ([], set()),
        (vain(1), set()),
        (vain(2), {"x"}),
        ([GuardAttempt("x", HUNG, False), GuardAttempt("x", FAILED, False)], {"x"}),
        # The fault of nobody, or not known to be the checkpoint's.
        ([GuardAttempt("x", PREEMPTED, False)] * 5, set()),
        ([GuardAttempt("x", CommandEnd.STOPPED, False)] * 5, set()),
        ([GuardAttempt("x", None, False)] * 5, set()),
        ([GuardAttempt("", FAILED, False)] * 5, set()),
        # It is good: a training went on from it as far as the next save.
        ([*vain(1), GuardAttempt("x", FAILED, True), *vain(1)], set()),
        ([*vain(2), GuardAttempt("x", FAILED, True)], set()),
        ([*vain(2), GuardAttempt("y", FAILED, True)], {"x"}),
        ([*vain(1), GuardAttempt("y", FAILED, True), *vain(1)], {"x"}),
        # The command is at fault: it fails alike and as fast from another one.
        ([*died("x", 2), *died("y", 1)], set()),
        ([*died("x", 2), *died("y", 1), *died("x", 1)], set()),
        ([*died("x", 2), *died("y", 2, code=2)], {"x", "y"}),
        ([*died("x", 2), *died("y", 2, seconds=300.0)], {"x", "y"}),
        ([*died("x", 2, seconds=200.0), *died("y", 2, seconds=300.0)], set()),
        # Not where training went on between.
        ([*died("x", 2), GuardAttempt("z", FAILED, True, 1, 3.0), *died("y", 1)], {"x"}),
        # A full disk says nothing about a checkpoint.
        ([one._replace(full=True) for one in died("x", 4)], set()),
    ],
)
def test_which_checkpoints_are_suspected(history: list[GuardAttempt], suspected: set[str]) -> None:
    assert suspects(history) == suspected


@given(
    st.lists(
        st.builds(GuardAttempt, st.sampled_from("abc"), st.sampled_from(CommandEnd), st.booleans())
    )
)
def test_one_more_save_never_makes_more_suspected(history: list[GuardAttempt]) -> None:
    found = suspects(history)
    for number, one in enumerate(history):
        better = [*history[:number], one._replace(saved=True), *history[number + 1 :]]
        assert suspects(better) <= found


def event(kind: str, token: str, **fields: object) -> dict[str, object]:
    return {"event": kind, "token": token, **fields}


def test_the_log_becomes_attempts() -> None:
    log: list[dict[str, object]] = [
        event("start", "a", identity="x", step=5),
        event("saved", "a", step=6),  # not yet known to be good
        event("ended", "a", ending="failed"),
        event("start", "b", identity="x", step=5),
        event("verified", "b", code=4),
        event("verified", "b", code=0),
        event("ended", "b", ending="hung"),
        event("start", "c", identity="y", step=6),
        event("verified", "b", code=0),  # of another start
        event("start", "d", identity="z", step=7),  # so c has saved it
        event("ended", "d", ending="nonsense"),
        {"event": 5},
    ]
    assert attempts(log) == [
        GuardAttempt("x", FAILED, False),
        GuardAttempt("x", HUNG, True),
        GuardAttempt("y", None, True),
        GuardAttempt("z", None, False),
    ]
    assert [one["token"] for one in unended(log)] == ["c"]
    assert attempts([*log, {"event": "cleared"}]) == []


def test_what_is_late() -> None:
    assert hang_limit(None, None, 15.0) is None
    assert hang_limit(7.0, 100.0, 15.0) == 7.0
    assert hang_limit(None, 100.0, 15.0) == 300.0
    assert hang_limit(None, 2.0, 15.0) == 15.0
    assert usual_interval([], 9.0) == 9.0
    assert usual_interval([0.0, 10.0], 9.0) == 9.0
    assert usual_interval([0.0, 10.0, 30.0], 9.0) == 15.0
    assert usual_interval([30.0, 30.0, 30.0, 60.0], 9.0) == 10.0  # three in one look


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        ("train --resume {} -v", "/a b", ["train", "--resume", "/a b", "-v"]),
        ("train --resume={} {}", "/c", ["train", "--resume=/c", "/c"]),
        ("train --resume {} -v", None, ["train", "-v"]),
        ("train --resume={} -v", None, ["train", "-v"]),
        ("train ckpt.path={} {}", None, ["train"]),
        ("train -v", None, ["train", "-v"]),
        ("{}", None, []),
    ],
)
def test_the_path_in_the_command(words: str, path: str | None, expected: list[str]) -> None:
    assert filled(words.split(), path) == expected


@pytest.mark.parametrize(
    ("script", "fresh"),
    [
        ("echo from {}", "echo from "),
        ("torchrun t.py --resume {} --lr 1", "torchrun t.py --lr 1"),
        ("t.py --resume='{}'; echo {}", "t.py ; echo "),
        ('if [ -n "{}" ]; then a --load {}; fi', 'if [ -n "" ]; then a ; fi'),
        ("CKPT={}; t ${CKPT:+--resume $CKPT}", "CKPT=; t ${CKPT:+--resume $CKPT}"),
        ("t.py --out {}/more", "t.py --out /more"),
    ],
)
def test_a_script_stays_at_a_fresh_start(script: str, fresh: str) -> None:
    for shell in (["bash", "-c"], ["bash", "-lc"], ["srun", "sh", "-ec"]):
        assert filled([*shell, script, "x"], None) == [*shell, fresh, "x"]
        assert filled([*shell, script], "/r/s")[-1] == script.replace("{}", "/r/s")
