"""Look into a checkpoint: `inspect`, `du`, `cat`. None of them checks what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.findings import finding
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import IF_ANY, UNSAID
from ftckpt.storage import StoreOptions

from .definition import argument, operation, option, switch
from .opening import STORES, Also, Memory, Opened, chosen, open_from, open_target, opened

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint, Commit, TensorInfo, Topology
    from ftckpt.comparison.part import TensorPart
    from ftckpt.discovery.pointers import Pointer
    from ftckpt.discovery.roots import Root
    from ftckpt.findings import Finding
    from ftckpt.formats.lora.config import AdapterDescription
    from ftckpt.inspection import ByteCounts, Inspection
    from ftckpt.inspection.resume import ResumeItem
    from ftckpt.inspection.usage import PrefixSum

_READ = {
    ExitCode.CORRUPT: "its headers or metadata are damaged",
    ExitCode.INCOMPLETE: "not committed, or still being written",
    ExitCode.UNSAFE: "its headers or metadata are hostile or ambiguous; nothing was executed",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metadata needs more than --max-memory",
    ExitCode.UNSUPPORTED: "",
}


class TensorOrder(StrEnum):
    """Orders of tensors; the largest first where it is one of numbers."""

    NAME = "name"
    BYTES = "bytes"
    DTYPE = "dtype"
    PIECES = "pieces"


class ListedPiece(NamedTuple):
    """Where a piece lies: in its tensor, and in a file.

    Attributes:
        offsets: of its first element in the tensor.
        sizes: of its box.
        flat: the half-open range of the box's elements that it holds, where it is not all.
        rank: that wrote it.
        replica: its number among equal ones; 0 is the main one.
        file: its path below the checkpoint.
        offset: of its bytes there.
        length: of its bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: tuple[int, int] | None
    rank: int | None
    replica: int
    file: str
    offset: int
    length: int


class ListedTensor(NamedTuple):
    """A tensor in numbers.

    Attributes:
        key: names it alone.
        name: of the parameter.
        component: `model`, `optimizer`, `ema`, `extra:<n>`.
        kind: `param`, `master`, `exp_avg`, ...
        shape: of the whole.
        dtype: of an element.
        bytes: of the whole, without replicas.
        pieces: their number, or the pieces themselves.
        alias_of: the key of the tensor that owns the same bytes.
    """

    key: str
    name: str
    component: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int | tuple[ListedPiece, ...]
    alias_of: str | None


@dataclass(frozen=True)
class TensorList:
    """Tensors.

    Attributes:
        count: of all, without aliases.
        pieces: of all.
        list: those that were asked for.
    """

    count: int
    pieces: int
    list: tuple[ListedTensor, ...] | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True)
class ListedFile:
    """A file.

    Attributes:
        path: below the checkpoint.
        bytes: of it.
        mtime: when it was written, in seconds since the epoch.
        member: whether it belongs to the checkpoint.
        places: that hold it, where the checkpoint lies in several.
    """

    path: str
    bytes: int
    mtime: float | None
    member: bool
    places: tuple[str, ...] | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True)
class FileList:
    """Files.

    Attributes:
        count: of all.
        bytes: of all.
        list: each of them.
    """

    count: int
    bytes: int
    list: tuple[ListedFile, ...] | None = field(default=None, metadata=IF_ANY)


class ListedObject(NamedTuple):
    """A value of other state: a schedule, a counter, a random stream.

    Attributes:
        name: its path in the trainer's state.
        rank: that wrote it; None where all share it, or it is not known.
        file: its path below the checkpoint.
        bytes: of its record, or of the file where it has none of its own.
    """

    name: str
    rank: int | None
    file: str
    bytes: int


class ListedSave(NamedTuple):
    """A checkpoint of a root.

    Attributes:
        path: its path or URL.
        step: as `latest` takes it.
        format: by its name and what lies there.
        commit: whether names say that it is finished.
    """

    path: str
    step: int | None
    format: str
    commit: str


