"""The `.metadata` pickle of torch.distributed.checkpoint: tensors, objects, and their places.

One pickle of one `Metadata` object; a save without collectives has one per rank. An item is stored
in its chunk, not in a dict of its own, because there may be millions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, FtckptError, NewerWriterError, UnsafeError
from ftckpt.formats.pickles import unpickle
from ftckpt.formats.pickles.inert import RefusedCallError, UnknownRecordError, one_bit_from
from ftckpt.storage.source import safe_name
from ftckpt.workers.memory import no_gc

from .records import (
    MAX_INT,
    SHAPES,
    TABLE,
    BytesEntry,
    Chunk,
    Fields,
    Index,
    Offsets,
    StoredItem,
    TensorEntry,
    is_shape,
    lacks,
    unknown,
)

_COPIES = r"num_copies=(\d{1,9})"

# Dict keys and list indices.
Path = tuple[str | int, ...]


class MetadataItem(NamedTuple):
    """One item and its owner: a chunk of a tensor, or (None) an object."""

    name: str
    chunk: Chunk | None
    item: StoredItem


@dataclass(slots=True)
class DcpMetadata:
    """The parsed metadata, checked for types and unsafe names, not for consistency.

    Attributes:
        tensors: stored name -> entry; its chunks know their items.
        objects: stored name of a byte item -> item, None if the metadata gives it no place.
        paths: stored name -> path of dict keys (str) and list indices (int) in the state_dict.
        named: the same of numbered states, with the names that the file records (see `numbered`).
        planned: whether `planner_data` names a tensor or object, with a path or something else.
        orphans: (stored name, offsets or None) -> item, of items without an owner.
        copies: further copies of chunks and objects: of a save without collectives, and local
            replicas (see `local_replicas`).
        files: names of the items' data files.
        transforms: names of all transforms of items.
        save_id: uuid of the save, if recorded (torch >= 2.4).
        version: `Metadata.version`, if recorded (torch >= 2.9).
        reformulated: stored name -> shape of a tensor that is stored in another one (Megatron-Core
            up to 0.14 stores optimizer state as a grid of flat shards).
        whole_copies: how often all data files lie there (see `whole_copies`).
        extras: members that plain torch does not write (a dialect's).
        opaque: names outside the table.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, StoredItem | None] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    named: dict[str, Path] = field(default_factory=dict)
    planned: bool = False
    orphans: dict[tuple[str, Offsets | None], StoredItem] = field(default_factory=dict)
    copies: list[MetadataItem] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    transforms: set[str] = field(default_factory=set)
    save_id: str = ""
    version: str = ""
    reformulated: dict[str, Offsets] = field(default_factory=dict)
    whole_copies: int = 1
    extras: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()

    def placed(self) -> Iterator[MetadataItem]:
        """Yield every item with an owner, once, in no order."""
        for name, entry in self.tensors.items():
            # Empty chunks at one place share an item.
            once = {id(chunk.item): chunk for chunk in entry.chunks}
            for chunk in once.values():
                if chunk.item is not None:
                    yield MetadataItem(name, chunk, chunk.item)
        for name, item in self.objects.items():
            if item is not None:
                yield MetadataItem(name, None, item)
        yield from self.copies

    def stored(self) -> Iterator[StoredItem]:
        """Yield every item, orphans too."""
        for entry in self.tensors.values():
            for chunk in entry.chunks:
                if chunk.item is not None:
                    yield chunk.item
        yield from (item for item in self.objects.values() if item is not None)
        yield from (copy.item for copy in self.copies)
        yield from self.orphans.values()


def parse_metadata(data: bytes, file: str) -> DcpMetadata:
    """Parse the bytes of one metadata file; `file` is its name for messages.

    Raises:
        UnsafeError, CorruptError: see `ftckpt.formats.pickles.unpickle.load`; also a path that
            leaves the checkpoint (`unsafe-path`), numbers that contradict each other, or a name
            that is one bit from a known one (`bad-metadata`).
        NewerWriterError: a record has other members, or values of other types, than is known.
    """
    try:
        loaded = unpickle.load(data, file=file, table=TABLE)
    except (RefusedCallError, UnknownRecordError) as error:
        near = one_bit_from(error.called, TABLE)
        if not near and isinstance(error, UnknownRecordError) and "._rebuild_" in error.called:
            raise UnsafeError(  # tensors are built in the items, never here
                f"a pickle calls {error.called}, which no metadata needs; nothing was executed",
                kind="unsafe-pickle",
                file=file,
            ) from None
        if not near:
            raise
        # No checksum covers this file. No harmful name is one bit from a name that torch writes,
        # and nothing is executed in either case: an attacker gains nothing by damage.
        raise CorruptError(
            f"{file} calls {error.called}, one bit from {near}: the bit flipped",
            kind="bad-metadata", file=file,
        ) from None  # fmt: skip
    finally:
        SHAPES.clear()  # objects in use by another thread stay alive; it only rebuilds the table
    top = loaded.value
    meta = DcpMetadata(opaque=loaded.opaque)
    try:
        with no_gc():
            if not isinstance(top, Fields):
                if isinstance(top, unpickle.Inert):
                    raise unknown("the pickle", "checkpoint metadata", top)
                raise CorruptError(f"{file} is a pickle, but not of checkpoint metadata",
                                   kind="bad-metadata", file=file)  # fmt: skip
            state = top.state
            if "state_dict_metadata" not in state:
                raise lacks("Metadata", state, *_MEMBERS)
            take_entries(meta, state["state_dict_metadata"], file)
            take_paths(meta, state.get("planner_data"))
            _take_storage(meta, state.get("storage_data"), file)
            take_members(meta, state)
    except FtckptError as error:
        error.file = error.file or file
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        for name in loaded.opaque:
            near = one_bit_from(name, TABLE)
            if near:
                raise CorruptError(f"{file} names {name}, one bit from {near}: the bit flipped",
                                   kind="bad-metadata", file=file) from None  # fmt: skip
        raise NewerWriterError.of(
            f"the metadata in {file}", expected="the records of torch 1.12 to 2.15",
            found=str(error), file=file,
        ) from None  # fmt: skip
    return meta


