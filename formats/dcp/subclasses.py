"""Tensor subclasses in DCP: an item that `.metadata` calls a tensor, and that holds several.

`dcp.save` writes a tensor of torchao's as it writes every tensor: with the shape and the type that
it shows, as one torch.save stream, in which its class and the tensors inside it stand; of a DTensor
one stream for each shard. The metadata do not say so; the length of the item does, so only items
of another length than a plain tensor's are opened. Of several shards the first and the last decide:
torchao's others are as the first. One that is not found by it (of a few hundred elements) is
refused by name when it is read.

Source: torch/distributed/checkpoint/{planner_helpers,filesystem}.py of 2.13, and what it writes of
torchao 0.18.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Piece
from ftckpt.errors import CorruptError, FtckptError, UnsafeError, UnsupportedError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.torch_files.inner import InnerPart, inner_tensors, outer_view
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import SubclassRef, TensorRef
from ftckpt.storage.source import Source

from .items import Item, as_item, windows
from .metadata import DcpMetadata
from .records import Chunk, StoredItem, TensorEntry

if TYPE_CHECKING:
    from ftckpt.formats.state.coded_shards import CodedShard, CodedTensor

# Bytes of a stream around the elements of a plain tensor, of all releases of torch; and how much
# they differ among the tensors of one save, whose names and sizes are short or long.
_LEAST, _MOST, _SPREAD = 400, 2500, 160


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
    """

    tensor: CodedTensor
    item: StoredItem
    parts: Sequence[InnerPart]


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
    names = _candidates(meta)
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
    chunks = [(name, chunk) for name in names for chunk in _full(meta.tensors[name])]
    items = []
    for name, chunk in chunks:
        assert chunk.item is not None
        items.append(as_item(name, chunk.item, chunk.item.length, chunk.sizes))
    # One pass over each file: a tensor has a chunk in every one.
    order = sorted(range(len(items)), key=lambda n: items[n].extent)
    found_at: list[CodedShard | None] = [None] * len(items)
    shards: dict[str, list[CodedShard]] = defaultdict(list)
    odd: set[str] = set()  # what the checks report, or refuse by name
    for n, window in zip(order, windows(source, (items[n] for n in order)), strict=True):
        name, chunk = chunks[n]
        if name not in odd and not isinstance(window, FtckptError):
            with suppress(FtckptError):
                box = Box(chunk.offsets, chunk.sizes)
                found_at[n] = _shard(window.parse(), window.item, box)
        if found_at[n] is None:
            odd.add(name)
    for (name, _), shard in zip(chunks, found_at, strict=True):
        if shard is not None:
            shards[name].append(shard)
    found: dict[str, CutSubclass] = {}
    wrong: list[Finding] = []
    for name, held in shards.items():
        if name not in odd and any(type(shard.value) is SubclassRef for shard in held):
            try:
                cut = _joined(name, meta.tensors[name], held, source, wrong)
            except UnsupportedError:
                continue  # refused by name when it is read
            except (CorruptError, UnsafeError) as error:
                error.tensor = name
                wrong.append(from_error(error))
                continue
            if cut is not None:
                found[name] = cut
    return found, wrong


def _joined(
    name: str,
    entry: TensorEntry,
    shards: Sequence[CodedShard],
    source: Source,
    wrong: list[Finding],
) -> CutSubclass | None:
    from ftckpt.formats.state.coded_shards import check_shards, joined

    def refuse(shard: CodedShard, what: str) -> None:
        told = f"{name} {what} {shard.file}"
        wrong.append(finding("bad-metadata", told, file=shard.file, tensor=name, rank=shard.rank))

    tensor, parts = joined(entry.size, entry.dtype, shards, refuse, source.read_many)
    if tensor is None:
        return None
    wrong += check_shards(tensor, name)
    item = next(c.item for c in _full(entry) if Box(c.offsets, c.sizes) == tensor.head)
    assert item is not None
    return CutSubclass(tensor, item, parts)


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


def _candidates(meta: DcpMetadata) -> list[str]:
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
        yield InnerPart(suffix or ".tensor", ref.shape, ref.dtype, (piece,))
