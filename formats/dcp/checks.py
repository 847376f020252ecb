"""Check a DCP checkpoint: keys without places, gaps between files, items of a wrong shape.

Every checkpoint that torch writes tiles its files: the items of a file follow each other from the
first byte to the last. So the listing and the metadata alone reveal truncation, swapped files and
trailing bytes, without reading data.

Several copies of all data files below one metadata: S3StorageWriter with `num_copies`.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from ftckpt.errors import CorruptError, FtckptError, NewerWriterError
from ftckpt.findings import Finding, counted, finding, from_error
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.formats.torch_files.inner import outer_view
from ftckpt.formats.torch_files.local_headers import check_local_headers, local_extents
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.progress import Counter
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry

from .items import Item, misshapen, only_tensor, opaque_note, windows
from .metadata import DcpMetadata, MetadataItem
from .names import RANK_METADATA
from .records import TABLE, Chunk, StoredItem
from .subclasses import SupposedShards

# Allowed delay of data after the commit marker, for inexact clocks and copies.
WRITE_ORDER_SLACK = 2.0


def check_keys(meta: DcpMetadata, marker: str) -> Iterator[Finding]:
    """The chunks of all tensors and the places of all items must be the same set."""
    for name, entry in meta.tensors.items():
        for chunk in entry.chunks:
            if chunk.item is None:
                yield finding(
                    "bad-metadata",
                    f"{name} has a chunk at {list(chunk.offsets)} that lies in no file",
                    file=marker,
                    tensor=name,
                )
    for name, item in meta.objects.items():
        if item is None:
            yield finding("bad-metadata", f"{name} lies in no file", file=marker, tensor=name)
    for name, offsets in meta.orphans:
        where = f" at {list(offsets)}" if offsets is not None else ""
        yield finding(
            "bad-metadata",
            f"{name}{where} has a place in a file but is part of nothing",
            file=marker,
            tensor=name,
        )


def check_names(meta: DcpMetadata, marker: str) -> Iterator[Finding]:
    """Yield keys with another key's path, and names one bit from a name that torch writes.

    No checksum covers the metadata, so redundant entries are compared.
    """
    # A dialect may omit paths, and hide other things among them.
    if meta.planned and not meta.paths and not meta.extras:
        yield from_error(NewerWriterError.of(
            f"planner_data of {marker}", expected="a path of keys and numbers for each name",
            found="values of another form", file=marker,
        ))  # fmt: skip
    elif meta.paths and not meta.extras:
        for name in (*meta.tensors, *meta.objects):
            path = meta.paths.get(name)
            if path is None or ".".join(map(str, path)) != name:
                what = "no path" if path is None else f"the path of {'.'.join(map(str, path))}"
                yield finding(
                    "bad-metadata", f"planner_data gives {name} {what}", file=marker, tensor=name
                )
        # Since torch 2.3 every rank's objects are saved; 2.4 began to record an id of the save. A
        # planner of the trainer's own may leave some out.
        lost = meta.paths.keys() - meta.tensors.keys() - meta.objects.keys()
        for name in sorted(lost if meta.save_id else ()):
            what = f"planner_data gives {name} a path, and nothing is stored under that name"
            yield finding("state-unknown", what, file=marker, tensor=name)
    for name in meta.opaque:
        near = one_bit_from(name, TABLE)
        if near:
            message = f"{marker} names {name}, one bit from {near}: the bit flipped"
            yield finding("bad-metadata", message, file=marker)


def check_rank_metadata(source: Source, markers: Sequence[str]) -> Iterator[Finding]:
    """Check that no rank is missing of those that wrote metadata of their own.

    How many they were is in the records of ranks that saved through `ftckpt.torch.SealingWriter`;
    nothing else says it.
    """
    ranks = {int(found[1]) for name in markers if (found := RANK_METADATA.search(name))}
    if not ranks:
        return
    from ftckpt.manifest.rank_digests import left_in

    implied = max(ranks) + 1
    world = left_in(source).world
    absent = max(world, implied) - len(ranks)
    if absent:
        rank = next(rank for rank in range(implied + 1) if rank not in ranks)
        which = f"of {world}" if world >= implied else f"below {implied - 1}"
        message = f"{counted(absent, 'rank')} {which} left no metadata, the first is {rank}"
        yield finding("missing-rank", message, file=f"__{rank}.metadata", rank=rank)
    if world < implied:
        yield finding(
            "count-unknown",
            f"nothing records how many ranks saved without collectives: {implied} is what the"
            " highest number in a name implies",
        )


def by_file(meta: DcpMetadata) -> Mapping[str, list[tuple[int, int, str]]]:
    """Return (offset, length, stored name) of the items of each file, by offset."""
    files: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, _, item in meta.placed():
        files[item.path].append((item.offset, item.length, name))
    for (name, _), item in meta.orphans.items():
        files[item.path].append((item.offset, item.length, name))
    for items in files.values():
        items.sort()
    return files


def check_tiling(meta: DcpMetadata, source: Source) -> Iterator[Finding]:
    """Check that the items of each file tile it from its first byte to its last."""
    for file, items in sorted(by_file(meta).items()):
        entry = source.entries.get(file)
        if entry is None:
            ranks = f", needed by {len(items)} items"
            yield finding("missing-file", f"{file} is missing{ranks}", file=file)
            continue
        end = 0
        for offset, length, name in items:
            if offset < end:
                yield finding(
                    "extent-overlap",
                    f"{name} and the item before it claim the same bytes of {file}",
                    file=file,
                    tensor=name,
                    offset=offset,
                    length=end - offset,
                )
            elif offset > end:
                yield finding(
                    "extent-hole",
                    f"{offset - end} bytes of {file} before {name} belong to no item",
                    file=file,
                    offset=end,
                    length=offset - end,
                )
            end = max(end, offset + length)
        if entry.size < end:
            lost = [name for offset, length, name in items if offset + length > entry.size]
            yield finding(
                "truncated-file",
                f"{file} has {entry.size} of {end} bytes: {_names(lost)} cut off",
                file=file,
                tensor=lost[0],
                offset=entry.size,
                length=end - entry.size,
            )
        elif entry.size > end:
            yield finding(
                "trailing-bytes",
                f"{file} has {entry.size - end} bytes after its last item: it is not the file "
                "that the metadata describes",
                file=file,
                offset=end,
                length=entry.size - end,
            )


def check_items(
    source: Source,
    meta: DcpMetadata,
    items: Iterable[Item],
    counter: Counter,
    other: Set[str],
    supposed: SupposedShards,
) -> Iterator[Finding]:
    """Open every item: its archive, its pickle, and its shape and type against the metadata.

    In the files `other`, which do not tile, a record that is cut anywhere is damage, however
    ambiguous its pieces look as an archive. Records that are `supposed` to be as others are
    compared with them.
    """
    counter.start("items", sum(1 for _ in meta.placed()), "items")
    opaque: dict[str, tuple[str, str]] = {}
    for window in windows(source, (i for i in items if i.extent.file in source.entries)):
        counter.add(1)
        if isinstance(window, FtckptError):
            if window.kind != "truncated-file":  # the tiling reported it
                yield from_error(window)
            continue
        item = window.item
        try:
            stream = window.parse()
            archive = stream.archive
            if archive is not None:
                # An object may have many records, each of which would cost two reads.
                places = () if item.name in meta.tensors else local_extents(archive)
                read = window.read_first(places)
                for found in check_local_headers(archive, read, file=item.extent.file):
                    yield _in_item(found, item)
            for name in stream.opaque:
                opaque.setdefault(name, (item.extent.file, item.name))
            if not supposed.compare(stream, item) and item.name in meta.tensors:
                yield from _compare(stream, item, meta)
        except FtckptError as error:
            if error.kind == "unsafe-zip" and item.extent.file in other:
                message = f"the record of {item.name} is not where {item.extent.file} has it"
                yield _in_item(finding("bad-zip", message, file=item.extent.file), item)
            else:
                yield _in_item(from_error(error), item)
    yield from opaque_note(opaque)


def _in_item(found: Finding, item: Item) -> Finding:
    """Add the record's owner; a place inside a compressed record is not one in the file."""
    if item.transforms or found.offset is None:
        found = replace(found, offset=item.extent.offset, length=item.extent.length)
    return replace(found, file=item.extent.file, tensor=item.name, rank=item.rank)


