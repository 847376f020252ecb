"""Map the stored names of a DCP checkpoint to logical tensors and their pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError
from ftckpt.formats.state.vocabulary import is_generator
from ftckpt.formats.state.wrappers import Homes, find_homes, names_of
from ftckpt.formats.torch_files.inner import inner_kind
from ftckpt.formats.torch_files.lazy_pieces import LazyPieces

from .items import rank_of
from .metadata import DcpMetadata, Path
from .records import Chunk, Offsets

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
