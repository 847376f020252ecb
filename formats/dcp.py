"""PyTorch Distributed Checkpoint: `.metadata` and `__<rank>_<n>.distcp` files.

Reads what torch 2.0 to 2.13 write, saves without collectives (`__R.metadata`), compressed items,
and the dialects of Megatron-Core and NVRx in their stored form.
"""

from __future__ import annotations

import io
import re
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, overload

from ftckpt.checkpoint import (
    Box,
    Checkpoint,
    Commit,
    CommitState,
    Extent,
    ObjectInfo,
    Payload,
    Piece,
    Record,
    Scalar,
    TensorInfo,
    Topology,
)
from ftckpt.errors import CorruptError, FtckptError, IncompleteError
from ftckpt.findings import Finding, finding
from ftckpt.memory import demand
from ftckpt.progress import NULL, Counter
from ftckpt.registry import Listing, Recognition
from ftckpt.source import Source
from ftckpt.store import Reader

from .dcp_checks import check_items, check_keys, check_tiling, check_write_order
from .dcp_items import (
    DATA,
    OVERHEAD,
    Item,
    Window,
    as_item,
    only_tensor,
    open_item,
    rank_of,
    windows,
)
from .dcp_metadata import Chunk, DcpMetadata, StoredItem, is_shape, merge, parse_metadata
from .dcp_names import place
from .dcp_scalars import read_scalars
from .field_names import field_names
from .unpickle import no_gc

MARKER = ".metadata"
# Parsed metadata is this many times its size, measured with 100,000 tensors in 200,000 pieces.
METADATA_GROWTH = 9
_RANK_METADATA = re.compile(r"__(\d+)\.metadata$")
# Objects that hold a whole dict because the trainer saved one: the resume check looks inside.
_DEEP_LIMIT, _DEEP_BYTES = 32, 4 << 20


