from __future__ import annotations

import json
from typing import Any

import pytest

from ftckpt.errors import UsageError
from ftckpt.joblogs.runlog import RunLog
from tests.builders.run_logs import read_log


def lines(*events: dict[str, Any]) -> list[str]:
    return [json.dumps(event) + "\n" for event in events]


def test_a_log_is_summed_up() -> None:
    log = lines(
        {"event": "start", "time": 1000.0},
        {"event": "step", "step": 1, "seconds": 4.0},
        {"event": "step", "step": 2, "seconds": 5.0},
        {"event": "step", "step": 3, "seconds": 100.0},
        {"event": "save", "time": 2000, "seconds": 60, "bytes": 5},
        {"event": "save", "time": 3000, "seconds": 80, "bytes": 7.5},
        {"event": "failure", "time": 4000, "class": "gpu", "detect": 90, "restart": 300},
        {"event": "failure", "time": 5000, "class": "gpu", "detect": 110},
        {"event": "failure", "time": 6000},
        {"event": "loss", "value": 2.5},
        {"event": "end", "time": 11000},
    )
    assert read_log([*log[:3], "\n", *log[3:]], "run.jsonl") == RunLog(
        saves=2,
        failures=3,
        classes={"gpu": 2, "": 1},
        components={"gpu": 2, "": 1},
        nodes={"": 3},
        span_s=10000.0,
        exposed_s=10000.0 - (90 + 110 + 100) - 3 * 300,
        exposed_failures=3,
        save_s=70.0,
        nbytes=7.5,
        detect_s=100.0,
        restart_s=300.0,
        step_s=5.0,
        ignored=1,
    )


def test_async_saves_and_times_with_a_zone() -> None:
    log = read_log(
        lines(
            {"event": "save", "time": "2026-01-01T00:00:00Z", "snapshot": 1.5, "flush": 50},
            {"event": "save", "time": "2026-01-01T02:00:00+01:00", "snapshot": 2.5, "flush": 70},
        ),
        "run.jsonl",
    )
    assert (log.snapshot_s, log.flush_s, log.save_s, log.span_s) == (2.0, 60.0, None, 3600.0)


def test_nothing_is_said_of_what_is_not_there() -> None:
    assert read_log([], "empty") == RunLog()


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"seconds": 5}',
        '{"event": 5}',
        '{"event": "save", "seconds": -1}',
        '{"event": "save", "seconds": NaN}',
        '{"event": "save", "seconds": 1e999}',
        '{"event": "save", "seconds": true}',
        '{"event": "save", "seconds": "60s"}',
        '{"event": "failure", "time": "2026-01-01T00:00:00"}',
        '{"event": "failure", "time": "yesterday"}',
        # Beyond what a calendar holds.
        '{"event": "failure", "time": 1e250}',
        '{"event": "failure", "time": 4.2e9}',
        '{"event": "end", "time": "9999-12-31T23:59:59-23:59"}',
        '{"event": "start", "time": "0001-01-01T00:00:00+23:59"}',
        '{"event": "save", "bytes": ' + "9" * 400 + "}",
        "[" * 50_000,
        " " * (1 << 17),
    ],
)
def test_what_is_no_event_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"line 2 of run\.jsonl"):
        read_log([json.dumps({"event": "step"}), line], "run.jsonl")


def test_a_log_that_ends_before_it_starts() -> None:
    with pytest.raises(UsageError, match="ends before it starts"):
        read_log(lines({"event": "end", "time": 5}, {"event": "start", "time": 9}), "run.jsonl")
