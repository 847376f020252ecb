"""Two checkpoints of any formats and topologies, compared tensor by tensor and field by field.

Tensors are aligned by their keys, so that what is compared is the training state and not the files:
a checkpoint and its resharded or converted copy are equal. Equal means equal bits; tolerances hold
only where they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, Severity, finding, from_error, in_file
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.verification.record_sums import ByteRun, ReadSums, RecordIndex
from ftckpt.workers import ALONE, Work

from .arithmetic import Tolerance
from .damage import Choice, DamageFinder
from .evidence import Basis, RecordedEqual
from .report import Cell, DiffReport, Summary, TensorDifference, ordered
from .state import (
    DiffStatus,
    Field,
    Fields,
    Follows,
    Hangs,
    StateDifference,
    Vocabulary,
    align,
    compare_fields,
    field_of,
    mark_layout,
    state_tensors,
)
from .tensors import Compared, Reading, compare_tensors

__all__ = [
    "Basis",
    "Cell",
    "Choice",
    "DiffReport",
    "DiffStatus",
    "Field",
    "Fields",
    "Follows",
    "Hangs",
    "Reading",
    "StateDifference",
    "Summary",
    "TensorDifference",
    "Tolerance",
    "Vocabulary",
    "compare",
    "compare_share",
]  # fmt: skip

_ALL = Choice()


def compare(
    ours: Content,
    theirs: Content,
    reading: Reading,
    *,
    fields: Fields,
    vocabulary: Vocabulary,
    hangs: Hangs = lambda _: None,
    choice: Choice = _ALL,
    work: Work = ALONE,
) -> DiffReport:
    """Compare two checkpoints.

    Args:
        ours: the first, under the names that are compared; each tensor is one of the source's.
        theirs: the second, likewise.
        reading: how.
        fields: reads the non-tensor state of a checkpoint.
        vocabulary: what is known of padding rows.
        hangs: says which fields of the non-tensor state follow the grid of ranks.
        choice: which part.
        work: who does it; its counter is told of the bytes of one side. Its limiter bounds the
            rate of reading of both together.

    Records whose CRC-32 is another than their writer recorded are findings (4), also where both
    checkpoints are damaged alike.

    Raises:
        NotFoundError: neither has anything of a component or a name that was asked for.
        UnavailableError: the storage does not answer.
    """
    began = time.monotonic()
    both = ours.checkpoint, theirs.checkpoint
    begun = _Begun(ours, theirs, choice)
    keys, small, aside, indexes, sums = (
        begun.keys,
        begun.small,
        begun.aside,
        begun.indexes,
        begun.sums,
    )
    recorded, done = begun.tensors(reading, vocabulary, work)
    work = replace(work, division=None)  # what is left is small, or of damage
    findings = list(done.findings)
    held: list[list[Field]] = [[], []]
    whole = not any(_wrong(side.checkpoint) for side in (ours, theirs))
    for content, names, into, read_of in zip((ours, theirs), small, held, sums, strict=True):
        wanted = {key: name for key, name in names.items() if key in aside}
        more = fields(content.checkpoint) if choice.state else ()
        read = {*wanted, *(content.objects if choice.state else ())}
        places = extents_of(content.checkpoint, read)
        with reading_ahead(
            content.checkpoint, places, work.limiter, bases=False, jobs=work.threads
        ):
            for found in chain(_small_tensors(content, wanted, work, read_of), more):
                if isinstance(found, Field):
                    into.append(found)
                else:
                    whole = False
                    findings.append(_of_side(from_error(found), content.checkpoint.source))
    differences = list(compare_fields(*held))
    # What one side could not read is not missing there.
    state = [d for d in differences if whole or d.status is DiffStatus.DIFFERENT]
    passed = len(state) < len(differences)
    state = mark_layout(state, hangs, other_grid=_other_grid(*both))
    lost: list[Finding] = []
    for side in (ours, theirs):
        if passed or _lacks(side, keys):
            lost += _lost(side)
        elif choice == _ALL and _wrong(side.checkpoint):
            # Both may lack what lies in a file that neither could read.
            held_in = {extent.file for extent, *_ in side.checkpoint.extents_by_owner()}
            lost += _lost(side, held_in)
    findings = [*lost, *findings]
    damage = DamageFinder(both, indexes, sums, work)
    changed = any(one.status is DiffStatus.DIFFERENT for one in state)
    sealed = list(recorded.sealed_objects()) if changed else []
    findings += damage.find(findings, done.contradicted, sealed, state=choice.state)
    findings += _changed_meanwhile(ours.checkpoint)
    findings += _changed_meanwhile(theirs.checkpoint)
    return DiffReport(
        total=done.summaries.total,
        tensors=ordered(done.tensors),
        components=done.summaries.components,
        layers=done.summaries.layers,
        cells=done.summaries.cells,
        state=state,
        state_fields=len({field.name for side in held for field in side}),
        layout_counts=choice.layout,
        evidence=dict(done.evidence),
        true_vocab_rows=vocabulary.true_rows,
        bytes_read=done.bytes_read + damage.bytes_read,
        findings=findings,
        seconds=time.monotonic() - began,
    )


def compare_share(
    ours: Content,
    theirs: Content,
    reading: Reading,
    *,
    vocabulary: Vocabulary,
    choice: Choice = _ALL,
    work: Work,
) -> tuple[Sequence[Finding], int]:
    """Compare the tensors of a share, as the work's division says; other state is not compared.

    The arguments are as in `compare`.

    Returns:
        What could not be read, and the bytes that were read.

    Raises:
        NotFoundError, UnavailableError: as `compare`.
    """
    _, done = _Begun(ours, theirs, choice).tensors(reading, vocabulary, work)
    changed = [*_changed_meanwhile(ours.checkpoint), *_changed_meanwhile(theirs.checkpoint)]
    return [*done.findings, *changed], done.bytes_read


class _Begun:
    """Two checkpoints that are about to be compared."""

    def __init__(self, ours: Content, theirs: Content, choice: Choice) -> None:
        self.keys = choice.keys(ours, theirs)
        self.small = [state_tensors(content) for content in (ours, theirs)]
        self.aside = self.keys & frozenset(_small_on_both(ours, theirs, self.small))
        self.indexes = RecordIndex(ours.checkpoint), RecordIndex(theirs.checkpoint)
        self.sums = ReadSums(self.indexes[0]), ReadSums(self.indexes[1])
        self._both = ours, theirs

    def tensors(
        self, reading: Reading, vocabulary: Vocabulary, work: Work
    ) -> tuple[RecordedEqual, Compared]:
        """Compare the tensors."""
        ours, theirs = self._both
        by_value = reading.tolerance is not None
        pairs = align(ours, theirs, self.keys - self.aside, vocabulary, by_value=by_value)
        recorded = RecordedEqual(ours.checkpoint, theirs.checkpoint, self.indexes)
        done = compare_tensors(ours, theirs, list(pairs), reading, recorded, self.sums, work)
        return recorded, done


def _other_grid(one: Checkpoint, other: Checkpoint) -> bool:
    """Say whether two checkpoints are known to be of other grids of ranks."""
    pairs = (
        (getattr(one.topology, name), getattr(other.topology, name))
        for name in ("world_size", "tp", "pp", "dp", "ep")
    )
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _lacks(content: Content, keys: Collection[str]) -> bool:
    return any(key not in content.tensors for key in keys)


def _lost(content: Content, known: Collection[str] | None = None) -> Iterator[Finding]:
    """Yield what was wrong with a side when it was opened: it may lack the other's for that.

    What lies in a file that cannot be read is not missing, and no difference.

    Args:
        content: the side.
        known: files of which nothing is yielded, nor of no file at all.
    """
    source = content.checkpoint.source
    for one in _wrong(content.checkpoint):
        if known is not None and (one.file is None or one.file in known):
            continue
        yield _of_side(one, source)


def _wrong(checkpoint: Checkpoint) -> list[Finding]:
    return [one for one in checkpoint.open_findings if one.severity is Severity.ERROR]


def _small_on_both(
    ours: Content, theirs: Content, small: Sequence[Mapping[str, str]]
) -> Iterator[str]:
    """Yield the keys that are compared as fields wherever they are."""
    for key in small[0].keys() | small[1].keys():
        if all(key in own or key not in content.tensors
               for own, content in zip(small, (ours, theirs), strict=True)):  # fmt: skip
            yield key


def _small_tensors(
    content: Content, names: Mapping[str, str], work: Work, sums: ReadSums
) -> Iterator[Field | FtckptError]:
    """Yield the tensors that are compared as fields, in order."""
    gatherer = Gatherer(content.checkpoint, work.limiter, sums)

    def read(key: str) -> tuple[str, Field | FtckptError, Sequence[ByteRun]]:
        shard = content.whole(key)
        data = bytearray(shard.nbytes)
        try:
            gatherer.fill(shard, 0, shard.numel, memoryview(data))
        except FtckptError as error:
            error.tensor = error.tensor or key
            return key, error, sums.drain()
        return key, field_of(names[key], content.tensors[key], bytes(data)), sums.drain()

    found: dict[str, Field | FtckptError] = {}
    try:
        for key, one, runs in work.run(names, read):
            found[key] = one
            sums.take(runs)
    finally:
        gatherer.close()
    yield from (found[key] for key in names)


def _changed_meanwhile(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [name for name in checkpoint.members() if name in checkpoint.source.entries]
    for name in checkpoint.source.changed(names):
        message = f"{name} of {checkpoint.source.url} changed while it was being read"
        yield finding("changed-file", message, file=name)


def _of_side(found: Finding, source: Source) -> Finding:
    """Return a finding with its file named in full: two sides have files of the same names."""
    if found.file is None:
        return found
    return in_file(found, source.store.describe(source.path(found.file)))
