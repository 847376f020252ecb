"""Map the stored names of a DCP checkpoint to logical tensors and their pieces.

Relate Megatron's local replicas to the tensors that they repeat.

A rank that reads a shard which another rank wrote may write it a second time, into its own file, so
that each rank loads from its own disk. DCP tells shards by (name, offsets), so a second copy has
another name:

    decoder.final_layernorm.weight                    the tensor, all its chunks
    __shadow_3__decoder.final_layernorm.weight        chunks that rank 3 wrote again, perhaps few
    decoder.final_layernorm.weight.__tp_replica_1     the whole tensor again, by tensor rank 1

The last form has no plain name: every tensor rank writes one, and the lowest counts as the tensor.

Source: megatron/core/dist_checkpointing/strategies/local_replica.py of Megatron-LM's pull requests
4628 and 5556 (`__shadow_R__`), and 3392 (`.__tp_replica_R`), which are open in November 2026.

Name the states of an optimizer that numbers its parameters, where the file says the names.

`optimizer.state_dict()` saved as it is has states under numbers. torch 2.6 and newer record the
names beside the numbers (`param_names` of each group) if the optimizer was made of
`model.named_parameters()`. DCP does not keep the model's order, so without that record no order
proves which parameter a number is, and the states stay numbered.

The step counters of a DCP checkpoint: small objects and one-element tensors, a few per file.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box, Extent, Kind, Piece, Scalar, StepRole, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType, decode_scalar
from ftckpt.checkpoint.steps import READ_FIRST, is_counter, role_of
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.findings import Finding, counted, finding, listed
from ftckpt.formats.state.stored_names import is_generator
from ftckpt.formats.state.wrappers import NO_HOMES, Homes, find_homes, names_of
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.formats.torch_files.inner import inner_kind
from ftckpt.formats.torch_files.stream import TensorRef
from ftckpt.storage.source import Source

from .items import Item, ItemWindow, as_item, open_item, rank_of, windows
from .metadata import DcpMetadata, MetadataItem, Path
from .records import Chunk, Offsets, TensorEntry

if TYPE_CHECKING:
    from ftckpt.formats.torch_files.inner import InnerPart


_MARKER = ".metadata"


# The NamedTuple's own constructor without its call overhead: there are many tensors.
_made = partial(tuple.__new__, TensorInfo)


def logical_tensors(
    meta: DcpMetadata, homes: Homes
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors by key, and key -> name in the metadata.

    `homes` are the models and optimizers below wrappers (`homes_of`).
    """
    tensors: dict[str, TensorInfo] = {}
    stored: dict[str, str] = {}
    paths = {**meta.paths, **meta.named} if meta.named else meta.paths
    rows = [(name, paths.get(name, ()), entry.dtype) for name, entry in meta.tensors.items()]
    for (component, kind, said), (name, size, dtype, pieces) in zip(
        names_of(rows, homes), _rows(meta), strict=True
    ):
        if dtype.name == "uint8" and component == "model" and is_generator(said, "uint8", size):
            component, kind = f"extra:{said.partition('.')[0]}", Kind.OTHER
        # If our reading maps two stored names to one tensor, they stay separate.
        key = tensor_key(component, kind, said)
        while key in tensors:
            component, said = "extra:dcp", name if component != "extra:dcp" else said + "'"
            key = tensor_key(component, kind, said)
        pieces.of = key
        tensors[key] = _made((component, said, kind, size, dtype, pieces, name))
        stored[key] = name
    return tensors, stored


def inner_infos(
    meta: DcpMetadata, homes: Homes, inside: Mapping[str, Sequence[InnerPart]]
) -> Iterator[tuple[TensorInfo, str, str]]:
    """Yield the tensors inside subclasses, each with its stored name and that of its subclass."""
    rows: list[tuple[str, Path, DType]] = []
    held: list[tuple[str, InnerPart]] = []
    for name, parts in inside.items():
        path = meta.named.get(name) or meta.paths.get(name) or (name,)
        for part in parts:
            rows.append((name + part.shown, (*path[:-1], f"{path[-1]}{part.shown}"), part.dtype))
            held.append((name, part))
    for (component, kind, said), (name, part) in zip(names_of(rows, homes), held, strict=True):
        stored = name + part.suffix
        if component == "model":
            kind = inner_kind(part.suffix.rpartition(".")[2], kind)
        info = TensorInfo(component, said, kind, part.shape, part.dtype, part.pieces, stored)
        yield info, stored, name


