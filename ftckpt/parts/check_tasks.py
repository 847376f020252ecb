"""Name the tasks of the checks, and write their results as JSON.

A key is the same on every machine. A result is a short list, because there may be millions; what
the task says of itself (file, range) is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from ftckpt.comparison.read import ComparedRange
from ftckpt.delta.original_files import OriginalRuns
from ftckpt.digests.blocks import Block, BlockDigest, BlockFailure
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, Severity
from ftckpt.replication.damage import BlockToJudge
from ftckpt.transfer.casting import Changes
from ftckpt.transfer.forms import ResultTensor
from ftckpt.transfer.prove.against_digests import DigestedRange
from ftckpt.transfer.prove.against_source import ProofRange
from ftckpt.verification.file_digests import CopiesOf, FileToHash, HashedFile
from ftckpt.verification.records import RecordStream, Spans, Sums
from ftckpt.verification.replica import BlockPair, ReplicaDifference, TensorPair
from ftckpt.verification.selfchecks import ChosenSelfCheck, SelfCheckDone
from ftckpt.verification.values import Numbers, NumbersOf
from ftckpt.verification.values.masters import MasterCast

from .comparison_tasks import dump_ranges, key_of_ranges, load_ranges, part_of_ranges
from .finish import dump_error, load_error
from .shares import Shares


class _Kind(NamedTuple):
    """How tasks of one class are handled.

    Attributes:
        key: names a task.
        part: returns the part that it belongs to.
        dump: turns a result into JSON's types.
        load: makes the result of a task from them.
    """

    key: Callable[[Any], str]
    part: Callable[[Any, Shares], int]
    dump: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]


def key_of(task: Any) -> str:
    """Return what names a task."""
    return _kind(task).key(task)


def part_of(task: Any, shares: Shares) -> int:
    """Return the part that a task belongs to."""
    return _kind(task).part(task, shares)


def dumped(task_key: str, result: Any) -> Any:
    """Return a result in JSON's types."""
    return _DUMPS[task_key.partition(" ")[0]](result)


def loaded(task: Any, value: Any) -> Any:
    """Return the result of a task from JSON's types.

    Raises:
        ValueError, TypeError, KeyError: it is not a result of this task.
    """
    return _kind(task).load(task, value)


def dump_finding(found: Finding) -> list[Any]:
    """Return a finding in JSON's types."""
    return [
        found.kind, found.message, str(found.severity), int(found.code), found.file, found.tensor,
        found.rank, found.offset, found.length,
    ]  # fmt: skip


def load_finding(value: Any) -> Finding:
    """Return a finding from JSON's types.

    Raises:
        ValueError, TypeError: it is none.
    """
    kind, message, severity, code, *where = value
    return Finding(kind, message, Severity(severity), ExitCode(code), *where)


def _kind(task: Any) -> _Kind:
    if isinstance(task, Sequence) and not hasattr(task, "_fields"):
        if isinstance(task[0], ComparedRange):
            return _COMPARED
        return _RANGES if isinstance(task[0], ProofRange) else _SELF_CHECKS
    return _KINDS[type(task)]


def _dump_block(done: BlockDigest | BlockFailure) -> Any:
    return dump_error(done.error) if isinstance(done, BlockFailure) else done.digest.hex()


def _load_block(task: Block, value: Any) -> BlockDigest | BlockFailure:
    if isinstance(value, str):
        digest = bytes.fromhex(value)
        if len(digest) != 16:
            raise ValueError("it is not a digest")
        return BlockDigest(task.file, task.number, task.length, digest)
    return BlockFailure(task.file, task.number, task.length, _error(value))


def _key_sums(task: Spans | RecordStream) -> str:
    import xxhash

    if isinstance(task, Spans):
        file, first = task.file, task.ranges[0].offset
    else:
        file, first = task.extent.file, task.extent.offset
    places = [(r.offset, r.length) for r in task.ranges]
    one = len(places) == 1
    more = str(places[0][1]) if one else xxhash.xxh3_64_hexdigest(repr(places).encode())
    return f"crc {first} {more} {file}"


