"""The files that a checkpoint was stored in: where its tensors lay in them, and every other byte.

Trainers keep more in their files than state: orders of parameters, arguments, tokenizers. With this
beside its tensors a delta gives the very files back, whether or not anything here can write their
format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, TensorInfo
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError
from ftckpt.extents import Extent
from ftckpt.own_files import is_own
from ftckpt.storage.source import safe_name
from ftckpt.strict_json import count, counts, decode
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Elements, OutputFile, Segment, Stored

_SPARE, _SHARE = 16 << 20, 8  # most bytes beside tensors, and as a share of theirs, as a divisor


class FileElements(NamedTuple):
    """Elements of a tensor, dense, at a place of a file.

    Attributes:
        offset: of the first byte.
        key: of the tensor.
        box: in the tensor.
        start, stop: which of the box's elements, in its C order.
        nbytes: of the elements.
    """

    offset: int
    key: str
    box: Box
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class OriginalFile:
    """One file.

    Attributes:
        path: relative to the checkpoint.
        size: bytes.
        placed: what lies in it of the tensors, in order; nothing overlaps.
    """

    path: str
    size: int
    placed: Sequence[FileElements] = field(repr=False, default=())

    @property
    def rest(self) -> Iterator[tuple[int, int]]:
        """Offset and length of what is not a tensor's."""
        at = 0
        for one in self.placed:
            if one.offset > at:
                yield at, one.offset - at
            at = one.offset + one.nbytes
        if self.size > at:
            yield at, self.size - at


@dataclass(frozen=True)
class Original:
    """All files of a checkpoint.

    Attributes:
        single: whether the checkpoint is its one file, and not a directory.
        files: by name.
    """

    single: bool
    files: Sequence[OriginalFile]

    @property
    def rest_bytes(self) -> int:
        """Bytes of all files that are no tensor's."""
        return sum(length for file in self.files for _, length in file.rest)

    def dump(self) -> bytes:
        """Return it as JSON."""
        rows = [
            [file.path, file.size, [[p.offset, p.key, *map(list, p.box), p.start, p.stop, p.nbytes]
                                    for p in file.placed]]
            for file in self.files
        ]  # fmt: skip
        said = {"single": self.single, "files": rows}
        return json.dumps(said, ensure_ascii=True, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Original:
        """Return what `dump` gave.

        Raises:
            CorruptError: it is something else (`bad-delta`).
            UnsafeError: a name leads out of the checkpoint.
        """
        try:
            said = decode(data)
            rows, single = said["files"], said["single"] is True
            files = [
                OriginalFile(
                    safe_name(path, named_by="the delta"), count(size, "a size"), _parsed(more)
                )
                for path, size, more in rows
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise _bad("its list of files is not understood") from error
        names = {file.path for file in files}
        if len(names) != len(files) or any(map(is_own, names)) or _nested(names):
            raise _bad("the files that it lists cannot lie beside each other")
        for file in files:
            if list(file.placed) != _apart(file.placed, file.size):
                raise _bad(f"tensors overlap in {file.path}, or lie behind its end")
        if single and len(files) != 1:
            raise _bad("one file was packed and it lists others")
        return cls(single, files)


class OriginalRuns(NamedTuple):
    """Bytes of files that are no tensor's, to be compared.

    Attributes:
        start: where the first lies, when such bytes of all files lie one after the other.
        nbytes: of all runs.
        extents: where they lie in the files.
    """

    start: int
    nbytes: int
    extents: Sequence[Extent]


def original_of(checkpoint: Checkpoint) -> Original | None:
    """Return the files of a checkpoint; None where too much in them is not a plain tensor.

    Raises:
        CorruptError, UnsafeError: the record around a tensor cannot be trusted.
    """
    placed: dict[str, list[FileElements]] = {}
    for info in checkpoint.tensors.values():
        for file, one in _placed(checkpoint, info):
            placed.setdefault(file, []).append(one)
    entries = checkpoint.source.entries
    names = sorted({*checkpoint.members(), *placed} & entries.keys())
    names = [name for name in names if not is_own(name)]
    files = [
        OriginalFile(name, entries[name].size, _apart(placed.get(name, ()), entries[name].size))
        for name in names
    ]
    found = Original(checkpoint.source.single, files)
    most = _SPARE + sum(info.nbytes for info in checkpoint.tensors.values()) // _SHARE
    return found if files and found.rest_bytes <= most else None


def rest_of(original: Original) -> list[Stored]:
    """Return all that is not a tensor's, file by file, from the source."""
    return [Stored(Extent(file.path, *place)) for file in original.files for place in file.rest]


def laid_out(
    original: Original, content: Content, rest: Callable[[int, int], Segment]
) -> list[OutputFile]:
    """Return the files as they were.

    Args:
        original: the files.
        content: has their tensors.
        rest: reads what `rest_of` names: from an offset, a number of bytes.

    Raises:
        CorruptError: the files do not fit the tensors (`bad-delta`).
    """
    made = []
    at = 0
    for file in original.files:
        segments: list[tuple[int, Segment]] = []
        for offset, length in file.rest:
            segments.append((offset, rest(at, length)))
            at += length
        for one in file.placed:
            wanted = content.tensors.get(one.key)
            if wanted is None or not _inside(one.box, wanted.shape):
                raise _bad(f"places of {file.path} are of no tensor")
            shard = content.part(one.key, one.box)
            elements = Elements(shard, one.start, one.stop)
            if one.stop > shard.numel or elements.nbytes != one.nbytes:
                raise _bad(f"{one.key} has other bytes than {file.path} held")
            segments.append((one.offset, elements))
        made.append(OutputFile(file.path, [s for _, s in sorted(segments, key=lambda s: s[0])]))
    return made


def _parsed(rows: Any) -> list[FileElements]:
    return [
        FileElements(
            count(offset, "an offset"),
            str(key),
            Box(tuple(counts(offsets, "offsets")), tuple(counts(sizes, "sizes"))),
            *counts(more, "a range"),
        )
        for offset, key, offsets, sizes, *more in rows
    ]


def _placed(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[tuple[str, FileElements]]:
    """Yield where the elements of a tensor lie as they are, with the file."""
    for piece in info.pieces:
        if piece.replica or not piece.box.volume or not info.dtype.itemsize:
            continue
        payload = checkpoint.payload(piece)
        dense = dense_strides(piece.box.sizes)
        if payload.transforms or (payload.strides or dense) != dense:
            continue
        start, stop = piece.flat or (0, piece.box.volume)
        file, offset, _ = payload.extent
        yield (
            file,
            FileElements(offset, info.key, piece.box, start, stop, info.dtype.nbytes(stop - start)),
        )


def _apart(placed: Sequence[FileElements], size: int) -> list[FileElements]:
    """Return what does not overlap what comes before it, nor the end of the file."""
    kept: list[FileElements] = []
    at = 0
    for one in sorted(placed, key=lambda p: (p.offset, -p.nbytes)):
        if one.offset >= at and one.nbytes and one.offset + one.nbytes <= size:
            kept.append(one)
            at = one.offset + one.nbytes
    return kept


def _nested(names: Collection[str]) -> bool:
    """Say whether one name is that of a directory around another."""
    return any(str(around) in names for name in names for around in PurePosixPath(name).parents)


def _inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        o + n <= s for o, n, s in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _bad(what: str) -> CorruptError:
    return CorruptError(f"the delta contradicts itself: {what}", kind="bad-delta")