class ListedRoot(NamedTuple):
    """A root.

    Attributes:
        path: its path or URL.
        checkpoints: in it, in order.
        pointers: what names one of them: `latest`, trackers, links.
    """

    path: str
    checkpoints: tuple[ListedSave, ...]
    pointers: tuple[Pointer, ...]


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What a checkpoint holds.

    Attributes:
        dialect: what more is known of the writer.
        step: of the save; None: cannot tell.
        step_by: what says it: `content`, `name`, or `siblings` around it.
        optimizer_count: updates that the optimizer counts for itself: no step of the save.
        commit: whether the save was finished, and the evidence.
        topology: known sizes of the job.
        world_size: of the job.
        bytes: of logical tensors, each element once; `files` of all files.
        parameters: elements of the model's parameters, without aliases.
        tensors: their number; with `tensors` or `match` also a list.
        objects: number of non-tensor objects.
        object_list: each of them, with `objects`.
        files: their number and bytes; with `files` also a list.
        aliases: key -> key of the tensor that owns the same bytes.
        resume: what a restart has and lacks.
        notes: remarks and defects found while opening; `verify` finds all.
        requests: to the store.
        bytes_read: of headers and metadata.
        adapter: the LoRA adapter in it.
        tensor: those that `tensor` named, each with its pieces.
        checkpoint: that was opened.
    """

    checkpoint: Checkpoint = field(metadata=UNSAID)
    dialect: str
    step: int | None
    step_by: str | None
    optimizer_count: int | None
    commit: Commit
    topology: Topology
    world_size: int | None
    bytes: ByteCounts
    parameters: int
    tensors: TensorList
    objects: int
    files: FileList
    aliases: Mapping[str, str]
    resume: tuple[ResumeItem, ...]
    notes: tuple[Finding, ...]
    requests: int
    bytes_read: int
    object_list: tuple[ListedObject, ...] | None = field(default=None, metadata=IF_ANY)
    adapter: AdapterDescription | None = field(default=None, metadata=IF_ANY)
    tensor: tuple[ListedTensor, ...] | None = field(default=None, metadata=IF_ANY)


@operation(
    examples=(
        ("ftckpt inspect /ckpt/run7/step-1000", "what it is, and what a restart from it lacks"),
        ("ftckpt inspect /ckpt/run7/step-1000 --resume", "the same, and what follows of each lack"),
        ("ftckpt inspect model/ --match '*.mlp.*' --sort bytes", "some tensors, the largest first"),
        ("ftckpt inspect /ckpt/run7", "the checkpoints of a root, and the newest of them"),
        ("ftckpt inspect s3://run7/ckpt@1000 --tensors", "every tensor: shape, type, pieces"),
        ("ftckpt inspect model.safetensors --tensor lm_head.weight", "where its bytes lie"),
    ),
    codes={
        **_READ,
        ExitCode.OK: "readable; the content was not checked",
        ExitCode.NOT_FOUND: "no checkpoint there, or no tensor of that name",
    },
    everyday=("--tensors", "--tensor", "--match", "--sort", "--files", "--resume"),
)
def inspect(
    checkpoint: Opened,
    *,
    tensors: Annotated[bool, switch("--tensors", "List every tensor.")] = False,
    files: Annotated[bool, switch("--files", "List every file.")] = False,
    objects: Annotated[bool, switch("--objects", "List the other state: schedule, RNG.")] = False,
    tensor: Annotated[
        str, option("GLOB", "Show tensors of this name and where their pieces lie.")
    ] = "",
    match: Annotated[str, option("GLOB", "List tensors of this name, with sums by prefix.")] = "",
    sort: Annotated[
        TensorOrder | str | None, option("", "Order of the listed tensors; else as stored.")
    ] = None,
    resume: Annotated[
        bool, switch("--resume", "Say what a restart lacks, and what follows of it.")
    ] = False,
    also: Also = (),
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> Inspected:
    """Show what a checkpoint holds, from headers alone.

    Format, step, topology, bytes by kind and type, and the resume check: which parts of the
    training state are present, absent, or cannot be told, by names and by content, and what goes
    wrong without them. With --resume it also says where the files of it are missing or cut. Never
    reads tensor bytes and never runs code from a file.

    Raises:
        NotFoundError: nothing is there, or no tensor is of that name.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    from ftckpt import inspection
    from ftckpt.formats.state import state_contents

    if isinstance(checkpoint, str):
        target = open_target(checkpoint, stores, on, also=also)
        if target.root is not None and not target.place.which:
            on.report(root=_listed_root(target.root))
        held = open_from(target, on, newest=True)
    else:
        held = opened(checkpoint, stores, on, also=also)
    order = chosen(TensorOrder, sort, "--sort") if sort else None
    named = _named(held, tensor, order) if tensor else None
    shown = _sorted(inspection.matching(held, match), order) if match or tensors else None
    found = inspection.inspect(held, state_contents)
    if resume:
        from ftckpt.verification.structure import with_structure

        found = with_structure(found, held)
    else:
        found = replace(found, notes=(*found.notes, *_absent(held, found.notes)))
    known = _known_step(held, found, stores)
    return _inspected(held, found, known, shown, named, files=files, objects=objects)