def homes_of(meta: DcpMetadata) -> Homes:
    """Find the models and optimizers below wrappers in the paths of `planner_data`."""
    paths = {**meta.paths, **meta.named} if meta.named else meta.paths
    tensors = {path: e.size for name, e in meta.tensors.items() if (path := paths.get(name))}
    return find_homes(tensors, [path for name in meta.objects if (path := paths.get(name))])


class ChunkPieces(LazyPieces):
    """The chunks of one stored tensor as pieces; `of` is the tensor's key."""

    __slots__ = ("of",)
    of: str

    @abstractmethod
    def chunk(self, index: int) -> Chunk:
        """Return one chunk; `index` is in range."""

    def replica(self, index: int) -> int:
        """Return the number of earlier chunks with the same box."""
        return 0

    def box(self, index: int) -> Box:
        """Return the box of one chunk."""
        chunk = self.chunk(index)
        return Box(chunk.offsets, chunk.sizes)

    def piece(self, index: int) -> Piece:
        """Return one chunk; see `LazyPieces.piece`."""
        chunk = self.chunk(index)
        item = chunk.item
        if item is None:
            raise CorruptError(
                f"{self.of} has a chunk at {list(chunk.offsets)} that lies in no file",
                kind="bad-metadata",
                file=_MARKER,
                tensor=self.of,
            )
        place_ = Extent(item.path, item.offset, item.length)
        box = Box(chunk.offsets, chunk.sizes)
        rank = rank_of(item.path)
        return Piece(box, place_, replica=self.replica(index), rank=rank, packed=True)


class ListedChunks(ChunkPieces):
    """Chunks in a list, followed by their copies."""

    __slots__ = ("_chunks", "_replicas")

    def __init__(self, chunks: Sequence[Chunk], copies: Sequence[Chunk] = ()) -> None:
        self._chunks = [*chunks, *copies] if copies else chunks
        self._replicas: list[int] = []  # of the copies
        if copies:
            before = Counter(chunk.offsets for chunk in chunks)
            for copy in copies:
                self._replicas.append(before[copy.offsets])
                before[copy.offsets] += 1

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk(self, index: int) -> Chunk:
        """Return one chunk."""
        return self._chunks[index]

    def replica(self, index: int) -> int:
        """Return the number of chunks with a copy's box before it."""
        copy = index - len(self) + len(self._replicas)
        return self._replicas[copy] if copy >= 0 else 0


def _rows(meta: DcpMetadata) -> Iterator[tuple[str, Offsets, DType, ChunkPieces]]:
    """Yield stored names, sizes, element types and pieces, whose keys are not set yet."""
    copies: dict[str, list[Chunk]] = defaultdict(list)
    for name, chunk, _ in meta.copies:
        if chunk is not None:
            copies[name].append(chunk)
    for name, entry in meta.tensors.items():
        yield name, entry.size, entry.dtype, ListedChunks(entry.chunks, copies.get(name, ()))


# No cluster has more ranks than seven digits can count.
_SHADOW = re.compile(r"__shadow_(\d{1,7})__(.+)", re.DOTALL)
_TP_REPLICA = re.compile(r"(.+)\.__tp_replica_(\d{1,7})", re.DOTALL)
_Boxes = frozenset[tuple[Offsets, Offsets]]


