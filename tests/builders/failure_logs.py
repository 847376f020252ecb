"""Logs of simulated runs, as docs/plan.md describes them: plain Python, nothing of ftckpt.

Time between failures is exponential. Nothing fails from a failure until it is noticed; a restart
either can fail as well or cannot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is simulated; times in seconds.

    Attributes:
        mtbf: the truth that a log is to tell.
        length: of the run on the wall clock.
        interval: of work between two saves.
        detect: from a failure until it is noticed.
        restart: from there until training goes on.
        fragile: whether failures strike restarts too.
        start: whether the log has an event for its start.
        end: whether it has one for its end.
    """

    mtbf: float
    length: float
    interval: float
    detect: float = 0.0
    restart: float = 0.0
    fragile: bool = False
    start: bool = True
    end: bool = True

    def log(self, random: Random) -> list[str]:
        """Return the lines of one such run."""
        origin = 1.75e9
        events = [event | {"time": origin + event["time"]} for event in self._events(random)]
        if self.start:
            events.insert(0, {"event": "start", "time": origin})
        if self.end:
            events.append({"event": "end", "time": origin + self.length})
        return [json.dumps(event) for event in events]

    def _events(self, random: Random) -> Iterator[dict[str, Any]]:
        now = 0.0
        while True:
            left = random.expovariate(1 / self.mtbf)
            # The run goes on working and saving until the failure.
            while left > self.interval:
                now, left = now + self.interval, left - self.interval
                if now > self.length:
                    return
                yield {"event": "save", "time": now, "seconds": 0}
            now += left
            while True:
                if now > self.length:
                    return
                again = random.expovariate(1 / self.mtbf) if self.fragile else self.restart
                failure: dict[str, Any] = {"event": "failure", "time": now}
                if self.detect:
                    failure["detect"] = self.detect
                if self.restart and again >= self.restart:
                    failure["restart"] = self.restart
                yield failure
                now += self.detect + min(again, self.restart)
                if again >= self.restart:
                    break
