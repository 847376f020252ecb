"""Guards of one job on several nodes: the lowest rank decides, the others follow.

They meet below the root, in `.ftckpt/guard/JOB/`, so it must be a place that every node sees:

- `node-R.json`: what node R does now, rewritten every few seconds with a rising count; a count that
  stands still means that its guard is gone.
- `attempt-N.json`: the decision of the leader, created once. It names a token of every node. A node
  follows only a decision with the token that it made for this very start, so none starts from what
  an earlier run of the same job has left there.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    ExitCode,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from ftckpt.retention.records import own_folder
from ftckpt.strict_json import JsonError, decode

from .decisions import REQUEUE, CommandEnd, Next
from .notices import Notice
from .terms import StartPoint, Team

# Seconds between two signs of life, and until a node without one counts as lost.
BEAT, LOST = 2.0, 60.0
# Seconds after which what another job has left is removed; none of its nodes waits any more.
LEFT = 7 * 24 * 3600.0
# What the leader says once every node's command has ended.
_AFTER = ("over", "deciding")
# Where one node's command has ended so, those of the others end by themselves: they may still save.
_BY_ITSELF = (CommandEnd.DONE, CommandEnd.PREEMPTED)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_OURS = re.compile(r"/guard/[^/]+/(node|attempt)-[0-9]+\.json$")
# Rank, number of guards, and what names the job and this start of it.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
     ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
    ("NODE_RANK", "NNODES", ("JOB_ID",)),
    ("JOB_COMPLETION_INDEX", "", ("JOB_NAME",)),
)  # fmt: skip


class NodePlace(NamedTuple):
    """This guard among those of its job.

    Attributes:
        rank: 0 leads.
        guards: their number.
        job: names the job, and which start of it.
    """

    rank: int
    guards: int
    job: str


def node_place(
    environment: Mapping[str, str], count: int | None = None, job: str = ""
) -> NodePlace | None:
    """Return this guard's place by what a launcher has set; None if it is the only one.

    Args:
        environment: the variables.
        count: the number of guards, if the user says it.
        job: the name of the job, if the user says it.
    """
    for rank, several, names in _LAUNCHERS:
        number, of = environment.get(rank, ""), environment.get(several, "")
        if not number.isdecimal() or not (count or of.isdecimal()):
            continue
        total = count or int(of)
        if total < 2:
            return None
        name = job or "-".join([rank.partition("_")[0], *(environment.get(n, "") for n in names)])
        return NodePlace(int(number), total, _UNSAFE.sub("_", name))
    return None


class _Meeting(Team):
    """What leader and followers share: their files, and the signs of life."""

    def __init__(
        self, root: Root, place: NodePlace, *, patience: float, beat: float, lost: float
    ) -> None:
        self._store = root.store
        self._folder = f"{own_folder(root)}/guard/{place.job}"
        self._place, self._patience, self._beat, self._lost = place, patience, beat, lost
        self._mine: dict[str, Any] = {
            "rank": place.rank,
            "state": "new",
            "life": secrets.token_hex(8),
        }
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._tell: Callable[[object], None] = lambda _: None
        self._attempt = 0
        self._running = False
        self._seen: dict[int, tuple[object, float, bool]] = {}
        self._said: dict[int, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._live, name="ftckpt-nodes", daemon=True)

    def begin(self, tell: Callable[[object], None]) -> None:
        self._tell = tell
        self._thread.start()

    def close(self, code: int) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(FtckptError):
            self._say(state="left", code=code)

    def noticed(self, notice: Notice) -> None:
        with suppress(FtckptError):
            self._say(notice=notice._asdict())

    def _say(self, **changed: object) -> None:
        with self._lock:
            self._mine |= changed
            self._mine["count"] = int(self._mine.get("count", 0)) + 1
            text = json.dumps(self._mine).encode() + b"\n"
            self._store.put(f"{self._folder}/node-{self._place.rank}.json", text)

    def _live(self) -> None:
        while not self._ended.wait(self._beat):
            with suppress(FtckptError):
                self._say()
                if self._running:
                    self._look()

    def _look(self) -> None:
        """Look for what the others do while the command runs."""

    def _read(self, name: str) -> dict[str, Any]:
        """Return a file; {} if it is absent, or not whole yet."""
        try:
            found = decode(self._store.read(f"{self._folder}/{name}"))
        except (NotFoundError, CorruptError, JsonError):
            return {}
        return found if isinstance(found, dict) else {}

    def _node(self, rank: int) -> dict[str, Any]:
        """Return what a node says, and note whether it lives.

        Where its file cannot be read, as while a service replaces it, what it said before holds: a
        node that is gone shows by its count.
        """
        said = self._read(f"node-{rank}.json") or self._said.get(rank, {})
        self._said[rank] = said
        sign = said.get("life"), said.get("count")
        now = time.monotonic()
        if rank not in self._seen:
            self._seen[rank] = sign, now, False
        elif self._seen[rank][0] != sign:
            self._seen[rank] = sign, now, True
        return said

    def _lives(self, rank: int) -> bool:
        """Whether a node has shown, since this guard began, that it is there now."""
        return rank in self._seen and self._seen[rank][2]

    def _is_lost(self, rank: int) -> bool:
        return rank in self._seen and time.monotonic() - self._seen[rank][1] > self._lost

    def _relay(self, rank: int, said: Mapping[str, Any]) -> None:
        """Tell of a notice that another node has."""
        given = said.get("notice")
        if given:
            source = f"node {rank}: {given['source']}"
            self._tell(Notice(source, given["seconds"], given["detail"]))

    def _pause(self) -> None:
        time.sleep(min(0.5, self._beat / 2))


class _Gathered(NamedTuple):
    """The nodes of a job before a start.

    Attributes:
        tokens: of those that are ready, by rank.
        left: one that has left to be started again, as after a notice of preemption: it does not
            come back before the whole job does, and no command is started.
    """

    tokens: dict[str, str]
    left: int | None = None


class Leader(_Meeting):
    """The guard that chooses, for all nodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: dict[str, str] = {}
        self._told = False

    def agree(self, choose: Callable[[], StartPoint]) -> StartPoint:
        """Wait for every node, choose, and publish the choice."""
        self._running = False
        self._say(state="deciding")
        if not self._attempt:
            with suppress(FtckptError):
                self._clean()
        tokens, left = self._gather()
        if left is not None:
            return StartPoint(ExitCode.REQUEUE, f"node {left} has left: start the whole job again")
        chosen = choose()
        if chosen.code is ExitCode.UNAVAILABLE:
            return chosen
        self._publish(tokens, chosen)
        self._tokens, self._told = tokens, False
        self._running = chosen.starts
        return chosen

    def _clean(self) -> None:
        """Remove what jobs have left in which no node has shown itself for long.

        By the store's own clock: the age of each file against the one that this guard has just
        written.
        """
        above = self._folder.rpartition("/")[0]
        files = [e for e in self._store.walk(above) if _OURS.search(e.path)]
        now = max(
            (e.mtime or 0.0 for e in files if e.path.startswith(f"{self._folder}/")), default=0.0
        )
        newest: dict[str, float] = {}
        for entry in files:
            job = entry.path.rpartition("/")[0]
            newest[job] = max(newest.get(job, 0.0), now if entry.mtime is None else entry.mtime)
        old = {job for job, at in newest.items() if job != self._folder and at < now - LEFT}
        self._store.delete([e.path for e in files if e.path.rpartition("/")[0] in old])
        local = self._store.local_path(above)
        for job in old if local is not None else ():
            with suppress(OSError):  # not empty
                os.rmdir(os.path.join(str(local), job.rpartition("/")[2]))

    def _gather(self) -> _Gathered:
        """Wait for every node to be ready, or for one of them to leave.

        Raises:
            UnavailableError: one did not come.
        """
        until = time.monotonic() + self._patience
        used = set(self._tokens.values())
        while True:
            tokens: dict[str, str] = {}
            for rank in range(1, self._place.guards):
                said = self._node(rank)
                token = str(said.get("token", ""))
                if not self._lives(rank):
                    continue
                if said.get("state") == "left" and said.get("code") == REQUEUE:
                    return _Gathered(tokens, rank)
                if said.get("state") == "ready" and token not in used:
                    tokens[str(rank)] = token
            missing = [r for r in range(1, self._place.guards) if str(r) not in tokens]
            if not missing:
                return _Gathered(tokens)
            if time.monotonic() > until:
                raise UnavailableError(
                    f"node {missing[0]} of {self._place.guards} did not come",
                    hint="every node runs the same guard on a ROOT that all of them see",
                )
            self._pause()

    def _publish(self, tokens: Mapping[str, str], chosen: StartPoint) -> None:
        """Create the decision that the others follow.

        Raises:
            RefusedError: another guard leads the same job.
        """
        if not self._attempt:
            names = (e.path.rpartition("/")[2] for e in self._store.children(self._folder))
            numbers = (re.fullmatch(r"attempt-([0-9]{1,9})\.json", name) for name in names)
            self._attempt = max((int(n[1]) for n in numbers if n), default=0)
        self._attempt += 1
        decision = {
            "attempt": self._attempt, "tokens": tokens, "code": int(chosen.code),
            "message": chosen.message, "path": chosen.path, "step": chosen.step,
            "environment": dict(chosen.environment),
        }  # fmt: skip
        try:
            self._store.create(
                f"{self._folder}/attempt-{self._attempt}.json", json.dumps(decision).encode()
            )
        except ExistsError as error:
            raise RefusedError(
                f"another guard leads the job {self._place.job}",
                hint="each node has a rank of its own: see --nodes",
            ) from error
        self._say(state="running", attempt=self._attempt)

    def _look(self) -> None:
        for rank in range(1, self._place.guards):
            said = self._node(rank)
            mine = said.get("token") == self._tokens.get(str(rank))
            if mine:
                self._relay(rank, said)
            # Another token: its guard was started anew, and waits.
            bad = not mine or (
                said.get("state") == "ended" and said.get("ending") not in _BY_ITSELF
            )
            if (bad or said.get("state") == "left" or self._is_lost(rank)) and not self._told:
                self._told = True
                self._tell(CommandEnd.FAILED)

    def conclude(
        self, ending: CommandEnd, code: int, decide: Callable[[CommandEnd, int], Next]
    ) -> Next:
        """Wait for every node's command to end, decide, and publish the decision."""
        self._running = False
        self._say(state="ended", ending=ending, code=code)
        ends = self._ends()
        first = [one for one in ends if one.get("ending") and not one.get("provoked")]
        if ending is CommandEnd.DONE or (self._told and ending is CommandEnd.FAILED):
            for said in first:
                if said["ending"] != CommandEnd.DONE:
                    ending, code = CommandEnd(said["ending"]), int(said["code"])
                    break
        if any(said.get("ending") == CommandEnd.PREEMPTED for said in ends):
            ending = CommandEnd.PREEMPTED
        if ending is CommandEnd.STOPPED and self._told:  # by a signal that another node was sent
            ending = CommandEnd.FAILED
        lost = [rank for rank in range(1, self._place.guards) if self._is_lost(rank)]
        if lost and ending is CommandEnd.FAILED:
            after = Next(False, REQUEUE, 0.0, f"node {lost[0]} is gone: start the job again")
        else:
            after = decide(ending, code)
        self._say(
            state="over", again=after.again, code=after.code, reason=after.reason, full=after.full
        )
        return after

    def _ends(self) -> list[dict[str, Any]]:
        """Wait for the other nodes' commands to end; return how they did."""
        until = time.monotonic() + self._lost
        while True:
            ends = []
            for rank in range(1, self._place.guards):
                said = self._node(rank)
                mine = said.get("token") == self._tokens.get(str(rank))
                gone = self._is_lost(rank) or said.get("state") == "left" or not mine
                if said.get("state") == "ended" or gone:
                    ends.append(said if mine else {})
            if len(ends) == self._place.guards - 1 or time.monotonic() > until:
                return ends
            self._pause()


