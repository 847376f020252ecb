"""What a plan takes of a log of JSON lines that lies in memory."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.joblogs import TOGETHER, report_of
from ftckpt.joblogs.collect import Collection
from ftckpt.joblogs.reading import records
from ftckpt.joblogs.runlog import RunLog, run_log_of


def read_log(lines: Iterable[str], name: str) -> RunLog:
    collection = Collection(TOGETHER)
    collection.take(records.of_events((line.encode() for line in lines), name, 0))
    return run_log_of(report_of([collection], TOGETHER), name)
