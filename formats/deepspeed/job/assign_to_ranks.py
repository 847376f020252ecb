"""Distribute state that ZeRO does not cut to the files of another grid of ranks.

Every file repeats some of it: the scheduler, the configuration, the loss scale, the client's own
keys. A rank that the source has too gets what that rank saved. A rank that is new gets what the
source's files hold alike, and nothing of what differs (a random stream). What differs and belonged
to a rank that has gone has no place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ftckpt.checkpoint import TensorInfo
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import DeepSpeedFile
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Elements, Literal, Segment, Stored

from .shares import GROUPS, FileShare, FileState, PartitionRank

# Tensors in other state are random states: small. More than this is not read to be compared.
_COMPARED = 16 << 20
# How a component of one rank alone begins; its number follows.
OWN = "extra:rank"


class OtherStateResult(Protocol):
    """Other state of the source, and what became of it; known when all files were laid out."""

    @property
    def unplaced(self) -> Sequence[str]:
        """Names of objects and keys of tensors that no file of the result has."""

    @property
    def notes(self) -> Sequence[Finding]:
        """What the user should know."""

    @property
    def tensors(self) -> Sequence[TargetTensor]:
        """Those inside, under the names that the result's ranks give them."""

    @property
    def same(self) -> Collection[str]:
        """Names of objects that mean the same in the result."""

    def strays(self, keys: Sequence[str]) -> set[str]:
        """Return those of some tensors' keys that lie in none of it."""


class RestOfRole:
    """The other state of all files of one role.

    Attributes:
        unplaced: names of objects and keys of tensors that no rank can have.
        notes: which ranks lack what.
        tensors: those inside, under the names that the result's ranks give them.
        same: names of objects that mean the same in the result.
    """

    def __init__(self, content: Content, states: Iterable[FileState]) -> None:
        """Take the states of what is to be written, one of each file or rank."""
        self._content = content
        self.unplaced: list[str] = []
        self.notes: list[Finding] = []
        self.tensors: list[TargetTensor] = []
        self.same: set[str] = set()
        self._states = {state.place: state for state in states}
        self._dealt: set[PartitionRank] = set()
        for state in self._states.values():
            self._leave_out(state)

    @classmethod
    def of(
        cls, content: Content, files: Sequence[DeepSpeedFile], decided: Collection[str] = ()
    ) -> RestOfRole:
        """Read the files of a DeepSpeed source, one after the other.

        Args:
            content: what is to be written.
            files: of one role.
            decided: labels of what is not the source's to say.

        Raises:
            CorruptError, UnsafeError: a file is not what it was when it was opened.
        """
        checkpoint = content.checkpoint
        assert isinstance(checkpoint, DeepSpeedCheckpoint)
        names = {(i.extent.file, tuple(i.field)): name for name, i in checkpoint.objects.items()}
        own: dict[str, list[TensorInfo]] = {}
        for info in checkpoint.tensors.values():
            if info.component.startswith(OWN):
                own.setdefault(info.pieces[0].extent.file, []).append(info)

        def read(file: DeepSpeedFile) -> FileState:
            state = FileState.of(file, checkpoint)
            state.names = {p: names[file.path, p] for p in state.fields if (file.path, p) in names}
            _index(state, own.get(file.path, ()))
            for path in [path for path, label in state.labels.items() if label in decided]:
                state.forget(path)
            return state

        return cls(content, map(read, files))

    @property
    def states(self) -> Collection[FileState]:
        """What was taken."""
        return self._states.values()

    def _leave_out(self, state: FileState) -> None:
        """Forget fields of which something was dropped."""
        for path in state.labels:
            name, keys = state.names.get(path), state.inside.get(path, [])
            dropped = name is not None and name not in self._content.objects
            if dropped or any(key not in self._content.tensors for key in keys):
                del state.fields[path]
                self.unplaced += (key for key in keys if key in self._content.tensors)
                if not dropped and name is not None:
                    self.unplaced.append(name)

    def deal(self, place: PartitionRank, rank: int, *, first: bool) -> FileShare:
        """Return what the file of one place of the result holds.

        Args:
            place: which.
            rank: its global rank in the result.
            first: whether it is the first file of the role, whose names have no rank.
        """
        state = self._states.get(place)
        self._dealt.add(place)
        if state is not None:
            self._keep(state, rank, first=first)
            return FileShare(state.fields, state.storages, state.at, state.layout)
        states = list(self._states.values())
        others = [s for s in states if s.place.mp == place.mp] or states
        if not others:
            return FileShare({}, {})
        shared = others[0].fields.keys() - others[0].private
        alike = {path for path in shared if self._alike(path, others)}
        for path in shared - alike:
            what = f"{others[0].labels[path]} was of each rank alone: rank {rank} has none"
            self.notes.append(finding("note", what, rank=rank))
        fields = {path: value for path, value in others[0].fields.items() if path in alike}
        return FileShare(fields, others[0].storages, others[0].at, others[0].layout)

    def _keep(self, state: FileState, rank: int, *, first: bool) -> None:
        prefix = "" if first else f"rank_{rank}."
        for path in state.fields:
            name = state.names.get(path)
            if name == prefix + state.labels[path]:
                self.same.add(name)
            for key in state.inside.get(path, ()):
                wanted = self._content.tensors[key]
                self.tensors.append(wanted._replace(component=f"{OWN}{rank}"))

    def strays(self, keys: Sequence[str]) -> set[str]:
        """Return those of some tensors' keys that lie in no field of these files."""
        states = self._states.values()
        return set(keys).difference(*(held for s in states for held in s.inside.values()))

    def settle(self) -> None:
        """Say what has no place, after everything was dealt."""
        for place, state in self._states.items():
            if place in self._dealt:
                continue
            near = {place.mp} & {dealt.mp for dealt in self._dealt}
            others = [s for s in self._states.values() if not near or s.place.mp in near]
            for path in state.fields:
                if not self._alike(path, others):
                    self.unplaced += [state.names[path]] if path in state.names else []
                    self.unplaced += state.inside.get(path, ())

    def _alike(self, path: Path, states: Sequence[FileState]) -> bool:
        """Say whether all files hold the same at a path, the tensors inside included."""
        if any(path not in state.fields for state in states):
            return False
        return len({self._bytes(state, path) for state in states}) == 1

    def _bytes(self, state: FileState, path: Path) -> bytes:
        try:
            text, storages = pickled(CopiedTree(state.fields[path], state.storages))
        except UnsupportedError as error:
            error.file = state.path
            raise
        if sum(storage.nbytes for storage in storages) > _COMPARED:
            return f"{state.path}: not compared".encode()
        return text + b"".join(self._data(s) for storage in storages for s in storage.segments)

    def _data(self, segment: Segment) -> bytes:
        if isinstance(segment, Literal):
            return segment.data
        if isinstance(segment, Elements):
            keys = [fill.key for fill in segment.shard.fills]
            return b"".join(read_tensor(self._content.checkpoint, key) for key in keys)
        assert isinstance(segment, Stored)
        return self._content.checkpoint.source.read(*segment.extent)


