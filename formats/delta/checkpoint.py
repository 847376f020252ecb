"""Open a delta as an ordinary checkpoint that decodes tensors when they are read.

A tensor's one piece is packed: its extent is the rows of its blocks in the index, and its payload
is a file of `ComputedSource`. The base is opened when bytes are asked for, or when the delta is
checked, so that listing a root of deltas opens each of them once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ftckpt.checkpoint import (
    Checkpoint,
    Decoding,
    Extent,
    Look,
    Payload,
    Piece,
    Scalar,
    SelfCheck,
    StepRole,
)
from ftckpt.delta import NAME, Fill
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, finding, from_error
from ftckpt.formats.safetensors.records import StoredObjects
from ftckpt.formats.state.paths import RecordedPaths
from ftckpt.formats.state.wrappers import find_homes
from ftckpt.progress import NULL, Counter
from ftckpt.verification import check_structure
from ftckpt.verification.structure import Seal

from .chain import ChainLink, chain, is_damage, open_base, within
from .decoding import ChainDecoder


@dataclass(kw_only=True, repr=False)
class DeltaCheckpoint(ChainLink):
    """A delta, with its base where it has one.

    Attributes:
        stored: the non-tensor state.
        decoded: by the extent of a tensor's piece, the place of its decoded bytes.
    """

    format: ClassVar[str] = "delta"

    stored: StoredObjects
    decoded: Mapping[Extent, Extent]
    _base: Checkpoint | None = field(default=None, init=False, repr=False)
    _decoder: ChainDecoder | None = field(default=None, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def base(self) -> Checkpoint | None:
        """What it depends on, opened once; None for a full one.

        Raises:
            FtckptError: see `delta_chain.open_base`.
        """
        with self._lock:
            if self._base is None and self.index.base is not None:
                self._base = open_base(self, self.index.base)
            return self._base

    @property
    def decoder(self) -> ChainDecoder:
        """What decodes its tensors, with all that they are decoded from opened.

        Raises:
            FtckptError: a base is missing, wrong, or cannot be opened.
            NoResourceError: so long a chain needs more memory than is allowed.
        """
        with self._lock:
            if self._decoder is None:
                self._decoder = ChainDecoder(chain(self))
            return self._decoder

    @property
    def source_format(self) -> str:
        """The format of what was packed."""
        return self.index.source_format

    def recorded_paths(self) -> RecordedPaths:
        """Return the paths that the index keeps of what was packed (see `RecordsPaths`)."""
        tensors = {tensor.key: tensor.path for tensor in self.index.tensors if tensor.path}
        objects = {entry.name: entry.path for entry in self.index.objects if entry.path}
        shapes = {path: self.tensors[key].shape for key, path in tensors.items()}
        return RecordedPaths(tensors, objects, find_homes(shapes, objects.values()))

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return nothing: objects have records of their own."""
        return {}

    def fill(self) -> Fill:
        """Return what puts decoded bytes into place (see `decoder`)."""
        return self.decoder.fill

    def members(self) -> Iterable[str]:
        """Return the index and the data files."""
        return [NAME, *(file.name for file in self.index.files)]

    def load_object(self, name: str) -> Any:
        """Return a stored object: parsed where its form is known, else its bytes."""
        return self.stored.load(self.source, name)

    def payload(self, piece: Piece) -> Payload:
        """Return where the decoded elements are."""
        return Payload(self.decoded[piece.extent])

    @property
    def decoding(self) -> ChainDecoding:
        """How its tensors are decoded, from its bases and from each other."""
        return ChainDecoding(self)

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield the payload of every block, the rows of every tensor, and every object."""
        for tensor in self.index.tensors:
            for block in self.index.blocks_of(tensor):
                file = self.index.files[block.file].name if block.length else NAME
                yield Extent(file, block.offset, block.length), tensor.key, None
        yield from super().extents_by_owner()

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield data files of another size than the index says, and what is wrong with the base."""
        for file in self.index.files:
            entry = self.source.entries.get(file.name)
            if entry is not None and entry.size != file.size:
                yield finding(
                    "truncated-file" if entry.size < file.size else "trailing-bytes",
                    f"{file.name} has {entry.size} bytes and the index says {file.size}",
                    file=file.name,
                    offset=min(entry.size, file.size),
                    length=abs(entry.size - file.size),
                )
        try:
            links = chain(self)
            # Its own digests say what the base must hold; the base's manifest may be of before.
            base = [(one, Seal(one.source, use=False)) for one in links[1:2]]
            for found in (f for one, seal in base for f in check_structure(one, NULL, seal)):
                if found.severity is Severity.ERROR:
                    place = within(links[1], found.file)
                    message = f"the base: {found.message}"
                    if is_damage(found.kind):
                        found = replace(found, kind="wrong-base", code=ExitCode.CORRUPT)
                    yield replace(found, message=message, file=place)
        except FtckptError as error:
            yield from_error(error)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the recorded step."""
        if self.index.step is not None and limit:
            yield Scalar(NAME, "step", self.index.step, StepRole.ITERATION)


class ChainDecoding(Decoding):
    """Decodes the tensors of a delta, from its bases and from each other."""

    def __init__(self, delta: DeltaCheckpoint) -> None:
        self._delta = delta

    def __bool__(self) -> bool:
        """Return True: even a delta without a base is compressed."""
        return True

    def bases(self) -> Sequence[Checkpoint]:
        """Return all that the tensors are decoded from."""
        return chain(self._delta)[1:]

    def slots(self) -> int:
        """Return how many tensors may be decoded at a time."""
        return self._delta.decoder.at_once

    def helpers(self) -> Mapping[str, Sequence[str]]:
        """Return the keys of the tensors that predict a tensor, by its key."""
        keys = list(self._delta.tensors)  # of the index's tensors, in its order
        tensors = zip(keys, self._delta.index.tensors, strict=True)
        return {key: [keys[n] for n in t.helpers] for key, t in tensors if t.helpers}

    @contextmanager
    def reusing(self, look: Look) -> Iterator[None]:
        """Let blocks that predict others be taken from where they were put before."""
        decoder = self._delta.decoder
        decoder.look(look)
        try:
            yield
        finally:
            decoder.look(None)

    def digests(self) -> Mapping[str, str]:
        """Return the tensor digests, all of which the index has."""
        return {tensor.key: tensor.digest for tensor in self._delta.index.tensors}

    def checks(self, *, sealed: bool) -> Iterator[SelfCheck]:
        """Yield the decoding of every block, and the reading of every object.

        What a manifest covers is not read again, but where it is decoded from a base.
        """
        if not sealed or self._delta.index.base is not None:
            yield from self._delta.decoder.checks()


class ChainNote(Sequence[Finding]):
    """Says, when it is asked, what a delta depends on: that costs a look at every base."""

    def __init__(self, delta: DeltaCheckpoint) -> None:
        self._delta = delta

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[Finding]:
        try:
            below = [f"{link.source.url} ({link.format})" for link in chain(self._delta)[1:]]
        except FtckptError as error:
            below = [f"what could not be opened: {error.message}"]
        yield finding("note", f"it depends on {', which depends on '.join(below)}")
