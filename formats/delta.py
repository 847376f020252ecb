"""delta: a checkpoint stored as what it adds to another, read as one ordinary checkpoint.

A delta is a directory with `ftckpt.delta`, the index, which is written last, and data files
(`ftckpt.delta.index` has the format). Opening reads the index alone. Its base may be of any format,
on any store, and a delta itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftckpt import manifest
from ftckpt.checkpoint import Box, Commit, CommitState, Extent, Piece, TensorInfo
from ftckpt.delta import NAME, DeltaIndex
from ftckpt.delta.index import MAX_BYTES, ROW
from ftckpt.errors import CorruptError, IncompleteError
from ftckpt.registry import Listing, Recognition
from ftckpt.rules import Rules
from ftckpt.source import Source
from ftckpt.stores import StoreOptions

from .delta_checkpoint import ChainNote, DeltaCheckpoint
from .delta_objects import stored_objects
from .delta_source import DecodedSource, decoded_name

_END = 16  # bytes of the digest behind the rows
_DATA = re.compile(r"\d{5,}\.blocks")


@dataclass(frozen=True)
class Delta:
    """The format `delta` (see the module's docstring).

    Attributes:
        rules: the user's table of how tensors are cut, for reading the base.
        bases: places where bases of a chain may lie, asked before those that are recorded.
        stores: how to reach bases; as the delta was reached, where None.
    """

    rules: Rules | None = None
    bases: Sequence[str] = ()
    stores: StoreOptions | None = None

    name = "delta"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Go by the name of the index, which is written last, else by those of the data files."""
        if listing.single:
            return None
        if NAME in listing.files:
            return Recognition(self.name, f"has {NAME}", CommitState.COMMITTED)
        # It has little but these, so that a hundred of its names show one.
        if any(n.endswith(".blocks") and _DATA.fullmatch(n) for n in listing.at_hand.files):
            return Recognition(self.name, "has blocks of a delta", CommitState.UNCOMMITTED)
        return None

    def open(self, source: Source) -> DeltaCheckpoint:
        """Read the index.

        Raises:
            IncompleteError: it is not there, nor a manifest that says that it was.
            CorruptError: it is damaged, or contradicts itself (`bad-delta`).
            UnsafeError: it names a file outside the delta.
            UnsupportedError: it is of another version, or uses what this one does not know.
        """
        from .catalog import formats

        if NAME not in source.entries and manifest.NAME not in source.entries:
            source.require_absent(NAME)
            raise IncompleteError(
                f"{source.url} has no {NAME}, which is written last: the packing did not finish",
                hint="the same ftckpt delta pack goes on where it was",
                file=NAME,
            )
        size = source.size(NAME)
        if size > MAX_BYTES:
            raise CorruptError(
                f"{NAME} has {size} bytes and {MAX_BYTES} is most", kind="bad-delta", file=NAME
            )
        index = DeltaIndex.parse(source.read(NAME))
        begin = size - _END - len(index.rows)
        tensors: dict[str, TensorInfo] = {}
        decoded: dict[Extent, Extent] = {}
        for tensor in index.tensors:
            rows = Extent(NAME, begin + tensor.first * ROW.size, tensor.blocks * ROW.size)
            decoded[rows] = Extent(decoded_name(tensor.key), 0, tensor.nbytes)
            piece = Piece(Box.whole(tensor.shape), rows, packed=True)
            tensors[tensor.key] = TensorInfo(
                tensor.component,
                tensor.name,
                tensor.kind,
                tensor.shape,
                tensor.dtype,
                (piece,),
                tensor.stored_name,
            )
        stored = stored_objects(index)
        checkpoint = DeltaCheckpoint(
            source=source,
            tensors=tensors,
            objects=stored.infos,
            aliases=index.aliases,
            topology=replace(index.topology, evidence="as recorded when it was packed"),
            commit=Commit(CommitState.COMMITTED, NAME),
            dialect=_dialect(index),
            index=index,
            stored=stored,
            decoded=decoded,
            formats=formats(self.rules, self.bases),
            given=self.bases,
            stores=source.store.options if self.stores is None else self.stores,
        )
        checkpoint.source = DecodedSource.over(source, checkpoint.fill)
        if index.base is not None:
            checkpoint.notes = ChainNote(checkpoint)
        return checkpoint


def _dialect(index: DeltaIndex) -> str:
    made_of = f"{index.source_format} packed by {index.tool}".strip()
    if index.base is None:
        return f"full, of {made_of}"
    step = "a step that is not known" if index.base.step is None else f"step {index.base.step}"
    return f"upon {step} at {index.base.path}, of {made_of}"