def _index(state: FileState, own: Sequence[TensorInfo]) -> None:
    """Find which of a file's own tensors lie in which field."""
    for info in own:
        fits = [path for path, label in state.labels.items() if _below(info.name, label)]
        if fits:
            path = max(fits, key=lambda path: len(state.labels[path]))
            state.inside.setdefault(path, []).append(info.key)


def _below(name: str, label: str) -> bool:
    return name == label or name.startswith(f"{label}.")


def unplaced(content: Content, rests: Sequence[OtherStateResult]) -> list[str]:
    """Return the names of objects and the keys of tensors that no file of the result has."""
    own = [key for key, wanted in content.tensors.items() if _is_own(wanted)]
    strays = set(own).intersection(*(rest.strays(own) for rest in rests))
    return sorted(strays.union(*(rest.unplaced for rest in rests)))


def stored(content: Content, rests: Sequence[OtherStateResult], *, renumbered: bool) -> Content:
    """Return what the files hold, under the names that the result's ranks give it.

    Args:
        content: what was to be written.
        rests: the other state.
        renumbered: whether parameter groups have other numbers than in the source.
    """
    kept = [wanted for wanted in content.tensors.values() if not _is_own(wanted)]
    found = content.with_tensors([*kept, *(wanted for rest in rests for wanted in rest.tensors)])
    same = {name for rest in rests for name in rest.same}
    if renumbered:
        same = {name for name in same if not name.endswith(f"optimizer.{GROUPS}")}
    objects = {name: info for name, info in found.objects.items() if name in same}
    return replace(found, objects=objects)


def _is_own(wanted: TargetTensor) -> bool:
    return wanted.component.startswith(OWN)