def merge(parts: Mapping[str, DcpMetadata]) -> DcpMetadata:
    """Join the metadata of a save without collectives: a union by (name, offsets).

    Every rank's file has global sizes but only that rank's chunks. Data that every rank holds is in
    every rank's file: the first rank's is the main copy, and each rank restarts from its own.

    Raises:
        CorruptError: two ranks give one tensor different sizes or types (`bad-metadata`).
    """
    tensors: dict[str, TensorEntry] = {}
    whole = DcpMetadata(tensors=tensors)
    chunks: dict[str, list[Chunk]] = {}
    seen: dict[str, dict[Offsets, Chunk]] = {}
    for file, part in parts.items():
        for name, entry in part.tensors.items():
            first = tensors.setdefault(name, entry)
            if first.size != entry.size or first.dtype != entry.dtype:
                raise CorruptError(f"{file} gives {name} another shape or type than other ranks",
                                   kind="bad-metadata", file=file, tensor=name)  # fmt: skip
            if first is entry:
                entry.chunks = chunks[name] = list(entry.chunks)
                seen[name] = {chunk.offsets: chunk for chunk in entry.chunks}
                continue
            for chunk in entry.chunks:
                known = seen[name].setdefault(chunk.offsets, chunk)
                if known is chunk:
                    chunks[name].append(chunk)
                elif known.item is None:
                    known.item = chunk.item
                elif chunk.item is not None:
                    whole.copies.append(MetadataItem(name, chunk, chunk.item))
        for name, item in part.objects.items():
            if whole.objects.get(name) is None:
                whole.objects[name] = item
            elif item is not None:
                whole.copies.append(MetadataItem(name, None, item))
        whole.paths.update(part.paths)
        whole.planned = whole.planned or part.planned
        whole.reformulated.update(part.reformulated)
        whole.orphans = part.orphans | whole.orphans
        whole.files |= part.files
        whole.transforms |= part.transforms
        whole.save_id = whole.save_id or part.save_id
        whole.version = whole.version or part.version
        whole.extras += tuple(n for n in part.extras if n not in whole.extras)
        whole.opaque += tuple(n for n in part.opaque if n not in whole.opaque)
    return whole


def _copies(modules: Any) -> int:
    """Return the number of copies of all data files that a writer recorded (see `whole_copies`)."""
    if type(modules) is not list:
        return 1
    said = (re.fullmatch(_COPIES, module) for module in modules if type(module) is str)
    return next((int(match[1]) for match in said if match), 1)


def _text(value: Any) -> str:
    return value[:200] if type(value) is str else ""


