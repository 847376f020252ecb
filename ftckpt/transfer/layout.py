"""The files of a result, byte by byte, before a byte is read or written.

A file is a sequence of parts whose lengths are known, so every offset is known too and any block of
the file can be made on its own. Checksums that a format stores behind its data (CRC-32 in a zip)
are parts whose bytes are computed when the data is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.extents import Extent

from .content import Content, Shard

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.findings import Finding


class Literal(NamedTuple):
    """Bytes that are known: headers, pickles, padding."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.data)


class Zeros(NamedTuple):
    """`nbytes` zero bytes."""

    nbytes: int


class Elements(NamedTuple):
    """Elements `start` to `stop` of a shard, in its C order."""

    shard: Shard
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.shard.dtype.nbytes(self.stop - self.start)

    @classmethod
    def all(cls, shard: Shard) -> Elements:
        """Return all elements of a shard."""
        return cls(shard, 0, shard.numel)


class Stored(NamedTuple):
    """Bytes of a source file, as they are."""

    extent: Extent

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.extent.length


class Checksums(ABC):
    """Bytes that depend on the CRC-32 of earlier ranges of the same file.

    Attributes:
        nbytes: their length.
        ranges: [start, stop) of the file, each made of whole parts that all precede this one.
    """

    nbytes: int
    ranges: Sequence[tuple[int, int]]

    @abstractmethod
    def build(self, crcs: Sequence[int]) -> bytes:
        """Return the bytes, given the CRC-32 of each range."""


Segment = Literal | Zeros | Elements | Stored | Checksums


@dataclass(frozen=True)
class OutputFile:
    """One file of the result.

    Attributes:
        path: relative to the destination, POSIX.
        segments: its content, in order.
    """

    path: str
    segments: Sequence[Segment] = field(repr=False)

    @cached_property
    def offsets(self) -> Sequence[int]:
        """The first byte of each segment, and the file's size at the end."""
        return [0, *accumulate(segment.nbytes for segment in self.segments)]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offsets[-1]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All files of a result.

    Attributes:
        files: data files, in the order in which they are best made.
        commit: small files of literals (an index, a metadata file), written after the data is
            whole and in this order: the last is what makes the format's readers see a checkpoint.
        unplaced: names of objects and tensors that the format has no place for.
        notes: what the user should know (RNG streams that no longer fit their ranks).
        content: what the files hold, where a layout must change what it was given (a vocabulary
            padded for other ranks, state of ranks that came or went); None where they hold all of
            that, unchanged. The proof compares the result with it, and notes say what differs.
    """

    files: Sequence[OutputFile]
    commit: Sequence[OutputFile] = ()
    unplaced: Sequence[str] = ()
    notes: Sequence[Finding] = ()
    content: Content | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in (*self.files, *self.commit))


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """What the user asks of a layout; None where nothing was said.

    Attributes:
        tp, pp, vp, dp, ep: sizes of the tensor-, pipeline-, virtual-pipeline-, data- and
            expert-parallel groups of the job that will load it.
        zero_stage: DeepSpeed's.
        max_shard_size: bytes of tensors in one file, where the format lets us choose.
        rules: how tensors are cut, asked before the format's own rules.
        true_vocab_size: rows of a vocabulary that are no padding.
        like: a checkpoint that the target job saved, to be laid out as (see `transfer.example`).
    """

    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    dp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None
    max_shard_size: int | None = None
    rules: Rules | None = None
    true_vocab_size: int | None = None
    like: Checkpoint | None = None


class Writer(Protocol):
    """One format's way to lay content out. Stateless; `formats.writers` knows one of each."""

    @property
    def name(self) -> str:
        """The format's name (`dcp`, `safetensors`)."""

    @property
    def single(self) -> bool:
        """Whether the result is one file and not a directory; `Layout.files` then has just it."""

    @property
    def supported_options(self) -> Collection[str]:
        """The names of the fields of `LayoutRequest` that it can do; others are refused."""

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content`. Reads headers and small objects at most, never tensor bytes.

        The same content and request give the same bytes, on any machine: a killed run is resumed by
        laying out again. What is asked is among `supported_options`.

        Raises:
            UsageError: a wish that the format or a shape cannot grant (divisibility).
            UnsupportedError: a tensor that the format cannot hold, or no rule for its name.
        """
