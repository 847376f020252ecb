"""The tensors of two checkpoints: what headers and records say of each, and what reading shows."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.checkpoint.read_ahead import extents_in_order, reading_ahead
from ftckpt.errors import CorruptError, FtckptError, UnavailableError
from ftckpt.findings import Finding, from_error, in_file
from ftckpt.transfer.content import Content
from ftckpt.verification.record_sums import ReadSums
from ftckpt.workers import ALONE, Work

from .arithmetic import Tally, Tolerance
from .evidence import Basis, RecordedEqual
from .read import Readers, ShardPair, ShardResult
from .report import Summaries, TensorDifference, difference
from .state import ComparedPair, DiffStatus, Side, shards

# This many unreadable tensors mean that the storage is gone.
_GIVE_UP = 8


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How tensors are compared.

    Attributes:
        tolerance: which differences are none; None compares bits.
        trust_recorded: do not read what recorded digests or CRC-32s say to be equal.
    """

    tolerance: Tolerance | None = None
    trust_recorded: bool = False


@dataclass
class Compared:
    """What became of the tensors.

    Attributes:
        tensors: those that are not equal.
        summaries: all of them, added up.
        evidence: number of tensors by what their verdict rests on.
        bytes_read: of both checkpoints.
        findings: what could not be read.
        contradicted: keys of the source tensors that differ although what is recorded of both says
            that they are equal: one of the two is damaged.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    summaries: Summaries = field(default_factory=Summaries)
    evidence: Count[str] = field(default_factory=Count)
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)
    contradicted: list[tuple[str, str]] = field(default_factory=list)


class _Verdict(NamedTuple):
    status: DiffStatus
    evidence: Basis
    tally: Tally | None = None
    error: FtckptError | None = None


def compare_tensors(
    ours: Content,
    theirs: Content,
    pairs: Collection[ComparedPair],
    reading: Reading,
    recorded: RecordedEqual,
    sums: tuple[ReadSums, ReadSums],
    work: Work = ALONE,
) -> Compared:
    """Compare every pair.

    Args:
        ours: the first checkpoint.
        theirs: the second.
        pairs: of `alignment.align`.
        reading: how.
        recorded: knows what is recorded as equal.
        sums: sum up what is read of the two.
        work: who does it; its counter is told of the bytes of one side. Of a share nothing is said
            but what could not be read.

    Raises:
        UnavailableError: the storage does not answer.
    """
    plan = _Plan(ours, theirs, recorded, reading)
    for pair in pairs:
        plan.add(pair)
    work.counter.start("comparing", sum(two.ours[1].nbytes for two in plan.shards.values()))
    readers = Readers(ours, theirs, sums, work.limiter)
    with ExitStack() as stack:
        stack.callback(readers.close)
        for second, content in enumerate((ours, theirs) if plan.shards else ()):
            keys = _keys(plan.shards.values(), bool(second))
            extents = extents_in_order(content.checkpoint, keys)
            ahead = reading_ahead(content.checkpoint, extents, work.limiter, jobs=work.threads)
            stack.enter_context(ahead)
        found = readers.compare(plan.shards, reading.tolerance, work)
    done = Compared()
    if work.partial:
        for name, result in found.items():
            if result.error is not None:
                done.findings.append(from_error(result.error, tensor=name.partition("\0")[0]))
        done.bytes_read = 2 * sum(result.nbytes for result in found.values())
        _require_storage(found)
        return done
    tolerant = reading.tolerance is not None
    for pair in pairs:
        verdict = plan.verdict(pair, found)
        tensor = difference(
            pair, verdict.evidence, verdict.tally, tolerant=tolerant, status=verdict.status
        )
        done.summaries.add(tensor, verdict.tally)
        done.evidence[verdict.evidence] += 1
        if verdict.status is not DiffStatus.EQUAL:
            done.tensors.append(tensor)
        if verdict.error is not None:
            done.findings.append(_unread(verdict.error, pair.key, ours, theirs))
        if verdict.tally is not None and verdict.tally.changed:
            done.contradicted += plan.contradicted(pair)
    done.bytes_read = sum(
        plan.shards[name].ours[1].nbytes + plan.shards[name].theirs[1].nbytes
        for name, result in found.items()
        if result.error is None
    )
    _require_storage(found)
    return done


def _unread(error: FtckptError, key: str, ours: Content, theirs: Content) -> Finding:
    """Return what could not be read of a pair; with the side, where sizes alone tell it."""
    found = from_error(error, tensor=key)
    if found.file is None:
        return found
    end = (found.offset or 0) + (found.length or 0)
    short = [
        source
        for source in (ours.checkpoint.source, theirs.checkpoint.source)
        if (entry := source.entries.get(found.file)) is None or entry.size < end
    ]
    if len(short) != 1:
        return found
    return in_file(found, short[0].store.describe(short[0].path(found.file)))


def _keys(shards: Iterable[ShardPair], second: bool) -> Iterator[str]:
    """Yield the keys of what is read of one checkpoint, in that order."""
    for two in shards:
        for one, shard in (two.ours, two.theirs):
            if one is second:
                yield from (fill.key for fill in shard.fills)


class _Plan:
    """What must be read, and what is known of the rest."""

    def __init__(
        self, ours: Content, theirs: Content, recorded: RecordedEqual, reading: Reading
    ) -> None:
        self.shards: dict[str, ShardPair] = {}
        self._contents = ours, theirs
        self._recorded = recorded
        self._reading = reading
        self._verdicts: dict[str, _Verdict] = {}
        self._first: dict[tuple[str, str, int | None], str] = {}  # of tensors with two names
        self._same: dict[str, str] = {}

    def add(self, pair: ComparedPair) -> None:
        """Decide on one pair, or plan its reading."""
        if pair.status is not None:
            tied = pair.status is DiffStatus.EQUAL
            rests = Basis.TIED if tied else Basis.HEADERS
            self._verdicts[pair.key] = _Verdict(pair.status, rests)
            side = pair.ours or pair.theirs
            for number, copy in enumerate(pair.tied):
                assert side is not None
                self._plan(f"{pair.key}\0{number}", side, copy, None)
            return
        assert pair.ours is not None
        assert pair.theirs is not None
        owners = self._owner(pair.ours), self._owner(pair.theirs)
        first = self._first.setdefault((*owners, pair.rows), pair.key)
        if first != pair.key:
            self._same[pair.key] = first
            return
        for side in (pair.ours, pair.theirs):
            gap = next(self._gaps(side), None)
            if gap is not None:
                self._verdicts[pair.key] = _Verdict(DiffStatus.UNREAD, Basis.HEADERS, error=gap)
                return
        if 0 in pair.either.shape:
            self._verdicts[pair.key] = _Verdict(DiffStatus.EQUAL, Basis.HEADERS)
            return
        recorded = self._as_recorded(pair)[0] if self._reading.trust_recorded else None
        if recorded is not None:
            self._verdicts[pair.key] = _Verdict(DiffStatus.RECORDED, recorded)
        else:
            self._plan(pair.key, pair.ours, pair.theirs, pair.rows)

    def contradicted(self, pair: ComparedPair) -> Iterator[tuple[str, str]]:
        """Yield the source's tensors of a pair that differs although it is recorded as equal."""
        if pair.key in self.shards:
            recorded, keys = self._as_recorded(pair)
            if recorded is not None:
                yield keys

    def verdict(self, pair: ComparedPair, found: dict[str, ShardResult]) -> _Verdict:
        """Return what became of a pair."""
        if pair.key in self._same:
            same = self._verdict(self._same[pair.key], found)
            return same._replace(evidence=Basis.TIED, error=None)
        for number in range(len(pair.tied)):
            result = found[f"{pair.key}\0{number}"]
            if result.error is None and not result.tally.changed:
                return _Verdict(DiffStatus.EQUAL, Basis.TIED)
        return self._verdict(pair.key, found)

    def _verdict(self, key: str, found: dict[str, ShardResult]) -> _Verdict:
        if key in self._verdicts:
            return self._verdicts[key]
        tally, error = found[key].tally, found[key].error
        two = self.shards[key]
        status = DiffStatus.DIFFERENT
        if error is not None:
            return _Verdict(DiffStatus.UNREAD, Basis.READ, None, error)
        if not tally.changed and two.ours[1].dtype == two.theirs[1].dtype:
            status = DiffStatus.EQUAL
        elif self._reading.tolerance is not None and not tally.beyond:
            status = DiffStatus.CLOSE
        return _Verdict(status, Basis.READ, tally)

    def _plan(self, name: str, ours: Side, theirs: Side, rows: int | None) -> None:
        one, two = (
            (side.second, shards(self._contents[side.second], side, rows))
            for side in (ours, theirs)
        )
        self.shards[name] = ShardPair(name, one, two)

    def _owner(self, side: Side) -> str:
        content = self._contents[side.second]
        return content.aliases.get(side.key, side.key)

    def _gaps(self, side: Side) -> Iterator[CorruptError]:
        """Yield what keeps the pieces of a tensor from being read as one."""
        content = self._contents[side.second]
        for copy in side.wanted.copies:
            info = content.checkpoint.tensors[copy.key]
            for gap in check_coverage(info.shape, info.pieces):
                message = f"{copy.key} in {content.checkpoint.source.url}: {gap.message}"
                yield CorruptError(message, kind=gap.kind, tensor=side.key)

    def _as_recorded(self, pair: ComparedPair) -> tuple[Basis | None, tuple[str, str]]:
        """Return what records a pair as equal, if anything, and its keys in the two sources."""
        assert pair.ours is not None
        assert pair.theirs is not None
        one, two = (
            self._contents[side.second].tensors[self._owner(side)]
            for side in (pair.ours, pair.theirs)
        )
        keys = one.copies[0].key, two.copies[0].key
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return None, keys
        return self._recorded.evidence(*keys), keys


def _require_storage(found: dict[str, ShardResult]) -> None:
    """Raise what made many tensors unreadable.

    Raises:
        UnavailableError: the storage does not answer.
    """
    lost = [one.error for one in found.values() if isinstance(one.error, UnavailableError)]
    if len(lost) >= _GIVE_UP:
        raise lost[0]
