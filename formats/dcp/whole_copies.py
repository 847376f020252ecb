"""Several copies of all data files below one metadata: S3StorageWriter with `num_copies`.

    step-5/.metadata             names __0_0.distcp, and says num_copies=2
    step-5/copy-0/__0_0.distcp
    step-5/copy-1/__0_0.distcp

Each rank of a restart reads the copy of its number, modulo the number of copies, so that all of
them are needed. `.metadata` is written after all copies.

Source: s3torchconnector/dcp/s3_file_system.py of awslabs/s3-connector-for-pytorch's pull request
368 (branch feature/shadow-copies-poc, September 2025).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ftckpt.errors import CorruptError
from ftckpt.findings import Finding, finding
from ftckpt.storage.store import Entry

from .metadata import DcpMetadata, MetadataItem
from .records import Chunk, StoredItem

_COPY = re.compile(r"copy-\d{1,9}/")
# More of them would be no protection, and each has its own record of every item.
_MOST = 64


def relate(meta: DcpMetadata, entries: Mapping[str, Entry], file: str) -> list[Finding]:
    """Place every item in each of the copies; return notes about them.

    The first copy whose files are all there at the size that the items need is read; the others are
    its replicas.

    Args:
        meta: is changed: `files` get their folders, `copies` gets the other copies.
        entries: the listed files.
        file: name of the metadata.

    Raises:
        CorruptError: it records more copies than any store has (`bad-metadata`).
    """
    number = meta.whole_copies
    if number < 2:
        return []
    if number > _MOST:
        raise CorruptError(f"{file} says that the files lie there {number} times",
                           kind="bad-metadata", file=file)  # fmt: skip
    needed: dict[str, int] = {}
    placed = list(meta.placed())
    for item in meta.stored():
        item.path = _COPY.sub("", item.path, count=1)
        needed[item.path] = max(needed.get(item.path, 0), item.offset + item.length)
    whole = [n for n in range(number) if not _lost(entries, needed, n)]
    first = whole[0] if whole else 0
    for copy in range(number):
        if copy != first:
            meta.copies += [_moved(one, copy) for one in placed]
    for one in placed:
        one.item.path = f"copy-{first}/{one.item.path}"
    for orphan in meta.orphans.values():
        orphan.path = f"copy-{first}/{orphan.path}"
    meta.files = {f"copy-{copy}/{path}" for copy in range(number) for path in needed}
    notes = [finding(
        "note",
        f"the data files lie there {number} times, in copy-0 to copy-{number - 1}:"
        " `verify --level content` compares them",
    )]  # fmt: skip
    if first:
        lost = _lost(entries, needed, 0)
        what = f"copy-{first} is read: {lost} of copy-0 is not whole"
        notes.append(finding("note", what, file=f"copy-0/{lost}"))
    return notes


def groups(meta: DcpMetadata) -> dict[str, tuple[str, ...]]:
    """Return the other copies of each data file, beginning with the next one."""
    number = meta.whole_copies
    found: dict[str, tuple[str, ...]] = {}
    for path in dict.fromkeys(_COPY.sub("", file, count=1) for file in sorted(meta.files)):
        names = [f"copy-{copy}/{path}" for copy in range(number)]
        found |= {name: (*names[n + 1 :], *names[:n]) for n, name in enumerate(names)}
    return found


def _lost(entries: Mapping[str, Entry], needed: Mapping[str, int], copy: int) -> str:
    """Return a file of a copy that is missing or too short; "" if it is whole."""
    for path, size in needed.items():
        entry = entries.get(f"copy-{copy}/{path}")
        if entry is None or entry.size < size:
            return path
    return ""


def _moved(one: MetadataItem, copy: int) -> MetadataItem:
    item = StoredItem()
    item.path, item.offset = f"copy-{copy}/{one.item.path}", one.item.offset
    item.length, item.transforms = one.item.length, one.item.transforms
    if one.chunk is None:
        return MetadataItem(one.name, None, item)
    chunk = Chunk()
    chunk.offsets, chunk.sizes, chunk.item = one.chunk.offsets, one.chunk.sizes, item
    return MetadataItem(one.name, chunk, item)
