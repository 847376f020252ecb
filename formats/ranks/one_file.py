"""One file of `torch.save` that holds the shards of several ranks, read as the whole tensors.

The file was written in one piece, so what it lacks is lost and not still being written: ranks that
are missing, and elements that no shard holds, are damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ftckpt.checkpoint import Extent, ObjectInfo, Scalar, StepRole
from ftckpt.checkpoint.steps import role_of
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.formats.pickles.walk import at, dotted
from ftckpt.formats.ranks.training_tree import TrainingTree
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .checkpoint import RanksCheckpoint
from .contents import Contents
from .files import SHOWN, Size, check_set, size_of
from .names import RankFile, Role
from .nested_shards import Inside, InsideRanks
from .parse_files import RecordedConfig
from .reader import RanksReader
from .recorded_job import Evidence


@dataclass(kw_only=True, repr=False)
class OneFileRanksCheckpoint(RanksCheckpoint):
    """An opened file that holds the shards of several ranks.

    Attributes:
        tree: what it holds.
    """

    format: ClassVar[str] = "torchsave"

    tree: Any = field(repr=False)

    def load_object(self, name: str) -> Any:
        """Return one object as inert data."""
        if name in self.coded:
            return self.coded[name].tensor.record
        return at(self.tree, self.objects[name].field)


def open_one_file(
    source: Source, stream: TorchStream, inside: InsideRanks
) -> OneFileRanksCheckpoint:
    """Put the shards of a file together.

    Args:
        source: the place of the file.
        stream: the file, parsed.
        inside: the ranks' parts of its tree.

    Raises:
        CorruptError: what is recorded of a tensor cannot be.
        UnsupportedError: a tensor that no strided view describes.
    """
    with no_gc():
        try:
            return _OneFile(source, stream, inside).checkpoint()
        except FtckptError as error:
            error.file = stream.file
            raise


class _OneFile(RanksReader):
    """Collects what the ranks' parts hold, and then what stands beside them."""

    def __init__(self, source: Source, stream: TorchStream, inside: InsideRanks) -> None:
        super().__init__(source, None)
        self._stream, self._inside = stream, inside
        self._places: set[tuple[str, str]] = set()

    def checkpoint(self) -> OneFileRanksCheckpoint:
        file, rest = self._stream.file, self._inside.rest
        self.streams[file] = self._stream._replace(tree=None)
        read = [(self._contents(part), self._stream.storages) for part in self._inside.parts]
        self._check([contents for contents, _ in read], rest)
        self._merge(read, "model", RecordedConfig(), self.world_size)
        self.found = [replace(one, file=file) for one in self.found]
        self.notes = [replace(one, file=file) for one in self.notes]
        self._beside_them(rest)
        if self._stream.opaque:
            what = f"{file} names classes that are kept inert: {', '.join(self._stream.opaque[:8])}"
            self.notes.append(finding("opaque-object", what, file=file))
        return OneFileRanksCheckpoint(
            **(self.parts() | {"elsewhere": self._places | self.coded_places}),
            dialect="the shards of several ranks in one file",
            files=[file],
            tree=self._stream.tree,
        )

    def _contents(self, part: Inside) -> Contents:
        """Sort one rank's part; names of places become those in the file."""
        file = self._stream.file
        named = RankFile(f"{file} (rank {part.rank})", Role.WHOLE, part.rank, None)
        contents = Contents(named, self._stream._replace(tree=part.tree), [], "")
        found = []
        for one in contents.tensors:
            stored = _real(part, one.stored_name)
            self._places.add((file, stored))
            found.append(one._replace(stored_name=stored))
        contents.tensors = found
        self.names += contents.names
        self.counters += (Scalar(file, n.name, n.value, n.role) for n in contents.numbers)
        for name, info in contents.objects.items():
            path = part.path(tuple(info.field))
            if part.prefix:  # else it is a word beside a shard
                self.objects[name] = ObjectInfo(name, self._pickle(), part.rank, path)
        step, roles = contents.evidence.step, {n.role for n in contents.numbers}
        if step is not None and StepRole.ITERATION not in roles:
            self.counters.append(
                Scalar(file, contents.evidence.spelled["step"], step, StepRole.ITERATION)
            )
        return contents

    def _pickle(self) -> Extent:
        file = self._stream.file
        own = (extent for name, extent, _ in self._stream.records if name == "data.pkl")
        return next(own, Extent(file, 0, self.source.size(file)))

    def _check(self, read: Sequence[Contents], rest: Any) -> None:
        """Hold the parts to what the file and they themselves record of the job."""
        file = self._stream.file
        ranks = [contents.file.rank for contents in read]
        if not self._inside.by_rank:
            self.world_size, self.evidence = 1 + max(ranks), "the shards of its tensors"
            return
        evidence = [contents.evidence for contents in read]
        told = Evidence(file, 0)
        told.read(rest)
        for one in evidence:
            one.take_counts(told)  # not its rank: that is of the one who wrote for all
            self.found += (
                finding("world-size", f"{one.file} {torn}", rank=one.number) for torn in one.torn
            )
            one.torn = []  # told; files of their own may repeat a configuration of another job
        beside = RecordedConfig(file, {} if told.step is None else {"step": told.step})
        files = [contents.file for contents in read]
        size = size_of(files, beside, evidence)
        self.world_size, self.evidence = size.files, size.known_by or "the highest rank"
        wrong = check_set(files, size, beside, evidence)
        self.found += (f for f in wrong if f.kind not in ("missing-rank", "count-unknown"))
        self.found += _missing(file, ranks, size)

    def _beside_them(self, rest: Any) -> None:
        """Add what is not a rank's: schedules, settings, an optimizer of whole tensors."""
        if not rest:
            return
        file, stream = self._stream.file, self._stream
        known = [(i.name, i) for i in self.tensors.values() if i.component == "model"]
        tree = TrainingTree(stream._replace(tree=rest), weights=known)
        for one in tree.tensors:
            info = one.info(stream)
            if self.tensors.setdefault(info.key, info) is not info:
                what = f"{file} holds {info.key} in shards and whole"
                self.found.append(finding("duplicate-tensor", what, file=file, tensor=info.key))
        for name, path in tree.objects.items():
            self.objects[name] = ObjectInfo(name, self._pickle(), None, path)
        self.names += tree.names
        self.notes += (finding("note", f"{file}: {said}", file=file) for said in tree.remarks)
        for number in tree.numbers:
            role = role_of(number.name, optimizer=number.optimizer)
            if role is not None:
                self.counters.append(Scalar(file, number.name, number.value, role))


def _real(part: Inside, stored: str) -> str:
    """Return the dotted path in the file of a dotted path in a rank's part."""
    if not part.prefix:
        return dotted(part.paths[stored])
    inner = stored if not part.added else stored.partition(".")[2]
    return f"{dotted(part.prefix)}.{inner}"


def _missing(file: str, ranks: Sequence[int], size: Size) -> Iterator[Finding]:
    absent = sorted(set(range(size.files)) - set(ranks)) if size.files < 1 << 20 else []
    for rank in absent[:SHOWN]:
        what = f"{file} holds no shards of rank {rank} of {size.files}: {size.known_by} says"
        yield finding("world-size", f"{what} how many there are", file=file, rank=rank)
    more = size.files - len(set(ranks)) - min(len(absent), SHOWN)
    if more > 0:
        yield finding("world-size", f"{file} lacks the shards of {more} more ranks", file=file)
