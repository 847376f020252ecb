"""The items inside `.distcp` files: each a torch.save stream, perhaps compressed as a whole.

The metadata gives an item's place; its head (the pickle) and its tail (the zip directory) give its
content. Many items are opened with few reads: heads and tails of a batch are fetched together, and
a small item is fetched whole. So are larger objects: their pickle is long, and so is their
directory if they hold many tensors, as states of random generators do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, FtckptError, NewerWriterError, UnsafeError, UnsupportedError
from ftckpt.extents import Read
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.torch_files.stream import TensorRef, TorchStream, parse_stream
from ftckpt.storage.source import Source

from .names import DATA
from .records import StoredItem

HEAD = 1024
TAIL = 1536
WHOLE, WHOLE_OBJECT = 8192, 64 << 10
BATCH, BATCH_BYTES = 1024, 16 << 20
# Allowance for torch's framing in a decompressed item, beyond its elements or object.
OVERHEAD = 1 << 20
OBJECT_LIMIT = 1 << 30


class Item(NamedTuple):
    """One item to open.

    Attributes:
        name: stored name of the tensor or object.
        extent: the stream's bytes in its file.
        transforms: to undo before the stream can be read.
        rank: the rank that wrote the file.
        limit: maximum size of a decoded stream.
        sizes: required shape of a tensor in its stream; None if unknown.
    """

    name: str
    extent: Extent
    transforms: tuple[str, ...]
    rank: int | None
    limit: int = OBJECT_LIMIT
    sizes: tuple[int, ...] | None = None


class ItemWindow:
    """Random access to one stream, served from the parts in memory."""

    __slots__ = ("_parts", "_source", "item", "size")

    def __init__(
        self, source: Source, item: Item, parts: tuple[tuple[int, bytes], ...], size: int
    ) -> None:
        self._source = source
        self._parts = parts
        self.item = item
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset` of the decoded stream.

        Raises:
            CorruptError: the stream ends before (`bad-zip`), or cannot be decoded.
        """
        held = self._held(offset, length)
        if held is not None:
            return held
        if offset < 0 or offset + length > self.size:
            raise CorruptError(
                f"the record of {self.item.name} ends early in {self.item.extent.file}",
                kind="bad-zip",
                file=self.item.extent.file,
                tensor=self.item.name,
                offset=self.item.extent.offset,
                length=self.item.extent.length,
            )
        if self.item.transforms:
            from ftckpt.storage.decompress import read_undone

            inner = (offset, length)
            return read_undone(self._source, self.item.extent, self.item.transforms, inner)
        place = self.item.extent
        return self._source.read(place.file, place.offset + offset, length)

    def _held(self, offset: int, length: int) -> bytes | None:
        """Return the bytes of a place inside a part, else None."""
        for start, data in self._parts:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def read_first(self, places: Iterable[tuple[int, int]]) -> Read:
        """Return `read` for some places (offset, length); reads those outside the parts at once.

        Raises:
            CorruptError: the file ends before one of them.
        """
        inside = [(at, n) for at, n in places if at >= 0 and at + n <= self.size]
        places = [place for place in inside if self._held(*place) is None]
        if self.item.transforms or len(places) < 2:
            return self.read
        file, begin, _ = self.item.extent
        found = self._source.read_many([Extent(file, begin + at, n) for at, n in places])
        known = dict(zip(places, found, strict=True))

        def read(offset: int, length: int) -> bytes:
            held = known.get((offset, length))
            return self.read(offset, length) if held is None else held

        return read

    def parse(self) -> TorchStream:
        """Parse the stream; offsets in the result are of the file, or of the decoded stream."""
        base = 0 if self.item.transforms else self.item.extent.offset
        try:
            return parse_stream(
                self.read, self.size, file=self.item.extent.file, base=base, tail=TAIL
            )
        except FtckptError as error:
            error.tensor = error.tensor or self.item.name
            raise


def windows(source: Source, items: Iterable[Item]) -> Iterator[ItemWindow | FtckptError]:
    """Open many items, in the given order; an unreadable item yields its error."""
    todo = iter(items)
    while batch := _batch(todo):
        plain = [item for item in batch if not item.transforms and _inside(source, item)]
        wanted: list[Extent] = []
        for item in plain:
            wanted += _probes(item)
        try:
            fetched = iter(source.read_many(wanted))
            ready = {id(item) for item in plain}
        except (CorruptError, UnsafeError):
            ready = set()  # one file failed: opened alone, each item reports its own error
        for item in batch:
            if id(item) in ready:
                at = item.extent.offset
                parts = tuple((p.offset - at, next(fetched)) for p in _probes(item))
                yield ItemWindow(source, item, parts, item.extent.length)
            else:
                yield open_item(source, item, collect=True)


