"""An opened set of rank files: its records, its step counters, its objects.

Locate each tensor in the files of a rank.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, Piece, Record, Scalar, StepRole, TensorInfo
from ftckpt.checkpoint.steps import Allowance
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.findings import Finding, from_error
from ftckpt.formats.pickles.walk import Path, at, dotted, leaves
from ftckpt.formats.state.coded_shards import CodedParts
from ftckpt.formats.state.paths import IsList, RecordedPaths, recorded_paths, tensor_paths
from ftckpt.formats.torch_files.parse_files import check_saved_names, check_streams
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.progress import NULL, Counter
from ftckpt.transfer.content import Content, TargetTensor

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


class RankPlace(NamedTuple):
    """A place: in which file of a rank, where in its tree, and whose it is; None is everyone's."""

    role: Role
    path: Path
    owner: int | None


class RankPlaces:
    """The places of the tensors of some content.

    Attributes:
        found: by key.
        unplaced: keys of tensors that the format has no place for.
    """

    def __init__(
        self, content: Content, *, whole: bool, inside: Mapping[str, str] | None = None
    ) -> None:
        """Find the places.

        Args:
            content: what is to be written.
            whole: whether a rank has one file, which holds other components too.
            inside: keys of tensors inside a subclass, and what follows its name. They have its
                place, and this at the end.
        """
        self._inside = inside or {}
        self.found: dict[str, RankPlace] = {}
        self.unplaced: list[str] = []
        self._checkpoint = content.checkpoint
        self._ranks = placed_as_in(content.checkpoint)
        self._trees: dict[str, tuple[Any, dict[str, Path]]] = {}
        others: list[TargetTensor] = []
        for key, wanted in content.tensors.items():
            place = self._own(wanted)
            if place is None:
                others.append(wanted)
            else:
                self.found[key] = place
        paths, lost = tensor_paths(content.with_tensors(others), RecordedPaths({}, {}))
        self.unplaced += lost
        recorded = recorded_paths(self._checkpoint).tensors if paths else {}
        self._lists: set[Path] = set()
        for key, path in paths.items():
            nested = recorded.get(key, path)
            alone = OF_ONE_RANK.fullmatch(content.tensors[key].component)
            if alone and dotted(nested) == dotted(path):
                # A store says how the state of one rank was nested, with numbers for lists alone.
                path = nested
                self._lists |= {path[1:n] for n, step in enumerate(path) if type(step) is int}
            place = _named(content.tensors[key], path, whole=whole)
            if place is None:
                self.unplaced.append(key)
            else:
                self.found[key] = place

    def tree(self, key: str) -> Any:
        """Return the tree of the source's file that holds a tensor; None where it is not known."""
        info = self._checkpoint.tensors.get(key)
        held = None if info is None or not info.pieces else self._trees.get(_file_of(info))
        return None if held is None else held[0]

    def is_list(self, role: Role) -> IsList:
        """Return what says which containers of a file are lists: those that were."""
        trees = [
            tree
            for file, (tree, _) in self._trees.items()
            if self._ranks is not None and self._ranks.role_of(file) is role
        ]

        def says(path: Path) -> bool:
            nested = role is Role.EXTRA and path in self._lists
            return nested or any(_is_list(tree, path) for tree in trees)

        return says

    def _own(self, wanted: TargetTensor) -> RankPlace | None:
        """Return where the source has a tensor, if it is a source of this format."""
        if self._ranks is None or len(wanted.copies) != 1:
            return None
        info = self._checkpoint.tensors[wanted.copies[0].key]
        if info.name != wanted.name or not info.pieces:
            return None
        suffix = self._inside.get(wanted.key, "")
        path = self._path(info, suffix)
        match = OF_ONE_RANK.fullmatch(wanted.component)
        if path is not None and suffix:
            path = (*path[:-1], f"{path[-1]}{suffix}")
        role = self._ranks.role_of(_file_of(info))
        return None if path is None else RankPlace(role, path, int(match[1]) if match else None)

    def _path(self, info: TensorInfo, suffix: str) -> Path | None:
        file = _file_of(info)
        if file not in self._trees:
            assert self._ranks is not None
            tree = self._ranks.tree_of(file)
            self._trees[file] = tree, {dotted(path): path for path, _ in leaves(tree)}
        # What is one rank's own stands under the rank's name, where another component had it.
        own = info.name.removeprefix(f"{info.component.removeprefix('extra:')}.")
        return self._trees[file][1].get((info.stored_name or own).removesuffix(suffix))


def _file_of(info: TensorInfo) -> str:
    return info.pieces[0].extent.file


def _named(wanted: TargetTensor, path: Path, *, whole: bool) -> RankPlace | None:
    """Return the place of a tensor by its path in a nested state."""
    match = OF_ONE_RANK.fullmatch(wanted.component)
    if match:
        return RankPlace(Role.EXTRA, path[1:], int(match[1]))
    roles = {"model": Role.MODEL, "optimizer": Role.OPTIMIZER}
    role = roles.get(wanted.component)
    if role is not None:
        return RankPlace(role, path[1:], None)
    return RankPlace(Role.EXTRA, path, None) if whole and wanted.component == "ema" else None


def placed_as_in(checkpoint: Checkpoint) -> RanksCheckpoint | None:
    """Return the source if what is written stands where it stood in its files; None for others."""
    if not isinstance(checkpoint, RanksCheckpoint):
        return None
    return checkpoint if type(checkpoint) is RanksCheckpoint or checkpoint.keeps_places else None


def _is_list(tree: Any, path: Path) -> bool:
    try:
        return type(at(tree, path)) is list
    except KeyError:
        return False