def _inspected(
    held: Checkpoint,
    found: Inspection,
    known: tuple[int | None, str | None],
    shown: Sequence[TensorInfo] | None,
    named: tuple[ListedTensor, ...] | None,
    *,
    files: bool,
    objects: bool,
) -> Inspected:
    usage = held.source.store.usage()
    rows = None if shown is None else tuple(_listed(held, i, len(i.pieces)) for i in shown)
    return Inspected(
        checkpoint=held,
        dialect=found.dialect,
        step=known[0],
        step_by=known[1],
        optimizer_count=found.optimizer_count,
        commit=found.commit,
        topology=found.topology,
        world_size=found.topology.world_size,
        bytes=found.bytes,
        parameters=found.parameters,
        tensors=TensorList(found.tensors, found.pieces, rows),
        objects=found.objects,
        files=FileList(found.files, found.bytes.files, _files(held) if files else None),
        object_list=_objects(held) if objects else None,
        aliases=found.aliases,
        resume=found.resume,
        notes=found.notes,
        requests=usage.requests,
        bytes_read=usage.bytes_read,
        adapter=_adapter_of(held),
        tensor=named,
    )


def _known_step(
    held: Checkpoint, found: Inspection, stores: StoreOptions
) -> tuple[int | None, str | None]:
    """Return the step as `latest` takes it, and what says it."""
    from ftckpt.discovery.step_names import step_in_name

    if found.step is not None:
        return found.step, "content"
    named = step_in_name(held.source.name)
    if named is not None:
        return named, "name"
    from ftckpt.discovery.step_around import step_around  # most say it themselves
    from ftckpt.formats.catalog import FORMATS

    around = step_around(held.source.url, FORMATS, stores)
    return around, None if around is None else "siblings"


def _adapter_of(checkpoint: Checkpoint) -> AdapterDescription | None:
    """Describe the adapter in a checkpoint; nothing is imported for one without."""
    names = (info.name for info in checkpoint.tensors.values())
    if not any(".lora_" in name or ".adapter." in name for name in names):
        return None
    from ftckpt.formats.lora.config import describe

    return describe(checkpoint)


def _listed_root(root: Root) -> ListedRoot:
    # Most commands name one checkpoint.
    from ftckpt.discovery.candidates import steps_of
    from ftckpt.discovery.roots import saves_among

    children = saves_among(root.children())
    steps = steps_of(root, children)
    rows = (
        ListedSave(
            root.url_of(child.candidate), steps[child.candidate.path], child.part.format.name,
            child.part.recognition.commit,
        )
        for child in children
    )  # fmt: skip
    return ListedRoot(root.url, tuple(rows), tuple(root.pointers))


