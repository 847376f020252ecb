"""Damage that a comparison meets: compared bytes that are not what their writer recorded.

Choose the part of two checkpoints to compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Record
from ftckpt.checkpoint.sharding import name_pattern
from ftckpt.errors import FtckptError, NotFoundError, UnavailableError
from ftckpt.extents import BLOCK, Extent
from ftckpt.findings import Finding, Severity, finding, from_error, in_file, listed
from ftckpt.manifest.locate import find
from ftckpt.storage.suggestions import hint_for_name
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.verification.blocks import check_blocks
from ftckpt.verification.evidence import OwnerIndex
from ftckpt.verification.record_sums import ReadSums, RecordIndex
from ftckpt.verification.records import check_these
from ftckpt.workers import Work

from .report import part_of


class DamageFinder:
    """Finds the damage of two checkpoints in what was compared of them.

    Args:
        checkpoints: the two.
        indexes: their records.
        sums: of what was read of them.
        work: who reads again, and how fast.

    Attributes:
        bytes_read: what the checks have read beside the comparison.
    """

    def __init__(
        self,
        checkpoints: tuple[Checkpoint, Checkpoint],
        indexes: tuple[RecordIndex, RecordIndex],
        sums: tuple[ReadSums, ReadSums],
        work: Work,
    ) -> None:
        self.bytes_read = 0
        self._checkpoints = checkpoints
        self._indexes = indexes
        self._sums = sums
        self._work = work

    def find(
        self,
        known: Sequence[Finding],
        contradicted: Collection[tuple[str, str]],
        objects: Collection[str] = (),
        *,
        state: bool,
    ) -> list[Finding]:
        """Return what is damaged, with files named in full.

        Args:
            known: what is known to be wrong already.
            contradicted: keys in the two of tensors that are recorded as equal and differ.
            objects: names of objects that are sealed as equal, where fields of some differ.
            state: whether the non-tensor state was compared.

        Raises:
            UnavailableError: the storage does not answer.
        """
        found: list[Finding] = []
        lost = {one.file for one in known}
        for side, checkpoint in enumerate(self._checkpoints):
            source, here = checkpoint.source, list[Finding]()
            error = self._indexes[side].error
            if error is not None:
                here.append(from_error(error))
            here += self._check_records(side, state=state)
            extents = [checkpoint.objects[name].extent for name in objects]
            for keys in contradicted:
                pieces = checkpoint.tensors[keys[side]].pieces
                extents += [piece.extent for piece in pieces if not piece.replica]
            here += self._check_blocks(checkpoint, extents)
            if state:
                here += _check_objects(checkpoint)
            for one in here:
                if one.severity is not Severity.ERROR or one.file in lost:
                    continue
                if one.file is None:
                    found += [] if None in lost else [one]
                    continue
                named = source.store.describe(source.path(one.file))
                if named not in lost:
                    found.append(in_file(one, named))
        if contradicted and not found and not known:
            names = listed([key for key, _ in contradicted], 3)
            message = f"recorded as equal in both and read as different: {names}"
            found.append(finding("corrupt", message, tensor=next(iter(contradicted))[0]))
        return found

    def _check_records(self, side: int, *, state: bool) -> Iterator[Finding]:
        """Check the records that were read in part, and name those of other content."""
        checkpoint = self._checkpoints[side]
        doubtful = dict(self._sums[side].doubtful())
        misread = [record for record, wrong in doubtful.items() if wrong]
        wanted = set(doubtful)
        if state:
            wanted |= {
                record
                for records in self._indexes[side].records.values()
                for record in records
                if record.owner not in checkpoint.tensors
            }
        found: list[Finding] = []
        self.bytes_read += check_these(
            checkpoint,
            sorted(wanted, key=_place),
            emit=found.append,
            work=self._work,
        )
        yield from found
        named = {(one.file, one.offset) for one in found if one.severity is Severity.ERROR}
        changed = {one.file for one in found if one.kind == "changed-file"}
        for record in misread:
            file, offset, length = record.extent
            if (file, offset) not in named and file not in changed:
                # What was compared is not what is there: the answer about it is worth nothing.
                message = f"{file} was read wrongly once at {offset}: compare again"
                error = UnavailableError(message, file=file, offset=offset, length=length)
                yield from_error(error, tensor=record.owner, rank=record.rank)

    def _check_blocks(
        self, checkpoint: Checkpoint, extents: Collection[Extent]
    ) -> Iterator[Finding]:
        """Check the sealed blocks that hold some bytes, where the checkpoint is sealed."""
        if not extents:
            return
        try:
            sealed = find(checkpoint.source)
        except FtckptError:
            return  # a manifest that cannot be read says nothing: `verify` reports it
        if sealed is None:
            return
        blocks: dict[str, set[int]] = defaultdict(set)
        for file, offset, length in extents:
            entry = checkpoint.source.entries.get(file)
            listed_as = sealed.by_path.get(file)
            if entry is not None and listed_as is not None and entry.size == listed_as.size:
                blocks[file].update(range(offset // BLOCK, -(-(offset + length) // BLOCK)))
        found: list[Finding] = []
        self.bytes_read += check_blocks(
            checkpoint.source,
            sealed,
            blocks,
            emit=found.append,
            owners=OwnerIndex(checkpoint),
            work=self._work,
        )
        yield from found


def _check_objects(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Check the objects by the digests that the format itself keeps of them."""
    for check in checkpoint.decoding.checks(sealed=False):
        if check.owner in checkpoint.tensors:
            continue  # reading it is the check
        try:
            check.read()
        except FtckptError as error:
            yield from_error(error, tensor=check.owner)


