"""An opened Orbax checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ftckpt.checkpoint import (
    Checkpoint,
    Decoding,
    Payload,
    Piece,
    Scalar,
    SelfCheck,
    StepRole,
)
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.steps import is_counter, role_of
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.extents import Extent
from ftckpt.findings import Finding, finding, from_error
from ftckpt.progress import NULL, Counter
from ftckpt.storage.decompress import undone_length
from ftckpt.storage.source import Source

from .chunks import ChunkForm, payload_of
from .ocdbt import crc32c, read_database
from .tree import TreeFiles, check_beside, read_json

if TYPE_CHECKING:
    from ftckpt.formats.safetensors.records import StoredObjects

_INTEGERS = ("int", "uint")


class KeptObjects(NamedTuple):
    """Non-tensor state that `convert --to orbax` stored beside a tree.

    Attributes:
        folder: of the tree, "" or ending in a slash.
        source: the files below it.
        stored: the objects, with places in `source`.
    """

    folder: str
    source: Source
    stored: StoredObjects


@dataclass(kw_only=True, repr=False)
class OrbaxCheckpoint(Checkpoint):
    """A step's trees of arrays, and its items of JSON.

    Attributes:
        marker: the metadata that a counter's finding names.
        owned: the names of all files that belong to it.
        forms: how each chunk is stored, by its place.
        nodes: the manifests and nodes of the databases that are read, all of them checked.
        indexes: of shards, with their arrays' keys; all of them checked.
        databases: folders of the databases of single processes.
        trees: the items that are trees of arrays; "" is the step's own directory.
        paths: of each array, by key: its item, and its path in the tree.
        files: the trees, with what their chunks show, to hold the JSON beside them to.
        strings: of each string of a tree, by the name of its object: its item and its path.
        kept: of each object that lies in a folder of ftckpt's own, by name.
        steps: recorded there, by file.
        defects: found while opening.
    """

    format: ClassVar[str] = "orbax"

    marker: str
    owned: frozenset[str]
    forms: Mapping[Extent, ChunkForm]
    nodes: Sequence[Extent]
    indexes: Sequence[tuple[Extent, str]]
    databases: Sequence[str]
    trees: Sequence[str] = ()
    paths: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    files: Sequence[TreeFiles] = ()
    strings: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    kept: Mapping[str, KeptObjects] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    defects: Sequence[Finding] = field(default=())

    @property
    def loads_at_any_world(self) -> bool:
        """Return True: Orbax restores any mesh from any other."""
        return True

    @property
    def saving_ranks(self) -> int | None:
        """Return None: state beside arrays is saved once, and randomness lies in arrays."""
        return None

    @property
    def json_items(self) -> Set[str]:
        """Names of the objects that are items of JSON."""
        return self.objects.keys() - self.strings.keys() - self.kept.keys()

    def members(self) -> Iterable[str]:
        """Return all files of Orbax's names, and those that its databases refer to."""
        return sorted(self.owned)

    def load_object(self, name: str) -> Any:
        """Return an item of JSON, or a string of the tree."""
        if name in self.kept:
            return self.kept[name].stored.load(self.kept[name].source, name)
        item = self.objects[name]
        value = read_json(self.source, item.extent.file)
        for step in item.field:
            if not isinstance(value, dict) or step not in value:
                raise CorruptError(
                    f"{item.extent.file} lacks {name}", kind="bad-metadata", file=item.extent.file
                )
            value = value[step]
        return value

    def payload(self, piece: Piece) -> Payload:
        """Return where the elements of a chunk are, in its file or decoded."""
        return payload_of(piece, self.forms[piece.extent])

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield arrays that are missing or too many, and chunks of a wrong size."""
        yield from self.defects
        for files in self.files:
            yield from check_beside(self.source, files)
        for folder in self.databases:
            yield from _check_database(self.source, folder)
        for kept in {one.folder: one for one in self.kept.values()}.values():
            for found in kept.stored.check(kept.source):
                yield replace(found, file=f"{kept.folder}{found.file}")
        for key, info in self.tensors.items():
            for piece in info.pieces:
                form = self.forms[piece.extent]
                length = piece.extent.length
                wrong = not length if form.transforms else length != form.nbytes
                if wrong and (form.transforms or form.strides is not None):
                    yield finding(
                        "size-mismatch",
                        f"a chunk of {key} has {length} bytes and unfolds to {form.nbytes}"
                        if form.transforms
                        else f"a chunk of {key} needs {form.nbytes} bytes and has {length}",
                        file=self.source.stored(piece.extent.file), tensor=key,
                        offset=piece.extent.offset, length=length,
                    )  # fmt: skip

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the trainer's step, and the counts of the optimizer."""
        for file, step in self.steps.items():
            yield Scalar(file, "step", step, StepRole.ITERATION)
        left = limit
        for key, info in self.tensors.items():
            if info.shape or info.dtype.family not in _INTEGERS or not left:
                continue
            role = role_of(info.name)
            if info.component == "optimizer" and info.name.endswith(".count"):
                role = StepRole.OPTIMIZER
            if role is None or info.component not in ("optimizer", "extra:state", "model"):
                continue
            left -= 1
            value = decode_scalar(info.dtype, read_tensor(self, key))
            if is_counter(int(value) if value is not None else None):
                assert value is not None
                yield Scalar(self.marker, info.name, value, role)

    @property
    def decoding(self) -> Decoding:
        """Its own checks; its tensors are decoded as they are read."""
        return _Checks(self)


