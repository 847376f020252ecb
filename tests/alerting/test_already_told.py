"""A lasting condition is told once; when it is over that is told, and then it is news again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ftckpt.alerting import AlertHook, AlertMemory, AlertSource, Condition, state_file, tell
from ftckpt.errors import UsageError

HOOK = AlertHook("command")


class Desk:
    """Takes alerts, and may be away."""

    def __init__(self, path: Path, hook: AlertHook = HOOK) -> None:
        self.path, self.hook = path, hook
        self.got: list[tuple[str, str, tuple[str, ...]]] = []
        self.warned: list[str] = []
        self.away: set[str] = set()
        self.now = 0.0

    def deliver(self, hook: AlertHook, document: Mapping[str, Any]) -> list[str]:
        who = "command" if hook.command else "webhook"
        if who in self.away:
            return [f"{who} is away"]
        about = tuple(document["about"])
        self.got.append((f"{who} {document['event']}", document["kind"], about))
        return []

    def run(self, *conditions: Condition, complete: bool = True) -> list[Any]:
        self.got = []
        self.now += 60
        tell(
            conditions, self.hook, AlertMemory(str(self.path), self.warned.append),
            AlertSource("status", "/ckpt", self.now), complete=complete, warn=self.warned.append,
            deliver=self.deliver,
        )  # fmt: skip
        return self.got


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "state/told.json")


def bad(*names: str) -> Condition:
    return Condition("corrupt", f"{names} are bad", "", names)


STALE = Condition("stale", "2 h old")
UP, DOWN = "command raised", "command cleared"


def test_once_and_again_after_it_was_over(desk: Desk) -> None:
    assert desk.run(STALE) == [(UP, "stale", ())]
    assert desk.run(STALE._replace(message="3 h old")) == []
    assert desk.run() == [(DOWN, "stale", ())]
    assert desk.run() == []
    assert desk.run(STALE) == [(UP, "stale", ())]
    assert not desk.warned


def test_what_is_new_about_it_is_news_and_what_goes_is_not(desk: Desk) -> None:
    assert desk.run(bad("a")) == [(UP, "corrupt", ("a",))]
    assert desk.run(bad("a", "b")) == [(UP, "corrupt", ("a", "b"))]
    assert desk.run(bad("b")) == []
    assert desk.run(bad("b"), bad("c")) == [(UP, "corrupt", ("b", "c"))]
    assert desk.run(bad("a", "b", "c")) == [(UP, "corrupt", ("a", "b", "c"))]
    assert desk.run() == [(DOWN, "corrupt", ())]


def test_many_are_one_message_that_can_be_read(desk: Desk) -> None:
    told: list[Mapping[str, Any]] = []

    def deliver(_: AlertHook, document: Mapping[str, Any]) -> list[str]:
        told.append(document)
        return []

    many = [bad(f"step-{number}") for number in range(700)]
    tell(
        many, HOOK, AlertMemory(str(desk.path), desk.warned.append), AlertSource("gc", "/ckpt", 1),
        complete=True, warn=desk.warned.append, deliver=deliver,
    )  # fmt: skip
    (one,) = told
    assert len(one["about"]) == 700
    assert one["message"].endswith("; and 690 more")
    assert "step-9'" in one["message"]


def test_a_run_that_could_not_look_says_of_nothing_that_it_is_over(desk: Desk) -> None:
    away = Condition("unavailable", "the store is away")
    desk.run(STALE)
    assert desk.run(away, complete=False) == [(UP, "unavailable", ())]
    assert desk.run(away, complete=False) == []
    assert desk.run(STALE) == [(DOWN, "unavailable", ())]


def test_what_was_not_delivered_is_news_again(desk: Desk) -> None:
    desk.away = {"command"}
    assert desk.run(STALE) == []
    assert desk.warned == ["alert stale (raised): command is away"]
    desk.away = set()
    assert desk.run(STALE) == [(UP, "stale", ())]


def test_an_end_that_was_not_delivered_is_told_later(desk: Desk) -> None:
    desk.run(STALE, bad("a"))
    desk.away = {"command"}
    assert desk.run(bad("b")) == []  # nobody knows of it, so its kind is still to be cleared
    desk.away = set()
    assert desk.run() == [(DOWN, "stale", ()), (DOWN, "corrupt", ())]
    assert desk.run() == []
    assert desk.run(STALE) == [(UP, "stale", ())]


def test_two_runs_at_once_tell_once(desk: Desk) -> None:
    told: list[str] = []

    def deliver(_: AlertHook, document: Mapping[str, Any]) -> list[str]:
        time.sleep(0.3)
        told.append(document["kind"])
        return []

    def run(wait: float = 20.0) -> None:
        tell(
            [STALE], HOOK, AlertMemory(str(desk.path), desk.warned.append),
            AlertSource("status", "/ckpt", 1.0), complete=True, warn=desk.warned.append,
            deliver=deliver, wait=wait,
        )  # fmt: skip

    both = [threading.Thread(target=run) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert told == ["stale"]
    assert not desk.warned
    desk.path.unlink()
    with AlertMemory(str(desk.path), desk.warned.append).alone(0.0):
        run(wait=0.0)  # it does not wait for ever for one that hangs
    assert told == ["stale", "stale"]
    assert "told twice" in desk.warned[0]


def test_each_of_two_is_told_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "told.json", AlertHook("command", "https://host/x"))
    desk.away = {"webhook"}
    assert desk.run(STALE) == [(UP, "stale", ())]
    desk.away = set()
    assert desk.run(STALE) == [("webhook raised", "stale", ())]
    assert desk.run(STALE) == []


def test_a_damaged_or_unwritable_memory_tells_again_and_says_so(desk: Desk, tmp_path: Path) -> None:
    desk.run(STALE)
    for text in ("{", '{"schema": "ftckpt.told/1", "told": 3}', '{"schema": "x", "told": {}}'):
        desk.path.write_text(text)
        assert desk.run(STALE) == [(UP, "stale", ())]
        assert "is not read" in desk.warned.pop()
    lost = Desk(tmp_path / "file/told.json")
    (tmp_path / "file").write_text("no directory")
    assert lost.run(STALE) == [(UP, "stale", ())]
    assert any("is not written" in line for line in lost.warned)


def test_the_state_is_of_one_verb_and_one_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    paths = {
        state_file(verb, root) for verb in ("status", "gc") for root in ("/a/b", "/a-b", "s3://a/b")
    }
    assert len(paths) == 6
    assert all(path.startswith("/state/ftckpt/alerts/") for path in paths)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert state_file("gc", "/a").startswith("/home/me/.local/state/ftckpt/")
    monkeypatch.setattr("os.path.expanduser", lambda _: "~")
    with pytest.raises(UsageError):
        state_file("gc", "/a")
