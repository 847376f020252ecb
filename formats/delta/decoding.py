"""Decode a delta with its whole chain, in bounded memory, from many threads.

Each link decodes what the one above asks for, so that one read holds blocks of every link at once.
How many reads may go on together follows from that and from the memory that is allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Extent, Look, SelfCheck
from ftckpt.delta import NAME, DeltaDecoder, DeltaIndex, Fill
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import DeltaObject, DeltaTensor
from ftckpt.delta.index.parse import IndexParser
from ftckpt.delta.pack.tensor_bytes import TensorBytes
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.storage.chunks import chunks
from ftckpt.transfer.read.source_bytes import SourceBytes
from ftckpt.workers.budget import demand, share
from ftckpt.workers.buffers import buffer

from .chain import ChainLink, of_base, within

_SHARE = 2  # of the memory budget, as a divisor: who asks for decoded bytes holds memory too
_CHECK_SLOT = 6


class _Need(NamedTuple):
    """Bytes that one link holds while one read goes on: what is kept for the next, and the rest."""

    kept: int
    working: int

    @classmethod
    def of(cls, index: DeltaIndex) -> _Need:
        block = max((min(t.nbytes, _block_bytes(t)) for t in index.tensors), default=0)
        if any(tensor.helpers for tensor in index.tensors):
            # The four tensors of a parameter, each decoded once; the arrays of predictions that
            # wait for each other: a weight's for its master's, that one's for both moments'.
            return cls(4 * block, 8 * block)
        return cls(block, 2 * block)  # payload and reference

    @property
    def nbytes(self) -> int:
        return self.kept + self.working


class ChainDecoder:
    """Decodes the tensors of a delta; may be used from many threads.

    Args:
        links: the delta, its base, and so on down to the full checkpoint.

    Raises:
        NoResourceError: one read needs more memory than is allowed.
    """

    def __init__(self, links: Sequence[Checkpoint]) -> None:
        deltas = [link for link in links if isinstance(link, ChainLink)]
        needs = [_Need.of(delta.index) for delta in deltas]
        each = max(1, sum(need.nbytes for need in needs))
        demand(_SHARE * each, f"decoding {deltas[0].source.name} with {len(links) - 1} others")
        self._each = each
        fill: Fill | None = None
        if not isinstance(links[-1], ChainLink):
            fill = _told(TensorBytes(links[-1]).fill, links[-1])
        for delta, need in zip(reversed(deltas), reversed(needs), strict=True):
            read = partial(_read, SourceBytes(delta))
            decoder = DeltaDecoder(delta.index, read, fill, partial(self._kept, need.kept))
            fill = decoder.fill if delta is deltas[0] else _told(decoder.fill, delta)
        assert fill is not None
        self._top = deltas[0]
        self._decoder = decoder
        self._fill = fill
        self._room = threading.BoundedSemaphore(self.at_once)

    @property
    def at_once(self) -> int:
        """How many reads may go on at a time in the memory that is this process's."""
        return max(1, share() // _SHARE // self._each)

    def _kept(self, nbytes: int) -> int:
        return nbytes * self.at_once

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put decoded bytes of a tensor into `view` (see `DeltaDecoder.fill`)."""
        with self._room:
            self._fill(key, offset, view)

    def look(self, look: Look | None) -> None:
        """Say where the delta's own tensors may be found (see `DeltaDecoder.look`)."""
        self._decoder.look = look

    def checks(self) -> Iterator[SelfCheck]:
        """Yield the decoding of every block, what predicts before what is predicted, and objects.

        Blocks of equal number of the tensors of one parameter follow each other, so that what one
        decodes serves the others.
        """
        index, source = self._top.index, self._top.source
        size = source.size(NAME)
        yield SelfCheck(Extent(NAME, 0, size), "", size, self._check_index)
        for family in self._families():
            for number in range(max(tensor.blocks for tensor in family)):
                follows = False
                for tensor in family:
                    if number < tensor.blocks:
                        yield self._check_of(index, tensor, number, follows)
                        follows = True
        for entry in index.objects:
            place = Extent(index.files[entry.file].name, entry.offset, entry.length)
            read = partial(self._check_object, entry, place)
            yield SelfCheck(place, entry.name, entry.length, read)

    def _families(self) -> Iterator[list[DeltaTensor]]:
        """Yield the tensors in groups, each with what predicts it, in an order that decodes.

        Copies of others, which have the same payloads, are left out.
        """
        index = self._top.index
        tensors = index.tensors
        owner = list(range(len(tensors)))

        def first(number: int) -> int:
            while owner[number] != number:
                owner[number] = owner[owner[number]]
                number = owner[number]
            return number

        for number, tensor in enumerate(tensors):
            for helper in tensor.helpers:
                owner[first(number)] = first(helper)
        families: dict[int, list[DeltaTensor]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.key not in index.aliases:
                families.setdefault(first(number), []).append(tensor)
        for family in families.values():
            yield sorted(family, key=lambda t: -1 if t.fit is None else t.fit.rule.level)

    def _check_of(
        self, index: DeltaIndex, tensor: DeltaTensor, number: int, follows: bool
    ) -> SelfCheck:
        stored = index.block(tensor, number)
        size = _block_bytes(tensor)
        begin = number * size
        length = min(size, tensor.nbytes - begin)
        file = index.files[stored.file].name if stored.length else NAME
        place = Extent(file, stored.offset, stored.length)
        read = partial(self._check_block, tensor.key, begin, length)
        return SelfCheck(place, tensor.key, length, read, follows)

    def _check_block(self, key: str, offset: int, length: int) -> None:
        self.fill(key, offset, buffer(length, _CHECK_SLOT))

    def _check_index(self) -> None:
        IndexParser(NAME).require_whole(self._top.source.read(NAME))

    def _check_object(self, entry: DeltaObject, place: Extent) -> None:
        import xxhash

        state = xxhash.xxh3_128()
        with self._top.source.open(place.file) as reader:
            for part in chunks(reader, place.offset, place.length):
                state.update(part)
        if state.digest() != entry.digest:
            raise CorruptError(
                f"{place.file} holds other bytes than the index says for {entry.name}",
                kind="bad-digest",
                file=place.file,
                tensor=entry.name,
                offset=place.offset,
                length=place.length,
            )


def _block_bytes(tensor: DeltaTensor) -> int:
    return tensor.block_words * words_of(tensor.dtype).size


def _read(source: SourceBytes, file: str, offset: int, length: int) -> memoryview:
    view = memoryview(bytearray(length))
    source.read(file, offset, view)
    return view


def _told(fill: Fill, base: Checkpoint) -> Fill:
    """Return a fill whose errors say that they are of a base, and of which."""

    def located(key: str, offset: int, view: memoryview) -> None:
        try:
            fill(key, offset, view)
        except FtckptError as error:
            error.message = f"the base: {error.message}"
            error.args = (error.message,)
            error.file = within(base, error.file)
            raise of_base(error) from error

    return located
