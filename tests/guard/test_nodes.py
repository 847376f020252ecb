"""Guards on several nodes: one decides, the others follow, and none starts from yesterday's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.guard import nodes
from ftckpt.guard.decisions import Limits
from ftckpt.guard.nodes import NodePlace, node_place
from ftckpt.guard.terms import GuardSettings
from tests.guard.light_job import Job, quick
from tests.guard.test_processes import forked, until

# A rank that says what it starts from, and ends as the test says for its node and attempt.
RANK = """
import json, os, sys, time
node, out = sys.argv[1], sys.argv[2]
attempt = os.environ["FTCKPT_ATTEMPT"]
with open(out, "a") as file:
    file.write(json.dumps([int(node), int(attempt), os.environ.get("FTCKPT_RESUME")]) + "\\n")
does = json.loads(os.environ.get("FAULTS", "{}")).get(f"{node}.{attempt}", 0)
if does == "hang":
    time.sleep(300)
time.sleep(0.1)
sys.exit(does)
"""


@pytest.fixture
def crew(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(nodes, "BEAT", 0.05)
    monkeypatch.setattr(nodes, "LOST", 30.0)  # a slow disk holds up a sign of life for seconds
    job.have(1, 2)
    return job


def words(job: Job, rank: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", RANK, str(rank), str(job.log)]


def node(
    job: Job, rank: int, count: int = 2, settings: GuardSettings | None = None, name: str = "j1"
) -> int:
    place = NodePlace(rank, count, name)
    return forked(
        lambda: job.run(
            words=words(job, rank), settings=settings or quick(), node=place,
            choice={"timeout": 60.0}, keep_faults=True,
        )
    )  # fmt: skip


def code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def told(job: Job) -> list[list[Any]]:
    if not job.log.exists():
        return []
    return sorted(
        [json.loads(line) for line in job.log.read_text().splitlines()], key=lambda e: (e[1], e[0])
    )


def test_all_nodes_start_from_what_the_leader_chose(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.flip(2)
    children = [node(crew, rank, 3) for rank in (2, 0, 1)]
    assert [code(child) for child in children] == [0, 0, 0]
    assert told(crew) == [[r, 1, f"{crew.root}/step-1"] for r in (0, 1, 2)]


def test_a_file_that_cannot_be_read_once_ends_no_command(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nodes._Meeting._read
    reads = count()

    def cut(self: nodes._Meeting, name: str) -> dict[str, Any]:
        return real(self, name) if next(reads) % 3 else {}

    monkeypatch.setattr(nodes._Meeting, "_read", cut)
    children = [node(crew, rank, 3) for rank in (0, 1, 2)]
    assert [code(child) for child in children] == [0, 0, 0]
    assert told(crew) == [[r, 1, f"{crew.root}/step-2"] for r in (0, 1, 2)]


@pytest.mark.parametrize("broken", ["0.1", "1.1"])
def test_a_failure_of_one_restarts_all(
    crew: Job, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    other = "1.1" if broken == "0.1" else "0.1"
    monkeypatch.setenv("FAULTS", json.dumps({broken: 7, other: "hang"}))
    children = [node(crew, rank) for rank in (0, 1)]
    assert [code(child) for child in children] == [0, 0]
    path = f"{crew.root}/step-2"
    assert told(crew) == [[0, 1, path], [1, 1, path], [0, 2, path], [1, 2, path]]


def test_the_code_is_that_of_the_node_that_failed(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": 9, "0.1": "hang"}))
    settings = quick(limits=Limits(0))
    children = [node(crew, rank, settings=settings) for rank in (0, 1)]
    assert [code(child) for child in children] == [9, 9]


def test_a_notice_on_one_node_ends_the_job_for_all(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": "hang", "0.1": "hang"}))
    settings = quick(notice_signals=[signal.SIGUSR2])
    children = [node(crew, rank, settings=settings) for rank in (0, 1)]
    until(lambda: len(told(crew)) == 2)
    time.sleep(0.2)
    os.kill(children[1], signal.SIGUSR2)  # SIGUSR1 then ends both commands
    assert [code(child) for child in children] == [75, 75]


def test_a_notice_before_the_start_ends_the_job_for_all(crew: Job) -> None:
    """The leader waits for a third node when the second has to leave."""
    settings = quick(notice_signals=[signal.SIGUSR2])
    children = [node(crew, rank, 3, settings) for rank in (0, 1)]
    until(lambda: all(signs(crew, rank) > 5 for rank in (0, 1)))
    os.kill(children[1], signal.SIGUSR2)
    assert [code(child) for child in children] == [75, 75]
    assert told(crew) == []


def signs(job: Job, rank: int) -> int:
    """How often a node has shown that it lives."""
    file = job.root / ".ftckpt" / "guard" / "j1" / f"node-{rank}.json"
    return int(json.loads(file.read_bytes())["count"]) if file.exists() else 0


def test_damage_everywhere_starts_no_node(crew: Job) -> None:
    crew.flip(1)
    crew.flip(2)
    children = [node(crew, rank) for rank in (0, 1)]
    assert [code(child) for child in children] == [4, 4]
    assert told(crew) == []


def test_a_node_that_does_not_come_starts_none(crew: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    place = NodePlace(0, 2, "j1")
    ended = crew.run(words=words(crew, 0), node=place)
    assert ended.own is ExitCode.UNAVAILABLE
    place = NodePlace(1, 2, "j2")
    ended = crew.run(words=words(crew, 1), node=place)
    assert ended.own is ExitCode.UNAVAILABLE
    assert told(crew) == []


def test_a_node_does_not_follow_a_decision_of_an_earlier_start(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job name, files of guards that were killed, a follower that comes first."""
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": "hang", "0.1": "hang"}))
    children = [node(crew, rank) for rank in (0, 1)]
    until(lambda: len(told(crew)) == 2)
    for child in children:
        os.kill(child, signal.SIGKILL)
        code(child)
    # What it started from is damaged meanwhile; the follower is there before the leader.
    crew.flip(2)
    crew.log.unlink()
    monkeypatch.setenv("FAULTS", "{}")
    follower = node(crew, 1)
    time.sleep(0.5)
    assert told(crew) == []
    until(lambda: not held(crew.root))
    leader = node(crew, 0)
    assert [code(leader), code(follower)] == [0, 0]
    assert told(crew) == [[r, 1, f"{crew.root}/step-1"] for r in (0, 1)]


