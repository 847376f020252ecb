"""Lay out the non-tensor state of a checkpoint as records (see `object_records` for the form)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ftckpt.checkpoint import Extent, ObjectInfo
from ftckpt.errors import UnsupportedError
from ftckpt.formats.state.objects import object_tree, objects_of
from ftckpt.formats.torch_files.storages import MAGIC
from ftckpt.formats.torch_files.write_tree import save
from ftckpt.storage.decompress import ZSTD
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, OutputFile, Segment, Stored, Zeros

from .records import BYTES, INDEX, JSON, RECORDS, SCHEMA, TORCH, ObjectRecord, StoredObjects

_ALIGNMENT = 64
_PROBE = 16  # bytes that tell the forms apart
_ZIP, _ZSTD_MAGIC = b"PK\3\4", b"\x28\xb5\x2f\xfd"


class Collected(NamedTuple):
    """The records of a content's objects, one after the other.

    Attributes:
        segments: of the file that holds them.
        records: each with its place in that file, in order.
        unplaced: names of objects of which no record can be made.
    """

    segments: tuple[Segment, ...]
    records: tuple[tuple[ObjectInfo, ObjectRecord], ...]
    unplaced: tuple[str, ...]


class Laid(NamedTuple):
    """What a layout needs for the objects of its content.

    Attributes:
        files: the records; none where there are none.
        commit: the index; none where there is nothing to say.
        unplaced: names of objects of which no record can be made.
    """

    files: tuple[OutputFile, ...]
    commit: tuple[OutputFile, ...]
    unplaced: tuple[str, ...]


def lay_out_objects(content: Content, step: int | None) -> Laid:
    """Lay out the non-tensor state of `content`.

    Reads the first bytes of each record, which say what it is, and objects that are a part of a
    larger one.

    Args:
        content: whose objects.
        step: to be recorded beside them; None where it is not known.
    """
    found = collect(content)
    if not found.records and step is None:
        return Laid((), (), found.unplaced)
    index: dict[str, Any] = {"schema": SCHEMA, "format": content.checkpoint.format}
    if step is not None:
        index["step"] = step
    entries = {info.name: _said(info, record) for info, record in found.records}
    text = json.dumps(index | {"objects": entries}, ensure_ascii=False, indent=1)
    files = (OutputFile(RECORDS, found.segments),) if found.segments else ()
    return Laid(files, (OutputFile(INDEX, [Literal(text.encode() + b"\n")]),), found.unplaced)


def collect(content: Content) -> Collected:
    """Return the records of all objects of `content`, one after the other (see the module).

    Reads the first bytes of each record, and objects that are a part of a larger one.
    """
    objects = objects_of(content)
    heads = _heads(content)
    segments: list[Segment] = []
    records: list[tuple[ObjectInfo, ObjectRecord]] = []
    unplaced: list[str] = []
    end = 0
    for name, info in content.objects.items():
        begin = end + -end % _ALIGNMENT
        record: list[Segment] = [Stored(info.extent)]
        kind = _own_record(content, info, heads[name]) if name in heads else None
        if kind is None:
            kind = ObjectRecord(TORCH)
            try:
                record = save(object_tree(content, objects, name), base=begin)
            except UnsupportedError:
                unplaced.append(name)
                continue
        length = sum(segment.nbytes for segment in record)
        records.append((ObjectInfo(name, Extent(RECORDS, begin, length), info.rank), kind))
        segments += [Zeros(begin - end), *record] if begin > end else record
        end = begin + length
    return Collected(tuple(segments), tuple(records), tuple(unplaced))


def _said(info: ObjectInfo, record: ObjectRecord) -> dict[str, Any]:
    """Return what the index says of one object."""
    said: dict[str, Any] = {"offset": info.extent.offset, "length": info.extent.length}
    said["form"] = record.form
    if record.transforms:
        said["transforms"] = list(record.transforms)
    return said if info.rank is None else said | {"rank": info.rank}


def _heads(content: Content) -> dict[str, bytes]:
    """Return the first bytes of each object that has a record for itself alone."""
    own = [info for info in content.objects.values() if not info.field]
    probes = [i.extent._replace(length=min(i.extent.length, _PROBE)) for i in own]
    found = content.checkpoint.source.read_many(probes)
    return dict(zip([info.name for info in own], found, strict=True))


def _own_record(content: Content, info: ObjectInfo, head: bytes) -> ObjectRecord | None:
    """Return how the bytes of an object read without their file; None where they do not.

    The pickle inside a file of torch.save is such: its tensors are other records of the file.
    """
    stored = getattr(content.checkpoint, "stored", None)
    if isinstance(stored, StoredObjects):  # what was recorded once is not guessed again
        return stored.records[info.name]
    if head.startswith((_ZIP, MAGIC)):
        return ObjectRecord(TORCH)
    if head.startswith(_ZSTD_MAGIC):  # an item of DCP; what it unfolds to is a torch stream
        return ObjectRecord(TORCH, (ZSTD,))
    value = content.checkpoint.load_object(info.name)
    if type(value) is bytes and len(value) == info.extent.length:
        return ObjectRecord(BYTES)
    return ObjectRecord(JSON) if info.extent.file.endswith(".json") else None
