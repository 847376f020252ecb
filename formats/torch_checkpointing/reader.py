"""Open a save of torch_checkpointing: the files of all ranks, placed by the metadata.

A file holds DTensors, or local tensors of which the metadata say how they lie in the whole; what
both say must agree. A tensor that the metadata do not list is its rank's own.

Read the files of items, however they are written, as the trees that torch.save would hold.

What is neither the model, nor an optimizer, nor sharded stands under its item's name, as in the
mapping that the job saved: `train_state` and `step` of all items would be one otherwise.

An opened save of torch_checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ftckpt.checkpoint import Commit, CommitState, Extent
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError, NewerWriterError, NotFoundError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.pickles.walk import at
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.contents import Contents, RankTensor
from ftckpt.formats.ranks.names import FileSpelling, RankFile, Role
from ftckpt.formats.ranks.parse_files import RecordedConfig, read_stream, read_streams
from ftckpt.formats.ranks.reader import RanksReader
from ftckpt.formats.safetensors.header import Header, read_headers
from ftckpt.formats.state.stored_names import AVERAGES, MODELS, OPTIMIZERS
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.parse_files import opaque_notes
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed, Mesh
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse
from ftckpt.workers.memory import no_gc

from .metadata import Metadata, RecordedItem, Sharding, read_metadata
from .names import METADATA, REST, ItemFile, default_name, item_file

TORCH, JSON, RAW, SAFETENSORS = (
    f"{name}Serialization" for name in ("Torch", "Json", "Raw", "Safetensors")
)
_BY_SUFFIX = {"pt": TORCH, "json": JSON, "safetensors": SAFETENSORS}
_MOST_JSON = 64 << 20
_MOST_RAW = 64 << 20
_LIMITS = JsonLimits(depth=64, objects=1_000_000, keys=4_000_000, items=8_000_000, naturals=False)


@dataclass(frozen=True)
class ItemFiles:
    """The files of a save.

    Attributes:
        source: where they lie.
        files: by path.
        roles: item -> what it is.
    """

    source: Source
    files: Mapping[str, ItemFile]
    roles: Mapping[str, Role]

    @classmethod
    def of(cls, source: Source, metadata: Metadata) -> ItemFiles:
        """Collect what the metadata name, and files of other items by their default names.

        The metadata list sharded items alone. A name that they have not says an item by its form.
        """
        files = {
            file.path: file for item in metadata.items.values() for file in item.files.values()
        }
        for name in sorted(source.entries):
            found = None if name == METADATA or name in files else item_file(name)
            known = metadata.items.get(found.item) if found is not None else None
            if found is not None and (known is None or found.rank not in known.files):
                kind = _BY_SUFFIX.get(name.rpartition(".")[2], RAW)
                files[name] = found._replace(kind=kind)
        items = dict.fromkeys(file.item for file in files.values())
        return cls(source, files, {item: _role(item, metadata) for item in items})

    def rank_files(self, world: int) -> list[RankFile]:
        """Return the files that are there, as files of ranks of a world."""
        found = []
        for file in self.files.values():
            if file.path in self.source.entries:
                before = file.path.removesuffix(f"{file.rank}.pt")
                spelling = FileSpelling(before, 1, "", 0, ".pt")
                role = self.roles[file.item]
                found.append(RankFile(file.path, role, file.rank, world, spelling, word=file.item))
        return found

    def streams(
        self, files: Sequence[RankFile]
    ) -> Iterator[tuple[RankFile, TorchStream | CorruptError]]:
        """Yield what each file holds, or the damage that keeps it from being parsed.

        Raises:
            UnsafeError, UnsupportedError: of the first file that is hostile or of another format.
        """
        torch = [f for f in files if self.files[f.path].kind == TORCH]
        for file, stream in read_streams(self.source, torch):
            if not isinstance(stream, CorruptError):
                stream = stream._replace(tree=self._under(file.path, stream.tree))
            yield file, stream
        tensors = [f for f in files if self.files[f.path].kind == SAFETENSORS]
        headers = read_headers(self.source, [f.path for f in tensors])
        for file in tensors:
            header = headers[file.path]
            if isinstance(header, CorruptError):
                yield file, header
                continue
            tree = _tensors(header)
            storages = {
                one.name: StoredStorage(
                    Extent(file.path, one.begin, one.end - one.begin), one.dtype,
                    tree[one.name].numel,
                )
                for one in header.tensors
            }  # fmt: skip
            yield file, TorchStream(self._under(file.path, tree), storages, (), None, file.path)
        for file in files:
            if self.files[file.path].kind in (JSON, RAW):
                try:
                    yield file, TorchStream(self.tree(file.path), {}, (), None, file.path)
                except CorruptError as error:
                    error.file = error.file or file.path
                    yield file, error

    def tree(self, path: str) -> Any:
        """Return what a file holds, under the name of its item where it stands under that.

        Raises:
            CorruptError: it cannot be parsed.
            UnsafeError: it is hostile.
            NewerWriterError: it is written in a way that is not known.
        """
        kind = self.files[path].kind
        if kind == TORCH:
            return self._under(path, read_stream(self.source, path).tree)
        if kind == SAFETENSORS:
            header = read_headers(self.source, [path])[path]
            if isinstance(header, CorruptError):
                raise header
            return self._under(path, _tensors(header))
        if kind == JSON:
            self._require(path, _MOST_JSON)
            raw = self.source.read(path)
            said = parse(raw, _LIMITS, file=path, what="item", bad="bad-index", unsafe="unsafe")
            return self._under(path, said)
        if kind == RAW:
            self._require(path, _MOST_RAW)
            return self._under(path, self.source.read(path))
        raise NewerWriterError.of(
            f"how {path} is written",
            expected="torch, JSON, raw or safetensors",
            found=kind,
            file=path,
        )

    def _require(self, path: str, most: int) -> None:
        if self.source.size(path) > most:
            raise CorruptError(f"{path} is too long for what it is", kind="bad-index", file=path)

    def _under(self, path: str, tree: Any) -> Any:
        item = self.files[path].item
        return {item: tree} if self.is_wrapped(item) else tree

    def is_wrapped(self, item: str) -> bool:
        """Whether what an item's files hold stands under its name."""
        return self.roles[item] is Role.EXTRA and item != REST


