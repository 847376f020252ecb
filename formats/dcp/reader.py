"""An opened DCP checkpoint, and how to open one (see `dcp` for the supported saves)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ftckpt.checkpoint import (
    Checkpoint,
    Commit,
    CommitState,
    Extent,
    ImpliedCount,
    ObjectInfo,
    Payload,
    Piece,
    Record,
    Scalar,
    TensorInfo,
)
from ftckpt.checkpoint.alone import source_of
from ftckpt.errors import CorruptError, FtckptError, IncompleteError, UnsupportedError
from ftckpt.findings import Finding, counted, finding, from_error, renamed
from ftckpt.formats.state.stored_names import is_common, is_group_settings, is_of_bitsandbytes
from ftckpt.formats.state.wrappers import NO_HOMES, Homes
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source
from ftckpt.workers.budget import demand
from ftckpt.workers.memory import no_gc

from .items import (
    OVERHEAD,
    Item,
    ItemWindow,
    as_item,
    misshapen,
    only_tensor,
    opaque_note,
    open_item,
    rank_of,
    windows,
)
from .metadata import DcpMetadata, merge, parse_metadata
from .names import (
    COMMON,
    CONFIGURATION,
    DATA,
    INTEGRITY,
    MARKER,
    META,
    RANK_METADATA,
    RUN_CONFIG,
    TRAIN_STATE,
    lost_meta,
    lost_own_files,
    own_files,
)  # fmt: skip
from .state import StateDicts, unfinished, unnamed
from .subclasses import CutSubclass, Subclass, Subclasses, SupposedShards, find_subclasses
from .tensors import homes_of, inner_infos, logical_tensors, read_scalars

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.checkpoint.quantised import QuantisedTensor
    from ftckpt.formats.quantised.pairing import Pairing
    from ftckpt.formats.state.coded_shards import CodedParts
    from ftckpt.formats.state.paths import RecordedPaths

    from .metadata import Path

# Ratio of parsed metadata to its file, measured with 100,000 tensors in 200,000 pieces.
METADATA_GROWTH = 10
# Files of Megatron-Core and Megatron-Bridge beside the metadata that are not objects.
_BESIDE = frozenset({CONFIGURATION, INTEGRITY, RUN_CONFIG})

# Name of a record that is opened for one of its pieces, which have no names.
_UNNAMED = "a tensor"


@dataclass(kw_only=True, repr=False)
class DcpCheckpoint(Checkpoint):
    """An opened DCP checkpoint.

    Attributes:
        meta: the parsed metadata.
        markers: the metadata files.
        homes: the models and optimizers below wrappers.
        stored: key -> name in the metadata.
        beside: objects that are files of their own, by their item.
        subclasses: tensor subclasses in one chunk by stored name; each is an object, too.
        cut: those in several chunks; the record of one of them is an object.
        wrong_shards: what is wrong with the chunks of these, and of what would be one.
        coded: the tensors inside these, by the name of that object.
        tensors_inside: key of a tensor inside a subclass -> name of that object.
        inner_paths: stored name of a tensor inside a subclass -> its path, which nothing records.
        pairing: bitsandbytes' weights in codes and scales; None where there are none.
    """

    format: ClassVar[str] = "dcp"
    meta: DcpMetadata
    markers: tuple[str, ...]
    homes: Homes = NO_HOMES
    stored: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Item] = field(default_factory=dict)
    subclasses: Mapping[str, Subclass] = field(default_factory=dict)
    cut: Mapping[str, CutSubclass] = field(default_factory=dict)
    wrong_shards: Sequence[Finding] = ()
    coded: Mapping[str, CodedParts] = field(default_factory=dict)
    tensors_inside: Mapping[str, str] = field(default_factory=dict)
    inner_paths: Mapping[str, Path] = field(default_factory=dict)
    pairing: Pairing | None = None

    @property
    def loads_at_any_world(self) -> bool:
        """Return True: torch reshards it while it loads."""
        return True

    def members(self) -> Iterable[str]:
        """Return the markers, all data files of items, and Megatron's files beside them."""
        yield from self.markers
        yield from self.beside
        named = self.meta.files
        yield from sorted(named)
        for name, entry in self.source.entries.items():
            empty = DATA.search(name) and entry.size == 0 and name not in named
            if empty or name in _BESIDE:
                yield name

    def file_digests(self) -> Mapping[str, str]:
        """Return what Megatron's `integrity.json` records."""
        if INTEGRITY not in self.source.entries:
            return {}
        from .integrity import read_integrity

        return read_integrity(self.source)

    def load_object(self, name: str) -> Any:
        """Return one byte item as inert data."""
        window = open_item(self.source, self._object_item(name))
        assert isinstance(window, ItemWindow)
        return window.parse().tree

    def payload(self, piece: Piece) -> Payload:
        """Open the item and find the elements of its tensor."""
        if not piece.packed:  # inside a subclass
            self._supposed.require(piece.extent)
            return super().payload(piece)
        try:
            tensor, span, transforms, record = self._elements(piece)
        except FtckptError as error:
            if error.tensor == _UNNAMED:
                error.tensor = None  # the caller knows the piece's owner
            raise
        if tensor.shape != piece.box.sizes:
            raise misshapen(piece.extent, tensor.shape, piece.box.sizes)
        strides = None if tensor.dense else tensor.strides
        if transforms:
            return Payload(piece.extent, strides, transforms, (span.offset, span.length))
        return Payload(span, strides, record=record)

    def for_rank(self, tensors: Mapping[str, TensorInfo]) -> Checkpoint | None:
        """Return what reads some tensors in another process; see `Checkpoint.for_rank`."""
        source = source_of(self.source, tensors)
        pieces = [piece for info in tensors.values() for piece in info.pieces]
        if source is None or not all(piece.packed for piece in pieces):
            return None
        found = type(self)(
            source=source, tensors=tensors, objects={}, meta=DcpMetadata(), markers=self.markers
        )
        held = self._transformed
        found.__dict__["_transformed"] = {
            piece.extent: held[piece.extent] for piece in pieces if piece.extent in held
        }
        return found

    @property
    def records_by_piece(self) -> bool:
        """Return True: a record is opened for each piece, and its directory has the CRC-32."""
        return True

    def _elements(
        self, piece: Piece
    ) -> tuple[TensorRef, Extent, tuple[str, ...], tuple[Extent, int] | None]:
        """Return the tensor in a piece's record, its place, the transforms to undo, its CRC-32.

        The place is in the file, or in the decoded stream if there are transforms.
        """
        place_ = piece.extent
        transforms, limit = self._transformed.get(place_, ((), 0))
        item = Item(_UNNAMED, place_, transforms, piece.rank, limit)
        window = open_item(self.source, item)
        assert isinstance(window, ItemWindow)
        stream = window.parse()
        tensor = only_tensor(stream, item)
        if tensor.conj or tensor.neg or stream.storages[tensor.key].inline is not None:
            raise UnsupportedError(
                f"a record of {place_.file} holds a conjugate or negative view, or no bytes of "
                "its own",
                file=place_.file,
                offset=place_.offset,
                length=place_.length,
            )
        stored = stream.storages[tensor.key]
        crc = None if transforms else stored.crc32
        record = None if crc is None else (stored.extent, crc)
        return tensor, tensor.span(stream.storages), transforms, record

    @property
    def suppositions(self) -> Sequence[Finding]:
        """Tell how many records of shards were not read."""
        left = sum(len(one.supposed) for one in self.cut.values())
        if not left:
            return ()
        records = counted(sum(len(self.meta.tensors[name].chunks) for name in self.cut), "record")
        what = f"{left} of {records} of shards were taken to be as others of their tensors"
        return [finding("note", f"{what}; verify compares them")]

    @cached_property
    def _supposed(self) -> SupposedShards:
        return SupposedShards(self.source, self.meta, self.cut)

    @cached_property
    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """The weights of bitsandbytes in codes and scales; their states are read."""
        if self.pairing is None:
            return {}
        from ftckpt.formats.quantised.pairing import weights_of

        return weights_of(self, self.pairing)

    def dequantised(self, dtype: DType) -> Checkpoint:
        """Return itself; weights in codes are refused.

        Raises:
            UnsupportedError: it has some.
        """
        if self.pairing is not None and self.pairing.pairs:
            from ftckpt.formats.quantised.pairing import not_computed

            raise not_computed(self, self.pairing)
        return self

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield defects of keys, tiling, items and left-overs."""
        if self.pairing is not None:
            from ftckpt.formats.quantised.pairing import check

            yield from check(self.pairing, lambda: self.quantised)
        for found in self._check(counter):
            if found.tensor is None:
                yield found
                continue
            place_ = None
            if found.file is not None and found.offset is not None and found.length is not None:
                place_ = Extent(found.file, found.offset, found.length)
            yield renamed(found, self.owner(found.tensor, place_))

    def _check(self, counter: Counter) -> Iterator[Finding]:
        """Yield the same, with the metadata's own names for tensors."""
        from .checks import (
            check_items,
            check_keys,
            check_names,
            check_rank_metadata,
            check_tiling,
            check_write_order,
        )

        yield from check_keys(self.meta, self.markers[0])
        yield from check_names(self.meta, self.markers[0])
        other: set[str] = set()  # files that the metadata does not describe
        for found in check_tiling(self.meta, self.source):
            if found.code and found.file:
                other.add(found.file)
            yield found
        yield from self.wrong_shards
        items = self.metadata_items()
        yield from check_items(self.source, self.meta, items, counter, other, self._supposed)
        yield from check_write_order(self.source, self.markers)
        yield from check_rank_metadata(self.source, self.markers)
        named = self.meta.files
        # A separate checkpoint in a directory below is not a shard of this one.
        places = {name.rpartition("/")[0] for name in named}
        for name, entry in self.source.entries.items():
            here = name.rpartition("/")[0] in places
            if DATA.search(name) and name not in named and entry.size and here:
                yield finding(
                    "stale-shard",
                    f"{name} is named by no item: left by a save with more ranks or threads",
                    file=name,
                )
        yield from _check_bridge(self.source, self.format)
        yield from self._check_recorded()
        yield from lost_own_files(self.source, self.topology.world_size or 0)
        if f"{MARKER}.tmp" in self.source.entries:
            yield finding(
                "leftover-commit",
                f"{MARKER}.tmp was left by a save that did not finish; {MARKER} is complete",
                file=f"{MARKER}.tmp",
            )

    def _check_recorded(self) -> Iterator[Finding]:
        """Yield the files that `integrity.json` records and that are missing, or its own defect."""
        try:
            recorded = self.file_digests()
        except FtckptError as error:
            yield from_error(error)
            return
        for name in sorted(recorded.keys() - self.source.entries.keys()):
            yield finding("missing-file", f"{name} is missing: {INTEGRITY} names it", file=name)

    def metadata_items(self) -> Iterator[Item]:
        """Yield every item, by file and offset."""
        for name, chunk, item in sorted(
            self.meta.placed(), key=lambda p: (p.item.path, p.item.offset, p.name)
        ):
            if chunk is None:
                yield as_item(name, item)
                continue
            # The tensor's size bounds its chunk; `check` compares the exact size.
            entry = self.meta.tensors[name]
            yield as_item(name, item, entry.dtype.nbytes(prod(entry.size)), chunk.sizes)
        yield from self.beside.values()

    def records(self) -> Iterator[Record]:
        """Yield the CRC-32 of every record; `check` reports items that cannot be opened."""
        yield from self._records_of(self.metadata_items())

    def _records_of(self, items: Iterable[Item]) -> Iterator[Record]:
        for window in windows(self.source, items):
            if isinstance(window, FtckptError):
                continue
            item = window.item
            owner = self.owner(item.name, item.extent)
            for _, place_, crc in _records(window):
                if item.transforms:
                    inner = (place_.offset, place_.length)
                    yield Record(item.extent, crc, owner, item.rank, item.transforms, inner)
                else:
                    yield Record(place_, crc, owner, item.rank)

    def records_in(self, extents: Collection[Extent]) -> list[Record]:
        """Return the records of the items that are some ranges of files; opens no others."""
        wanted = frozenset(extents)
        items = [item for item in self.metadata_items() if item.extent in wanted] if wanted else []
        return list(self._records_of(items))

    def owner(self, stored: str, place: Extent | None) -> str:
        """Return the key of a tensor, or the name of an object, from its name in the metadata.

        `place` is the item, if known.
        """
        return self._keys.get(stored, stored)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield step counters, at most `limit` per file."""
        return read_scalars(self.source, self.meta, limit, self.state.scalars(), self.homes)

    def fields(self) -> Iterable[str]:
        """Return names of objects, and of the content of those that hold a whole dict."""
        yield from self.objects
        for error in self.state.errors:
            raise error
        yield from self.state.names()

    def recorded_paths(self) -> RecordedPaths:
        """Return the paths in the metadata (see `RecordsPaths`)."""
        from ftckpt.formats.state.paths import RecordedPaths

        paths = {**self.meta.paths, **self.inner_paths}
        return RecordedPaths(
            {key: paths.get(name, (name,)) for key, name in self.stored.items()},
            {name: paths.get(name, (name,)) for name in self.objects},
            self.homes,
            {key: at for key, name in self.stored.items() if (at := self.meta.named.get(name))},
        )

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return the byte items among the objects (see `RecordsPaths`)."""
        held = self.meta.objects | {name: one.item for name, one in self.cut.items()}
        return {name: item.transforms for name in self.objects if (item := held.get(name))}

    @cached_property
    def state(self) -> StateDicts:
        """Read the objects that hold a whole dict."""
        flat = ("optimizer.", "lr_scheduler.")
        whole = [
            name
            for name in self.objects
            if len(self.meta.paths.get(name, (name,))) == 1
            and (not name.startswith(flat) or is_group_settings(name))
            and "_extra_state" not in name
        ]
        return StateDicts(self.source, [self._object_item(name) for name in whole])

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """Name in the metadata -> key."""
        return {stored: key for key, stored in self.stored.items()}

    @cached_property
    def _transformed(self) -> Mapping[Extent, tuple[tuple[str, ...], int]]:
        """Place of a transformed tensor -> its transforms, and its maximum decoded size."""
        if not self.meta.transforms:
            return {}
        return {
            Extent(i.path, i.offset, i.length): (i.transforms, prod(chunk.sizes) * 16 + OVERHEAD)
            for _, chunk, i in self.meta.placed()
            if chunk is not None and i.transforms
        }

    def _object_item(self, name: str) -> Item:
        if name in self.beside:
            return self.beside[name]
        item = self.cut[name].item if name in self.cut else self.meta.objects[name]
        if item is None:
            raise CorruptError(f"{name} lies in no file", kind="bad-metadata",
                               file=self.markers[0], tensor=name)  # fmt: skip
        return as_item(name, item)