def _place(record: Record) -> tuple[object, ...]:
    return record.extent, record.inner or (0, 0), record.owner


STATE = "state"


class Choice(NamedTuple):
    """What is asked for; empty means all.

    Attributes:
        components: names of components or of parts of the optimizer (`exp_avg`), or `state` for
            what is not a tensor.
        tensors: patterns of keys, `*` for any text. With patterns the other state is left out.
        layout: whether state that follows the grid of ranks counts as a difference.
    """

    components: Sequence[str] = ()
    tensors: Sequence[str] = ()
    layout: bool = False

    @property
    def state(self) -> bool:
        """Whether the non-tensor state is compared."""
        return not self.tensors and (not self.components or STATE in self.components)

    def keys(self, ours: Content, theirs: Content) -> frozenset[str]:
        """Return the keys of the tensors that are compared, on both sides.

        Raises:
            NotFoundError: a component or a pattern that neither checkpoint has anything of, or no
                tensor is of both.
        """
        both = {**ours.tensors, **theirs.tensors}
        both |= {key: both[o] for c in (ours, theirs) for key, o in c.aliases.items() if o in both}
        kept = set(both)
        if self.components:
            names = {key: _names(wanted) for key, wanted in both.items()}
            known = set().union(*names.values()) | {STATE}
            hint = f"they hold {', '.join(sorted(known))}"
            _require(self.components, known, hint, ours, theirs)
            kept = {key for key, own in names.items() if not own.isdisjoint(self.components)}
        if self.tensors:
            found: set[str] = set()
            for text in self.tensors:
                pattern = name_pattern(text)
                matched = {key for key in both if pattern.fullmatch(key)}
                if not matched:
                    hint = hint_for_name(text, both)
                    hint = hint or "`ftckpt inspect --tensors` lists the names"
                    _require([text], (), hint, ours, theirs)
                found |= matched
            if not kept & found:
                both_asked = f"{' or '.join(self.tensors)} in {' or '.join(self.components)}"
                _require([both_asked], (), "a tensor is of one component alone", ours, theirs)
            kept &= found
        return frozenset(kept)


def _names(wanted: TargetTensor) -> frozenset[str]:
    """Return what a tensor's component may be called."""
    component = wanted.component
    return frozenset((component, component.partition(":")[0], part_of(component, wanted.kind)))


def _require(
    asked: Sequence[str], known: Iterable[str], hint: str, ours: Content, theirs: Content
) -> None:
    for name in asked:
        if name not in known:
            urls = " nor ".join(content.checkpoint.source.url for content in (ours, theirs))
            raise NotFoundError(f"neither {urls} has anything of {name}", hint=hint)
