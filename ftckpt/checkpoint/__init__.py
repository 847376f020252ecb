"""The data model: a logical tensor is made of pieces, a piece is an extent of bytes.

Every format parses into these nouns and every operation works on them; no operation knows a format.

- A **Box** is a hyper-rectangle of a tensor, an **Extent** a run of bytes in a file.
- A **Piece** ties them: which elements of the tensor, and where their bytes lie.
- A **TensorInfo** is one logical tensor: its kind, its global shape, its pieces.
- A **Checkpoint** is the smallest place that holds one step of one run.

The small nouns are NamedTuples, not dataclasses: a checkpoint can have millions of them, and a
tuple is built four times faster than a frozen dataclass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from ftckpt.errors import FtckptError, NoSuchTensorError, UsageError
from ftckpt.extents import Box as Box
from ftckpt.extents import Extent as Extent
from ftckpt.progress import NULL, Counter

from .pieces import Kind as Kind
from .pieces import Payload as Payload
from .pieces import Piece as Piece
from .pieces import TensorInfo as TensorInfo
from .pieces import tensor_key as tensor_key
from .steps import SCALARS_A_FILE, optimizer_count, step_of_save
from .steps import Scalar as Scalar
from .steps import StepRole as StepRole

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.checkpoint.quantised import QuantisedTensor
    from ftckpt.findings import Finding
    from ftckpt.storage.source import Source

    from .view import TensorView

# Copies a tensor's bytes (key, offset) into a view; returns whether they were found. They may be
# wrong.
Look = Callable[[str, int, memoryview], bool]
# Yields where a checkpoint is not the model that a file beside it describes.
Described = Callable[["Checkpoint"], Iterator["Finding"]]


class ObjectInfo(NamedTuple):
    """One piece of non-tensor state (a scheduler, a learning rate, an RNG state).

    Attributes:
        name: path in the trainer's state, joined by dots.
        extent: its record; the whole file if it has no finer place.
        rank: its rank, if known.
        field: path inside the record, if one record holds several objects.
    """

    name: str
    extent: Extent
    rank: int | None = None
    field: tuple[str | int, ...] = ()


class ImpliedCount(NamedTuple):
    """A kind of files whose number nothing records: the highest number in a name implies it.

    Attributes:
        before: the path of one of them, up to the number that counts them.
        after: the rest, after it.
    """

    before: str
    after: str


class Record(NamedTuple):
    """A run of bytes with its own CRC-32: evidence that is already on disk.

    Attributes:
        extent: the bytes that the CRC covers, or the whole transformed stream around them.
        crc32: as recorded; None if not recorded (torch can write 0 for "not computed").
        owner: key of the tensor or name of the object.
        rank: the rank that wrote it, if known.
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
    """A read that fails on damaged bytes: evidence of the format's own.

    Attributes:
        extent: the bytes that it covers.
        owner: key of the tensor or name of the object; "" without one.
        nbytes: decoded bytes, for progress.
        read: reads them; raises CorruptError if they are damaged.
        follows: whether it can use what the previous check has decoded.
        only_decodes: whether it compares nothing: reading the tensor would show the same.
        of_reading: whether each reading of the tensor makes this very check.
    """

    extent: Extent
    owner: str
    nbytes: int
    read: Callable[[], None]
    follows: bool = False
    only_decodes: bool = False
    of_reading: bool = False


class Decoding:
    """How tensors are decoded that a checkpoint does not store as they are.

    This one is of tensors that are stored: there is nothing to decode.
    """

    def __bool__(self) -> bool:
        """Return whether tensors are decoded at all; opens nothing."""
        return False

    @property
    def proves_reads(self) -> bool:
        """Whether nothing can be read of a tensor that its own digests do not prove."""
        return False

    @property
    def covers_all(self) -> bool:
        """Whether `checks` cover every tensor; else the bytes outside their extents have none."""
        return True

    def bases(self) -> Sequence[Checkpoint]:
        """Return the opened checkpoints from which tensors are decoded.

        Raises:
            FtckptError: one is missing, or cannot be opened.
        """
        return ()

    def slots(self) -> int:
        """Return how many tensors may be decoded at a time within the memory limit.

        0 if tensors are only read: reading keeps stores busy, decoding keeps processors busy.

        Raises:
            FtckptError: a base cannot be opened.
        """
        return 0

    def helpers(self) -> Mapping[str, Sequence[str]]:
        """Return for each tensor the keys of its checkpoint's tensors that it is decoded from.

        Tensors without such a dependency are left out.
        """
        return {}

    def reusing(self, look: Look) -> AbstractContextManager[None]:
        """Reuse tensors that were written earlier, instead of decoding them again for others.

        `look` is called before one is decoded again; a digest proves its result.
        """
        return nullcontext()

    def digests(self) -> Mapping[str, str]:
        """Return the recorded tensor digests (`ftckpt.digests.tensors`), by key."""
        return {}

    def checks(self, *, sealed: bool) -> Iterator[SelfCheck]:
        """Yield every read that checks itself by such a digest.

        With `sealed` a manifest covers the files: then only reads beyond it (bases elsewhere that
        tensors are decoded from) are useful.
        """
        return iter(())