C = TypeVar("C", bound=DcpCheckpoint)


def _records(window: ItemWindow) -> list[tuple[str, Extent, int | None]]:
    try:
        return window.parse().records
    except FtckptError:
        return []


def open_plain(source: Source) -> DcpCheckpoint:
    """Open a store that is not Megatron's (see `open_dcp`).

    Raises:
        IncompleteError: it is Megatron's or Lightning's, and not finished.
        CorruptError: it is Megatron's, and what says so is damaged (`bad-index`).
    """
    checkpoint = open_dcp(source, DcpCheckpoint)
    subclasses = find_subclasses(source, checkpoint.meta)
    checkpoint.wrong_shards = subclasses.wrong
    if subclasses.whole or subclasses.cut:
        checkpoint = with_subclasses(checkpoint, subclasses)
    common = (name for name in checkpoint.objects if name != COMMON and is_common(name))
    if any(common):
        # Its names alone look like a plain store's. Megatron has `common.pt` as a file alone: an
        # item of that name is of a conversion, where nothing lay in the state.
        raise unfinished() if CONFIGURATION not in source.entries else unnamed()
    lost = lost_meta(source, [*checkpoint.meta.tensors, *checkpoint.meta.objects])
    checkpoint.notes = [*checkpoint.notes, *lost]
    return checkpoint


