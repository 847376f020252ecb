"""The log of a guard: torn lines, full disks, and who wrote it."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.guard.decisions import CommandEnd, attempts
from ftckpt.guard.journal import GuardJournal, last_decision, sentence
from ftckpt.operations.choosing import read_root
from ftckpt.operations.opening import STORES
from tests.guard.light_job import Job
from tests.json_run import ftckpt_json
from tests.killing import kill_points
from tests.test_docs import validate
from tests.workers.forked import run


def journal(job: Job, said: list[str]) -> GuardJournal:
    return GuardJournal(replace(read_root(str(job.root), STORES), base=""), said.append)


def test_a_torn_last_line_is_passed_over_and_the_next_one_is_whole(job: Job) -> None:
    said: list[str] = []
    one = journal(job, said)
    one.add("start", token="a", identity="x", step=1)
    file = job.root / ".ftckpt" / "guard.jsonl"
    with open(file, "ab") as log:
        log.write(b'{"schema": "ftckpt.guard-log/1", "time": 1, "event": "end')
    two = journal(job, said)
    two.load()
    assert [event["event"] for event in two.events] == ["start"]
    two.add("ended", token="a", ending=CommandEnd.FAILED)
    lines = file.read_bytes().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["ending"] == "failed"
    two.load()
    assert attempts(two.events)[0].ending is CommandEnd.FAILED
    assert said == []


def test_killed_at_any_write_the_log_can_be_read_and_written(job: Job) -> None:
    kills = 0

    def add() -> None:
        journal(job, []).add("start", token="k", step=2)

    for _ in kill_points(add, each=True):
        kills += 1
        after = journal(job, [])
        after.load()
        after.add("ended", token="k", ending=CommandEnd.FAILED)
        after.load()
        assert after.events[-1]["event"] == "ended"
        # A log that is there is opened, and no change: each run makes its own.
        shutil.rmtree(job.root / ".ftckpt")
    assert kills > 3


def test_a_log_that_cannot_be_written_is_told_once_and_kept_in_memory(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    one = journal(job, said)

    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        one.add("start", token="a", identity="x", step=1)
        one.add("ended", token="a", ending=CommandEnd.FAILED)
    assert len(said) == 1
    assert attempts(one.events)[0].ending is CommandEnd.FAILED
    one.add("finished", code=1)
    assert "finished" in (job.root / ".ftckpt" / "guard.jsonl").read_text()


def test_a_link_in_place_of_the_log_is_not_followed(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.touch()
    (job.root / ".ftckpt" / "guard.jsonl").symlink_to(target)
    said: list[str] = []
    journal(job, said).add("start", token="a")
    assert target.read_bytes() == b""
    assert "link" in said[0]


def test_the_last_decision(job: Job) -> None:
    root = journal(job, []).root
    assert last_decision(root) is None
    job.have(1)
    job.run(2)
    last = last_decision(root)
    assert last is not None
    assert (last["event"], last["code"]) == ("finished", 0)
    told = run(["status", str(job.root)], os.environ)
    assert re.search(
        r"^guard +[\d.]+ m?s ago: ended with 0, 0 restarts$", told.stdout, re.MULTILINE
    )
    document = ftckpt_json("status", str(job.root))
    validate(document)
    assert document["guard"]["event"] == "finished"
    started = {"event": "start", "path": None, "attempt": 2, "host": "n1"}
    assert sentence(started) == "a fresh start, attempt 2, on n1"