def _listed(
    checkpoint: Checkpoint, info: TensorInfo, pieces: int | tuple[ListedPiece, ...]
) -> ListedTensor:
    return ListedTensor(
        info.key, info.name, info.component, info.kind, info.shape, info.dtype.name, info.nbytes,
        pieces, checkpoint.aliases.get(info.key),
    )  # fmt: skip


def _sorted(infos: Sequence[TensorInfo], order: TensorOrder | None) -> Sequence[TensorInfo]:
    from ftckpt.inspection.usage import natural

    if order is None:
        return infos
    keys: dict[TensorOrder, Callable[[TensorInfo], Any]] = {
        TensorOrder.NAME: lambda info: (natural(info.name), info.key),
        TensorOrder.BYTES: lambda info: -info.nbytes,
        TensorOrder.DTYPE: lambda info: info.dtype.name,
        TensorOrder.PIECES: lambda info: -len(info.pieces),
    }
    return sorted(infos, key=keys[order])


def _files(checkpoint: Checkpoint) -> tuple[ListedFile, ...]:
    members, source = set(checkpoint.members()), checkpoint.source
    gathered = len(source.store.parts()) > 1
    return tuple(
        ListedFile(
            name, entry.size, entry.mtime, name in members,
            tuple(source.store.places_of(entry.path)) if gathered else None,
        )
        for name, entry in source.entries.items()
    )  # fmt: skip


def _absent(checkpoint: Checkpoint, notes: Sequence[Finding]) -> list[Finding]:
    """Return a finding for each file of tensors that the listing lacks, and no note tells of."""
    source, told = checkpoint.source, {note.file for note in notes}
    needed = {p.extent.file for info in checkpoint.tensors.values() for p in info.pieces}
    gone = sorted({source.stored(file) for file in needed} - source.entries.keys() - told)
    return [finding("missing-file", f"{file} is missing", file=file) for file in gone]


def _objects(checkpoint: Checkpoint) -> tuple[ListedObject, ...]:
    return tuple(
        ListedObject(one.name, one.rank, one.extent.file, one.extent.length)
        for one in checkpoint.objects.values()
    )


def _named(
    checkpoint: Checkpoint, name: str, order: TensorOrder | None
) -> tuple[ListedTensor, ...]:
    from ftckpt.inspection import find_tensors

    found = _sorted(find_tensors(checkpoint, name), order)
    if not found:
        from ftckpt.storage.suggestions import hint_for_name

        near = hint_for_name(name, checkpoint.tensors)
        raise NotFoundError(
            f"{checkpoint.source.url} has no tensor {name}",
            hint=near or "ftckpt inspect PATH --tensors lists the names",
            tensor=name,
        )

    def pieces(info: TensorInfo) -> tuple[ListedPiece, ...]:
        return tuple(
            ListedPiece(
                p.box.offsets, p.box.sizes, p.flat, p.rank, p.replica, p.extent.file,
                p.extent.offset, p.extent.length,
            )
            for p in info.pieces
        )  # fmt: skip

    return tuple(_listed(checkpoint, info, pieces(info)) for info in found)


@dataclass(frozen=True, kw_only=True)
class BytesHeld:
    """Where the bytes of a checkpoint are.

    Attributes:
        depth: parts of a name that make the longest prefix.
        match: only tensors of this name were summed.
        sums: each component, the largest first, and below it its prefixes in the order of layers.
        tensors: number of the tensors counted.
        bytes: of the tensors, each element once.
        files: bytes of all files: those of tensors, replicas, other state and headers.
    """

    depth: int
    match: str | None
    sums: tuple[PrefixSum, ...]
    tensors: int
    bytes: int
    files: int