def with_subclasses(checkpoint: C, subclasses: Subclasses) -> C:
    """List the tensors inside subclasses, and their records as objects, in place of the tensors."""
    tensors, stored = dict(checkpoint.tensors), dict(checkpoint.stored)
    for key, name in checkpoint.stored.items():
        if name in subclasses.whole or name in subclasses.cut:
            del tensors[key], stored[key]
    items = {name: one.item for name, one in subclasses.whole.items()}
    entries = checkpoint.meta.tensors.items()
    meta = replace(
        checkpoint.meta,
        tensors={name: entry for name, entry in entries if name not in items},
        objects={**checkpoint.meta.objects, **items},
    )
    items |= {name: one.item for name, one in subclasses.cut.items()}
    objects = dict(checkpoint.objects)
    for name, item in items.items():
        extent = Extent(item.path, item.offset, item.length)
        objects[name] = ObjectInfo(name, extent, rank_of(item.path))
    inside: dict[str, str] = {}
    paths: dict[str, Path] = {}
    keys: dict[str, dict[str, str]] = {name: {} for name in subclasses.cut}
    for info, place_, name in inner_infos(meta, checkpoint.homes, subclasses.parts()):
        if tensors.setdefault(info.key, info) is info:
            stored[info.key] = place_
            if name in keys:
                keys[name][place_.removeprefix(name)] = info.key
            else:
                inside[info.key] = name
            path = meta.paths.get(name) or (name,)
            paths[place_] = (*path[:-1], f"{path[-1]}{place_.removeprefix(name)}")
    coded: Mapping[str, CodedParts] = {}
    if keys:
        from ftckpt.formats.state.coded_shards import CodedParts

        coded = {n: CodedParts(subclasses.cut[n].tensor, held) for n, held in keys.items()}
    return replace(
        checkpoint,
        meta=meta,
        tensors=tensors,
        objects=objects,
        stored=stored,
        subclasses=subclasses.whole,
        cut=subclasses.cut,
        coded=coded,
        tensors_inside=inside,
        inner_paths=paths,
    )