def _part_sums(task: Spans | RecordStream, shares: Shares) -> int:
    if isinstance(task, RecordStream):
        return shares.of_bytes(*task.extent)
    first, last = task.ranges[0], task.ranges[-1]
    return shares.of_bytes(task.file, first.offset, last.offset + last.length - first.offset)


def _dump_sums(done: Sums) -> Any:
    return [done.nbytes, *done.crcs] if done.error is None else dump_error(done.error)


def _load_sums(task: Spans | RecordStream, value: Any) -> Sums:
    if not isinstance(value, list):
        return Sums(task, (), 0, _error(value))
    nbytes, *crcs = value
    if len(crcs) != len(task.ranges) or not all(type(one) is int for one in value):
        raise ValueError("it has not one sum for each range")
    return Sums(task, tuple(crcs), nbytes)


def _dump_pair(done: ReplicaDifference) -> Any:
    return [done.first, done.last] if done.error is None else dump_error(done.error)


def _load_pair(task: BlockPair, value: Any) -> ReplicaDifference:
    if isinstance(value, list):
        return ReplicaDifference(task.file, task.length, *value)
    return ReplicaDifference(task.file, task.length, error=_error(value))


def _dump_tensors(done: tuple[str, str, FtckptError | None]) -> Any:
    return done[1] if done[2] is None else dump_error(done[2])


def _load_tensors(task: TensorPair, value: Any) -> tuple[str, str, FtckptError | None]:
    return (task.key, value, None) if isinstance(value, str) else (task.key, "", _error(value))


def _dump_file(done: HashedFile) -> Any:
    return done.digest if done.error is None else dump_error(done.error)


def _load_file(task: FileToHash, value: Any) -> HashedFile:
    if isinstance(value, str):
        return HashedFile(task.name, task.source.size(task.name), value)
    return HashedFile(task.name, 0, error=_error(value))


def _dump_numbers(done: Numbers) -> Any:
    findings = [dump_finding(one) for one in done.findings]
    return [findings, {f: [*astuple(c)] for f, c in done.cast.items()}, done.zero]


def _load_numbers(task: NumbersOf, value: Any) -> Numbers:
    findings, cast, zero = value
    counts = {file: MasterCast(*counted) for file, counted in cast.items()}
    return Numbers(task.tensor, tuple(map(load_finding, findings)), counts, zero is True)


Checks = Sequence[ChosenSelfCheck | FtckptError]


def _first(task: Checks) -> ChosenSelfCheck | None:
    return next((one for one in task if isinstance(one, ChosenSelfCheck)), None)


def _key_checks(task: Checks) -> str:
    first = _first(task)
    if first is None:
        return "decode"
    file, offset, length = first.check.extent
    return f"decode {offset} {length} {len(task)} {first.check.owner}\0{file}"


def _part_checks(task: Checks, shares: Shares) -> int:
    first = _first(task)
    return 0 if first is None else shares.of_bytes(*first.check.extent)


def _dump_checks(done: Sequence[SelfCheckDone]) -> Any:
    return [[dump_error(one.error), one.passing] for one in done]


def _load_checks(task: Checks, value: Any) -> Sequence[SelfCheckDone]:
    from ftckpt.extents import Extent

    made = []
    for one, (error, passing) in zip(task, value, strict=True):
        found = load_error(error)
        if isinstance(one, FtckptError):
            # What ends the listing of the checks here is true, whatever the part met.
            made.append(SelfCheckDone(Extent("", 0, 0), "", 0, sampled=False, error=found or one))
        else:
            check, sampled = one
            made.append(SelfCheckDone(check.extent, check.owner, check.nbytes, sampled, found,
                                      bool(passing)))  # fmt: skip
    return made


def _key_ranges(task: Sequence[ProofRange]) -> str:
    import xxhash

    places = [(r.info.key, r.start, r.stop, [p.extent for p in r.pieces]) for r in task]
    text = repr(places).encode("utf-8", "surrogateescape")
    return f"prove {xxhash.xxh3_128_hexdigest(text)} {task[0].info.key}"


