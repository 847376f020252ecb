"""Describe a chain of deltas and the cost of restoring its last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta import NAME, DeltaIndex, Reference
from ftckpt.delta.codec.predict import DeltaSide
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import DeltaTensor
from ftckpt.delta.pack.report import Method, PackedShare, shares
from ftckpt.delta.pack.tensor_bytes import own_tensors
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, from_error

from .chain import is_known, walk
from .checkpoint import DeltaCheckpoint
from .original import has_original, original_of_delta

# Blocks of tensors, by key.
_Blocks = dict[str, set[int]]


class BaseIdentity(StrEnum):
    """How it is known that a checkpoint is the base that the delta above it was made for."""

    ITSELF = "itself"  # nothing depends on it here
    CONTENT = "content"  # it is a delta, and says so
    MANIFEST = "manifest"  # it is sealed as it was then
    LIKELY = "likely"  # it has the tensors; only decoding tells their values


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain.

    Attributes:
        url: where it is.
        format: its format.
        step: its step, where known.
        base: how the place of its base is recorded; None for a full checkpoint.
        identity: how it is known to be the one.
        stored: bytes of its files.
        ratio: bytes of what was packed, what lay beside the tensors too, over bytes stored; None of
            one that is not a delta. Packing says the same one.
        read: bytes of it that a restore reads: index and payloads, or elements of a full one.
        blocks: of it that a restore decodes; 0 of one that is not a delta.
    """

    url: str
    format: str
    step: int | None
    base: str | None
    identity: BaseIdentity
    stored: int
    ratio: float | None
    read: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ChainSurvey:
    """A delta and its chain.

    Attributes:
        links: the delta, its base, and so on, as far as they were found.
        broken: why the chain goes no further, or what the delta itself lacks; None where nothing
            is missing.
        components: what the delta holds, by component and kind; `objects` is what lay beside the
            tensors.
        methods: the same, by method.
    """

    links: tuple[Link, ...]
    broken: Finding | None
    components: Mapping[str, PackedShare]
    methods: Mapping[Method, PackedShare]

    @property
    def followed(self) -> bool:
        """Whether the chain was followed to its full checkpoint."""
        return self.links[-1].base is None

    @property
    def read(self) -> int:
        """Bytes that a restore reads, over the whole chain."""
        return sum(link.read for link in self.links)

    @property
    def blocks(self) -> int:
        """Blocks that a restore decodes."""
        return sum(link.blocks for link in self.links)


def survey(delta: DeltaCheckpoint) -> ChainSurvey:
    """Look at a delta and at all that it depends on; no tensors are read.

    Indexes are, and the lists of the files that were packed. What is missing or wrong is part of
    the answer.
    """
    components, methods = shares(delta.index)
    links: list[Link] = []
    broken: Finding | None = None
    try:
        if delta.index.objects:
            components["objects"] = _beside(delta)
    except FtckptError as error:
        broken = from_error(error)
    above: DeltaCheckpoint | None = None
    wanted = {tensor.key: set(range(tensor.blocks)) for tensor in delta.index.tensors}
    try:
        for here in walk(delta):
            if isinstance(here, DeltaCheckpoint):
                cost, below = _cost(here.index, wanted)
            else:
                cost, below = (_bytes_of(here, wanted), 0), {}
            links.append(_link(here, above, *cost))
            if isinstance(here, DeltaCheckpoint):
                above, wanted = here, below
    except FtckptError as error:
        broken = broken or from_error(error)
    return ChainSurvey(tuple(links), broken, components, methods)


def _beside(delta: DeltaCheckpoint) -> PackedShare:
    """Return what lay beside the tensors when a delta was packed, and what it takes.

    Raises:
        CorruptError, UnsafeError: what it says of its files cannot be trusted.
    """
    index = delta.index
    held = sum(entry.length for entry in index.objects)
    if has_original(delta):
        held = original_of_delta(delta).rest_bytes
    files = {entry.file for entry in index.objects}
    return PackedShare.of(held, sum(index.files[file].size for file in files))


def _link(here: Checkpoint, above: DeltaCheckpoint | None, read: int, blocks: int) -> Link:
    stored = sum(here.source.entries[n].size for n in here.members() if n in here.source.entries)
    base = ratio = None
    if isinstance(here, DeltaCheckpoint):
        base = here.index.base
        own = sum(info.nbytes for info in own_tensors(here).values())
        with suppress(FtckptError):  # of a chain the rest is still worth knowing
            ratio = (own + _beside(here).bytes_in) / stored
        other = sum(entry.length for entry in here.index.objects)
        read += here.source.size(NAME) + (0 if above is not None else other)
    identity = BaseIdentity.ITSELF
    if above is not None:
        assert above.index.base is not None
        known = BaseIdentity.CONTENT if isinstance(here, DeltaCheckpoint) else BaseIdentity.MANIFEST
        identity = known if is_known(here, above.index.base) else BaseIdentity.LIKELY
    return Link(
        here.source.url,
        here.format,
        here.step,
        None if base is None else base.path,
        identity,
        stored,
        ratio,
        read,
        blocks,
    )


def _cost(index: DeltaIndex, wanted: _Blocks) -> tuple[tuple[int, int], _Blocks]:
    """Return payload bytes and number of blocks that decoding takes, and what it takes below."""
    tensors = {tensor.key: tensor for tensor in index.tensors}
    done: set[tuple[int, int]] = set()
    read: dict[tuple[int, int], int] = {}
    below: _Blocks = {}
    waiting = [(tensors[key], number) for key, numbers in wanted.items() for number in numbers]
    while waiting:
        tensor, number = waiting.pop()
        if (tensor.first, number) in done:
            continue
        done.add((tensor.first, number))
        stored = index.block(tensor, number)
        if stored.length:  # tied copies have one payload
            read[stored.file, stored.offset] = stored.length
        for side, owner in _references(index, tensor, stored.reference):
            if side is DeltaSide.TARGET:
                waiting.append((owner, number))
            else:
                assert owner.base is not None
                below.setdefault(owner.base.key, set()).add(number)
    return (sum(read.values()), len(done)), below


def _references(
    index: DeltaIndex, tensor: DeltaTensor, reference: Reference
) -> Iterator[tuple[DeltaSide, DeltaTensor]]:
    """Yield the tensors whose blocks a block is decoded from, of this checkpoint or of the base."""
    if reference is Reference.BASE:
        yield DeltaSide.BASE, tensor
    elif reference is Reference.PREDICTION:
        assert tensor.fit is not None
        helpers = dict(zip(tensor.fit.rule.helpers, tensor.helpers, strict=True))
        for need in tensor.fit.rule.needs:
            yield need.side, tensor if need.kind is None else index.tensors[helpers[need.kind]]


def _bytes_of(full: Checkpoint, wanted: _Blocks) -> int:
    """Return bytes of the elements in blocks of a checkpoint that is not a delta."""
    total = 0
    for key, numbers in wanted.items():
        info = full.tensors[key]
        whole = DeltaTensor(info.component, info.name, info.kind, info.shape, info.dtype, "")
        size = whole.block_words * words_of(info.dtype).size
        nbytes = info.dtype.nbytes(prod(info.shape))
        total += sum(min(size, nbytes - number * size) for number in numbers)
    return total
