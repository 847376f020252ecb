"""Tensor subclasses in DCP: an item that `.metadata` calls a tensor, and that holds several.

`dcp.save` writes a tensor of torchao's as it writes every tensor: with the shape and the type that
it shows, as one torch.save stream, in which its class and the tensors inside it stand. The metadata
do not say so; the length of the item does, so only items of another length than a plain tensor's
are opened. One that is not found by it (of a few hundred elements) is refused by name when it is
read.

Source: torch/distributed/checkpoint/{planner_helpers,filesystem}.py of 2.13, and what it writes of
torchao 0.18.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Piece
from ftckpt.errors import FtckptError
from ftckpt.formats.torch_files.inner import inner_tensors, outer_view
from ftckpt.formats.torch_files.stream import TensorRef, TorchStream
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.storage.source import Source

from .items import Item, as_item, windows
from .metadata import DcpMetadata
from .records import StoredItem, TensorEntry

# Bytes of a stream around the elements of a plain tensor, of all releases of torch; and how much
# they differ among the tensors of one save, whose names and sizes are short or long.
_LEAST, _MOST, _SPREAD = 400, 2500, 160


class Subclass(NamedTuple):
    """One tensor subclass.

    Attributes:
        entry: what the metadata say of it.
        item: its record.
        parts: the tensors inside, by suffix (`.qdata`), each with its one piece.
    """

    entry: TensorEntry
    item: StoredItem
    parts: Mapping[str, tuple[TensorRef, Piece]]


def find_subclasses(source: Source, meta: DcpMetadata) -> dict[str, Subclass]:
    """Return the tensor subclasses of a store by stored name.

    One in several chunks, or in a compressed item, is left as it is.
    """
    found: dict[str, Subclass] = {}
    for window in windows(source, _candidates(meta)):
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


def _candidates(meta: DcpMetadata) -> list[Item]:
    """Return the items that are longer or shorter than a plain tensor's would be."""
    whole: list[tuple[int, str, StoredItem]] = []
    usual: Counter[int] = Counter()
    copied = {copy.name for copy in meta.copies}
    for name, entry in meta.tensors.items():
        chunks = entry.chunks
        if len(chunks) != 1 or chunks[0].item is None or chunks[0].item.transforms:
            continue
        item = chunks[0].item
        around = item.length - entry.dtype.nbytes(prod(chunks[0].sizes))
        if _LEAST <= around <= _MOST:
            usual[around] += 1
        if chunks[0].sizes == entry.size and name not in copied:
            whole.append((around, name, item))
    # Records of several tensors are longer than plain ones, so the least common length is plain.
    often = [around for around, times in usual.items() if times * 16 >= len(whole)]
    plain = min(often, default=_LEAST - _SPREAD)
    return [
        as_item(name, item, item.length, meta.tensors[name].size)
        for around, name, item in whole
        if not 0 <= around - plain <= _SPREAD
    ]


def _parts(stream: TorchStream, item: Item) -> dict[str, tuple[TensorRef, Piece]]:
    """Return the tensors of a subclass that each lie in bytes of their own; else nothing."""
    if type(stream.tree) is not SubclassRef:
        return {}
    view = outer_view(stream.tree)
    if view is None or view[0] != item.sizes:
        return {}
    parts: dict[str, tuple[TensorRef, Piece]] = {}
    for suffix, ref in inner_tensors(stream.tree):
        if ref.conj or ref.neg or stream.storages[ref.key].inline is not None:
            return {}
        strides = None if ref.dense else ref.strides
        span = ref.span(stream.storages)
        piece = Piece(Box.whole(ref.shape), span, None, strides, 0, item.rank)
        parts[suffix or ".tensor"] = ref, piece
    return parts