STORED = Decoding()


@dataclass(frozen=True, slots=True)
class Topology:
    """Known sizes of the job that wrote the checkpoint; None means not recorded.

    `evidence` says in words how the world size is known.
    """

    world_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    evidence: str = ""


class CommitState(StrEnum):
    """Whether the format itself shows that the save was finished."""

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
    """One opened step of one run: headers and metadata are parsed, tensor bytes are not.

    A format returns a subclass. Opening never reads tensor bytes and never runs code from a file.
    As a mapping it holds a `TensorView` by each key of `tensors`, in their order.

    Attributes:
        source: its files, listed once.
        tensors: by `tensor_key`, in the file's own order.
        objects: non-tensor state by name.
        aliases: key -> key of the tensor that owns the same bytes (tied weights).
        topology: known sizes of the job.
        commit: whether the save was finished.
        dialect: the writer, in words ("written by accelerate").
        notes: findings made while opening (opaque objects, links followed).
        open_findings: defects found while opening; `check` yields them too. A tensor that
            contradicts the rest (a rank's part in another type) is left out of `tensors` and named
            here.
        second_copies: files that one process wrote in the same save from the same tensors as other
            files, as replicas of their pieces: a difference is damage. One that could not be read
            has no pieces here, and a note or a finding of its own.
        file_copies: files that stand there several times with the same bytes: each one's others.
        implied: the kinds of its files whose number nothing in it records.
        no_state: why it cannot be a checkpoint by itself, in a sentence; "" if it can. A part of
            one may hold a schedule or a counter alone.
        unread: files that may hold tensors and are of no part that was read -> why, "" if no format
            knows them.
        described: yields where it is not the model that a file beside it describes; None where
            nothing is known of such a file.
        loads: loads it into memory (`ftckpt.load`); set where it is opened by its path.
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
    second_copies: frozenset[str] = frozenset()
    file_copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    implied: Sequence[ImpliedCount] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    described: Described | None = None
    no_state: str = ""
    loads: Callable[..., dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    def __enter__(self) -> Self:
        """Return it: `with ftckpt.open(path) as checkpoint`."""
        return self

    def __exit__(self, *failed: object) -> None:
        """End the block: nothing of it is held open between two reads."""

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the five lines of `repr`, as a table."""
        from html import escape

        rows = [line.split(maxsplit=1) for line in repr(self).split("\n")]
        style = "style='text-align:left'"
        cells = (f"<th {style}>{escape(n)}</th><td {style}>{escape(said)}</td>" for n, said in rows)
        return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>"

    def state_dict(
        self, *, only: str = "model", names: str = "", device: str | None = "cpu", **flags: Any
    ) -> dict[str, Any]:
        """Return its tensors as a dict, checked as they are read.

        Args:
            only: `model`, `optimizer` or `adapter`; "" for everything, nested as torch nests it.
            names: whose names the parameters get: "" those of the bare model, `trainer` those of
                the trainer's, wrappers included, or `hf`, `megatron`, `torchtitan`, `meta`.
            device: `cpu` or `cuda[:N]` for tensors of torch; None for arrays of numpy.
            flags: the others of `ftckpt.load`.

        Raises:
            FtckptError: see `ftckpt.load`.
        """
        if self.loads is None:
            raise UsageError("a checkpoint is loaded where ftckpt.open has opened it")
        return self.loads(self, only=only, names=names, device=device, **flags)

    def __getitem__(self, key: str) -> TensorView:
        """Return one tensor, to be read by `.numpy()` or `.torch()`, or in part by a slice.

        Raises:
            NoSuchTensorError: a KeyError; it names similar keys.
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
        """Describe it in five lines: format, step, tensors, bytes, topology."""
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

    @property
    def resharded_part(self) -> str:
        """The folder inside that is a checkpoint of its own and has ranks; "" where it is none.

        `reshard` names it where it cannot write the whole anew.
        """
        return ""

    @abstractmethod
    def members(self) -> Iterable[str]:
        """Return the paths of the files that belong to the checkpoint; the others are strays."""

    @abstractmethod
    def load_object(self, name: str) -> Any:
        """Return one object of `objects` as inert data (dict, list, str, number, stand-in).

        Raises:
            UnsafeError: its pickle is hostile or malformed.
            CorruptError: its record is damaged.
        """

    def payload(self, piece: Piece) -> Payload:
        """Find the element bytes of `piece`; reads only headers.

        Raises:
            CorruptError, UnsafeError: the record around the elements cannot be trusted.
        """
        return Payload(piece.extent, piece.strides)

    def for_rank(self, tensors: Mapping[str, TensorInfo]) -> Checkpoint | None:
        """Return what reads some tensors in another process, where pieces have forms of their own.

        It can be pickled: a job opens a checkpoint once, and each of its ranks reads with this
        (`ftckpt.checkpoint.alone.for_rank`, which knows the plain formats).

        Args:
            tensors: by key; each may have fewer pieces than here.

        Returns:
            None where only an opened checkpoint reads them.
        """
        return None

    @property
    def records_by_piece(self) -> bool:
        """Whether `payload` tells the record around a packed piece, so that no list is needed."""
        return False

    def known_faults(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Yield the traces of faults that its writer is known for (`known-fault`).

        Args:
            findings: of the checks before, the values among them.

        Raises:
            UnavailableError: the storage does not answer.
        """
        return iter(())

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield violations of the format's own rules in headers, indexes and names.

        `ftckpt.verification` applies the rules of all formats (coverage, extents in bounds, missing
        files, mixed steps).
        """
        return iter(())

    def unread_parts(self) -> Iterator[Finding]:
        """Yield the files that may hold tensors and are of no part that was read."""
        from ftckpt.findings import finding  # few checkpoints have any

        for file, why in self.unread.items():
            what = why or f"{file} may hold tensors, and no format that is read here knows it"
            yield finding("unknown-part", what, file=file)

    def records(self) -> Iterator[Record]:
        """Yield every record with a CRC-32; none if the format has none."""
        return iter(())

    def records_in(self, extents: Collection[Extent]) -> list[Record]:
        """Return the records that share bytes with some ranges of files, by place."""
        files: dict[str, list[Extent]] = {}
        for extent in extents:
            files.setdefault(extent.file, []).append(extent)
        found = [
            record
            for record in (self.records() if files else ())
            if any(
                record.extent.offset < one.end and one.offset < record.extent.end
                for one in files.get(record.extent.file, ())
            )
        ]
        return sorted(found, key=lambda record: record.extent)

    def file_digests(self) -> Mapping[str, str]:
        """Return the SHA-256 or MD5 that was recorded of whole files, in hexadecimal digits.

        Raises:
            CorruptError, UnsafeError, UnsupportedError: the record cannot be trusted; `check`
                reports it too.
        """
        return {}

    @property
    def decoding(self) -> Decoding:
        """How its tensors are decoded; `STORED` where their bytes lie in its files as they are."""
        return STORED

    @property
    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """The weights that are stored as codes and scales, by the key of their codes.

        Raises:
            CorruptError: what says how one is stored is damaged.
        """
        return {}

    def dequantised(self, dtype: DType) -> Checkpoint:
        """Return the same with its quantised weights as if they were stored in a floating type.

        Raises:
            UnsupportedError: how a weight is quantised is not known, by the method's name.
            CorruptError: a weight lacks a scale, or one does not fit.
        """
        return self

    @property
    def as_stored(self) -> Checkpoint:
        """The checkpoint as its files hold it: itself, unless tensors of it are computed."""
        return self

    @property
    def is_plain(self) -> bool:
        """Whether tensors lie in its own files as they are: nothing decodes or computes them."""
        return self.as_stored is self and not self.made_from and not self.decoding

    @property
    def made_from(self) -> Sequence[Checkpoint]:
        """Other checkpoints that its tensors are computed from: adapters that are merged."""
        return ()

    @property
    def zero_at_first(self) -> Collection[str]:
        """Keys of tensors that begin as zeros: if all still are zero, nothing was trained."""
        return ()

    def is_local(self) -> bool:
        """Whether all files that its tensors are read from are local.

        Raises:
            FtckptError: a base cannot be opened.
        """
        return all(
            one.source.store.traits.local for one in (self, *self.made_from, *self.decoding.bases())
        )

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield byte ranges of files with the key or name and the rank of their owners.

        A compressed file is one range: a damaged byte there can be in anything.
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
        """Yield step-like scalars, at most `limit` per file, by small reads."""
        return iter(())

    @cached_property
    def step_scalars(self) -> tuple[Scalar, ...]:
        """A few step-like scalars of each file, read once: see `scalars`."""
        return tuple(self.scalars(SCALARS_A_FILE))

    @cached_property
    def step(self) -> int | None:
        """The step that the trainer's record in the content says; None without one."""
        return step_of_save(self.step_scalars, self.source.name)

    @property
    def optimizer_count(self) -> int | None:
        """The updates that the optimizer counts for itself; None if it does not say."""
        return optimizer_count(self.step_scalars)

    @property
    def known_step(self) -> int | None:
        """The step; None also if it cannot be read, which `verify` reports."""
        try:
            return self.step
        except FtckptError:
            return None

    @property
    def source_format(self) -> str:
        """The format in which a trainer wrote the state; a delta's differs from its own."""
        return self.format

    @property
    def suppositions(self) -> Sequence[Finding]:
        """Notes on what opening took for granted, and what a check or a read looks at."""
        return ()

    @property
    def unscaled(self) -> bool:
        """Whether the job's recorded arguments say that its loss is not scaled."""
        return False

    @property
    def saving_ranks(self) -> int | None:
        """Number of ranks that save a state of their own; None if unknown.

        All ranks, unless in this format one saves for others with the same state.
        """
        return self.topology.world_size

    def fields(self) -> Iterable[str]:
        """Names of all non-tensor state, as deep as known without reading tensor bytes.

        For the resume check; by default the objects' names.
        """
        return self.objects.keys()
