"""Map the stored names of a DCP checkpoint to logical tensors and their pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import CorruptError
from ftckpt.formats.state.stored_names import place
from ftckpt.formats.torch_files.lazy_pieces import LazyPieces

from .items import rank_of
from .metadata import DcpMetadata
from .records import Chunk, Offsets

_MARKER = ".metadata"


# The NamedTuple's own constructor without its call overhead: there are many tensors.
_made = partial(tuple.__new__, TensorInfo)


def logical_tensors(meta: DcpMetadata) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors by key, and key -> name in the metadata."""
    tensors: dict[str, TensorInfo] = {}
    stored: dict[str, str] = {}
    components, kinds, names = _places(meta)
    bare = _bare_names(components, names)
    places = zip(components, kinds, names, strict=True)
    for (component, kind, said), (name, size, dtype, pieces) in zip(
        places, _rows(meta), strict=True
    ):
        if bare and component in bare:
            said = bare[component][said]
        # If our reading maps two stored names to one tensor, they stay separate.
        key = tensor_key(component, kind, said)
        while key in tensors:
            component, said = "extra:dcp", name if component != "extra:dcp" else said + "'"
            key = tensor_key(component, kind, said)
        pieces.of = key
        tensors[key] = _made((component, said, kind, size, dtype, pieces, name))
        stored[key] = name
    return tensors, stored


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

    __slots__ = ("_chunks", "_copies")

    def __init__(self, chunks: Sequence[Chunk], copies: Sequence[Chunk] = ()) -> None:
        self._copies = len(copies)
        self._chunks = [*chunks, *copies] if copies else chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk(self, index: int) -> Chunk:
        """Return one chunk."""
        return self._chunks[index]

    def replica(self, index: int) -> int:
        """Return the number of chunks with a copy's box before it."""
        if index < len(self) - self._copies:
            return 0
        offsets = self._chunks[index].offsets
        return sum(1 for other in self._chunks[:index] if other.offsets == offsets)


def _rows(meta: DcpMetadata) -> Iterator[tuple[str, Offsets, DType, ChunkPieces]]:
    """Yield stored names, sizes, element types and pieces, whose keys are not set yet."""
    copies: dict[str, list[Chunk]] = defaultdict(list)
    for name, chunk, _ in meta.copies:
        if chunk is not None:
            copies[name].append(chunk)
    for name, entry in meta.tensors.items():
        yield name, entry.size, entry.dtype, ListedChunks(entry.chunks, copies.get(name, ()))


def _places(meta: DcpMetadata) -> tuple[list[str], list[Kind], list[str]]:
    """Return component, kind and name of each stored tensor."""
    components: list[str] = []
    kinds: list[Kind] = []
    names: list[str] = []
    for stored, entry in meta.tensors.items():
        component, kind, name = place(stored, meta.paths.get(stored, ()), entry.dtype)
        components.append(component)
        kinds.append(kind)
        names.append(name)
    return components, kinds, names


def _bare_names(components: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the names without wrappers' prefixes, by component and name, if there are any."""
    text = "\n".join(["", *names])  # searched as one text: most checkpoints have none
    if not any(sign in text for sign in ("\nmodule.", "_orig_mod", "_wrapped_module")):
        return {}
    own: dict[str, list[str]] = defaultdict(list)
    for component, name in zip(components, names, strict=True):
        own[component].append(name)
    return {component: unwrapped(all_) for component, all_ in own.items()}