def open_dcp(source: Source, kind: type[C]) -> C:
    """Parse the metadata of a checkpoint; return it as a `kind`.

    Raises:
        IncompleteError: it has no metadata (`uncommitted`).
        CorruptError, UnsafeError, NoResourceError: the metadata cannot be trusted, or is too large.
    """
    meta, markers = _read_metadata(source)
    with no_gc():
        notes = [*_replicas(meta), *_whole_copies(meta, source, markers[0])]
        if any(path[-1:] == ("param_names",) for path in meta.paths.values()):
            from .tensors import named_paths

            meta.named = named_paths(meta, source)
        checkpoint = _build(source, meta, markers, kind)
    checkpoint.notes = [*checkpoint.notes, *notes]
    return checkpoint


def _build(source: Source, meta: DcpMetadata, markers: tuple[str, ...], kind: type[C]) -> C:
    homes = homes_of(meta)
    tensors, stored = logical_tensors(meta, homes)
    if meta.named:
        from ftckpt.formats.state.param_ids import states_fit

        if not states_fit(tensors, [key for key, name in stored.items() if name in meta.named]):
            meta.named = {}
            return _build(source, meta, markers, kind)
    objects = {}
    for name, item in meta.objects.items():
        if item is not None:
            extent = Extent(item.path, item.offset, item.length)
            objects[name] = ObjectInfo(name, extent, rank_of(item.path))
    beside = {}
    for name in (COMMON, TRAIN_STATE, META):
        if name in source.entries and name not in objects:
            extent = Extent(name, 0, source.entries[name].size)
            objects[name] = ObjectInfo(name, extent)
            beside[name] = Item(name, extent, (), None)
    for name, rank in own_files(source).items():
        if name not in objects:
            extent = Extent(name, 0, source.entries[name].size)
            objects[name] = ObjectInfo(name, extent, rank)
            beside[name] = Item(name, extent, (), rank)
    ranks = {rank_of(path) for path in meta.files} - {None}
    world = max((r for r in ranks if r is not None), default=-1) + 1
    checkpoint = kind(
        source=source,
        tensors=tensors,
        objects=objects,
        commit=Commit(CommitState.COMMITTED, markers[0]),
        dialect=_dialect(meta, markers),
        notes=list(opaque_note(dict.fromkeys(meta.opaque, (markers[0], markers[0])))),
        meta=meta,
        markers=markers,
        homes=homes,
        stored=stored,
        beside=beside,
        implied=_implied(source, meta, markers),
    )
    if any(map(is_of_bitsandbytes, tensors)):
        from ftckpt.formats.quantised.pairing import paired

        checkpoint.pairing, checkpoint.tensors = paired(tensors)
    if meta.whole_copies > 1:
        from .checks import groups

        checkpoint.second_copies = frozenset(copy.item.path for copy in meta.copies)
        checkpoint.file_copies = groups(meta)
    evidence = f"data files of {counted(len(ranks), 'rank')}" if ranks else ""
    # Only Megatron's arguments add facts that are worth a read while opening.
    state = checkpoint.state if any(map(is_common, objects)) else StateDicts(source, ())
    checkpoint.topology = state.topology(world or None, evidence)
    return checkpoint


