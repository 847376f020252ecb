"""Lay out a PyTorch Distributed Checkpoint for a world size; each rank reads its file in order.

Parameters, masters and moments are cut along their first axis as DTensor's `Shard(0)` divides, so a
rank of FSDP2 finds its rows contiguous in `__<rank>_0.distcp`; everything that FSDP2 replicates
(buffers, step counters, the rest) is stored once. Empty shards are not stored: torch requests none
of their bytes.

A distributed checkpoint keeps its stored names, its key paths and its byte items. Any other source
is saved as torch saves its `get_state_dict`: `formats.state_paths` has the names, and non-tensor
state is flattened to single values.

Write the `.metadata` pickle of torch.distributed.checkpoint.

Readable by torch from 2.3 on (the classes' modules moved before). `storage_meta` is omitted: torch
before 2.4 does not know its class, later ones do not need it, and its random id would make the same
content give other bytes. An older torch keeps unknown members as plain attributes.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, 2.3 to 2.13.

The data files of a new distributed checkpoint: one per rank, items in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError
from ftckpt.extents import Box, Extent
from ftckpt.formats.pickles.walk import Path, dotted
from ftckpt.formats.pickles.write import Call, Global, Pairs, dumps
from ftckpt.formats.state.objects import StateObjects, of_all_ranks
from ftckpt.formats.state.paths import (
    carried_inside,
    coded_in,
    is_divided,
    own_paths,
    recorded_items,
    recorded_paths,
    tensor_paths,
    with_aliases,
    without_records,
)
from ftckpt.formats.state.world_size import world_notes, world_of
from ftckpt.formats.torch_files.write_tree import save, save_shard
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile, Segment, Stored

from .names import MARKER, META
from .reader import DcpCheckpoint

if TYPE_CHECKING:
    from .subclasses import Subclass


VERSION = "1.0.0"


class ItemPlace(NamedTuple):
    """The place of an item.

    Attributes:
        file: relative to the checkpoint.
        transforms: to undo before it can be read.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class WrittenChunk(NamedTuple):
    """A box of a tensor and the place of its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ItemPlace


class TensorItems(NamedTuple):
    """A tensor: its type, its global shape and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[WrittenChunk]


