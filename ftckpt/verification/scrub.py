"""Read a root's checkpoints in turn, over many runs, as its ledger remembers them.

A verdict is bound to the identity of the files (`ftckpt.discovery.ledger`), so a checkpoint that
was saved again or repaired counts as never read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.ledger import CheckedPlace, ContentStanding, Ledger, Remembered
from ftckpt.discovery.listing import files_of
from ftckpt.errors import UNPROVEN, ExitCode, FtckptError
from ftckpt.reports import Natural
from ftckpt.storage import StoreOptions

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Child, Root

    from . import VerifyReport


class ScrubSummary(NamedTuple):
    """How far a scrub has come.

    Attributes:
        ledger: path or URL of the verdicts.
        checkpoints: number in the root; those that are not committed do not count.
        checked: number that this run has read.
        never: number that no run has read as they are now.
        oldest: when the one that was not read for longest was read, in seconds since the epoch;
            None if one was never read.
        unproven: number of those that were opened, and whose content no evidence covers.
    """

    ledger: str
    checkpoints: Natural
    checked: Natural
    never: Natural
    oldest: float | None
    unproven: Natural = 0


class ScrubHistory(NamedTuple):
    """What is remembered of the checkpoints of a root.

    Attributes:
        ledger: path or URL of the verdicts.
        checks: by the path or URL of each committed checkpoint, what is known of its files as they
            are now.
    """

    ledger: str
    checks: dict[str, ContentStanding]


@dataclass
class Scrub:
    """One run over a root.

    Attributes:
        budget: seconds after which no further checkpoint is begun; None for no limit.
        stores: how to reach object stores.
        ledger: directory or URL of the ledger; "" for that of the root.
        passed_over: names that are not committed.
    """

    budget: float | None
    stores: StoreOptions
    ledger: str = ""
    passed_over: list[str] = field(default_factory=list)
    _children: dict[str, Child] = field(default_factory=dict)
    _known: dict[str, ContentStanding] = field(default_factory=dict)
    _done: dict[str, VerifyReport] = field(default_factory=dict)

    def turns(self, root: Root) -> Iterator[Child]:
        """Yield the checkpoints that were not read for longest, until the budget is spent.

        The first is always read; a further one only if the time that is left is enough for its
        bytes, at the speed so far. Each must be told of (`done`) before the next.

        Raises:
            UnsafeError: the root's `.ftckpt` is a link.
            DeniedError, NoResourceError: nothing can be remembered; so nothing is read.
            UnsupportedError: the store shows nothing that changes with a file's content.
        """
        began = time.monotonic()
        self._ledger(root).require_writable()
        self._look(root)
        for name in sorted(self._children, key=self._last):
            if self._done and self.budget is not None:
                left = self.budget - (time.monotonic() - began)
                if left <= _nbytes(root, self._children[name]) / self._speed():
                    return
            yield self._children[name]

    def done(self, child: Child, report: VerifyReport) -> None:
        """Take the report on a checkpoint that was read; its verdict is in the ledger."""
        self._done[child.candidate.path] = report

    def gone(self, child: Child) -> None:
        """Take note that a checkpoint was removed before it was read."""
        del self._children[child.candidate.path], self._known[child.candidate.path]

    def remembered(self) -> list[tuple[Child, Remembered]]:
        """Return the checkpoints that an earlier run found bad and that this one did not read."""
        return [
            (self._children[name], bad)
            for name, known in self._known.items()
            if name not in self._done and (bad := failure(known)) is not None
        ]

    def history(self, root: Root) -> ScrubHistory | None:
        """Return what is remembered; None if nothing has been checked here."""
        self._look(root)
        if not any(known.last or known.bad for known in self._known.values()):
            return None
        found = {
            root.url_of(child.candidate): self._known[name]
            for name, child in self._children.items()
        }
        return ScrubHistory(self._ledger(root).url, found)

    def summary(self, root: Root) -> ScrubSummary:
        """Return how far the scrub has come."""
        now = time.time()
        times = {n: k.last.verdict.checked for n, k in self._known.items() if k.last is not None}
        blind = {n for n, k in self._known.items() if n in times and is_blind(k)}
        for name, report in self._done.items():
            times[name] = now
            passed = report.code is ExitCode.OK
            unproven = report.code in UNPROVEN or (passed and report.evidence == "none")
            (blind.add if unproven else blind.discard)(name)
        never = len(self._children) - len(times)
        oldest = min(times.values()) if times and not never else None
        url = self._ledger(root).url
        return ScrubSummary(url, len(self._children), len(self._done), never, oldest, len(blind))

    def _ledger(self, root: Root) -> Ledger:
        return Ledger(root.store, root.base, self.ledger, self.stores)

    def _look(self, root: Root) -> None:
        from ftckpt.discovery.roots import saves_among

        for child in saves_among(root.children()):
            if child.part.recognition.commit is CommitState.UNCOMMITTED:
                self.passed_over.append(root.url_of(child.candidate))
            else:
                self._children[child.candidate.path] = child
        places = [CheckedPlace(root.store, child.part) for child in self._children.values()]
        self._known = dict(zip(self._children, self._ledger(root).standings(places), strict=True))

    def _last(self, name: str) -> float:
        last = self._known[name].last
        return 0.0 if last is None else last.verdict.checked

    def _speed(self) -> float:
        """Return the bytes a second of this run so far."""
        done = self._done.values()
        nbytes, seconds = sum(one.bytes_read for one in done), sum(one.seconds for one in done)
        return max(nbytes, 1) / max(seconds, 1e-3)


def failure(known: ContentStanding) -> Remembered | None:
    """Return the verdict that a checkpoint did not pass; None without one."""
    last = known.last
    return known.bad or (last if last is not None and last.verdict.code != ExitCode.OK else None)


def is_blind(known: ContentStanding) -> bool:
    """Whether no evidence covered a checkpoint's content, or it holds what is not understood."""
    failed = failure(known)
    if failed is not None:
        return failed.verdict.code in UNPROVEN
    return known.good is not None and not known.good.verdict.proven


def _nbytes(root: Root, child: Child) -> int:
    try:
        return files_of(root.store, child.part.entry).nbytes
    except FtckptError:
        return 0  # removed meanwhile: the check says so
