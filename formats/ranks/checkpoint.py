"""An opened set of rank files: its records, its step counters, its objects."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ftckpt.checkpoint import Checkpoint, Kind, Piece, Record, Scalar, StepRole, TensorInfo
from ftckpt.checkpoint.steps import Allowance
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.findings import Finding, from_error
from ftckpt.formats.pickles.walk import Path, at, dotted, leaves
from ftckpt.formats.state.coded_shards import CodedParts
from ftckpt.formats.torch_files.parse_files import check_saved_names, check_streams
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.progress import NULL, Counter

from .meta_llama.checklist import CHECKLIST, check_checklist, read_checklist
from .names import OF_ONE_RANK, Role, rank_file
from .parse_files import read_stream
from .tensors import RankSplit


@dataclass(kw_only=True, repr=False)
class RanksCheckpoint(Checkpoint):
    """An opened set of rank files.

    Attributes:
        files: every file that belongs to it, sorted.
        names: dotted names of the non-tensor state.
        counters: step counters of the non-tensor state.
        streams: each file's archive and storages, without its tree.
        elsewhere: (file, stored name) of what a file holds of a tensor under another name than its
            `stored_name`: pipeline stages number the parameters of their optimizers by themselves.
        splits: key -> how a plain tensor is cut over the ranks.
        coded: the tensor subclasses that are cut over ranks, each by the object that is its record.
        groups_number_states, shares_what_is_alike: see `HasGroups` of
            `formats.state.of_all_ranks`.
        keeps_places: whether writers of files of ranks put a subclass's state where it stood in its
            files, as they do with files of this format itself.
    """

    format: ClassVar[str] = "ranks"
    groups_number_states: ClassVar[bool] = True
    shares_what_is_alike: ClassVar[bool] = False
    keeps_places: ClassVar[bool] = False

    files: Sequence[str]
    names: Sequence[str]
    counters: Sequence[Scalar]
    streams: Mapping[str, TorchStream]
    ranks: Mapping[str, int]
    elsewhere: Set[tuple[str, str]] = frozenset()
    splits: Mapping[str, RankSplit] = field(default_factory=dict)
    coded: Mapping[str, CodedParts] = field(default_factory=dict)

    def role_of(self, file: str) -> Role:
        """Return what a file holds, by its name."""
        found = rank_file(file)
        return Role.EXTRA if found is None else found.role

    def tree_of(self, file: str) -> Any:
        """Return what a file holds, as a tree.

        Raises:
            CorruptError, UnsafeError, UnsupportedError: see `parse_stream`.
        """
        return read_stream(self.source, file).tree

    def members(self) -> Iterable[str]:
        """Paths of the rank files, their configuration and verl's own additions."""
        return self.files

    def fields(self) -> Iterable[str]:
        """Names of the non-tensor state of all ranks, as deep as the pickles say."""
        return self.names

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield missing ranks, mixed worlds, wrong ranks, shapes that disagree, odd archives."""
        yield from self.open_findings
        yield from check_streams(self.source, self.streams)
        yield from check_saved_names(self.streams, self.ranks)
        if CHECKLIST in self.members():
            try:
                yield from check_checklist(self.source)
            except (CorruptError, UnsafeError) as error:
                yield from_error(error)

    def file_digests(self) -> Mapping[str, str]:
        """Return the MD5 in the `checklist.chk` of one of Meta's releases."""
        return read_checklist(self.source) if CHECKLIST in self.members() else {}

    def load_object(self, name: str) -> Any:
        """Return one object as inert data; see `Checkpoint.load_object`."""
        info = self.objects.get(name)
        if info is None:
            raise NotFoundError(f"no object is called {name!r}", tensor=name)
        if name in self.coded:
            return self.coded[name].tensor.record
        path = tuple(info.field)
        try:
            return at(read_stream(self.source, info.extent.file).tree, path)
        except KeyError:
            raise CorruptError(
                f"{info.extent.file} no longer holds {name}", kind="changed-file", tensor=name
            ) from None

    def own_paths(self) -> Mapping[str, Path]:
        """Return where tensors that one rank alone has stand in its state (see `NestsOwn`).

        A step that is a number stands for a list; keys that are numbers have a flat name.
        """
        owned: dict[str, list[TensorInfo]] = defaultdict(list)
        for info in self.tensors.values():
            if OF_ONE_RANK.fullmatch(info.component) and info.pieces:
                owned[info.pieces[0].extent.file].append(info)
        found: dict[str, Path] = {}
        for file, infos in owned.items():
            tree = read_stream(self.source, file).tree
            paths = {dotted(path): path for path, _ in leaves(tree)}
            for info in infos:
                path = paths.get(info.name, ())
                lists = (n for n, step in enumerate(path) if type(step) is int)
                if path and all(type(at(tree, path[:n])) is list for n in lists):
                    found[info.key] = (info.component.removeprefix("extra:"), *path)
        return found

    def records(self) -> Iterator[Record]:
        """Yield every record of every file, with the tensor or object that owns its bytes."""
        owners: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for key, tensor in self.tensors.items():
            for piece in tensor.pieces:
                owners[piece.extent.file].append((piece.extent.offset, key))
        pickles = {info.extent: info.name for name, info in self.objects.items()
                   if name not in self.coded}  # fmt: skip
        for file, stream in self.streams.items():
            records = stream.records
            starts = [extent.offset for _, extent, _ in records]
            held: dict[int, str] = {}
            for offset, key in owners[file]:
                held.setdefault(bisect_right(starts, offset) - 1, key)
            for number, (name, extent, crc) in enumerate(records):
                owner = pickles.get(extent) or f"{file}:{name}"
                if name.startswith("data/"):
                    owner = held.get(number, owner)
                yield Record(extent, crc, owner, self.ranks.get(file))

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the counters in the non-tensor state, then the optimizer's `step` tensors."""
        allowance = Allowance(limit)
        for scalar in self.counters:
            if allowance.take(scalar.file):
                yield scalar
        wanted: list[tuple[TensorInfo, Piece]] = []
        for tensor in self.tensors.values():
            is_step = tensor.kind is Kind.OTHER and tensor.name.endswith(".step")
            if not is_step or tensor.numel != 1 or tensor.dtype.name not in _NUMBERS:
                continue
            for piece in tensor.pieces:
                if allowance.take(piece.extent.file):
                    wanted.append((tensor, piece))
        blocks = self.source.read_many([piece.extent for _, piece in wanted])
        for (tensor, piece), block in zip(wanted, blocks, strict=True):
            (value,) = struct.unpack(_NUMBERS[tensor.dtype.name], block)
            yield Scalar(piece.extent.file, tensor.key, float(value), StepRole.OPTIMIZER)


_NUMBERS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