class Dcp:
    """The format."""

    name = "dcp"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by its commit marker or by its data files."""
        names = listing.files
        if listing.single:
            return None
        if MARKER in names:
            return Recognition(self.name, f"has {MARKER}", CommitState.COMMITTED)
        if any(_RANK_METADATA.search(n) for n in names):
            return Recognition(self.name, "has a metadata file a rank", CommitState.COMMITTED)
        if f"{MARKER}.tmp" in names or any(DATA.search(n) for n in names):
            return Recognition(
                self.name, f"has data files but no {MARKER}", CommitState.UNCOMMITTED
            )
        return None

    def open(self, source: Source) -> DcpCheckpoint:
        """Parse the metadata; see `ftckpt.registry.Format.open`."""
        ranks = sorted(
            (n for n in source.entries if _RANK_METADATA.search(n) and "/" not in n),
            key=lambda n: int(_RANK_METADATA.search(n)[1]),  # type: ignore[index]
        )
        if MARKER in source.entries:
            meta = _read(source, MARKER)
            markers: tuple[str, ...] = (MARKER,)
        elif ranks:
            meta = merge({name: _read(source, name) for name in ranks})
            markers = tuple(ranks)
        else:
            raise _uncommitted(source)
        with no_gc():
            return _build(source, meta, markers)


@dataclass(kw_only=True)
class DcpCheckpoint(Checkpoint):
    """An opened DCP checkpoint.

    Attributes:
        meta: the parsed metadata.
        markers: the metadata files.
        stored: key -> name in the metadata.
    """

    format: ClassVar[str] = "dcp"
    meta: DcpMetadata
    markers: tuple[str, ...]
    stored: Mapping[str, str] = field(default_factory=dict)

    def members(self) -> Iterable[str]:
        """The markers, every data file that an item names, and what Megatron puts beside them."""
        yield from self.markers
        named = {item.path for item in self.meta.storage.values()}
        yield from sorted(named)
        for name, entry in self.source.entries.items():
            empty = DATA.search(name) and entry.size == 0 and name not in named
            if empty or name in ("metadata.json", "common.pt", "integrity.json"):
                yield name

    def load_object(self, name: str) -> Any:
        """Return one byte item as inert data."""
        item = self._item(name, None)
        window = open_item(self.source, item)
        assert isinstance(window, Window)
        return window.parse().tree

    def payload(self, piece: Piece) -> Payload:
        """Open the item and find the elements of its tensor."""
        place_ = piece.extent
        limit = piece.box.volume * 16 + OVERHEAD
        item = Item("a tensor", place_, self._transforms.get(place_, ()), piece.rank, limit)
        window = open_item(self.source, item)
        assert isinstance(window, Window)
        stream = window.parse()
        tensor = only_tensor(stream, item)
        span = tensor.span(stream.storages)
        strides = None if tensor.dense else tensor.strides
        if item.transforms:
            return Payload(place_, strides, item.transforms, (span.offset, span.length))
        return Payload(span, strides)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield defects of keys, tiling, items and left-overs."""
        yield from check_keys(self.meta, self.markers[0])
        yield from check_tiling(self.meta, self.source)
        yield from check_items(self.source, self.meta, self.items(), counter)
        yield from check_write_order(self.source, self.markers)
        named = {item.path for item in self.meta.storage.values()}
        for name, entry in self.source.entries.items():
            if DATA.search(name) and name not in named and entry.size:
                yield finding(
                    "stale-shard",
                    f"{name} is named by no item: left by a save with more ranks or threads",
                    file=name,
                )
        if f"{MARKER}.tmp" in self.source.entries:
            yield finding(
                "leftover-commit",
                f"{MARKER}.tmp was left by a save that did not finish; {MARKER} is complete",
                file=f"{MARKER}.tmp",
            )

    def items(self) -> Iterator[Item]:
        """Yield every item, by file and offset."""
        places = sorted((i.path, i.offset, n, i) for (n, _), i in self.meta.storage.items())
        for _, _, name, stored in places:
            entry = self.meta.tensors.get(name)
            # A chunk is at most the tensor: a bound, where the exact size is `check`'s matter.
            nbytes = None if entry is None else entry.dtype.nbytes(prod(entry.size))
            yield as_item(name, stored, nbytes)

    def records(self) -> Iterator[Record]:
        """Yield the CRC-32 of every record; items that cannot be opened are `check`'s to report."""
        keys = {stored: key for key, stored in self.stored.items()}
        for window in windows(self.source, self.items()):
            if isinstance(window, FtckptError):
                continue
            item = window.item
            owner = keys.get(item.name, item.name)
            for _, place_, crc in _records(window):
                if item.transforms:
                    inner = (place_.offset, place_.length)
                    yield Record(item.extent, crc, owner, item.rank, item.transforms, inner)
                else:
                    yield Record(place_, crc, owner, item.rank)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield step counters, at most `limit` a file."""
        return read_scalars(self.source, self.meta, limit)

    def fields(self) -> Iterable[str]:
        """Names of objects, and of what is inside those that hold a whole dict."""
        yield from self.objects
        small = [
            n for n, o in self.objects.items()
            if o.extent.length <= _DEEP_BYTES and len(self.meta.paths.get(n, (n,))) == 1
            and not n.startswith(("optimizer.", "lr_scheduler.")) and "_extra_state" not in n
        ]  # fmt: skip
        for name in small[:_DEEP_LIMIT]:
            yield from (f"{name}.{inner}" for inner in field_names(self.load_object(name)))

    @cached_property
    def _transforms(self) -> Mapping[Extent, tuple[str, ...]]:
        return {
            Extent(i.path, i.offset, i.length): i.transforms
            for i in self.meta.storage.values()
            if i.transforms
        }

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> Item:
        return as_item(name, self.meta.storage[name, offsets])


class _Pieces(Sequence[Piece]):
    """The pieces of one tensor, made when asked for: there may be a million of them."""

    __slots__ = ("_chunks", "_name", "_storage")

    def __init__(
        self,
        name: str,
        chunks: Sequence[Chunk],
        storage: Mapping[tuple[str, tuple[int, ...] | None], StoredItem],
    ) -> None:
        self._name = name
        self._chunks = chunks
        self._storage = storage

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        chunk = self._chunks[index]
        offsets, sizes = chunk.offsets, chunk.sizes
        if not (is_shape(offsets) and is_shape(sizes) and len(offsets) == len(sizes)):
            raise CorruptError(f"a chunk of {self._name} is no box",
                               kind="bad-metadata", file=MARKER, tensor=self._name)  # fmt: skip
        item = self._storage.get((self._name, offsets))
        if item is None:
            raise CorruptError(f"a chunk of {self._name} at {offsets} has no place in any file",
                               kind="bad-metadata", file=MARKER, tensor=self._name)  # fmt: skip
        place_ = Extent(item.path, item.offset, item.length)
        return Piece(Box(offsets, sizes), place_, rank=rank_of(item.path), packed=True)


def _records(window: Window) -> list[tuple[str, Extent, int | None]]:
    try:
        return window.parse().records
    except FtckptError:
        return []


class _Raw(io.RawIOBase):
    """A store's reader as a raw stream, so that a large pickle is never held whole."""

    def __init__(self, reader: Reader, size: int) -> None:
        self._reader, self._size, self._at = reader, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._size - self._at]
        if view:
            self._reader.readinto(self._at, view)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        return self._at