def _compare(stream: TorchStream, item: Item, meta: DcpMetadata) -> Iterator[Finding]:
    view = outer_view(stream.tree) if type(stream.tree) is SubclassRef else None
    if view is not None and item.sizes is not None and view[0] != item.sizes:
        raise misshapen(item.extent, view[0], item.sizes)
    tensor = only_tensor(stream, item)
    entry = meta.tensors[item.name]
    place = {
        "file": item.extent.file,
        "tensor": item.name,
        "offset": item.extent.offset,
        "length": item.extent.length,
    }
    if tensor.dtype != entry.dtype:
        yield finding(
            "dtype-mismatch",
            f"{item.name} is {tensor.dtype.name} in its file and {entry.dtype.name} in the "
            "metadata",
            rank=item.rank,
            **place,  # type: ignore[arg-type]
        )
    if item.sizes is not None and tensor.shape != item.sizes:
        yield finding(
            "shape-mismatch",
            f"{item.name} has shape {list(tensor.shape)} in its file and {list(item.sizes)} in the "
            "metadata",
            rank=item.rank,
            **place,  # type: ignore[arg-type]
        )


def check_write_order(source: Source, markers: Iterable[str]) -> Iterator[Finding]:
    """Data newer than the marker hints at a torn overwrite; copies reset the times."""
    times = [e.mtime for m in markers if (e := source.entries.get(m)) and e.mtime is not None]
    if not times:
        return
    newer = [
        name
        for name, entry in source.entries.items()
        if name.endswith(".distcp")
        and entry.mtime is not None
        and entry.mtime > max(times) + WRITE_ORDER_SLACK
    ]
    if newer:
        yield finding(
            "write-order",
            f"{_names(sorted(newer))} newer than the metadata: perhaps an overwrite that did not "
            "finish, perhaps a copy",
            file=sorted(newer)[0],
        )


def _names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{names[0]} and {len(names) - 1} more are"


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
