"""The non-tensor state of any checkpoint as the records of a delta."""

from __future__ import annotations

from ftckpt.delta.records import RecordEntry, RecordFile
from ftckpt.errors import UnsupportedError
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import OutputFile

from .delta_objects import form_of
from .object_records import collect

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
    entries = tuple(
        RecordEntry(info.name, form_of(record), info.rank, info.extent.offset, info.extent.length)
        for info, record in found.records
    )
    files = (OutputFile(NAME, found.segments),) if found.segments else ()
    return RecordFile(files, entries)