def _read(source: Source, name: str) -> DcpMetadata:
    size = source.size(name)
    if size == 0:
        raise CorruptError(f"{name} is empty", kind="truncated-file", file=name)
    demand(size * METADATA_GROWTH, f"the metadata {name} of {size >> 20} MiB")
    with source.open(name) as reader:
        return parse_metadata(io.BufferedReader(_Raw(reader, size), 1 << 20), size, name)


def _uncommitted(source: Source) -> IncompleteError:
    data = sorted(n for n in source.entries if DATA.search(n))
    temporary = f"{MARKER}.tmp"
    message = f"{MARKER} is absent: the save did not finish, or is still being written"
    hint = "wait for the save, or use an earlier checkpoint"
    if temporary in source.entries:
        try:
            meta = _read(source, temporary)
            whole = not any(f.code for f in check_tiling(meta, source))
        except FtckptError:
            whole = False
        if whole:
            message = (
                f"{MARKER} is absent, but {temporary} is complete and fits the data files: "
                "the save died between its last two acts"
            )
            hint = f"renaming {temporary} to {MARKER} commits it; verify it afterwards"
    return IncompleteError(f"{message} ({len(data)} data files)", hint=hint, kind="uncommitted")


def _build(source: Source, meta: DcpMetadata, markers: tuple[str, ...]) -> DcpCheckpoint:
    tensors: dict[str, TensorInfo] = {}
    stored: dict[str, str] = {}
    for name, entry in meta.tensors.items():
        where = place(name, meta.paths.get(name, ()), entry.dtype)
        pieces = _Pieces(name, entry.chunks, meta.storage)
        info = TensorInfo(
            where.component, where.name, where.kind, entry.size, entry.dtype, pieces, name
        )
        key = info.key
        if key in tensors:
            # Two stored names mean one tensor only by our reading: keep both apart.
            info = TensorInfo("extra:dcp", name, where.kind, entry.size, entry.dtype, pieces, name)
            key = info.key
        tensors[key] = info
        stored[key] = name
    objects = {}
    for name in meta.objects:
        item = meta.storage.get((name, None))
        if item is not None:
            extent = Extent(item.path, item.offset, item.length)
            objects[name] = ObjectInfo(name, extent, rank_of(item.path))
    notes = [
        finding("opaque-object", f"{markers[0]} names {name}, kept inert", file=markers[0])
        for name in meta.opaque
    ]
    ranks = {rank_of(path) for path in {i.path for i in meta.storage.values()}} - {None}
    world = max((r for r in ranks if r is not None), default=-1) + 1
    return DcpCheckpoint(
        source=source,
        tensors=tensors,
        objects=objects,
        topology=Topology(
            world_size=world or None,
            evidence=f"data files of {len(ranks)} ranks" if ranks else "",
        ),
        commit=Commit(CommitState.COMMITTED, markers[0]),
        dialect=_dialect(source, meta, markers),
        notes=notes,
        meta=meta,
        markers=markers,
        stored=stored,
    )


def _dialect(source: Source, meta: DcpMetadata, markers: Sequence[str]) -> str:
    words = []
    if "metadata.json" in source.entries:
        words.append("Megatron-Core torch_dist, as stored")
    if len(markers) > 1 or markers[0] != MARKER:
        words.append(f"metadata of {len(markers)} ranks, saved without collectives")
    transforms = Tally(t for i in meta.storage.values() for t in i.transforms)
    words += [f"items under {name}" for name in sorted(transforms)]
    if meta.version:
        words.append(f"metadata version {meta.version}")
    return ", ".join(words)
