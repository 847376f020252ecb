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

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ftckpt.errors import FtckptError, NoSuchTensorError
from ftckpt.extents import Box as Box
from ftckpt.extents import Extent as Extent
from ftckpt.progress import NULL, Counter

from .pieces import Kind as Kind
from .pieces import Payload as Payload
from .pieces import Piece as Piece
from .pieces import TensorInfo as TensorInfo
from .pieces import tensor_key as tensor_key
from .steps import SCALARS_A_FILE, step_of
from .steps import Scalar as Scalar
from .steps import StepRole as StepRole

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.storage.source import Source

    from .view import TensorView

# Put bytes of a tensor, by its key, that begin at an offset into a view; say whether they were
# found. They may be others.
Look = Callable[[str, int, memoryview], bool]


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


@dataclass(kw_only=True, repr=False)
class Checkpoint(Mapping[str, "TensorView"]):
    """One step of one run, opened: headers and metadata are parsed, tensor bytes are not.

    A format returns a subclass. Opening never reads tensor bytes and never runs code from a file.
    As a mapping it holds a `TensorView` by each key of `tensors`, in their order.

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

    def __getitem__(self, key: str) -> TensorView:
        """Return one tensor, to be read by `.numpy()`, `.torch()`, or a part of it by a slice.

        Raises:
            NoSuchTensorError: a KeyError; it names keys that are spelt nearly so.
        """
        from .view import TensorView

        info = self.tensors.get(key)
        if info is not None:
            return TensorView.of(self, info)
        from ftckpt.storage.suggestions import hint_for_name

        hint = hint_for_name(key, self.tensors) if isinstance(key, str) else ""
        raise NoSuchTensorError(f"{self.source.url} has no tensor {key}", hint=hint, tensor=key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def __bool__(self) -> bool:
        """Return True: one without tensors is a checkpoint too."""
        return True

    def __repr__(self) -> str:
        """Say in five lines what it is: format, step, tensors, bytes, topology."""
        from ftckpt.amounts import human_bytes
        from ftckpt.findings import counted

        owned = [info for key, info in self.tensors.items() if key not in self.aliases]
        by_type: dict[str, int] = {}
        for info in owned:
            by_type[info.dtype.name] = by_type.get(info.dtype.name, 0) + info.nbytes
        largest = sorted(by_type.items(), key=lambda item: -item[1])
        types = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in largest)
        step, known = self.known_step, self.topology
        grid = [
            f"{name} {size}" for name in ("tp", "pp", "dp", "ep") if (size := getattr(known, name))
        ]
        ranks = [] if known.world_size is None else [counted(known.world_size, "rank")]
        tied = f", {len(self.aliases)} tied" if self.aliases else ""
        return "\n".join(
            (
                f"format    {self.format}: {self.source.url}",
                f"step      {'not known' if step is None else step}",
                f"tensors   {len(owned)}{tied}, and {counted(len(self.objects), 'object')}",
                f"bytes     {human_bytes(sum(by_type.values()))}" + (f": {types}" if types else ""),
                f"topology  {', '.join([*ranks, *grid]) or 'not recorded'}",
            )
        )

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

    def require_bytes(self) -> None:
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
