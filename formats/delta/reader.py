"""Open a delta (see `delta`).

The non-tensor state in a delta: what its bytes are, in words.

A `form` is the form of `object_records` and, after commas, the transforms around it, the one that
is undone first last: `torch`, `json`, `bytes`, `torch,stream.zstd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftckpt.checkpoint import Box, Commit, CommitState, Extent, ObjectInfo, Piece, TensorInfo
from ftckpt.delta import NAME, DeltaIndex
from ftckpt.delta.index import MAX_BYTES, ROW
from ftckpt.delta.index.parse import parse_index
from ftckpt.discovery.recognise import Format
from ftckpt.errors import CorruptError, IncompleteError, UnsupportedError
from ftckpt.formats.safetensors.records import FORMS, ObjectRecord, StoredObjects
from ftckpt.own_files import MANIFEST
from ftckpt.storage import StoreOptions
from ftckpt.storage.computed import ComputedSource, computed_name
from ftckpt.storage.decompress import ZSTD, supported
from ftckpt.storage.source import Source

from .checkpoint import ChainNote, DeltaCheckpoint

# Not state but the files that were packed (`ftckpt.delta.original_files`): the list of them, and
# what they held beside tensors; the latter plain where it is much.
FILES, REST, PLAIN_REST = f"files,{ZSTD}", f"rest,{ZSTD}", "rest"


def form_of(record: ObjectRecord) -> str:
    """Return what a delta says of an object's bytes."""
    return ",".join((record.form, *record.transforms))


def stored_objects(index: DeltaIndex) -> StoredObjects:
    """Return the objects of a delta, found and not read.

    Raises:
        UnsupportedError: one is in a form that is not known.
    """
    infos: dict[str, ObjectInfo] = {}
    records: dict[str, ObjectRecord] = {}
    for entry in index.objects:
        if entry.form in (FILES, REST, PLAIN_REST):
            continue
        form, *transforms = entry.form.split(",")
        if form not in FORMS or not supported(transforms):
            raise UnsupportedError(
                f"{NAME} holds {entry.name} as {entry.form[:80]!r}, which is not known",
                hint="use a newer ftckpt",
                file=NAME,
                tensor=entry.name,
            )
        place = Extent(index.files[entry.file].name, entry.offset, entry.length)
        infos[entry.name] = ObjectInfo(entry.name, place, entry.rank)
        records[entry.name] = ObjectRecord(form, tuple(transforms))
    return StoredObjects(infos, index.step, (), records)


def original_places(index: DeltaIndex) -> Mapping[str, Extent]:
    """Return where a delta keeps the list of the files that were packed and the rest, by form."""
    return {
        entry.form: Extent(index.files[entry.file].name, entry.offset, entry.length)
        for entry in index.objects
        if entry.form in (FILES, REST, PLAIN_REST)
    }


_END = 16  # bytes of the digest behind the rows


def open_delta(
    source: Source, formats: Sequence[Format], bases: Sequence[str], stores: StoreOptions
) -> DeltaCheckpoint:
    """Read the index (see `Delta.open`).

    Args:
        source: the delta's files.
        formats: what reads its base.
        bases: places where bases may lie, asked before those that are recorded.
        stores: how to reach them.
    """
    if NAME not in source.entries and MANIFEST not in source.entries:
        source.require_absent(NAME)
        raise IncompleteError(
            f"{source.url} has no {NAME}, which is written last: the packing did not finish",
            hint="the same ftckpt delta pack goes on where it was",
            file=NAME,
        )
    size = source.size(NAME)
    if size > MAX_BYTES:
        raise CorruptError(
            f"{NAME} has {size} bytes and {MAX_BYTES} is most", kind="bad-delta", file=NAME
        )
    index = parse_index(source.read(NAME))
    begin = size - _END - len(index.rows)
    tensors: dict[str, TensorInfo] = {}
    decoded: dict[Extent, Extent] = {}
    for tensor in index.tensors:
        rows = Extent(NAME, begin + tensor.first * ROW.size, tensor.blocks * ROW.size)
        decoded[rows] = Extent(computed_name(tensor.key), 0, tensor.nbytes)
        piece = Piece(Box.whole(tensor.shape), rows, packed=True)
        tensors[tensor.key] = TensorInfo(
            tensor.component,
            tensor.name,
            tensor.kind,
            tensor.shape,
            tensor.dtype,
            (piece,),
            tensor.stored_name,
        )
    stored = stored_objects(index)
    checkpoint = DeltaCheckpoint(
        source=source,
        tensors=tensors,
        objects=stored.infos,
        aliases=index.aliases,
        topology=replace(index.topology, evidence="as recorded when it was packed"),
        commit=Commit(CommitState.COMMITTED, NAME),
        dialect=_dialect(index),
        index=index,
        stored=stored,
        decoded=decoded,
        formats=formats,
        given=bases,
        stores=stores,
    )
    checkpoint.source = ComputedSource.over(source, checkpoint.fill)
    if index.base is not None:
        checkpoint.notes = ChainNote(checkpoint)
    return checkpoint


def _dialect(index: DeltaIndex) -> str:
    made_of = f"{index.source_format} packed by {index.tool}".strip()
    if index.base is None:
        return f"full, of {made_of}"
    step = "a step that is not known" if index.base.step is None else f"step {index.base.step}"
    return f"based on {step} at {index.base.path}, of {made_of}"
