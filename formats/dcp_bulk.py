"""Read a large `.metadata` in bulk: its records as tables, the little that is left as a pickle.

The result is what `dcp_metadata.parse_metadata` gives, or None: whatever is not spelled as torch
spells it, contradicts itself or leaves a place open is for that reader, which also says what is
wrong. What may be in a pickle is decided by the unpickler alone.
"""

from __future__ import annotations

from typing import Any

from ftckpt.errors import FtckptError
from ftckpt.memory import bounded, no_gc

from . import unpickle
from .dcp_metadata import DcpMetadata, take_members
from .dcp_path_tables import read_paths
from .dcp_records import SHAPES, TABLE, Fields
from .dcp_rows import Joined
from .dcp_tables import EntryReader, ItemReader
from .lockstep import Shapes
from .pickle_cut import DeclinedError, Named, Walk, push
from .pickle_frames import unframe
from .pickle_values import Values
from .pickle_words import Words

_KEPT = 16 << 20


def parse_in_bulk(data: bytearray, size: int, file: str) -> DcpMetadata | None:
    """Parse one metadata pickle; None where it is not spelled as expected.

    Args:
        data: the file, and `pickle_words.PADDING` zeros; its frames are taken out.
        size: length of the file in bytes.
        file: its name, for messages.
    """
    import numpy as np

    # A large block that was freed tells the C library to keep small ones: it would hand the memory
    # of every short-lived array back to the system, and half the time would go into asking again.
    np.empty(_KEPT, np.uint8)
    try:
        with bounded(unpickle.GROWTH + unpickle.GROWTH_PER_BYTE * size), no_gc():
            return _parse(data, size, file)
    except (DeclinedError, FtckptError, LookupError, TypeError, AttributeError, ValueError):
        return None
    except MemoryError:  # many records of a few bytes, or one long text that all of them take
        return None


def _parse(data: bytearray, size: int, file: str) -> DcpMetadata:
    size, joints = unframe(data, size)
    walk = Walk(data, size, joints)
    shapes = _find_tables(walk, data, size)
    used = walk.named.used
    shape = b""
    if walk.wanted and Named.GLOBAL + b"Size" in walk.named.index:
        shape = push(walk.kept[walk.named.index[Named.GLOBAL + b"Size"]])
        used.append((walk.named.index[Named.GLOBAL + b"Size"], TABLE["torch.Size"]))
    tables = dict.fromkeys(run.table for run in walk.runs)
    values = Values(data, shapes, tables, walk.wanted.values(), shape)
    state, opaque = _load(walk, values, file)
    meta = DcpMetadata(opaque=opaque)
    joined = Joined(values, file)
    joined.take(
        meta, state["state_dict_metadata"], state.get("planner_data"), state.get("storage_data")
    )
    if joined.runs != len(walk.runs):
        raise DeclinedError
    take_members(meta, state)
    return meta


def _find_tables(walk: Walk, data: bytearray, size: int) -> Shapes:
    """Walk the pickle; where the first record of a dict has passed, look for all the others."""
    words, shapes = Words(data, size), Shapes()
    seen: dict[str, object] = {}

    def built(at: int) -> None:
        index = walk.named.index
        known = tuple(
            Named.GLOBAL + name in index
            for name in (b"TensorStorageMetadata", b"BytesStorageMetadata")
        )
        try:
            if any(known) and seen.get("entries") != known:
                reader = EntryReader(walk.named, shapes)
                end = _next(data, at, size, b"planner_data", b"storage_data")
                walk.ahead(reader.read(words, at, end))
                seen["entries"] = known
            if Named.GLOBAL + b"_StorageInfo" in index and "items" not in seen:
                walk.ahead(ItemReader(walk.named, shapes).read(words, at, size))
                seen["items"] = True
        except KeyError:  # not all of its members have passed yet
            pass

    def read(text: bytes, at: int) -> None:
        if text == b"planner_data" and "paths" not in seen:
            walk.ahead(read_paths(words, at, _next(data, at, size, b"storage_data")))
            seen["paths"] = True

    walk.walk(built, read)
    return shapes


def _next(data: bytearray, at: int, size: int, *members: bytes) -> int:
    """Return where the next of these members may begin: records behind it are read one by one."""
    found = (data.find(name, at, size) for name in members)
    return min((place for place in found if place >= 0), default=size)


def _load(walk: Walk, values: Values, file: str) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Load what is left; return the members of the Metadata object, and the opaque names."""
    used = walk.named.used
    rest = walk.rest(values.written, [index for index, _ in used] + values.foreign.tolist())
    try:
        loaded = unpickle.load(rest, file=file, table=TABLE, persistent=walk.runs.__getitem__)
    finally:
        SHAPES.clear()
    top, given = loaded.value
    for (_, expected), found in zip(used, given, strict=False):
        if found is not expected and (type(found) is not str or found != expected):
            raise DeclinedError
    values.give(given[len(used) :])
    if not isinstance(top, Fields):
        raise DeclinedError
    return top.state, loaded.opaque
