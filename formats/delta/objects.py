"""The non-tensor state in a delta: what its bytes are, in words.

A `form` is the form of `object_records` and, after commas, the transforms around it, the one that
is undone first last: `torch`, `json`, `bytes`, `torch,stream.zstd`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.checkpoint import Extent, ObjectInfo
from ftckpt.delta import NAME, DeltaIndex
from ftckpt.errors import UnsupportedError
from ftckpt.formats.safetensors.records import FORMS, ObjectRecord, StoredObjects
from ftckpt.storage.decompress import ZSTD, supported

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