def metadata(
    tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace], paths: Mapping[str, Path]
) -> bytes:
    """Return the bytes of a `.metadata` file.

    `tensors` and the `objects`' places are by stored name; `paths` are the keys in the nested state
    (`planner_data`).
    """
    writer = _Writer()
    state = {
        "state_dict_metadata": Pairs(writer.entries(tensors, objects)),
        "planner_data": Pairs(paths.items()),
        "storage_data": Pairs(writer.storage(tensors, objects)),
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(_made("Metadata", state))


class _Writer:
    """Creates each size and each type once, and everything else when it is written.

    A checkpoint has few sizes, and perhaps a million chunks.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], Call] = {}
        self._properties: dict[str, Call] = {}

    def entries(
        self, tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace]
    ) -> Iterator[tuple[str, Call]]:
        """Yield `state_dict_metadata`."""
        for name, tensor in tensors.items():
            yield name, self.tensor(tensor)
        for name in objects:
            yield name, _made("BytesStorageMetadata", None)

    def storage(
        self, tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace]
    ) -> Iterator[tuple[Call, Call]]:
        """Yield `storage_data`."""
        for name, tensor in tensors.items():
            for number, chunk in enumerate(tensor.chunks):
                index = {"fqn": name, "index": number, "offset": self.size(chunk.offsets)}
                yield _made("MetadataIndex", index), _info(chunk.place)
        for name, place in objects.items():
            yield _made("MetadataIndex", {"fqn": name, "index": None}), _info(place)

    def size(self, values: tuple[int, ...]) -> Call:
        """Return a `torch.Size`."""
        made = self._sizes.get(values)
        if made is None:
            made = self._sizes[values] = Call(Global("torch", "Size"), ((*values,),))
        return made

    def tensor(self, tensor: TensorItems) -> Call:
        """Return a `TensorStorageMetadata`."""
        chunks = [
            _made(
                "ChunkStorageMetadata",
                {"offsets": self.size(chunk.offsets), "sizes": self.size(chunk.sizes)},
            )
            for chunk in tensor.chunks
        ]
        state = {
            "properties": self._of(tensor.dtype),
            "size": self.size(tensor.shape),
            "chunks": chunks,
        }
        return _made("TensorStorageMetadata", state)

    def _of(self, dtype: DType) -> Call:
        made = self._properties.get(dtype.name)
        if made is None:
            layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
            memory = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))  # contiguous
            state = (Global("torch", dtype.name), layout, False, memory, False)
            made = self._properties[dtype.name] = Call(
                Global(_MODULE, "TensorProperties"), state=state, new=True
            )
        return made


def _made(name: str, state: Any) -> Call:
    return Call(_names(name), state=state, new=True, once=True)


@cache
def _names(name: str) -> Global:
    return Global(_MODULE, name)


def _info(place: ItemPlace) -> Call:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    extra = {"transform_descriptors": list(place.transforms)} if place.transforms else {}
    return Call(_INFO, state=state | extra, new=True, once=True)


_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")


class RankFiles:
    """One data file per rank; `sizes` are their bytes so far."""

    def __init__(self, world: int) -> None:
        """Start with empty files of `world` ranks."""
        self.sizes = [0] * world
        self._segments: list[list[Segment]] = [[] for _ in range(world)]

    def add(
        self, rank: int, segments: list[Segment], transforms: tuple[str, ...] = ()
    ) -> ItemPlace:
        """Put an item at the end of a rank's file."""
        start = self.sizes[rank]
        length = sum(segment.nbytes for segment in segments)
        self.sizes[rank] = start + length
        self._segments[rank] += segments
        return ItemPlace(_file(rank), start, length, transforms)

    def lightest(self, ranks: Iterable[int] | None = None) -> int:
        """Return the rank, of `ranks` or of all, with the smallest file; the first of equals."""
        return min(range(len(self.sizes)) if ranks is None else ranks, key=self.sizes.__getitem__)

    def outputs(self) -> Iterator[OutputFile]:
        """Yield the files of all ranks; like torch, an empty one for a rank without items."""
        for rank, segments in enumerate(self._segments):
            yield OutputFile(_file(rank), segments)


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


class DcpWriter:
    """The writer of the format `dcp` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "dcp"
    single = False
    supported_options = ("dp",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` ranks; None: the source's world size.

        Raises:
            UsageError: a division other than over one world.
            UnsupportedError: a tensor of a type that torch.save cannot write.
        """
        world = world_of(content, request)
        content = with_aliases(content)
        state = _State(content, world, anew=request.dp is not None)
        shared = of_all_ranks(content)
        state.add_objects(shared)  # before the tensors, as torch writes them
        state.add_tensors()
        held = without_records(shared, state.coded)
        marker = metadata(state.tensors, state.objects, state.paths)
        return Layout(
            files=[*state.files.outputs(), *_outputs(_kept_files(content))],
            content=held if held.objects.keys() != content.objects.keys() else None,
            commit=[OutputFile(MARKER, [Literal(marker)])],
            unplaced=state.unplaced,
            notes=world_notes(content, world),
        )


def _kept_files(content: Content) -> dict[str, Extent]:
    """Return the files beside a store that its trainer loads from there: Lightning's `meta.pt`."""
    checkpoint = content.checkpoint
    if not isinstance(checkpoint, DcpCheckpoint) or META not in checkpoint.beside:
        return {}
    return {META: content.objects[META].extent} if META in content.objects else {}


def _outputs(files: Mapping[str, Extent]) -> Iterator[OutputFile]:
    for name, extent in files.items():
        yield OutputFile(name, [Stored(extent)])


class _State:
    """Files and metadata while they grow."""

    def __init__(self, content: Content, world: int, *, anew: bool) -> None:
        self.tensors: dict[str, TensorItems] = {}
        self.objects: dict[str, ItemPlace] = {}
        self.paths: dict[str, Path] = {}
        self.files = RankFiles(world)
        self._content = content
        self._kept = _kept_files(content)
        self._world = world
        self._recorded = recorded_paths(content.checkpoint)
        nested = {**own_paths(content.checkpoint), **self._recorded.tensors}
        self._places, self.unplaced = tensor_paths(
            content, self._recorded._replace(tensors=nested), flat=self._recorded.flat
        )
        self._subclasses = _subclasses(content)
        self.coded = coded_in(content)
        # A store keeps the shards that it has, unless another number of ranks is asked for.
        self._anew = anew and world != content.topology.world_size
        self._coded_paths = {one.name: one.path(self._places) for one in self.coded}
        own = (key for one in self.coded for key in one.keys.values())
        for key in (*carried_inside(content), *own):
            self._places.pop(key, None)
        self._taken = {dotted(path) for path in self._places.values()}

    def add_objects(self, content: Content) -> None:
        """Place the non-tensor state, each rank's in that rank's file if there is one."""
        trees = StateObjects(content, self._recorded.objects)
        stored = recorded_items(self._content.checkpoint)
        coded = self._coded_paths
        for name, info in content.objects.items():
            if name in coded or name in self._kept:
                continue
            rank = (info.rank or 0) % self._world
            if name in self._subclasses:
                self._subclass(name, rank, info.extent)
                continue
            if name in stored:
                item: list[Segment] = [Stored(info.extent)]
                self._object(self._recorded.objects[name], rank, item, stored[name])
                continue
            try:
                # All of an object or nothing: unwritable parts show before anything is placed.
                parts = [(leaf, save(leaf.value)) for leaf in trees.flattened(name)]
            except UnsupportedError:
                self.unplaced.append(name)
                continue
            for leaf, segments in parts:
                based = all(type(segment) is Literal for segment in segments)
                at = self.files.sizes[rank]
                self._object(leaf.path, rank, segments if based else save(leaf.value, base=at))

    def _object(
        self, path: Path, rank: int, segments: list[Segment], transforms: tuple[str, ...] = ()
    ) -> None:
        name = dotted(path)
        if name in self._taken:
            self.unplaced.append(name)
            return
        self._taken.add(name)
        self.paths[name] = path
        self.objects[name] = self.files.add(rank, segments, transforms)

    def _subclass(self, name: str, rank: int, extent: Extent) -> None:
        """Place the record of a tensor subclass, which torch calls a tensor of one chunk."""
        path, entry = self._recorded.objects[name], self._subclasses[name].entry
        chunk = WrittenChunk((0,) * len(entry.size), entry.size,
                             self.files.add(rank, [Stored(extent)]))  # fmt: skip
        self.tensors[dotted(path)] = TensorItems(entry.dtype, entry.size, [chunk])
        self.paths[dotted(path)] = path

    def add_tensors(self) -> None:
        """Place every tensor: in rows over the ranks, or whole on the rank with fewest bytes."""
        for key, path in self._places.items():
            wanted = self._content.tensors[key]
            name = dotted(path)
            chunks = [self._chunk(key, rank, box) for rank, box in self._boxes(wanted)]
            self.tensors[name] = TensorItems(wanted.dtype, wanted.shape, chunks)
            self.paths[name] = path

        for one in self.coded:
            boxes = list(self._rows(one.tensor.shape))
            if not self._anew:
                boxes = [(n % self._world, box) for n, box in enumerate(one.tensor.boxes)]
            path = self._coded_paths[one.name]
            chunks = []
            for rank, box in boxes:
                segments = save(one.shard(box), base=self.files.sizes[rank])
                chunks.append(WrittenChunk(box.offsets, box.sizes, self.files.add(rank, segments)))
            self.tensors[dotted(path)] = TensorItems(one.tensor.dtype, one.tensor.shape, chunks)
            self.paths[dotted(path)] = path

    def _boxes(self, wanted: TargetTensor) -> Iterator[tuple[int, Box]]:
        if self._world == 1 or not is_divided(wanted):
            yield self.files.lightest(), Box.whole(wanted.shape)
            return
        yield from self._rows(wanted.shape)

    def _rows(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        rows, *rest = shape
        zeros = (0,) * len(rest)
        for rank in range(self._world):
            start, stop = even_rows(rows, self._world, rank)
            if start < stop:
                yield rank, Box((start, *zeros), (stop - start, *rest))

    def _chunk(self, key: str, rank: int, box: Box) -> WrittenChunk:
        shard = self._content.part(key, box)
        place = self.files.add(rank, save_shard(shard, base=self.files.sizes[rank]))
        return WrittenChunk(box.offsets, box.sizes, place)


def _subclasses(content: Content) -> Mapping[str, Subclass]:
    checkpoint = content.checkpoint
    return checkpoint.subclasses if isinstance(checkpoint, DcpCheckpoint) else {}