def _part_ranges(task: Sequence[ProofRange], shares: Shares) -> int:
    return shares.of_result(task[0].info.key, task[0].start * task[0].info.dtype.bits // 8)


def _load_changes(task: Any, value: Any) -> Changes | None:
    return None if value is None else Changes(*map(int, value))


def _load_digested(task: DigestedRange, value: Any) -> tuple[int, ...]:
    if len(value) != 3 or not all(type(one) is int and one >= 0 for one in value):
        raise ValueError("it is not a sum")
    return task.number, *value


def _load_nothing(task: Any, value: Any) -> None:
    if value is not None:
        raise ValueError("it is something")


def _error(value: Any) -> FtckptError:
    found = load_error(value)
    if found is None:
        raise ValueError("it is not an error")
    return found


_SELF_CHECKS = _Kind(_key_checks, _part_checks, _dump_checks, _load_checks)
_RANGES = _Kind(
    _key_ranges, _part_ranges, lambda done: None if done is None else list(done), _load_changes
)
_COMPARED = _Kind(key_of_ranges, part_of_ranges, dump_ranges, load_ranges)
_SUMS = _Kind(_key_sums, _part_sums, _dump_sums, _load_sums)
_KINDS: dict[type, _Kind] = {
    Block: _Kind(
        lambda task: f"hash {task.number} {task.file}",
        lambda task, shares: shares.of_bytes(task.file, task.offset, task.length),
        _dump_block, _load_block,
    ),
    Spans: _SUMS,
    RecordStream: _SUMS,
    BlockPair: _Kind(
        lambda task: f"pair {task.offset} {task.length} {task.file}",
        lambda task, shares: shares.of_bytes(task.file, task.offset, task.length),
        _dump_pair, _load_pair,
    ),
    TensorPair: _Kind(
        lambda task: f"tensors {task.key}", lambda task, shares: shares.of_tensor(task.key),
        _dump_tensors, _load_tensors,
    ),
    FileToHash: _Kind(
        lambda task: f"{task.algorithm} {task.name}",
        lambda task, shares: shares.of_bytes(task.name, 0, task.source.size(task.name)),
        _dump_file, _load_file,
    ),
    CopiesOf: _Kind(
        lambda task: f"copies {task.file}",
        lambda task, shares: shares.of_bytes(task.file, 0, 1),
        dump_error, lambda task, value: load_error(value),
    ),
    BlockToJudge: _Kind(
        lambda task: f"judge {task.block.number} {task.block.file}",
        lambda task, shares: shares.of_bytes(task.block.file, task.block.offset, task.block.length),
        lambda done: done[1], lambda task, value: (task.block, str(value)),
    ),
    ResultTensor: _Kind(
        lambda task: f"known {task.key}", lambda task, shares: shares.of_result(task.key, 0),
        lambda done: None, _load_nothing,
    ),
    DigestedRange: _Kind(
        lambda task: f"sum {task.start} {task.stop} {task.key}",
        lambda task, shares: shares.of_result(
            task.key, task.shard.dtype.nbytes((task.start + task.stop) // 2)
        ),
        lambda done: list(done[1:]), _load_digested,
    ),
    OriginalRuns: _Kind(
        lambda task: f"rest {task.start} {task.nbytes}",
        lambda task, shares: shares.of_result("", task.start),
        lambda done: None, _load_nothing,
    ),
    NumbersOf: _Kind(
        lambda task: f"values {task.tensor}", lambda task, shares: shares.of_tensor(task.tensor),
        _dump_numbers, _load_numbers,
    ),
}  # fmt: skip
_DUMPS: dict[str, Callable[[Any], Any]] = {
    "hash": _dump_block, "crc": _dump_sums, "pair": _dump_pair, "tensors": _dump_tensors,
    "sha256": _dump_file, "md5": _dump_file, "copies": dump_error, "values": _dump_numbers,
    "decode": _dump_checks, "prove": _RANGES.dump, "known": lambda done: None,
    "judge": lambda done: done[1], "differ": dump_ranges,
    "sum": lambda done: list(done[1:]), "rest": lambda done: None,
}  # fmt: skip
