"""The one data model: a logical tensor is made of pieces, a piece is an extent of bytes.

Every format parses into these nouns and every operation works on them; no operation knows a format.

- A **Box** is a hyper-rectangle of a tensor, an **Extent** a run of bytes in a file.
- A **Piece** ties them: which elements of the tensor, and where their bytes lie.
- A **TensorInfo** is one logical tensor: what it is, its global shape, its pieces.
- A **Checkpoint** is the smallest place that holds one step of one run.

The small nouns are NamedTuples, not dataclasses: a checkpoint can have millions of them and a tuple
is built four times faster than a frozen dataclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.extents import Box as Box
from ftckpt.extents import Extent as Extent
from ftckpt.progress import NULL, Counter

from .steps import SCALARS_A_FILE, step_of
from .steps import Scalar as Scalar
from .steps import StepRole as StepRole

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.storage.source import Source

    from .dtypes import DType

# Put bytes of a tensor, by its key, that begin at an offset into a view; say whether they were
# found. They may be others.
Look = Callable[[str, int, memoryview], bool]


class Piece(NamedTuple):
    """A part of a logical tensor and the place of its bytes.

    Attributes:
        box: which elements of the global tensor.
        extent: the bytes. Where `packed`, they are a record of the format's own (a torch.save
            stream, perhaps compressed) and `Checkpoint.payload` finds the elements in it.
        flat: half-open element range in C order inside `box`, where the piece holds only that
            range (a ZeRO or distributed-optimizer partition); None means all of the box.
        strides: in elements, where the elements are not dense in C order; None means dense.
        replica: 0 for the main copy, then 1, 2, …
        rank: the rank that wrote it, where known.
        packed: whether `extent` must go through `Checkpoint.payload`.
        first: of a packed record that holds more than this piece, the element (counted in the
            record's C order) with which the piece begins.
    """

    box: Box
    extent: Extent
    flat: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None
    replica: int = 0
    rank: int | None = None
    packed: bool = False
    first: int = 0


class Payload(NamedTuple):
    """The element bytes of one piece, found.

    Attributes:
        extent: the bytes in the file; raw elements unless `transforms` is not empty.
        strides: in elements, or None for dense C order; the first element is at `extent.offset`.
        transforms: names of stream transforms to undo over the whole `extent`, in order.
        inner: (offset, length) of the element bytes in the undone stream; None without transforms.
    """

    extent: Extent
    strides: tuple[int, ...] | None = None
    transforms: tuple[str, ...] = ()
    inner: tuple[int, int] | None = None


class Kind(StrEnum):
    """What a tensor is to training; never part of its name."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"
    OTHER = "other"

    # An enum's own, of the member's name, is a call in Python: there are many tensors.
    __hash__ = str.__hash__


class TensorInfo(NamedTuple):
    """One logical tensor.

    Attributes:
        component: `model`, `optimizer`, `ema` or `extra:<name>`.
        name: fully qualified name in the unsharded model, as the trainer's state_dict spells it.
        kind: what it is.
        shape: global shape.
        dtype: element type.
        pieces: where its elements are; main pieces tile `shape`, replicas repeat them.
        stored_name: the name that the format uses, where it differs from `name`.
    """

    component: str
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: DType
    pieces: Sequence[Piece]
    stored_name: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense logical tensor, each element once."""
        return self.dtype.nbytes(self.numel)

    @property
    def key(self) -> str:
        """Its key in `Checkpoint.tensors` (see `tensor_key`)."""
        return tensor_key(self.component, self.kind, self.name)


# Looked up once: an enum's members are found by a slow search, and there are many tensors.
_TOLD_BY_KIND = frozenset((Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ))


def tensor_key(component: str, kind: Kind, name: str) -> str:
    """Return the key of a tensor: its name alone for weights and buffers of the model.

    Others are prefixed by what tells them apart: `exp_avg:layers.0.weight` (the optimizer's),
    `optimizer:layers.0.weight.step`, `ema:layers.0.weight`, `extra:rng:torch_state`.
    """
    if component == "model":
        return f"{kind}:{name}" if kind in _TOLD_BY_KIND else name
    if kind not in _TOLD_BY_KIND:
        return f"{component}:{name}"
    return f"{kind}:{name}" if component == "optimizer" else f"{component}:{kind}:{name}"


class ObjectInfo(NamedTuple):
    """One piece of non-tensor state (a scheduler, a learning rate, an RNG state).

    Attributes:
        name: path in the trainer's state, joined by dots.
        extent: the record that holds it; a whole file where it has no finer place.
        rank: whose it is, where known.
        field: path inside the record, where one record holds several objects.
    """

    name: str
    extent: Extent
    rank: int | None = None
    field: tuple[str | int, ...] = ()


class Record(NamedTuple):
    """A run of bytes that carries its own CRC-32: evidence that is already on disk.

    Attributes:
        extent: the bytes that the CRC covers, or the whole transformed stream around them.
        crc32: as recorded; None means not recorded (torch can write 0 for "not computed").
        owner: key of the tensor or name of the object.
        rank: the rank that wrote it, where known.
        transforms: see `Payload`.
        inner: see `Payload`.
    """

    extent: Extent
    crc32: int | None
    owner: str
    rank: int | None = None
    transforms: tuple[str, ...] = ()
    inner: tuple[int, int] | None = None


class SelfCheck(NamedTuple):
    """A read that fails where the bytes are not what was written: evidence of the format's own.

    Attributes:
        extent: the bytes that it covers.
        owner: key of the tensor or name of the object; "" if it has no owner.
        nbytes: how many bytes it gives: what progress counts.
        read: reads them; raises CorruptError where they are damaged.
        follows: whether what the one before has decoded is of use for it.
    """

    extent: Extent
    owner: str
    nbytes: int
    read: Callable[[], None]
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """What is known of the job that wrote the checkpoint; None means not recorded.

    `evidence` says in words how the world size is known.
    """

    world_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    evidence: str = ""


class CommitState(StrEnum):
    """Whether the format itself says that the save was finished."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    NO_MARKER = "no marker"


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit state and the file that shows it."""

    state: CommitState
    marker: str = ""
    message: str = ""


@dataclass(kw_only=True)
class Checkpoint(ABC):
    """One step of one run, opened: headers and metadata are parsed, tensor bytes are not.

    A format returns a subclass. Opening never reads tensor bytes and never runs code from a file.

    Attributes:
        source: the files it is made of, listed once.
        tensors: by `tensor_key`, in the file's own order.
        objects: non-tensor state by name.
        aliases: key -> key of the tensor that owns the same bytes (tied weights).
        topology: what is known of the job.
        commit: whether the save was finished.
        dialect: what more is known of the writer, in words ("written by accelerate").
        notes: findings made while opening (opaque objects, links followed).
        open_findings: what is wrong, found while opening; `check` yields it too. What contradicts
            the rest (a rank's part in another type) is left out of `tensors`, and is named here.
    """

    format: ClassVar[str]

    source: Source
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, ObjectInfo]
    aliases: Mapping[str, str] = field(default_factory=dict)
    topology: Topology = Topology()
    commit: Commit = Commit(CommitState.NO_MARKER)
    dialect: str = ""
    notes: Sequence[Finding] = ()
    open_findings: Sequence[Finding] = ()

    @property
    def loads_at_any_world(self) -> bool:
        """Whether its framework loads it, as it is, with another number of ranks."""
        return False

    @abstractmethod
    def members(self) -> Iterable[str]:
        """Paths of the files that belong to the checkpoint; the others are strays."""

    @abstractmethod
    def load_object(self, name: str) -> Any:
        """Return one object of `objects` as inert data (dict, list, str, number, stand-in).

        Raises:
            UnsafeError: its pickle is hostile or malformed.
            CorruptError: its record is damaged.
        """

    def payload(self, piece: Piece) -> Payload:
        """Find the element bytes of `piece`; reads no more than headers.

        Raises:
            CorruptError, UnsafeError: the record around the elements cannot be trusted.
        """
        return Payload(piece.extent, piece.strides)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield what the format's own rules find wrong in headers, indexes and names.

        Rules that hold for every format (coverage, extents in bounds, missing files, mixed steps)
        are not here: `ftckpt.verification` applies them.
        """
        return iter(())

    def records(self) -> Iterator[Record]:
        """Yield every record that carries a CRC-32; nothing where the format has none."""
        return iter(())

    def digests(self) -> Mapping[str, str]:
        """Return the tensor digests (`ftckpt.digests.tensors`) that are recorded, by key."""
        return {}

    def self_checks(self, *, sealed: bool) -> Iterator[SelfCheck]:
        """Yield every read that checks itself; nothing where the format has none.

        Args:
            sealed: whether a manifest covers the files: then only what that does not cover (what
                lies elsewhere and tensors are decoded from) is worth the reading.
        """
        return iter(())

    def require_bytes(self) -> None:  # noqa: B027 - most checkpoints depend on nothing else
        """Open what the tensors' bytes depend on outside the checkpoint, before work begins.

        Raises:
            FtckptError: it is missing, or cannot be opened.
        """

    def bases(self) -> Sequence[Checkpoint]:
        """Return the other checkpoints whose bytes its tensors are decoded from, opened.

        Raises:
            FtckptError: one is missing, or cannot be opened.
        """
        return ()

    def is_local(self) -> bool:
        """Say whether all that its tensors are read from lies on this machine.

        Raises:
            FtckptError: what they are decoded from cannot be opened.
        """
        return all(one.source.store.traits.local for one in (self, *self.bases()))

    def decode_slots(self) -> int:
        """Return how many of its tensors may be decoded at a time in the memory that is allowed.

        0 where tensors are only read: that keeps stores busy, and decoding keeps processors.

        Raises:
            FtckptError: what they are decoded from cannot be opened.
        """
        return 0

    def decode_after(self) -> Mapping[str, Sequence[str]]:
        """Return the keys of other tensors of it that a tensor is decoded from, by its key.

        Those of tensors that need no other are left out.
        """
        return {}

    def decode_cache(self, look: Look) -> AbstractContextManager[None]:
        """Let tensors that others are decoded from be taken from where they were put before.

        Args:
            look: asked before one is decoded again. What it gives is proven by a digest.
        """
        return nullcontext()

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield bytes of files, and the key or name and the rank of what has its content there.

        Of a compressed file it is all of it: a damaged byte there can be in anything.
        """
        for key, info in self.tensors.items():
            try:
                held = [(piece.extent, piece.rank) for piece in info.pieces]
            except FtckptError:
                continue  # a tensor without a place: the structure check reports it
            for extent, rank in held:
                yield self._as_stored(extent), key, rank
        for name, item in self.objects.items():
            yield self._as_stored(item.extent), name, item.rank

    def _as_stored(self, extent: Extent) -> Extent:
        file = self.source.stored(extent.file)
        return extent if file == extent.file else Extent(file, 0, self.source.size(file))

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield step-like scalars, at most `limit` a file, by small reads."""
        return iter(())

    @cached_property
    def step(self) -> int | None:
        """The step that the content shows; None where nothing shows it."""
        return step_of(self.scalars(SCALARS_A_FILE))

    @property
    def known_step(self) -> int | None:
        """The step; None also where it cannot be read: verifying says why."""
        try:
            return self.step
        except FtckptError:
            return None

    @property
    def source_format(self) -> str:
        """The format in which a trainer wrote the state; another one stores a delta of it."""
        return self.format

    @property
    def saving_ranks(self) -> int | None:
        """Number of ranks that save a state of their own; None where that is not known.

        All of the job's, unless a format has ranks save for others that hold the same.
        """
        return self.topology.world_size

    def fields(self) -> Iterable[str]:
        """Names of all non-tensor state, as deep as it is known without reading tensor bytes.

        The resume check matches these; by default the objects' names.
        """
        return self.objects.keys()
