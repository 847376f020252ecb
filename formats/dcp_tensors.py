"""The logical tensors of a DCP checkpoint: what each stored name means, and its pieces."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from ftckpt.checkpoint import Box, Extent, Piece, TensorInfo, tensor_key
from ftckpt.errors import CorruptError
from ftckpt.names import unwrapped

from .dcp_items import rank_of
from .dcp_metadata import DcpMetadata
from .dcp_names import Place, place
from .dcp_records import Chunk
from .lazy_pieces import LazyPieces

_MARKER = ".metadata"


def logical_tensors(meta: DcpMetadata) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors by key, and key -> name in the metadata."""
    tensors: dict[str, TensorInfo] = {}
    stored: dict[str, str] = {}
    entries = deque(meta.tensors.items())
    paths = meta.paths
    places = [place(name, paths.get(name, ()), entry.dtype) for name, entry in entries]
    bare = _bare_names(places)
    copies: dict[str, list[Chunk]] = defaultdict(list)
    for name, chunk, _ in meta.copies:
        if chunk is not None:
            copies[name].append(chunk)
    for component, kind, said in places:
        name, entry = entries.popleft()  # what is made next takes its memory
        if component in bare:
            said = bare[component][said]
        # Two stored names can mean one tensor only by our reading: they are kept apart.
        key = tensor_key(component, kind, said)
        while key in tensors:
            component, said = "extra:dcp", name if component != "extra:dcp" else said + "'"
            key = tensor_key(component, kind, said)
        pieces = ChunkPieces(key, entry.chunks, copies.get(name, ()))
        tensors[key] = TensorInfo(component, said, kind, entry.size, entry.dtype, pieces, name)
        stored[key] = name
    return tensors, stored


class ChunkPieces(LazyPieces):
    """The pieces that are the chunks of one stored tensor."""

    __slots__ = ("_chunks", "_copies", "_name")

    def __init__(self, name: str, chunks: Sequence[Chunk], copies: Sequence[Chunk] = ()) -> None:
        self._name = name
        self._copies = len(copies)
        self._chunks = [*chunks, *copies] if copies else chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def box(self, index: int) -> Box:
        """Return the box of one chunk."""
        chunk = self._chunks[index]
        return Box(chunk.offsets, chunk.sizes)

    def piece(self, index: int) -> Piece:
        """Return one chunk; see `LazyPieces.piece`."""
        chunk = self._chunks[index]
        item = chunk.item
        if item is None:
            raise CorruptError(
                f"{self._name} has a chunk at {list(chunk.offsets)} that lies in no file",
                kind="bad-metadata",
                file=_MARKER,
                tensor=self._name,
            )
        place_ = Extent(item.path, item.offset, item.length)
        box = Box(chunk.offsets, chunk.sizes)
        replica = 0
        if index >= len(self) - self._copies:
            before = self._chunks[:index]
            replica = sum(1 for other in before if other.offsets == chunk.offsets)
        return Piece(box, place_, replica=replica, rank=rank_of(item.path), packed=True)


def _bare_names(places: Iterable[Place]) -> dict[str, dict[str, str]]:
    """Return the names without wrappers' prefixes, by component and name, where there are any."""
    names: dict[str, list[str]] = {}
    for component, _, name in places:
        names.setdefault(component, []).append(name)
    return {
        component: unwrapped(own)
        for component, own in names.items()
        if any(n.startswith("module.") or "_orig_mod" in n or "_wrapped_module" in n for n in own)
    }
