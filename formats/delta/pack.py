"""Pack opened checkpoints: what `ftckpt.delta.pack.run` needs of the formats, put together.

Store the state besides tensors, and the rest of the original files, in a delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.delta.index.objects import RecordEntry, RecordFile
from ftckpt.delta.original_files import original_of, rest_of
from ftckpt.delta.pack.assemble import Packable, PackOptions
from ftckpt.delta.pack.report import PackReport
from ftckpt.delta.pack.run import PackedByParts, pack
from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.formats.catalog import formats
from ftckpt.formats.delta import Delta
from ftckpt.formats.safetensors.write_records import collect
from ftckpt.formats.state.optimizer_settings import settings_of
from ftckpt.formats.state.paths import recorded_paths
from ftckpt.formats.state.same_object import SameObject
from ftckpt.manifest.locate import find
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, OutputFile, Segment, Stored
from ftckpt.transfer.places import place_of
from ftckpt.verification import VerifyReport
from ftckpt.verification.seen import SeenBytes
from ftckpt.workers import Work

from .chain import manifest_digest
from .checkpoint import DeltaCheckpoint
from .original import MOST_IN_MEMORY, compressed, has_original, original_of_delta
from .reader import FILES, PLAIN_REST, REST, form_of, original_places

if TYPE_CHECKING:
    from ftckpt.delta.pack.run import PackShare


NAME = "objects.records"


def record_file(content: Content) -> RecordFile:
    """Return the records of all objects of `content`, as they are stored where that is possible.

    Raises:
        UnsupportedError: of an object no record can be made.
        CorruptError, UnsafeError: one is damaged or hostile.
    """
    found = collect(content)
    if found.unplaced:
        listed = ", ".join(found.unplaced[:5])
        raise UnsupportedError(
            f"a delta has no place for {listed}", hint="ftckpt convert --drop NAME leaves it out"
        )
    entries = [
        RecordEntry(info.name, form_of(record), info.rank, info.extent.offset, info.extent.length)
        for info, record in found.records
    ]
    segments = list(found.segments)
    end = sum(segment.nbytes for segment in segments)
    bytes_in = sum(entry.length for entry in entries)
    for form, parts, held in _original(content):
        length = sum(part.nbytes for part in parts)
        name = f"ftckpt.{form.partition(',')[0]}"
        entries.append(RecordEntry(name, form, None, end, length))
        segments += parts
        end += length
        bytes_in = bytes_in if held is None else held
    files = (OutputFile(NAME, segments),) if segments else ()
    return RecordFile(files, tuple(entries), bytes_in)


def _original(content: Content) -> Iterator[tuple[str, Sequence[Segment], int | None]]:
    """Yield the list of the source's files, and what they hold beside tensors, if that is little.

    With each its form and, of the latter, how many bytes it is. A delta has them of what was packed
    first.
    """
    checkpoint = content.checkpoint
    if isinstance(checkpoint, DeltaCheckpoint):
        if has_original(checkpoint):
            size = original_of_delta(checkpoint).rest_bytes
            for form, place in original_places(checkpoint.index).items():
                yield form, [Stored(place)], None if form == FILES else size
        return
    original = original_of(checkpoint)
    if original is None:
        return
    yield FILES, [Literal(compressed(original.dump()))], None
    rest, size = rest_of(original), original.rest_bytes
    if size > MOST_IN_MEMORY:
        yield PLAIN_REST, rest, size
        return
    parts = checkpoint.source.read_many([part.extent for part in rest])
    yield REST, [Literal(compressed(b"".join(parts)))], size


# Verifies a source; what was seen of it is not read again (see `transfer.run.SourceCheck`).
Check = Callable[[Checkpoint, SeenBytes | None], VerifyReport]


@dataclass(frozen=True)
class PackJob:
    """Opened checkpoints that are about to be packed.

    Attributes:
        target: what is packed.
        base: what it is packed against; None packs it whole.
        destination: a local path or a URL that does not exist yet.
        records: the target's non-tensor state.
        result: reads the delta.
        options: how.
        store_options: how to reach object stores.
    """

    target: Packable
    base: Packable | None
    destination: str
    records: RecordFile
    result: Delta
    options: PackOptions
    store_options: StoreOptions

    def write(self, parts: PackedByParts | None = None) -> PackReport:
        """Pack it, prove it, and make it visible (see `ftckpt.delta.pack.run.pack`)."""
        return pack(
            self.target, self.base, self.destination, self.records, self.result,
            same_objects=SameObject, options=self.options, store_options=self.store_options,
            parts=parts,
        )  # fmt: skip

    def write_share(self, share: PackShare, work: Work) -> None:
        """Fill some of its files beside other parts (see `pack_share`)."""
        from ftckpt.delta.pack.run import pack_share

        pack_share(
            self.target, self.base, self.destination, self.records,
            options=replace(self.options, work=work), store_options=self.store_options,
            share=share,
        )  # fmt: skip

    def prove_share(self, parts: PackedByParts, work: Work) -> Mapping[str, str] | None:
        """Prove a share of what parts have filled (see `prove_packed_share`)."""
        from ftckpt.delta.pack.run import prove_packed_share

        return prove_packed_share(
            self.target, self.base, self.destination, self.records, self.result,
            same_objects=SameObject, options=self.options, store_options=self.store_options,
            parts=parts, work=work,
        )  # fmt: skip


def pack_job(
    target: Checkpoint,
    base: Checkpoint | None,
    destination: str,
    *,
    options: PackOptions,
    store_options: StoreOptions,
    check: Check | None = None,
) -> PackJob:
    """Put together what is needed to pack a checkpoint; the arguments are of `pack_checkpoint`."""
    given: tuple[str, ...] = ()
    if base is not None:
        require_chain(base)
        further = base.given if isinstance(base, DeltaCheckpoint) else ()
        given = (place_of(base.source), *further)
    require_chain(target)
    gap = target.source.store.traits.gap
    # Of longer pieces no more is read here than where their elements lie.
    near = (extent for extent in extents_of(target) if extent.length <= gap)
    with reading_ahead(target, near, options.work.limiter, bases=False):
        records = record_file(Content.of(target))
        options = replace(options, settings=settings_of(target, base))
    return PackJob(
        _packable(target, check),
        None if base is None else _packable(base, check),
        destination,
        records,
        Delta(formats, bases=given, stores=store_options),
        options,
        store_options,
    )


def pack_checkpoint(
    target: Checkpoint,
    base: Checkpoint | None,
    destination: str,
    *,
    options: PackOptions,
    store_options: StoreOptions,
    check: Check | None = None,
) -> PackReport:
    """Write a checkpoint as a delta based on another, or compressed whole (see `PackJob.write`).

    Args:
        target: what is packed, opened; a delta too.
        base: what it is packed against; a delta too. None packs it whole.
        destination: a local path or a URL that does not exist yet.
        options: how; the optimizer's settings are taken from the target.
        store_options: how to reach object stores.
        check: verifies each by its own evidence before anything is written; None does not.

    Raises:
        NotFoundError: a base further down the chain is missing.
        FtckptError: see `ftckpt.delta.pack.run.pack`.
    """
    return pack_job(
        target, base, destination, options=options, store_options=store_options, check=check
    ).write()


def require_chain(checkpoint: Checkpoint) -> None:
    """Open all that a delta depends on: what is missing is known before anything is done.

    Raises:
        NotFoundError: a base is missing.
        CorruptError: a base is wrong.
    """
    if isinstance(checkpoint, DeltaCheckpoint):
        _ = checkpoint.decoder


def _packable(checkpoint: Checkpoint, check: Check | None) -> Packable:
    """Return a checkpoint with what is known of it."""
    try:
        manifest = find(checkpoint.source)
    except FtckptError:  # one that cannot be understood is not evidence; the check reports it
        manifest = None
    recorded = recorded_paths(checkpoint)
    packable = Packable(
        checkpoint=checkpoint,
        paths=(recorded.tensors, recorded.objects),
        manifest="" if manifest is None else manifest_digest(manifest),
        check=None if check is None else lambda seen: check(checkpoint, seen),
    )
    if isinstance(checkpoint, DeltaCheckpoint):
        index = checkpoint.index
        known = {t.key: t.digest for t in index.tensors if t.key not in index.aliases}
        return replace(packable, digests=known)
    return packable