class Follower(_Meeting):
    """A guard that starts what the leader decides."""

    leads = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._provoked = False
        self._life: object = None

    def agree(self, choose: Callable[[], StartPoint]) -> StartPoint:
        """Return what the leader has chosen for this start."""
        self._running = False
        self._provoked = False
        token = secrets.token_hex(8)
        self._say(state="ready", token=token, ending=None, code=None, provoked=False)
        until = time.monotonic() + self._patience
        while True:
            leader = self._node(0)
            number = leader.get("attempt")
            decision = self._read(f"attempt-{number}.json") if number else {}
            if token in decision.get("tokens", {}).values():
                break
            if self._lives(0):
                if leader.get("state") == "left":
                    return StartPoint(_verdict(leader.get("code")), "the leading node has ended")
                until = max(until, time.monotonic() + self._lost)  # it may verify for long
            if time.monotonic() > until or (self._lives(0) and self._is_lost(0)):
                return StartPoint(
                    ExitCode.UNAVAILABLE, "the leading node does not answer",
                    "every node runs the same guard on a ROOT that all of them see",
                )  # fmt: skip
            self._pause()
        self._attempt, self._life = int(decision["attempt"]), leader.get("life")
        code = ExitCode(decision["code"])
        if code in (ExitCode.OK, ExitCode.NOT_FOUND):
            self._say(state="running")
            self._running = True
        return StartPoint(
            code, str(decision["message"]), "", decision["path"], decision["step"],
            environment=decision["environment"],
        )  # fmt: skip

    def _look(self) -> None:
        leader = self._node(0)
        self._relay(0, leader)
        over = leader.get("state") in ("ended", "over", "left", "deciding")
        if leader.get("attempt", 0) < self._attempt:
            over = False
        over |= leader.get("life") != self._life
        done = leader.get("state") == "ended" and leader.get("ending") in _BY_ITSELF
        if ((over and not done) or self._is_lost(0)) and not self._provoked:
            self._provoked = True
            self._tell(CommandEnd.FAILED)

    def conclude(
        self, ending: CommandEnd, code: int, decide: Callable[[CommandEnd, int], Next]
    ) -> Next:
        """Return what the leader decides."""
        self._running = False
        self._say(state="ended", ending=ending, code=code, provoked=self._provoked)
        while True:
            leader = self._node(0)
            if leader.get("life") not in (None, self._life):
                return Next(True, 0, 0.0, "another guard leads the job now")
            state, number = leader.get("state"), int(leader.get("attempt", 0))
            if number > self._attempt or (number == self._attempt and state in _AFTER):
                again = state != "over" or bool(leader.get("again"))
                said = f"the leading node says: {leader.get('reason', 'again')}"
                full = leader.get("full") is True
                return Next(again, int(leader.get("code") or 0), 0.0, said, full=full)
            if leader.get("state") == "left":
                said = str(leader.get("reason", "the leading node has ended"))
                return Next(False, int(leader.get("code", 1)), 0.0, said)
            if self._is_lost(0):
                return Next(False, REQUEUE, 0.0, "the leading node is gone")
            self._pause()


def _verdict(code: object) -> ExitCode:
    try:
        found = ExitCode(int(str(code)))
    except ValueError:
        return ExitCode.UNAVAILABLE
    return ExitCode.UNAVAILABLE if found in (ExitCode.OK, ExitCode.NOT_FOUND) else found


def team_of(root: Root, place: NodePlace | None, patience: float) -> Team:
    """Return this guard's part in its job; `patience`: seconds to wait for the other nodes."""
    if place is None:
        return Team()
    kind = Leader if place.rank == 0 else Follower
    return kind(root, place, patience=patience, beat=BEAT, lost=LOST)
