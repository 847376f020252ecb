"""Open a delta as an ordinary checkpoint that decodes tensors when they are read.

A tensor's one piece is packed: its extent is the rows of its blocks in the index, and its payload
is a file of `ComputedSource`. The base is opened when bytes are asked for, or when the delta is
checked, so that listing a root of deltas opens each of them once.

Decode a delta with its whole chain, in bounded memory, from many threads.

Each link decodes what the one above asks for, so that one read holds blocks of every link at once.
How many reads may go on together follows from that and from the memory that is allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import (
    Checkpoint,
    Decoding,
    Extent,
    Look,
    Payload,
    Piece,
    Scalar,
    SelfCheck,
    StepRole,
)
from ftckpt.delta import NAME, DeltaDecoder, DeltaIndex, Fill
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import DeltaObject, DeltaTensor
from ftckpt.delta.index.parse import IndexParser
from ftckpt.delta.pack.tensor_bytes import TensorBytes
from ftckpt.errors import CorruptError, ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, finding, from_error
from ftckpt.formats.safetensors.records import StoredObjects
from ftckpt.formats.state.paths import RecordedPaths
from ftckpt.formats.state.wrappers import find_homes
from ftckpt.progress import NULL, Counter
from ftckpt.storage.ranges import chunks
from ftckpt.transfer.read.source_bytes import SourceBytes
from ftckpt.verification import check_structure
from ftckpt.verification.structure import Seal
from ftckpt.workers.budget import demand, share
from ftckpt.workers.buffers import buffer

from .chain import ChainLink, chain, is_damage, of_base, open_base, within

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
        return SelfCheck(place, tensor.key, length, read, follows, of_reading=True)

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


@dataclass(kw_only=True, repr=False)
class DeltaCheckpoint(ChainLink):
    """A delta, with its base where it has one.

    Attributes:
        stored: the non-tensor state.
        decoded: by the extent of a tensor's piece, the place of its decoded bytes.
    """

    format: ClassVar[str] = "delta"

    stored: StoredObjects
    decoded: Mapping[Extent, Extent]
    _base: Checkpoint | None = field(default=None, init=False, repr=False)
    _decoder: ChainDecoder | None = field(default=None, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def base(self) -> Checkpoint | None:
        """What it depends on, opened once; None for a full one.

        Raises:
            FtckptError: see `delta_chain.open_base`.
        """
        with self._lock:
            if self._base is None and self.index.base is not None:
                self._base = open_base(self, self.index.base)
            return self._base

    @property
    def decoder(self) -> ChainDecoder:
        """What decodes its tensors, with all that they are decoded from opened.

        Raises:
            FtckptError: a base is missing, wrong, or cannot be opened.
            NoResourceError: so long a chain needs more memory than is allowed.
        """
        with self._lock:
            if self._decoder is None:
                self._decoder = ChainDecoder(chain(self))
            return self._decoder

    @property
    def source_format(self) -> str:
        """The format of what was packed."""
        return self.index.source_format

    def recorded_paths(self) -> RecordedPaths:
        """Return the paths that the index keeps of what was packed (see `RecordsPaths`)."""
        tensors = {tensor.key: tensor.path for tensor in self.index.tensors if tensor.path}
        objects = {entry.name: entry.path for entry in self.index.objects if entry.path}
        shapes = {path: self.tensors[key].shape for key, path in tensors.items()}
        return RecordedPaths(tensors, objects, find_homes(shapes, objects.values()))

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return nothing: objects have records of their own."""
        return {}

    def fill(self) -> Fill:
        """Return what puts decoded bytes into place (see `decoder`)."""
        return self.decoder.fill

    def members(self) -> Iterable[str]:
        """Return the index and the data files."""
        return [NAME, *(file.name for file in self.index.files)]

    def load_object(self, name: str) -> Any:
        """Return a stored object: parsed where its form is known, else its bytes."""
        return self.stored.load(self.source, name)

    def payload(self, piece: Piece) -> Payload:
        """Return where the decoded elements are."""
        return Payload(self.decoded[piece.extent])

    @property
    def decoding(self) -> ChainDecoding:
        """How its tensors are decoded, from its bases and from each other."""
        return ChainDecoding(self)

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield the payload of every block, the rows of every tensor, and every object."""
        for tensor in self.index.tensors:
            for block in self.index.blocks_of(tensor):
                file = self.index.files[block.file].name if block.length else NAME
                yield Extent(file, block.offset, block.length), tensor.key, None
        yield from super().extents_by_owner()

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield data files of another size than the index says, and what is wrong with the base."""
        for file in self.index.files:
            entry = self.source.entries.get(file.name)
            if entry is not None and entry.size != file.size:
                yield finding(
                    "truncated-file" if entry.size < file.size else "trailing-bytes",
                    f"{file.name} has {entry.size} bytes and the index says {file.size}",
                    file=file.name,
                    offset=min(entry.size, file.size),
                    length=abs(entry.size - file.size),
                )
        try:
            links = chain(self)
            # Its own digests say what the base must hold; the base's manifest may be of before.
            base = [(one, Seal(one.source, use=False)) for one in links[1:2]]
            for found in (f for one, seal in base for f in check_structure(one, NULL, seal)):
                if found.severity is Severity.ERROR:
                    place = within(links[1], found.file)
                    message = f"the base: {found.message}"
                    if is_damage(found.kind):
                        found = replace(found, kind="wrong-base", code=ExitCode.CORRUPT)
                    yield replace(found, message=message, file=place)
        except FtckptError as error:
            yield from_error(error)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the recorded step."""
        if self.index.step is not None and limit:
            yield Scalar(NAME, "step", self.index.step, StepRole.ITERATION)


class ChainDecoding(Decoding):
    """Decodes the tensors of a delta, from its bases and from each other."""

    def __init__(self, delta: DeltaCheckpoint) -> None:
        self._delta = delta

    def __bool__(self) -> bool:
        """Return True: even a delta without a base is compressed."""
        return True

    @property
    def proves_reads(self) -> bool:
        """Return True: every block is held to its digest when it is decoded."""
        return True

    def bases(self) -> Sequence[Checkpoint]:
        """Return all that the tensors are decoded from."""
        return chain(self._delta)[1:]

    def slots(self) -> int:
        """Return how many tensors may be decoded at a time."""
        return self._delta.decoder.at_once

    def helpers(self) -> Mapping[str, Sequence[str]]:
        """Return the keys of the tensors that predict a tensor, by its key."""
        keys = list(self._delta.tensors)  # of the index's tensors, in its order
        tensors = zip(keys, self._delta.index.tensors, strict=True)
        return {key: [keys[n] for n in t.helpers] for key, t in tensors if t.helpers}

    @contextmanager
    def reusing(self, look: Look) -> Iterator[None]:
        """Let blocks that predict others be taken from where they were put before."""
        decoder = self._delta.decoder
        decoder.look(look)
        try:
            yield
        finally:
            decoder.look(None)

    def digests(self) -> Mapping[str, str]:
        """Return the tensor digests, all of which the index has."""
        return {tensor.key: tensor.digest for tensor in self._delta.index.tensors}

    def checks(self, *, sealed: bool) -> Iterator[SelfCheck]:
        """Yield the decoding of every block, and the reading of every object.

        What a manifest covers is not read again, but where it is decoded from a base.
        """
        if not sealed or self._delta.index.base is not None:
            yield from self._delta.decoder.checks()


class ChainNote(Sequence[Finding]):
    """Says, when it is asked, what a delta depends on: that costs a look at every base."""

    def __init__(self, delta: DeltaCheckpoint) -> None:
        self._delta = delta

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[Finding]:
        try:
            below = [f"{link.source.url} ({link.format})" for link in chain(self._delta)[1:]]
        except FtckptError as error:
            below = [f"what could not be opened: {error.message}"]
        yield finding("note", f"it depends on {', which depends on '.join(below)}")