def _implied(source: Source, meta: DcpMetadata, markers: Sequence[str]) -> list[ImpliedCount]:
    """Return the data files of the ranks where no rank wrote metadata for all."""
    if RANK_METADATA.search(markers[0]) is None:
        return []
    from ftckpt.manifest.rank_digests import left_in

    first = next((m for path in sorted(meta.files) if (m := DATA.search(path))), None)
    if first is None or left_in(source).world >= len(markers):
        return []
    return [ImpliedCount(first.string[: first.start(1)], first.string[first.end(1) :])]


def _replicas(meta: DcpMetadata) -> list[Finding]:
    """Relate local replicas to their tensors, if a name says that there are some."""
    if not any("__shadow_" in name or ".__tp_replica_" in name for name in meta.tensors):
        return []
    from .tensors import relate

    return relate(meta)


def _whole_copies(meta: DcpMetadata, source: Source, file: str) -> list[Finding]:
    """Relate the copies of all data files, if the metadata says that there are some."""
    if meta.whole_copies < 2:
        return []
    from .checks import relate

    return relate(meta, source.entries, file)


def _check_bridge(source: Source, dialect: str) -> Iterator[Finding]:
    """Yield a missing one of Megatron-Bridge's two files; it writes the configuration last.

    Other programs save files of these names beside a store, so the store must be Megatron's.
    """
    if dialect == DcpCheckpoint.format and CONFIGURATION not in source.entries:
        return
    state, configuration = TRAIN_STATE in source.entries, RUN_CONFIG in source.entries
    if configuration and not state:
        what = f"{TRAIN_STATE} is missing: Megatron-Bridge writes it before {RUN_CONFIG}"
        yield finding("missing-file", what, file=TRAIN_STATE)
    elif state and not configuration:
        what = f"{RUN_CONFIG} is not there: Megatron-Bridge saves it after {TRAIN_STATE}"
        yield finding("state-unknown", what, file=RUN_CONFIG)