def relate(meta: DcpMetadata) -> list[Finding]:
    """Make the chunks of local replicas copies of the tensor's own; return notes about them.

    A replica has its tensor's shape and type, and each of its chunks is one of the tensor's.
    What only has such a name stays a tensor of its own, which the checks then judge.

    Args:
        meta: is changed: `tensors` loses the replicas, `copies` gets their chunks.
    """
    _name_first(meta)
    boxes: dict[str, _Boxes] = {}
    related: list[tuple[str, str]] = []  # names of a replica and of its tensor
    for name, entry in meta.tensors.items():
        tensor = _tensor_of(name)
        if tensor and _repeats(entry, meta.tensors.get(tensor), tensor, boxes):
            related.append((name, tensor))
    chunks = 0
    for name, tensor in related:
        entry = meta.tensors.pop(name)
        meta.reformulated.pop(name, None)
        chunks += len(entry.chunks)
        meta.copies += [MetadataItem(tensor, c, c.item) for c in entry.chunks if c.item is not None]
    if not related:
        return []
    tensors = counted(len({tensor for _, tensor in related}), "tensor")
    return [finding(
        "note",
        f"{counted(chunks, 'shard')} of {tensors} lie here again as local replicas "
        f"({listed([name for name, _ in related], 1)}): `verify --level values` compares them, "
        "and a reshard or convert writes each tensor once",
    )]  # fmt: skip


def _tensor_of(name: str) -> str:
    """Return the name of the tensor that `name` says it repeats; empty if it says none."""
    match = _SHADOW.fullmatch(name)
    if match is not None:
        # A shadow of a tensor rank's copy: that copy has the tensor's name, or is a replica too.
        inner = _TP_REPLICA.fullmatch(match[2])
        return inner[1] if inner else match[2]
    match = _TP_REPLICA.fullmatch(name)
    return match[1] if match else ""


def _name_first(meta: DcpMetadata) -> None:
    """Give the lowest tensor rank's copy the tensor's name, if nothing else has it."""
    lowest: dict[str, tuple[int, str]] = {}
    for name in meta.tensors:
        match = _TP_REPLICA.fullmatch(name)
        if match is None or _SHADOW.fullmatch(name):
            continue
        if match[1] not in meta.tensors and match[1] not in meta.objects:
            one = (int(match[2]), name)
            lowest[match[1]] = min(one, lowest.get(match[1], one))
    renamed = {first: name for name, (_, first) in lowest.items()}
    # Each in its place: the order of a store's tensors is the trainer's.
    meta.tensors = {renamed.get(name, name): entry for name, entry in meta.tensors.items()}
    for first, name in renamed.items():
        if first in meta.reformulated:
            meta.reformulated[name] = meta.reformulated.pop(first)
        if first in meta.paths:
            *outer, last = meta.paths.pop(first)
            meta.paths[name] = (*outer, str(last).rpartition(".__tp_replica_")[0])


def _repeats(
    entry: TensorEntry, whole: TensorEntry | None, tensor: str, boxes: dict[str, _Boxes]
) -> bool:
    """Return whether an entry has the shape, the type and only chunks of `whole`, all placed."""
    if whole is None or (whole.size, whole.dtype) != (entry.size, entry.dtype):
        return False
    if tensor not in boxes:
        boxes[tensor] = frozenset((chunk.offsets, chunk.sizes) for chunk in whole.chunks)
    return all(
        chunk.item is not None and (chunk.offsets, chunk.sizes) in boxes[tensor]
        for chunk in entry.chunks
    )


_GROUPS, _STATE = "param_groups", "state"


def named_paths(meta: DcpMetadata, source: Source) -> dict[str, Path]:
    """Return the paths of numbered states with their parameters' names, by stored name.

    Nothing for an optimizer whose record is incomplete, ambiguous or damaged.
    """
    groups: dict[Path, dict[tuple[int | str, str], str]] = defaultdict(dict)
    for name in meta.objects:
        path = meta.paths.get(name, ())
        if path[-3:-2] == (_GROUPS,) and path[-1] in ("params", "param_names"):
            groups[path[:-3]][path[-2], str(path[-1])] = name
    recorded = {
        at: names for at, names in groups.items() if any(k == "param_names" for _, k in names)
    }
    if not recorded:
        return {}
    known = {at: _names(meta, source, names) for at, names in recorded.items()}
    found: dict[str, Path] = {}
    for name in (*meta.tensors, *meta.objects):
        path = meta.paths.get(name, ())
        for at, names in known.items():
            size = len(at)
            if path[:size] == at and path[size : size + 1] == (_STATE,) and len(path) > size + 2:
                said = names.get(str(path[size + 1]))
                if said is not None:
                    found[name] = (*path[: size + 1], said, *path[size + 2 :])
    return found