def _tensors(header: Header) -> dict[str, TensorRef]:
    return {
        one.name: TensorRef(one.name, 0, one.shape, dense_strides(one.shape), one.dtype)
        for one in header.tensors
    }


def _role(item: str, metadata: Metadata) -> Role:
    """Return what an item is: by its name, and a sharded one by that it is sharded."""
    if item in MODELS:
        return Role.MODEL
    if item in OPTIMIZERS:
        return Role.OPTIMIZER
    sharded = bool(metadata.items.get(item))
    return Role.WHOLE if item in AVERAGES or sharded else Role.EXTRA


@dataclass(kw_only=True, repr=False)
class TorchCheckpointingCheckpoint(RanksCheckpoint):
    """An opened save: files of ranks, whose tensors the metadata place.

    Attributes:
        item_files: which file holds what, and how it is written.
    """

    format: ClassVar[str] = "torch-checkpointing"
    shares_what_is_alike: ClassVar[bool] = True
    keeps_places: ClassVar[bool] = True

    item_files: ItemFiles

    def role_of(self, file: str) -> Role:
        """Return what a file holds, by its item."""
        return self.item_files.roles[self.item_files.files[file].item]

    def tree_of(self, file: str) -> Any:
        """Return what a file holds, as a tree."""
        return self.item_files.tree(file)

    def load_object(self, name: str) -> Any:
        """Return one object as inert data; see `Checkpoint.load_object`."""
        info = self.objects.get(name)
        if info is None:
            raise NotFoundError(f"no object is called {name!r}", tensor=name)
        if name in self.coded:
            return self.coded[name].tensor.record
        file = info.extent.file
        try:
            return at(self.item_files.tree(file), tuple(info.field))
        except KeyError:
            raise CorruptError(
                f"{file} no longer holds {name}", kind="changed-file", tensor=name
            ) from None


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