def _dialect(meta: DcpMetadata, markers: Sequence[str]) -> str:
    words = []
    if len(markers) > 1 or markers[0] != MARKER:
        words.append(f"metadata of {len(markers)} ranks, saved without collectives")
    words += [f"items under {name}" for name in sorted(meta.transforms)]
    if meta.whole_copies > 1:
        words.append(f"{meta.whole_copies} copies of all data files")
    if meta.version:
        words.append(f"metadata version {meta.version}")
    return ", ".join(words)


def _read_metadata(source: Source) -> tuple[DcpMetadata, tuple[str, ...]]:
    """Return the metadata, merged if each rank wrote its own, and its files.

    Raises:
        IncompleteError: it does not exist (`uncommitted`).
        CorruptError, UnsafeError, NoResourceError: it cannot be trusted, or is too large.
    """
    if MARKER in source.entries:
        return _parsed(source, MARKER), (MARKER,)
    ranks = sorted(
        (n for n in source.entries if RANK_METADATA.search(n) and "/" not in n),
        key=lambda n: int(RANK_METADATA.search(n)[1]),  # type: ignore[index]
    )
    if not ranks:
        raise _uncommitted(source)
    return merge({name: _parsed(source, name) for name in ranks}), tuple(ranks)


def _parsed(source: Source, name: str) -> DcpMetadata:
    size = source.entry(name).size  # a link to nothing is told as such, and not as an empty file
    if size == 0:
        raise CorruptError(f"{name} is empty", kind="truncated-file", file=name)
    demand(size * METADATA_GROWTH, f"the metadata {name} of {size >> 20} MiB")
    with source.open(name) as reader:
        return parse_metadata(reader.read(0, size), name)


def _uncommitted(source: Source) -> IncompleteError:
    data = sorted(n for n in source.entries if DATA.search(n))
    temporary = f"{MARKER}.tmp"
    message = f"{MARKER} is absent: the save did not finish, or is still being written"
    hint = "wait for the save, or use an earlier checkpoint"
    if temporary in source.entries:
        from .checks import check_tiling

        try:
            meta = _parsed(source, temporary)
            whole = not any(f.code for f in check_tiling(meta, source))
        except FtckptError:
            whole = False
        if whole:
            message = (
                f"{MARKER} is absent, but {temporary} is complete and fits the data files: "
                "the save died between its last two acts"
            )
            hint = f"renaming {temporary} to {MARKER} commits it; verify it afterwards"
    return IncompleteError(
        f"{message} ({len(data)} data files)", hint=hint, kind="uncommitted", file=MARKER
    )