def open_item(source: Source, item: Item, *, collect: bool = False) -> ItemWindow | FtckptError:
    """Open one item; with `collect`, return an error instead of raising it.

    Raises:
        CorruptError: its file is missing or ends before its record, or it cannot be decoded.
        UnsafeError: its file is a fifo, socket or device.
        UnsupportedError: a transform is not known, or its object is archived.
    """
    try:
        source.entry(item.extent.file)
        if not _inside(source, item):
            raise CorruptError(
                f"{item.extent.file} ends before the record of {item.name}",
                kind="truncated-file",
                file=item.extent.file,
                tensor=item.name,
                offset=item.extent.offset,
                length=item.extent.length,
            )
        if item.transforms:
            return _undone(source, item)
        probes = _probes(item)
        parts = zip(probes, source.read_many(probes), strict=True)
        at = item.extent.offset
        return ItemWindow(
            source, item, tuple((p.offset - at, d) for p, d in parts), item.extent.length
        )
    except FtckptError as error:
        error.tensor = error.tensor or item.name
        if collect:
            return error
        raise


def only_tensor(stream: TorchStream, item: Item) -> TensorRef:
    """Return the tensor that a tensor item must hold.

    Raises:
        UnsupportedError: it holds a tensor subclass, or a record that is not known.
        CorruptError: it holds something else.
    """
    if isinstance(stream.tree, TensorRef):
        return stream.tree
    what = type(stream.tree).__name__
    if what == "SubclassRef":
        raise UnsupportedError(f"{item.name} is stored as a tensor subclass",
                               file=item.extent.file, tensor=item.name)  # fmt: skip
    if what in ("Inert", "Composite"):  # a record, not a plain value
        found = stream.tree if what == "Inert" else f"a {stream.tree.how} tensor"
        raise NewerWriterError.of(f"the record of {item.name}", expected="a tensor", found=found,
                                  file=item.extent.file, tensor=item.name)  # fmt: skip
    raise CorruptError(  # such a value is an object's, by the metadata's own words
        f"the record of {item.name} holds a {what}, not a tensor",
        kind="bad-metadata",
        file=item.extent.file,
        tensor=item.name,
        offset=item.extent.offset,
        length=item.extent.length,
    )


def misshapen(place: Extent, shape: Sequence[int], wanted: Sequence[int]) -> CorruptError:
    """Return the error for a record whose tensor has another shape than its piece."""
    return CorruptError(
        f"a record of {place.file} has shape {list(shape)} where its piece has {list(wanted)}",
        kind="shape-mismatch",
        file=place.file,
        offset=place.offset,
        length=place.length,
    )


def rank_of(path: str) -> int | None:
    """Return the rank in a data file's name, or None."""
    match = DATA.search(path)
    return int(match[1]) if match else None


def as_item(name: str, stored: StoredItem, nbytes: int | None = None,
            sizes: tuple[int, ...] | None = None) -> Item:  # fmt: skip
    """Return the item at `stored`; `nbytes` of elements, if a tensor."""
    place = Extent(stored.path, stored.offset, stored.length)
    limit = OBJECT_LIMIT if nbytes is None else nbytes + OVERHEAD
    return Item(name, place, stored.transforms, rank_of(stored.path), limit, sizes)


def _inside(source: Source, item: Item) -> bool:
    entry = source.entries.get(item.extent.file)
    return entry is not None and item.extent.end <= entry.size


def _batch(items: Iterator[Item]) -> list[Item]:
    """Take the next items to open at once."""
    batch: list[Item] = []
    nbytes = 0
    for item in islice(items, BATCH):
        batch.append(item)
        nbytes += sum(probe.length for probe in _probes(item))
        if nbytes >= BATCH_BYTES:
            break
    return batch


def _probes(item: Item) -> list[Extent]:
    extent = item.extent
    if extent.length <= (WHOLE_OBJECT if item.limit == OBJECT_LIMIT else WHOLE):
        return [extent]
    return [extent._replace(length=HEAD), Extent(extent.file, extent.end - TAIL, TAIL)]


def _undone(source: Source, item: Item) -> ItemWindow:
    """Decode a transformed item once, keeping head and tail of the output."""
    head, tail, size = b"", b"", 0
    for block in _stream(source, item, item.limit + 1):
        if len(head) < WHOLE:
            head += block[: WHOLE - len(head)]
        tail = (tail + block)[-(64 << 10) :]
        size += len(block)
    if size > item.limit:
        raise UnsafeError(
            f"the record of {item.name} unfolds to more than the {item.limit} bytes that it can "
            "need",
            kind="bad-transform",
            file=item.extent.file,
            tensor=item.name,
            offset=item.extent.offset,
            length=item.extent.length,
        )
    return ItemWindow(source, item, ((0, head), (size - len(tail), tail)), size)


def _stream(source: Source, item: Item, limit: int) -> Iterator[bytes]:
    from ftckpt.storage.decompress import open_stream

    with source.open(item.extent.file) as reader:
        yield from open_stream(reader, item.extent, item.transforms, limit=limit)


def opaque_note(found: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Yield one note on classes outside the allow-list, which are kept inert.

    `found` maps each class name to the first file and object that names it.
    """
    if not found:
        return
    names = sorted(found)
    file, holder = found[names[0]]
    if len(names) == 1:
        message = f"{holder} holds a {names[0]}, kept inert"
    else:
        message = f"{len(names)} classes are kept inert: {listed(names)}"
    yield finding("opaque-object", message, file=file, tensor=holder)