def take_entries(meta: DcpMetadata, entries: Any, file: str) -> None:
    """Take tensors and objects from `state_dict_metadata`.

    Raises:
        CorruptError: a size that no tensor can have.
        NewerWriterError, TypeError, AttributeError: an entry has a wrong type.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if type(name) is not str:
            raise TypeError(f"a tensor's name is a {type(name).__name__}")
        if type(entry) is TensorEntry:
            if not isinstance(entry.dtype, DType):
                what = f"the element type of {name}"
                raise unknown(what, "one that torch 2.15 has", entry.dtype)
            if prod(entry.size) >= MAX_INT:
                raise CorruptError(f"{name} has more elements than a tensor can",
                                   kind="bad-metadata", file=file, tensor=name)  # fmt: skip
            if type(entry.chunks) is not list:
                raise TypeError(f"{name} has no chunks")
            for chunk in entry.chunks:
                if type(chunk) is not Chunk:
                    raise TypeError(f"{name} has a chunk that is none")
                chunk.item = None  # it has offsets and sizes, or this raises AttributeError
            tensors[name] = entry
        elif type(entry) is BytesEntry:
            meta.objects[name] = None
        else:
            raise TypeError(f"{name} is neither tensor nor bytes")
    meta.tensors = tensors


_PARTS = frozenset({str, int})


def take_paths(meta: DcpMetadata, paths: Any) -> None:
    """Take paths of dict keys and list indices from `planner_data`; ignore other values."""
    for name, path in (paths or {}).items():
        # A newer Megatron dialect stores plans under a reserved key: not a path, not needed.
        if type(name) is str and type(path) is tuple and _PARTS.issuperset(map(type, path)):
            meta.paths[name] = path
        if not meta.planned and type(name) is str:
            meta.planned = name in meta.tensors or name in meta.objects


_MEMBERS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


def take_members(meta: DcpMetadata, state: Mapping[Any, Any]) -> None:
    """Take the short members of a Metadata object."""
    storage_meta = state.get("storage_meta")
    if isinstance(storage_meta, Fields):
        meta.save_id = _text(storage_meta.state.get("save_id"))
        meta.whole_copies = _copies(storage_meta.state.get("modules"))
    elif storage_meta is not None:
        raise TypeError("storage_meta is of another class")
    meta.version = _text(state.get("version"))
    _take_shapes(meta, state.get("mcore_data"))
    meta.extras = tuple(sorted(k for k in state if isinstance(k, str) and k not in _MEMBERS))


def _take_shapes(meta: DcpMetadata, said: Any) -> None:
    for name, entry in (said or {}).items():
        shape = entry.get("nd_reformulated_orig_global_shape")
        if type(name) is str and name in meta.tensors and is_shape(shape):
            meta.reformulated[name] = shape


def _take_storage(meta: DcpMetadata, storage: Any, file: str) -> None:
    # The one loop over every item of a checkpoint: the common work is inline.
    files = meta.files
    tensors = meta.tensors
    numbered: _Numbered = {}
    placed = 0
    for index, stored in (storage or {}).items():
        if type(index) is not Index or type(stored) is not StoredItem:
            raise TypeError("storage_data holds something else than item locations")
        name, path, start, length = index.fqn, stored.path, stored.offset, stored.length
        if type(name) is not str or type(path) is not str:
            raise TypeError("storage_data holds something else than names")
        if path not in files:
            files.add(safe_name(path, named_by=file))
        if type(start) is not int or type(length) is not int:
            raise TypeError(f"the place of {name} is not a number")
        if not (0 <= start < MAX_INT and 0 <= length < MAX_INT):
            raise CorruptError(f"the place of {name} is outside any file",
                               kind="bad-metadata", file=file, tensor=name)  # fmt: skip
        if stored.transforms:
            stored.transforms = _transforms(stored.transforms, name)
            meta.transforms.update(stored.transforms)
        entry = None if index.offset is None else tensors.get(name)
        if entry is not None:
            chunk = _chunk_of(name, entry.chunks, index, numbered)
            if chunk is not None:
                if chunk.item is not None:
                    raise _placed_twice(file, name)
                chunk.item = stored
                placed += 1
                continue
        if not _attach_other(meta, index, stored):
            raise _placed_twice(file, name)
    if placed < sum(len(entry.chunks) for entry in tensors.values()):
        _share(meta)


_Numbered = dict[str, dict[Offsets, Chunk]]


def _chunk_of(
    name: str, chunks: Sequence[Chunk], index: Index, numbered: _Numbered
) -> Chunk | None:
    hint, offset = index.hint, index.offset
    if type(hint) is int and 0 <= hint < len(chunks):
        chunk = chunks[hint]
        if chunk.offsets is offset or chunk.offsets == offset:
            return chunk
    # A rank's own numbering, or none: found by the offsets, which identify a chunk.
    if name not in numbered:
        numbered[name] = {chunk.offsets: chunk for chunk in reversed(chunks)}
    return numbered[name].get(offset)


def _attach_other(meta: DcpMetadata, index: Index, stored: StoredItem) -> bool:
    """Attach an item to an object, or to the orphans; False if its place is taken."""
    name, offset = index.fqn, index.offset
    if offset is None and name in meta.objects:
        taken = meta.objects[name] is not None
        meta.objects[name] = stored
        return not taken
    return meta.orphans.setdefault((name, offset), stored) is stored


def _placed_twice(file: str, name: str) -> UnsafeError:
    return UnsafeError(
        f"{file} gives two places for one piece of {name}",
        kind="bad-metadata",
        file=file,
        tensor=name,
    )


def _share(meta: DcpMetadata) -> None:
    """Let chunks at one place share their item: empty shards of several ranks are stored once."""
    for entry in meta.tensors.values():
        chunks = entry.chunks
        if len(chunks) > 1 and any(chunk.item is None for chunk in chunks):
            known = {chunk.offsets: chunk.item for chunk in chunks if chunk.item is not None}
            for chunk in chunks:
                if chunk.item is None:
                    chunk.item = known.get(chunk.offsets)


def _transforms(value: Any, name: str) -> tuple[str, ...]:
    if type(value) not in (list, tuple) or not all(type(t) is str for t in value):
        raise TypeError(f"the transforms of {name} are no list of names")
    return tuple(value)