class _Checks(Decoding):
    """The CRC-32Cs of a checkpoint, and the decoding of chunks that none covers."""

    def __init__(self, checkpoint: OrbaxCheckpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def covers_all(self) -> bool:
        """Return False: Orbax itself writes chunks without a checksum."""
        return False

    def checks(self, *, sealed: bool) -> Iterator[SelfCheck]:
        """Yield the nodes and indexes, which opening has checked; every chunk with a CRC; others.

        A chunk without a CRC covers no bytes: it is decoded to see that it can be.
        """
        if sealed:
            return
        own = self._checkpoint
        for place in own.nodes:
            yield SelfCheck(place, "", place.length, _nothing)
        for place, key in own.indexes:
            stored = own.source.stored(place.file)
            if stored == place.file:
                yield SelfCheck(place, key, place.length, _nothing)
        for key, info in own.tensors.items():
            for piece in info.pieces:
                form = own.forms[piece.extent]
                file, offset, length = piece.extent
                stored = own.source.stored(file)
                inline = stored != file
                read = partial(_check_chunk, own, key, piece, form)
                if form.crc and not inline:
                    place = Extent(file, offset, length + 4)
                    yield SelfCheck(place, key, form.nbytes, read)
                elif form.crc or form.transforms:
                    place = Extent(stored, 0 if inline else offset, 0)
                    alone = not form.crc
                    yield SelfCheck(place, key, form.nbytes, read, only_decodes=alone)


def _nothing() -> None:
    """Do nothing: it was checked when the checkpoint was opened."""


def _check_database(source: Source, folder: str) -> Iterator[Finding]:
    """Yield what is damaged or cut off of what one process wrote, whether it is reached or not."""
    try:
        database = read_database(source, folder)
    except FtckptError as error:
        yield from_error(error)
        return
    ends: dict[str, int] = {}
    for place in (*(value.extent for value in database.values.values()), *database.older):
        ends[place.file] = max(place.end, ends.get(place.file, 0))
    for file, end in ends.items():
        entry = source.entries.get(file)
        if entry is None:
            yield finding("missing-file", f"{file} is missing", file=file)
        elif entry.size < end:
            said = f"{file} ends at byte {entry.size} of {end}"
            yield finding("truncated-file", said, file=file)


def _check_chunk(checkpoint: OrbaxCheckpoint, key: str, piece: Piece, form: ChunkForm) -> None:
    """Compare a chunk with its CRC-32C, and decode it to its end."""
    place = piece.extent
    stored = checkpoint.source.stored(place.file)

    def damaged(said: str, kind: str) -> CorruptError:
        return CorruptError(
            f"a chunk of {key} in {stored} {said}",
            kind=kind, file=stored, tensor=key, offset=place.offset, length=place.length,
        )  # fmt: skip

    with checkpoint.source.open(place.file) as reader:
        if form.crc:
            raw = reader.read(place.offset, place.length + 4)
            if crc32c(memoryview(raw)[:-4]) != int.from_bytes(raw[-4:], "little"):
                raise damaged("does not match its CRC-32C", "bad-crc")
        if not form.transforms:
            return
        found = undone_length(reader, place, form.transforms, limit=form.nbytes + 1)
        if found != form.nbytes:
            some = f"more than {form.nbytes}" if found > form.nbytes else str(found)
            raise damaged(f"unfolds to {some} bytes of {form.nbytes}", "bad-transform")
