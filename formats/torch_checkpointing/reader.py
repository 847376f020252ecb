"""Open a save of torch_checkpointing: the files of all ranks, placed by the metadata.

A file holds DTensors, or local tensors of which the metadata say how they lie in the whole; what
both say must agree. A tensor that the metadata do not list is its rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.checkpoint import Commit, CommitState
from ftckpt.errors import CorruptError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.ranks.contents import Contents, RankTensor
from ftckpt.formats.ranks.names import RankFile
from ftckpt.formats.ranks.parse_files import RecordedConfig
from ftckpt.formats.ranks.reader import RanksReader
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.parse_files import opaque_notes
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed, Mesh
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .checkpoint import TorchCheckpointingCheckpoint
from .items import ItemFiles
from .metadata import Metadata, RecordedItem, Sharding, read_metadata
from .names import METADATA, default_name


def open_torch_checkpointing(source: Source) -> TorchCheckpointingCheckpoint:
    """Open a save (see `TorchCheckpointing.open`)."""
    with no_gc():
        return _Reader(source).checkpoint()


class _Reader(RanksReader):
    """Collects what the files of all items hold."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, None)
        self._metadata = read_metadata(source)
        self._items = ItemFiles.of(source, self._metadata)

    def parsed(
        self, files: Sequence[RankFile]
    ) -> Iterator[tuple[RankFile, TorchStream | CorruptError]]:
        """Yield what each file holds, however it is written."""
        return self._items.streams(files)

    def checkpoint(self) -> TorchCheckpointingCheckpoint:
        """Read all files and put their tensors together."""
        world = self._metadata.world_size
        self.world_size, self.evidence = world, METADATA
        self.found += _missing(self._items, self._metadata)
        contents = self._read(self._items.rank_files(world), "")
        if not self.streams and self.broken:
            raise self.broken[0]
        for one, _ in contents:
            self._place(one)
        self._merge(contents, "model", RecordedConfig(), world)
        self.notes += opaque_notes(self.opaque)
        self.commit = Commit(CommitState.COMMITTED, METADATA)
        return TorchCheckpointingCheckpoint(
            **self.parts(),
            dialect="torch_checkpointing",
            files=sorted({*self._items.files, METADATA}),
            item_files=self._items,
        )

    def _place(self, contents: Contents) -> None:
        """Give each tensor of a file its place by the metadata; report what contradicts them."""
        item_file = self._items.files[contents.file.path]
        item = self._metadata.items.get(item_file.item)
        if item is None:
            return
        prefix = f"{item_file.item}." if self._items.is_wrapped(item_file.item) else ""
        placed: list[RankTensor] = []
        seen: set[str] = set()
        for tensor in contents.tensors:
            name = tensor.stored_name.removeprefix(prefix)
            said = _of_rank(item, name, item_file.rank)
            if said is not None:
                seen.add(name)
                held, wrong = self._held(tensor.held, said, item_file.rank)
                if wrong:
                    self._report(wrong, tensor.where.name, contents.file)
                    continue
                tensor = tensor._replace(held=held)
            placed.append(tensor)
        for name in item.tensors.keys() - seen:
            if _of_rank(item, name, item_file.rank) is not None:
                what = f"{contents.file.path} lacks {name}, which {METADATA} says it holds"
                self.found.append(
                    finding("missing-tensor", what, file=contents.file.path, tensor=name,
                            rank=item_file.rank)
                )  # fmt: skip
        contents.tensors = placed
        contents.sharded = True

    def _report(self, wrong: str, name: str, file: RankFile) -> None:
        what = f"{name} {wrong} in {file.path}, against {METADATA}"
        self.found.append(
            finding("bad-metadata", what, file=file.path, tensor=name, rank=file.rank)
        )

    def _held(self, held: Held, said: Sharding, rank: int) -> tuple[Held, str]:
        """Return what a rank holds with its place, or what contradicts the metadata."""
        if (held.dtype, *held.shape) != (said.dtype, *said.shape) and isinstance(
            held, (Distributed, Listed)
        ):
            return held, f"is {held.dtype.name} {list(held.shape)}"
        if isinstance(held, Distributed):
            same = said.mesh is not None and held.mesh.sizes == said.mesh.sizes
            if not same or held.placements != said.placements:
                return held, "has another mesh or placement"
            return held, ""
        if isinstance(held, Listed):
            return held, "lists its shards" if said.mesh is not None else ""
        if held.dtype is not said.dtype:
            return held, f"is {held.dtype.name}"
        if said.mesh is not None:
            mesh = Mesh(said.mesh.sizes, said.mesh.coordinate(rank), rank, said.mesh.names)
            return Distributed(said.shape, said.dtype, held, mesh, said.placements), ""
        return self._listed(held, said, rank)

    def _listed(self, held: TensorRef, said: Sharding, rank: int) -> tuple[Held, str]:
        shards = []
        for box, start in said.boxes:
            inside = len(held.shape) == len(start) and all(
                at + size <= whole
                for at, size, whole in zip(start, box.sizes, held.shape, strict=True)
            )
            if not inside:
                return held, f"has a part of {list(box.sizes)} at {list(start)} outside of the file"
            first = sum(at * stride for at, stride in zip(start, held.strides, strict=True))
            part = held._replace(shape=box.sizes, storage_offset=held.storage_offset + first)
            shards.append((Patch(box, (0,) * len(start)), part))
        return Listed(said.shape, said.dtype, tuple(shards), (), rank, self.world_size), ""


def _of_rank(item: RecordedItem, name: str, rank: int) -> Sharding | None:
    return next((one for one in item.tensors.get(name, ()) if rank in one.ranks), None)


def _missing(items: ItemFiles, metadata: Metadata) -> Iterator[Finding]:
    """Yield the ranks whose file of an item is not there.

    Of an item that the metadata list they say whose files there are. Of another, either all ranks
    have one, or the first alone; with some of them, the others were lost.
    """
    held: dict[str, set[int]] = {}
    for file in items.files.values():
        if file.path in items.source.entries:
            held.setdefault(file.item, set()).add(file.rank)
    every = set(range(metadata.world_size))
    for name in sorted({file.item for file in items.files.values()}):
        listed_here = metadata.items.get(name)
        there = held.get(name, set())
        wanted = set(listed_here.files) if listed_here else every if len(there) > 1 else there
        absent = sorted(wanted - there)
        if absent:
            known = listed_here.files.get(absent[0]) if listed_here else None
            path = known.path if known else default_name(name, absent[0])
            told = f"ranks {listed([str(rank) for rank in absent])} have no file of {name}"
            if len(absent) == 1:
                told = f"{path}, the file of {name} of rank {absent[0]}, is not there"
            yield finding("missing-rank", told, file=path, rank=absent[0])
        for rank in sorted(there - every):
            told = f"a file of {name} is of rank {rank}, and the world has {metadata.world_size}"
            yield finding("world-size", told, file=f"{name}_{rank}.pt", rank=rank)
