"""Read the log of a job, a kernel or a scheduler: words for people, with times here and there."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from ftckpt.joblogs import faults
from ftckpt.joblogs.entries import Fault, LogEntry, LogEntryKind, Weight

from . import messages, training
from .times import Stamps

# A line without a time has that of a line above it, at most this many above.
_ABOVE = 64
_BATCH = 1 << 20
# Entries without a time that wait for the first one of their file.
_WAITING = 1000
# Ranks whose tracebacks are followed at once, and lines that one may have.
_TRACEBACKS, _TRACEBACK_LINES = 4096, 2000


class TextLog:
    """One such log, read line by line."""

    def __init__(self, stamps: Stamps, source: int) -> None:
        self._stamps, self._source = stamps, source
        self._time: float | None = None
        self._above: deque[bytes] = deque(maxlen=_ABOVE)
        self._tracebacks: set[str] = set()  # prefixes of the ranks that are in one
        self._block: dict[str, str] = {}  # torchrun's table of a failed process
        self._forget = 0  # line from which no traceback is followed any more

    def entries(self, lines: Iterable[bytes]) -> Iterator[LogEntry]:
        """Yield what the lines tell, in their order; what precedes the first time is given it."""
        waiting: list[LogEntry] = []
        for entry in self._entries(lines):
            dated = entry.time is not None or entry.kind is LogEntryKind.STEP
            if not dated and self._time is None and len(waiting) < _WAITING:
                waiting.append(entry)
                continue
            if self._time is not None:
                yield from (one._replace(time=self._time) for one in waiting)
                waiting.clear()
            yield entry
        yield from waiting

    def _entries(self, lines: Iterable[bytes]) -> Iterator[LogEntry]:
        number = 0
        for batch in _batches(lines):
            # Hardly any line tells of a failure; looking in many at once costs a fifth.
            together = b"\n".join(batch)
            suspicious = any(word in together for word in messages.WORDS)
            for line in batch:
                number += 1
                if self._tracebacks and number > self._forget:
                    self._tracebacks.clear()
                if self._tracebacks or (suspicious and messages.HINT.search(line) is not None):
                    text = messages.STAMP.sub("", line.decode("utf-8", "replace"))
                    entry = self._failure(text, line, number)
                    if entry is not None:
                        yield entry
                        self._above.append(line)
                        continue
                if training.may_show(line):
                    entry = self._training(line, number)
                    if entry is not None:
                        yield entry
                self._above.append(line)

    def _when(self, line: bytes) -> float | None:
        """Return the time of a line, else that of the nearest line above it."""
        time = self._stamps.of_line(line)
        if time is None:
            for above in reversed(self._above):
                time = self._stamps.of_line(above)
                if time is not None:
                    break
            else:
                return self._time
        self._above.clear()
        self._time = time
        return time

    def _training(self, line: bytes, number: int) -> LogEntry | None:
        text = line.decode("utf-8", "replace")
        found = training.training_line(text)
        if found is None:
            return None
        rank = messages.RANK.search(text)
        # A step that took the time of a line above it would be done too early.
        if found.kind is LogEntryKind.STEP:
            time = self._stamps.of_line(line)
            self._time = self._time if time is None else time
        else:
            time = self._when(line)
        return LogEntry(
            found.kind,
            time,
            step=found.step,
            seconds=found.seconds,
            bar=found.bar,
            rank=None if rank is None else _rank(rank),
            source=self._source,
            line=number,
        )

    def _failure(self, text: str, line: bytes, number: int) -> LogEntry | None:
        if match := messages.BLOCK.match(text):
            self._block[match["key"]] = match["value"]
            return None
        if messages.PLANNED.search(text):
            return LogEntry(LogEntryKind.END, self._when(line), source=self._source, line=number,
                            planned=True)  # fmt: skip
        if match := messages.XID.search(text):
            fault, weight = faults.of_xid(int(match["xid"]))
            return self._said(text, line, number, fault, weight, f"Xid {int(match['xid'])}")
        if match := messages.SXID.search(text):
            weight = Weight.FATAL if match["fatal"] == "Fatal" else Weight.HINT
            return self._said(text, line, number, faults.NVLINK, weight, f"SXid {match['xid']}")
        for message in messages.MESSAGES:
            if match := message.pattern.search(text):
                groups = match.groupdict()
                if not text[:1].isspace():
                    self._tracebacks.discard(_head(text))
                sign = message.sign.format(groups.get("detail") or "").rstrip()
                return self._said(text, line, number, message.fault, message.weight, sign,
                                  groups.get("node") or "")  # fmt: skip
        return self._exception(text, line, number)

    def _exception(self, text: str, line: bytes, number: int) -> LogEntry | None:
        """Follow the tracebacks of all ranks; the last line of one names the exception."""
        head = _head(text)
        if messages.TRACEBACK in text:
            if len(self._tracebacks) < _TRACEBACKS:
                self._tracebacks.add(head)
                self._forget = number + _TRACEBACK_LINES
            return None
        if head not in self._tracebacks:
            return None
        match = messages.EXCEPTION.match(messages.PREFIX.sub("", text))
        if match is None:
            return None
        module, _, name = match["type"].rpartition(".")
        if not module and not messages.CLASS.match(name):
            return None
        if training.may_show(line) and training.training_line(text) is not None:
            return None
        self._tracebacks.discard(head)
        if name in messages.NO_FAILURE:
            return None
        return self._said(text, line, number, faults.EXCEPTION, Weight.FATAL, name)

    def _said(
        self, text: str, line: bytes, number: int, fault: Fault, weight: Weight, sign: str,
        node: str = "",
    ) -> LogEntry:  # fmt: skip
        block, self._block = self._block, {}
        in_block = "exitcode" in text and "exitcode  :" in text
        rank = messages.RANK.search(text)
        host = messages.NCCL_HOST.search(text)
        if host is None and fault.name not in faults.TOLD_BY_OTHERS:
            host = messages.SYSLOG_HOST.match(line.decode("utf-8", "replace"))
        time = self._stamps.of_text(block["time"]) if in_block and "time" in block else None
        return LogEntry(
            LogEntryKind.FAILURE,
            self._when(line) if time is None else time,
            fault,
            weight,
            node=node
            or (host["node"] if host else "")
            or (block.get("host", "") if in_block else ""),
            rank=_block_rank(block) if in_block else (None if rank is None else _rank(rank)),
            sign=sign,
            source=self._source,
            line=number,
        )


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield lines in lists of about a megabyte."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line) + 64  # what an object takes
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _head(text: str) -> str:
    """Return the prefix by which launchers tell the ranks of one log apart."""
    prefix = messages.PREFIX.match(text)
    return "" if prefix is None else prefix[0].strip()


def _rank(match: re.Match[str]) -> int:
    return int(match["rank"] or match["task"] or match["pg"])


def _block_rank(block: dict[str, str]) -> int | None:
    value = block.get("rank", "")
    return int(value) if value.isdecimal() and len(value) < 8 else None