def _names(
    meta: DcpMetadata, source: Source, objects: Mapping[tuple[int | str, str], str]
) -> dict[str, str]:
    """Return number -> name of one optimizer; nothing unless every group says both, once each."""
    found: dict[str, str] = {}
    total = 0
    try:
        for number in dict.fromkeys(group for group, _ in objects):
            numbers, names = (
                _loaded(meta, source, objects.get((number, key), ""))
                for key in ("params", "param_names")
            )
            if not _fit(numbers, names):
                return {}
            total += len(numbers)
            found |= {str(i): name for i, name in zip(numbers, names, strict=True)}
    except FtckptError:  # the checks report it
        return {}
    return found if len(found) == total == len(set(found.values())) else {}


def _loaded(meta: DcpMetadata, source: Source, name: str) -> Any:
    item = meta.objects.get(name)
    if item is None:
        return None
    window = open_item(source, as_item(name, item))
    return window.parse().tree if isinstance(window, ItemWindow) else None


def _fit(numbers: Any, names: Any) -> bool:
    return (
        isinstance(numbers, list)
        and isinstance(names, list)
        and len(numbers) == len(names)
        and all(type(number) is int for number in numbers)
        and all(isinstance(name, str) and name for name in names)
    )


def read_scalars(
    source: Source,
    meta: DcpMetadata,
    limit: int,
    known: Iterable[Scalar] = (),
    homes: Homes = NO_HOMES,
) -> Iterator[Scalar]:
    """Yield step counters, at most `limit` per file; the checks report unreadable ones.

    `known` counters, read before, come first and count towards the limit. A counter below wrappers
    (`homes`) has the meaning that it would have at the top.
    """
    left: dict[str, int] = defaultdict(lambda: limit)
    for scalar in known:
        if left[scalar.file] > 0:
            left[scalar.file] -= 1
            yield scalar
    chosen: dict[str, list[tuple[StepRole, Item]]] = defaultdict(list)
    wanted = dict(_candidates(meta, homes))
    for name, _, stored in meta.placed() if wanted else ():
        if name in wanted:
            chosen[stored.path].append((wanted[name], as_item(name, stored)))
    items: list[Item] = []
    roles: dict[Item, StepRole] = {}
    for file, found in chosen.items():
        if file not in source.entries:
            continue
        found.sort(key=lambda pair: (READ_FIRST[pair[0]], pair[1].extent.offset))
        for role, item in found[: left[file]]:
            items.append(item)
            roles[item] = role
    for window in windows(source, items):
        if isinstance(window, FtckptError):
            continue
        value = _value(window)
        if value is not None:
            item = window.item
            yield Scalar(item.extent.file, item.name, value, roles[item])


def _candidates(meta: DcpMetadata, homes: Homes) -> Iterator[tuple[str, StepRole]]:
    for name in meta.tensors:
        if not name.endswith(("step", "iteration", "steps")):
            continue
        role = _role(name, meta, homes)
        if role is not None and all(n == 1 for n in meta.tensors[name].size):
            yield name, role
    for name in meta.objects:
        if name.endswith(("step", "iteration", "steps", "last_epoch", "iter_num")):
            role = _role(name, meta, homes)
            if role is not None:
                yield name, role


def _role(name: str, meta: DcpMetadata, homes: Homes) -> StepRole | None:
    path = meta.paths.get(name, ())
    home = homes.found.get(homes.above(path)) if homes.found else None
    if home is not None:
        return role_of(name, optimizer=True) if home.component == "optimizer" else None
    if homes.wrappers and path:
        name = ".".join(map(str, homes.without_wrapper(path)))
    return role_of(name, optimizer=name.startswith(("optimizer", "optim")))


def _value(window: ItemWindow) -> float | None:
    try:
        stream = window.parse()
        value = stream.tree
        if isinstance(value, TensorRef):
            if value.numel != 1 or stream.storages[value.key].inline is not None:
                return None
            span = value.span(stream.storages)
            at = 0 if window.item.transforms else window.item.extent.offset
            value = decode_scalar(value.dtype, window.read(span.offset - at, span.length))
    except FtckptError:
        return None
    return float(value) if is_counter(value) else None