def held(root: Path) -> bool:
    import fcntl

    with open(root / ".ftckpt" / "guard.lock", "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_leader_that_is_gone_ends_its_followers(
    crew: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LOST", 2.0)
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": "hang", "0.1": "hang"}))
    children = [node(crew, rank) for rank in (0, 1)]
    until(lambda: len(told(crew)) == 2)
    os.kill(children[0], signal.SIGKILL)
    code(children[0])
    assert code(children[1]) == 75


def test_a_follower_that_is_gone_is_a_failure(crew: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LOST", 2.0)
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": "hang", "0.1": "hang"}))
    settings = quick(limits=Limits(0))
    children = [node(crew, rank, settings=settings) for rank in (0, 1)]
    until(lambda: len(told(crew)) == 2)
    os.kill(children[1], signal.SIGKILL)
    code(children[1])
    assert code(children[0]) == 75


@pytest.mark.parametrize("again", [0, 1])
def test_a_guard_that_is_started_anew_joins_the_others(
    crew: Job, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """As Kubernetes restarts one pod of a job: no node starts before all have ended."""
    monkeypatch.setenv("FAULTS", json.dumps({"1.1": "hang", "0.1": "hang"}))
    children = [node(crew, rank) for rank in (0, 1)]
    until(lambda: len(told(crew)) == 2)
    os.kill(children[again], signal.SIGKILL)
    code(children[again])
    until(lambda: again or not held(crew.root))
    monkeypatch.setenv("FAULTS", "{}")
    children[again] = node(crew, again)
    assert [code(child) for child in children] == [0, 0]
    lines = [json.loads(line) for line in crew.log.read_text().splitlines()]
    # The one that went on makes its second attempt, the new one its first.
    assert sorted(one[:2] for one in lines[2:]) == sorted([[again, 1], [1 - again, 2]])


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}, None),  # no step: alone
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7",
             "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "3"},
            NodePlace(1, 2, "SLURM-7-0-3"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7"}, None),
        (
            {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a/b"},
            NodePlace(0, 4, "GROUP-a_b-"),
        ),
        ({"NODE_RANK": "2", "NNODES": "3"}, NodePlace(2, 3, "NODE-")),
        ({"JOB_COMPLETION_INDEX": "1"}, None),
    ],
)  # fmt: skip
def test_the_place_of_a_node(environment: dict[str, str], place: NodePlace | None) -> None:
    assert node_place(environment) == place


def test_the_place_that_the_user_says() -> None:
    environment = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "x"}
    assert node_place(environment, 4, "run7") == NodePlace(1, 4, "run7")
    assert node_place(environment, 1) is None


def test_what_old_jobs_left_is_removed(crew: Job) -> None:
    folder = crew.root / ".ftckpt" / "guard"
    for name, age in (("old", 8 * 86400), ("recent", 86400)):
        (folder / name).mkdir(parents=True)
        for file in ("node-0.json", "attempt-1.json"):
            (folder / name / file).write_text("{}")
            at = time.time() - age
            os.utime(folder / name / file, (at, at))
    (folder / "old" / "kept.txt").write_text("a person's")
    children = [node(crew, rank) for rank in (0, 1)]
    assert [code(child) for child in children] == [0, 0]
    assert sorted(one.name for one in folder.iterdir()) == ["j1", "old", "recent"]
    assert [one.name for one in (folder / "old").iterdir()] == ["kept.txt"]
    assert len(list((folder / "recent").iterdir())) == 2
