"""Store the state besides tensors, and the rest of the original files, in a delta."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.delta.index.objects import RecordEntry, RecordFile
from ftckpt.delta.original_files import original_of, rest_of
from ftckpt.errors import UnsupportedError
from ftckpt.formats.safetensors.write_records import collect
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, OutputFile, Segment, Stored

from .checkpoint import DeltaCheckpoint
from .objects import FILES, PLAIN_REST, REST, form_of, original_places
from .original import MOST_IN_MEMORY, compressed, has_original, original_of_delta

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