@operation(
    examples=(
        ("ftckpt du /ckpt/run7/step-1000", "by component, and by the first two parts of names"),
        ("ftckpt du /ckpt/run7@1000 --depth 3", "by layer, where names are model.layers.N"),
        ("ftckpt du s3://run7/ckpt@1000 --match '*.experts.*'", "the experts alone"),
    ),
    codes={
        **_READ,
        ExitCode.OK: "summed; the content was not checked",
        ExitCode.NOT_FOUND: "no checkpoint there, or no tensor matches",
    },
    everyday=("--depth", "--match", "--also"),
)
def du(
    checkpoint: Opened,
    *,
    depth: Annotated[int, option("N", "Parts of a name to sum by.", "--depth", "-d", min=0)] = 2,
    match: Annotated[str, option("GLOB", "Only tensors of this name, `*` any text.")] = "",
    also: Also = (),
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> BytesHeld:
    """Show where a checkpoint's bytes are, by component and layer.

    Sums the logical tensors by the first parts of their names, from headers alone: each element
    once, without replicas and tied copies.

    Raises:
        NotFoundError: nothing is there, or nothing matches.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    from ftckpt.inspection import matching
    from ftckpt.inspection.usage import prefix_sums

    held = opened(checkpoint, stores, on, newest=True, also=also)
    infos = [info for info in matching(held, match) if info.key not in held.aliases]
    sums = prefix_sums(infos, depth)
    whole = [one for one in sums if not one.depth]
    return BytesHeld(
        depth=depth,
        match=match or None,
        sums=tuple(sums),
        tensors=sum(one.tensors for one in whole),
        bytes=sum(one.bytes for one in whole),
        files=held.source.nbytes,
    )


@operation(
    examples=(
        ("ftckpt cat run@1000 model.norm.weight --slice 0:8", "the first eight elements"),
        ("ftckpt cat run@1000 lm_head.weight --format hist", "how its values lie"),
        ("ftckpt cat s3://run7/ckpt@1000 exp_avg:lm_head.weight --format stats", "norm, NaNs, ..."),
        ("ftckpt cat run@1000 lm_head.weight --slice 0:4,: --format npy > x.npy", "for numpy.load"),
        ("ftckpt cat run@1000 optimizer.param_groups", "a subtree of other state, as JSON"),
    ),
    codes={
        ExitCode.OK: "printed; the content was not checked",
        ExitCode.CORRUPT: "it is damaged, as far as it was read",
        ExitCode.INCOMPLETE: "not committed, or still being written",
        ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
        ExitCode.NOT_FOUND: "no checkpoint there, or nothing of that name",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "it does not fit into --max-memory: take a slice, stats, hist or npy",
        ExitCode.UNSUPPORTED: "a format that is not read, or elements that are no numbers",
    },
    everyday=("--slice", "--format", "--also"),
)
def cat(
    checkpoint: Opened,
    name: Annotated[str, argument("TENSOR", "A tensor, an object, or a subtree of state.")],
    *,
    slice_: Annotated[str, option("SLICE", "A part, as numpy: 0:4,: or -1.")] = "",
    also: Also = (),
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> TensorPart | Any:
    """Print a tensor, a part of it, or other state.

    Without a slice, text shows the beginning along each axis. bfloat16 and 8-bit floats are shown
    by their values, and written to npy, which has no such types, as float32, which holds all of
    them. Other state is printed as JSON. Nothing is checked: that is for verify.

    Returns:
        A view of the tensor that reads when it is asked; or other state as plain data.

    Raises:
        NotFoundError: it has nothing of that name.
        UsageError: the slice is none, or the name means several tensors.
    """
    from ftckpt.comparison.part import state_at, view_of

    held = opened(checkpoint, stores, on, newest=True, also=also)
    view = view_of(held, name, slice_)
    return view if view is not None else state_at(held, name)
