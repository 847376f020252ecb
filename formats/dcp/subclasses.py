"""Tensor subclasses in DCP: an item that `.metadata` calls a tensor, and that holds several.

`dcp.save` writes a tensor of torchao's as it writes every tensor: with the shape and the type that
it shows, as one torch.save stream, in which its class and the tensors inside it stand; of a DTensor
one stream for each shard. The metadata do not say so; the length of the item does, so only items
of another length than a plain tensor's are opened. Of several shards the first and the last decide:
torchao's others are as the first. Where the shortest are longer than plain ones that are known, one
of them says whether it is plain. A subclass that is not found by it (of a few hundred elements) is
refused by name when it is read.

There may be a hundred thousand shards, so not every one is opened: one of the same tensor, shape
and length of item as another is supposed to be as that, and its record is compared when its
elements are wanted, and by the checks.

Source: torch/distributed/checkpoint/{planner_helpers,filesystem}.py of 2.13, and what it writes of
torchao 0.18.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Extent, Piece
from ftckpt.errors import CorruptError, FtckptError, UnsafeError, UnsupportedError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.torch_files.inner import InnerPart, inner_tensors, outer_view, shown_suffix
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import SubclassRef, TensorRef
from ftckpt.storage.source import Source

from .items import Item, ItemWindow, as_item, misshapen, open_item, rank_of, windows
from .metadata import DcpMetadata
from .records import Chunk, StoredItem, TensorEntry

if TYPE_CHECKING:
    from ftckpt.formats.state.coded_shards import CodedShard, CodedTensor

# Records of a file that are compared at once where the elements of one are wanted: the first time,
# and at most, since each time they are twice as many.
_FIRST, _MOST_AT_ONCE = 2, 128
# Bytes of a stream around the elements of a plain tensor, of all releases of torch; and how much
# they differ among the tensors of one save, whose names and sizes are short or long.
_LEAST, _MOST, _SPREAD = 400, 2500, 160
# The most that was seen of a plain tensor is 1,577 bytes (torch 2.13); the least of torchao's
# float8 weight around the same elements is 2,153. Between them only its record tells.
_SURELY_PLAIN = 1650


class Subclass(NamedTuple):
    """One tensor subclass in one chunk.

    Attributes:
        entry: what the metadata say of it.
        item: its record.
        parts: the tensors inside.
    """

    entry: TensorEntry
    item: StoredItem
    parts: Sequence[InnerPart]


class CutSubclass(NamedTuple):
    """One tensor subclass in several chunks.

    Attributes:
        tensor: what its shards make up.
        item: the record of one shard.
        parts: the tensors inside.
        supposed: the shards whose records were not read, by the file and offset of these.
    """

    tensor: CodedTensor
    item: StoredItem
    parts: Sequence[InnerPart]
    supposed: Mapping[tuple[str, int], CodedShard]

    def require(self, stream: TorchStream, item: Item, source: Source) -> None:
        """Require that a shard's record is what it was supposed to be, if it was not read before.

        Raises:
            UnsupportedError, CorruptError: it is not.
        """
        from ftckpt.formats.state.coded_shards import require_same_record

        supposed = self.supposed.get((item.extent.file, item.extent.offset))
        if supposed is None:
            return
        shard = _shard(stream, item, supposed.box)
        try:
            if shard is None:
                raise misshapen(item.extent, (), supposed.box.sizes)
            # Shards that keep their own parts have their own tables.
            require_same_record(shard, supposed, source.read_many, tables=not self.tensor.own)
        except FtckptError as error:
            error.tensor, error.offset = item.name, item.extent.offset
            error.length = item.extent.length
            raise


class SupposedShards:
    """The shards of subclasses whose records are read when their elements are wanted."""

    def __init__(self, source: Source, meta: DcpMetadata, cut: Mapping[str, CutSubclass]) -> None:
        self._source, self._meta, self._cut = source, meta, cut
        self._compared: set[tuple[str, int]] = set()
        self._next: dict[str, int] = {}

    def compare(self, stream: TorchStream, item: Item) -> bool:
        """Require of a record that it is what it is supposed to be; tell if it is of a subclass.

        Raises:
            UnsupportedError, CorruptError: it is not.
        """
        cut = self._cut.get(item.name)
        if cut is not None:
            cut.require(stream, item, self._source)
            self._compared.add((item.extent.file, item.extent.offset))
        return cut is not None

    def require(self, place: Extent) -> None:
        """Require of a shard with elements at a place that its record is what it is supposed to be.

        Records that follow in its file are compared with it, ever more of them: who reads a second
        shard of a file reads most of it, and each read of one record waits for the store.

        Raises:
            UnsupportedError, CorruptError: it is not.
        """
        file = place.file
        starts, names = self._places.get(file, ((), ()))
        at = bisect_right(starts, place.offset) - 1
        if at < 0 or (file, starts[at]) in self._compared:
            return
        if place.offset >= starts[at] + names[at][1]:
            return
        count = self._next.get(file, _FIRST)
        self._next[file] = min(2 * count, _MOST_AT_ONCE)
        items = [
            Item(names[n][0], Extent(file, starts[n], names[n][1]), (), rank_of(file))
            for n in range(at, min(at + count, len(starts)))
            if (file, starts[n]) not in self._compared
        ]
        for item, window in zip(items, windows(self._source, items), strict=True):
            try:
                if isinstance(window, FtckptError):
                    raise window
                self.compare(window.parse(), item)
            except FtckptError:
                if item is items[0]:
                    raise
                # Another one's is told when its own elements are wanted.

    @cached_property
    def _places(self) -> Mapping[str, tuple[list[int], list[tuple[str, int]]]]:
        """By file, where the records begin, and of each its name and length."""
        found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for name, one in self._cut.items():
            for chunk in self._meta.tensors[name].chunks if one.supposed else ():
                item = chunk.item
                if item is not None and (item.path, item.offset) in one.supposed:
                    found[item.path].append((item.offset, item.length, name))
        for file, rows in found.items():
            rows.sort()
            for (at, length, name), (after, *_) in pairwise(rows):
                if at + length > after:
                    raise CorruptError(
                        f"{name} and the item after it claim the same bytes of {file}",
                        kind="extent-overlap", file=file, offset=after, length=at + length - after,
                    )  # fmt: skip
        return {
            file: ([at for at, *_ in rows], [(name, length) for _, length, name in rows])
            for file, rows in found.items()
        }


class Subclasses(NamedTuple):
    """The tensor subclasses of a store by stored name.

    Attributes:
        whole: those in one chunk.
        cut: those in several.
        wrong: what is wrong with the shards of all, of tensors that are none for it, too.
    """

    whole: Mapping[str, Subclass]
    cut: Mapping[str, CutSubclass]
    wrong: Sequence[Finding]

    def parts(self) -> Mapping[str, Sequence[InnerPart]]:
        """Return the tensors inside, by the name of the subclass."""
        whole = {name: one.parts for name, one in self.whole.items()}
        return whole | {name: one.parts for name, one in self.cut.items()}


def find_subclasses(source: Source, meta: DcpMetadata) -> Subclasses:
    """Return the tensor subclasses of a store; one in a compressed item is left as it is."""
    names = _candidates(source, meta)
    whole = {
        name for name in names if meta.tensors[name].chunks[0].sizes == meta.tensors[name].size
    }
    cut, wrong = _cut(source, meta, [name for name in names if name not in whole])
    return Subclasses(_whole(source, meta, [name for name in names if name in whole]), cut, wrong)


def _whole(source: Source, meta: DcpMetadata, names: Sequence[str]) -> dict[str, Subclass]:
    found: dict[str, Subclass] = {}
    items = []
    for name in names:
        stored = meta.tensors[name].chunks[0].item
        assert stored is not None
        items.append(as_item(name, stored, stored.length, meta.tensors[name].size))
    for window in windows(source, items):
        if isinstance(window, FtckptError):
            continue  # the checks report it
        item = window.item
        try:
            parts = _parts(window.parse(), item)
        except FtckptError:
            continue  # so they do this
        entry = meta.tensors[item.name]
        stored = entry.chunks[0].item
        if parts and stored is not None:
            found[item.name] = Subclass(entry, stored, parts)
    return found


def _cut(
    source: Source, meta: DcpMetadata, names: Sequence[str]
) -> tuple[dict[str, CutSubclass], list[Finding]]:
    read: dict[str, dict[int, CodedShard]] = defaultdict(dict)
    found: dict[str, CutSubclass] = {}
    wrong: list[Finding] = []
    todo = {name: _to_read(meta.tensors[name]) for name in names}
    while todo:
        odd = _read_shards(source, todo, read)
        again: dict[str, list[tuple[int, Chunk]]] = {}
        for name, chunks in todo.items():
            if not chunks or name in odd:
                continue
            if not any(type(shard.value) is SubclassRef for shard in read[name].values()):
                continue
            cut: CutSubclass | None = None
            told: list[Finding] = []
            try:
                cut = _joined(name, meta.tensors[name], read[name], source, told)
            except UnsupportedError:
                pass  # refused by name when it is read
            except (CorruptError, UnsafeError) as error:
                error.tensor = name
                told.append(from_error(error))
            if cut is not None and cut.tensor.differs and cut.supposed:
                # Each shard has a table of its own, so none is as another: every one is read.
                full = enumerate(_full(meta.tensors[name]))
                again[name] = [(n, chunk) for n, chunk in full if n not in read[name]]
                continue
            wrong += told
            if cut is not None:
                found[name] = cut
        todo = again
    return found, wrong


def _read_shards(
    source: Source,
    todo: Mapping[str, Sequence[tuple[int, Chunk]]],
    read: Mapping[str, dict[int, CodedShard]],
) -> set[str]:
    """Add the shards of some chunks to those that were read; return the tensors with odd ones."""
    chunks = [(name, n, chunk) for name, numbered in todo.items() for n, chunk in numbered]
    items = []
    for name, _, chunk in chunks:
        assert chunk.item is not None
        items.append(as_item(name, chunk.item, chunk.item.length, chunk.sizes))
    # One pass over each file: a tensor has a chunk in every one.
    order = sorted(range(len(items)), key=lambda n: items[n].extent)
    odd: set[str] = set()  # what the checks report, or refuse by name
    for n, window in zip(order, windows(source, (items[n] for n in order)), strict=True):
        name, number, chunk = chunks[n]
        shard = None
        if name not in odd and not isinstance(window, FtckptError):
            with suppress(FtckptError):
                box = Box(chunk.offsets, chunk.sizes)
                shard = _shard(window.parse(), window.item, box)
        if shard is None:
            odd.add(name)
        else:
            read[name][number] = shard
    return odd


def _to_read(entry: TensorEntry) -> list[tuple[int, Chunk]]:
    """Return the first chunk of each form, and the last, each with its number."""
    full = _full(entry)
    first = {_form(chunk): n for n, chunk in reversed([*enumerate(full)])}
    return [(n, full[n]) for n in sorted({*first.values(), len(full) - 1})]


def _form(chunk: Chunk) -> tuple[tuple[int, ...], int]:
    """Return what shards of one tensor have the same that are supposed to be alike."""
    assert chunk.item is not None
    return chunk.sizes, chunk.item.length


def _joined(
    name: str,
    entry: TensorEntry,
    read: Mapping[int, CodedShard],
    source: Source,
    wrong: list[Finding],
) -> CutSubclass | None:
    from ftckpt.formats.state.coded_shards import check_shards, joined

    # Of each form, a shard that was read, and where its record begins.
    known: dict[tuple[tuple[int, ...], int], tuple[CodedShard, int]] = {}
    supposed: dict[tuple[str, int], CodedShard] = {}
    shards = []
    for n, chunk in enumerate(_full(entry)):
        item = chunk.item
        assert item is not None
        shard = read.get(n)
        if shard is None:
            shard, begin = known[_form(chunk)]
            box = Box(chunk.offsets, chunk.sizes)
            rank, moved = rank_of(item.path), item.offset - begin
            shard = shard._replace(box=box, rank=rank, file=item.path, moved=moved)
            supposed[item.path, item.offset] = shard
        else:
            known.setdefault(_form(chunk), (shard, item.offset))
        shards.append(shard)

    def refuse(shard: CodedShard, what: str) -> None:
        told = f"{name} {what} {shard.file}"
        wrong.append(finding("bad-metadata", told, file=shard.file, tensor=name, rank=shard.rank))

    tensor, parts = joined(entry.size, entry.dtype, shards, refuse, source.read_many)
    if tensor is None:
        return None
    wrong += check_shards(tensor, name)
    item = next(c.item for c in _full(entry) if Box(c.offsets, c.sizes) == tensor.head)
    assert item is not None
    return CutSubclass(tensor, item, parts, supposed)


def _shard(stream: TorchStream, item: Item, box: Box) -> CodedShard | None:
    from ftckpt.formats.state.coded_shards import CodedShard

    value = stream.tree
    view = outer_view(value) if type(value) is SubclassRef else None
    if type(value) is TensorRef and stream.storages[value.key].inline is None:
        view = value.shape, value.dtype
    if view is None or view[0] != box.sizes:
        return None
    return CodedShard(box, value, stream.storages, item.rank, item.extent.file)


def _full(entry: TensorEntry) -> list[Chunk]:
    return [chunk for chunk in entry.chunks if 0 not in chunk.sizes]


def _ends(entry: TensorEntry) -> tuple[Chunk | None, Chunk | None]:
    """Return the first and the last chunk that has elements; nothing for a part of a tensor."""
    chunks = entry.chunks
    if not chunks or (len(chunks) == 1 and chunks[0].sizes != entry.size):
        return None, None
    first, last = chunks[0], chunks[-1]
    if 0 in first.sizes or 0 in last.sizes:
        full = _full(entry)
        return (full[0], full[-1]) if full else (None, None)
    return first, last


def _holds_subclass(source: Source, meta: DcpMetadata, name: str) -> bool:
    entry = meta.tensors[name]
    for chunk in _ends(entry):
        if chunk is not None and chunk.item is not None:
            item = as_item(name, chunk.item, entry.dtype.nbytes(prod(chunk.sizes)), chunk.sizes)
            window = open_item(source, item, collect=True)
            if isinstance(window, ItemWindow):
                with suppress(FtckptError):
                    return type(window.parse().tree) is SubclassRef
    return False


def _candidates(source: Source, meta: DcpMetadata) -> list[str]:
    """Return the tensors with items that are longer or shorter than a plain tensor's would be."""
    told: list[tuple[int, str]] = []
    copied = {copy.name for copy in meta.copies}
    elements: dict[tuple[tuple[int, ...], int], int] = {}  # there are many tensors of few shapes
    for name, entry in meta.tensors.items():
        if name in copied:
            continue
        first, last = _ends(entry)
        for chunk in (first,) if last is first else (first, last):
            if chunk is None or chunk.item is None or chunk.item.transforms:
                break
            form = chunk.sizes, entry.dtype.bits
            nbytes = elements.get(form)
            if nbytes is None:
                nbytes = elements[form] = entry.dtype.nbytes(prod(chunk.sizes))
            told.append((chunk.item.length - nbytes, name))
    usual = Counter(around for around, _ in told if _LEAST <= around <= _MOST)
    # Records of several tensors are longer than plain ones, so the least common length is plain.
    often = [around for around, times in usual.items() if times * 16 >= len(told)]
    plain = min(often, default=_LEAST - _SPREAD)
    if plain > _SURELY_PLAIN:
        # One says whether it is, because a store may hold nothing but subclasses.
        shortest = next(name for around, name in told if around == plain)
        if _holds_subclass(source, meta, shortest):
            plain = _LEAST - _SPREAD
    odd = (name for around, name in told if not 0 <= around - plain <= _SPREAD)
    return [
        name
        for name in dict.fromkeys(odd)
        if all(chunk.item is not None and not chunk.item.transforms
               for chunk in _full(meta.tensors[name]))
    ]  # fmt: skip


def _parts(stream: TorchStream, item: Item) -> list[InnerPart]:
    """Return the tensors of a subclass that each lie in bytes of their own; else nothing."""
    if type(stream.tree) is not SubclassRef:
        return []
    view = outer_view(stream.tree)
    if view is None or view[0] != item.sizes:
        return []
    return list(_inside(stream, item, stream.tree))


def _inside(stream: TorchStream, item: Item, record: SubclassRef) -> Iterator[InnerPart]:
    held = list(inner_tensors(record))
    if any(ref.conj or ref.neg or stream.storages[ref.key].inline is not None for _, ref in held):
        return
    for suffix, ref in held:
        strides = None if ref.dense else ref.strides
        span = ref.span(stream.storages)
        piece = Piece(Box.whole(ref.shape), span, None, strides, 0, item.rank)
        own = suffix or ".tensor"
        shown = shown_suffix(record.type_name, own)
        yield InnerPart(own, ref.shape, ref.dtype, (piece,), shown)
