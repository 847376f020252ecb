"""The shards that `torch.distributed.checkpoint` writes as safetensors, one set of files a rank.

`HuggingFaceStorageWriter(save_distributed=True)` writes no index but, for each rank R from 1,
`shard-RRRRR-model-IIIII-of-NNNNN.safetensors`; the parts have the numbers that the trainer gives,
which are those of the model that it began with, so from 0 for some. The place of each piece stands
in the header's `__metadata__` under `DCP_SHARDING_INFO`, as JSON text:
`{fqn: {"saved_offsets": [...]}}`. Neither global shapes nor the number of ranks are recorded: a
shape is the furthest end of any piece, so a tensor whose last rank is lost only looks smaller. What
the names give away is checked here.
Source: `torch/distributed/checkpoint/_hf_utils.py` and `hf_storage.py` (torch 2.13).

Join a consolidated DCP save with the shards that it was made of.

`HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)` leaves the shards of
all ranks in `sharded/`, below the files that it joins them to: every tensor is there twice. The
shards are what the ranks saved, so tensors are read from them; the consolidated files are second
copies, which `verify` compares. torch 2.13 writes zero for every tensor without axes when it
consolidates (and leaves some out), so the shards alone have its value.

Source: `torch/distributed/checkpoint/hf_storage.py` and `_consolidate_hf_safetensors.py`
(torch 2.13).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Extent, ImpliedCount, Kind, Piece, TensorInfo
from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, FtckptError, NewerWriterError
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.formats.huggingface.index import lost_numbers
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse, shown

from .header import Header, HeaderTensor, read_headers
from .names import SHARDED, ShardName, shard_place

SHARDING_INFO = "DCP_SHARDING_INFO"
SHOWN = 64
_MOST_RANKS = 1_000_000
_LIMITS = JsonLimits(depth=3, objects=1_000_002, keys=2_000_010, items=16_000_000, naturals=True)


def offsets_of(header: Header, file: str) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a shard begins in its global tensor.

    Raises:
        CorruptError: the record is absent, no JSON, or does not fit the header (`bad-metadata`).
        UnsafeError: the record has equal keys or is nested (`unsafe-header`).
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        raise _bad(file, "is not there")
    value = parse(
        text.encode(),
        _LIMITS,
        file=file,
        what=SHARDING_INFO,
        bad="bad-metadata",
        unsafe="unsafe-header",
    )
    found: dict[str, tuple[int, ...]] = {}
    for tensor in header.tensors:
        try:
            offsets = value[tensor.name]["saved_offsets"]
        except (TypeError, KeyError, IndexError):
            raise _unknown(file, tensor.name, value, "saved_offsets") from None
        if (
            type(offsets) is not list
            or len(offsets) != len(tensor.shape)
            or not all(type(o) is int and o < 2**62 for o in offsets)
        ):
            raise _bad(
                file,
                f"places {shown(tensor.name)} at {shown(offsets)}, which does not fit its shape",
            )
        found[tensor.name] = tuple(offsets)
    return found


def _unknown(file: str, name: str, value: Any, member: str) -> FtckptError:
    """Return the error for a record that is there without a member, or not of one tensor."""
    known = value.get(name) if isinstance(value, dict) else None
    if known is None and isinstance(value, dict):
        return _bad(file, f"has no {member} for {shown(name)}")
    found = listed(sorted(known)) if isinstance(known, dict) else known
    return NewerWriterError.of(
        f"the {SHARDING_INFO} of {shown(name)}", expected=member, found=found, file=file
    )


def _bad(file: str, reason: str) -> CorruptError:
    return CorruptError(f"the {SHARDING_INFO} of {file} {reason}", kind="bad-metadata", file=file)


def assemble(
    headers: Mapping[str, Header],
) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Return the global tensors that the shards of all ranks make, and what contradicts itself.

    Args:
        headers: by file name (see `shard_place`).

    Raises:
        CorruptError: the only shard does not say where its tensors belong.
        UnsafeError: see `offsets_of`.
    """
    parts: dict[str, list[tuple[HeaderTensor, Piece]]] = {}
    found: list[Finding] = []
    for file, header in headers.items():
        place = shard_place(file)
        assert place is not None
        try:
            offsets = offsets_of(header, file)
        except CorruptError as error:
            if len(headers) == 1:
                raise
            found.append(from_error(error))
            continue
        for tensor in header.tensors:
            piece = Piece(
                Box(offsets[tensor.name], tensor.shape),
                Extent(file, tensor.begin, tensor.end - tensor.begin),
                rank=place.rank - 1,
            )
            parts.setdefault(tensor.name, []).append((tensor, piece))

    tensors: dict[str, TensorInfo] = {}
    for name, several in parts.items():
        dtype, ndim = several[0][0].dtype, len(several[0][0].shape)
        kept: list[Piece] = []
        for tensor, piece in several:
            wrong = _misfit(tensor, piece, dtype, ndim)
            if wrong is None:
                kept.append(piece)
            else:
                found.append(wrong)
        ends = ([o + s for o, s in zip(*p.box, strict=True)] for p in kept)
        shape = tuple(map(max, zip(*ends, strict=True)))
        tensors[name] = TensorInfo("model", name, Kind.PARAM, shape, dtype, _number_replicas(kept))
    return tensors, found


def _misfit(tensor: HeaderTensor, piece: Piece, dtype: DType, ndim: int) -> Finding | None:
    """Return what is wrong with a part that cannot belong to the same tensor as the first."""
    if tensor.dtype != dtype:
        return finding(
            "dtype-mismatch",
            f"{shown(tensor.name)} is {tensor.dtype.name} in {piece.extent.file} and {dtype.name} "
            "in another shard",
            file=piece.extent.file,
            tensor=tensor.name,
            rank=piece.rank,
        )
    if len(tensor.shape) != ndim:
        return finding(
            "shape-mismatch",
            f"{shown(tensor.name)} has {len(tensor.shape)} dimensions in {piece.extent.file} and "
            f"{ndim} in another shard",
            file=piece.extent.file,
            tensor=tensor.name,
            rank=piece.rank,
        )
    return None


def _number_replicas(pieces: Sequence[Piece]) -> list[Piece]:
    """Number equal boxes: the first is the main copy, others repeat it."""
    seen: dict[Box, int] = {}
    numbered = []
    for piece in pieces:
        replica = seen.get(piece.box, 0)
        seen[piece.box] = replica + 1
        numbered.append(piece._replace(replica=replica) if replica else piece)
    return numbered


def implied(files: Iterable[str]) -> list[ImpliedCount]:
    """Return that nothing records how many ranks wrote these shards."""
    first = min((place for place in map(shard_place, files) if place is not None), default=None)
    if first is None:
        return []
    before, _, after = first.file.split("-", 2)
    return [ImpliedCount(f"{before}-", f"-{after}")]


def check_grid(
    files: Collection[str], headers: Mapping[str, Header], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Yield the files that the grid of ranks and parts must hold and does not.

    A rank that has no tensor of a part writes no file for it, so a gap alone proves nothing. It is
    an error where the tensors have a hole, or where tensors elsewhere are cut into as many parts
    as there are ranks (every rank holds a part of everything) and these are not; otherwise a note.

    Args:
        files: names of all shards that are there.
        headers: of those that could be read.
        tensors: what `assemble` made of them.
    """
    places = sorted(place for place in map(shard_place, files) if place is not None)
    totals = sorted({place.total for place in places})
    if len(totals) > 1:
        yield finding(
            "shard-count",
            f"shards of sets of {' and '.join(map(str, totals))} lie in one directory",
        )
        return
    ranks = max(place.rank for place in places)
    if max(ranks, totals[0]) > _MOST_RANKS:
        file = max(places, key=lambda place: max(place.rank, place.total)).file
        yield finding("unsafe-path", f"{file} says more ranks or parts than any job has", file=file)
        return
    yield finding(
        "count-unknown",
        f"nothing records how many ranks there are, or how large a tensor is: {ranks} is what the"
        " highest number in a name implies",
    )
    groups: dict[int, set[str]] = {}
    for file, header in headers.items():
        place = shard_place(file)
        assert place is not None
        groups.setdefault(place.part, set()).update(t.name for t in header.tensors)
    parts = {name: sum(1 for p in t.pieces if p.replica == 0) for name, t in tensors.items()}
    everywhere = ranks > 1 and ranks in parts.values()
    torn = {name for name, t in tensors.items() if _has_hole(t)}
    if everywhere:
        # A small vector may be whole on one rank; a matrix beside others that are cut is not.
        torn |= {
            n for n, t in tensors.items() if parts[n] < ranks and (parts[n] > 1 or len(t.shape) > 1)
        }
    held: dict[int, set[int]] = {}
    for place in places:
        if 0 <= place.part <= totals[0]:
            held.setdefault(place.part, set()).add(place.rank)
    lost = lost_numbers(held, totals[0])
    for part in lost[:SHOWN]:
        first = ShardName(1, part, totals[0]).file
        what = f"no rank has part {part} of {totals[0]}: {first} and its siblings are missing"
        yield finding("missing-file", what, file=first)
    if (more := len(lost) - SHOWN) > 0:
        yield finding("missing-file", f"no rank has {more} more parts of {totals[0]}")
    for part, own in sorted(held.items()):
        damaged = not torn.isdisjoint(groups.get(part, ()))
        kind = "missing-file" if damaged else "note"
        said = "" if damaged else ", and no tensor of the other ranks shows that it was written"
        for rank in _some(range(1, ranks + 1), own):
            file = ShardName(rank, part, totals[0]).file
            yield finding(kind, f"{file} is missing{said}", file=file, rank=rank - 1)
        if (more := ranks - len(own) - SHOWN) > 0:
            yield finding(kind, f"part {part} of {more} more ranks is missing{said}")


def _some(numbers: range, held: Collection[int]) -> Iterator[int]:
    """Yield the first numbers that are absent: a name may say that there are any number."""
    return islice((number for number in numbers if number not in held), SHOWN)


def _has_hole(tensor: TensorInfo) -> bool:
    held = sum(prod(p.box.sizes) for p in tensor.pieces if p.replica == 0)
    return held < prod(tensor.shape)


_BELOW = f"{SHARDED}/"
_OF_SEVERAL = {"overlap": ": shards of several saves lie together"}


class Shards(NamedTuple):
    """The shards below a consolidated save.

    Attributes:
        files: names of all of them, present in the folder.
        headers: of those that could be read, by their name in `sharded/`.
        tensors: what they hold, by name; their places are in the folder.
        findings: damage and contradictions in them.
    """

    files: tuple[str, ...] = ()
    headers: Mapping[str, Header] = {}
    tensors: Mapping[str, TensorInfo] = {}
    findings: tuple[Finding, ...] = ()

    def check(self) -> Iterator[Finding]:
        """Yield what the grid of ranks and parts lacks, with the files' places in the folder."""
        if self.files:
            names = [name.removeprefix(_BELOW) for name in self.files]
            for found in check_grid(names, self.headers, self.tensors):
                yield found if found.file is None else replace(found, file=_BELOW + found.file)


NO_SHARDS = Shards()


def read_shards(source: Source) -> Shards:
    """Read the headers of the shards in `sharded/`; nothing without such shards."""
    files = tuple(
        name
        for name in source.entries
        if name.startswith(_BELOW) and shard_place(name.removeprefix(_BELOW))
    )
    if not files:
        return NO_SHARDS
    read = read_headers(source, files)
    headers = {f.removeprefix(_BELOW): h for f, h in read.items() if isinstance(h, Header)}
    findings = [from_error(error) for error in read.values() if not isinstance(error, Header)]
    try:
        made, wrong = assemble(headers)
    except CorruptError as error:
        made, wrong = {}, [from_error(error)]
    findings += [f if f.file is None else replace(f, file=_BELOW + f.file) for f in wrong]
    tensors = {
        name: info._replace(
            pieces=[
                p._replace(extent=p.extent._replace(file=_BELOW + p.extent.file))
                for p in info.pieces
            ]
        )
        for name, info in made.items()
    }
    return Shards(files, headers, tensors, tuple(findings))


def join(
    tensors: Mapping[str, TensorInfo], shards: Shards
) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Return the consolidated tensors with their second copies, and those that only shards hold.

    A finding names every tensor that is in one of the two alone, or has another shape or type, and
    every one that the shards do not tile: torch consolidates every file that it finds in
    `sharded/`, so what an earlier save on more ranks left is in the consolidated files too.
    """
    joined, found = dict(tensors), list(shards.findings)
    if not shards.tensors:
        return joined, found
    scalars = []
    for name, info in shards.tensors.items():
        whole = tensors.get(name)
        gaps = list(check_coverage(info.shape, info.pieces))
        for gap in gaps:
            file = info.pieces[gap.piece or 0].extent.file
            what = f"in the shards of the ranks {gap.message}{_OF_SEVERAL.get(gap.kind, '')}"
            found.append(finding(gap.kind, what, file=file, tensor=name))
        if whole is None:
            joined[name] = info
            what = f"{name} is in the shards of the ranks and not in the consolidated files"
            found.append(finding("note", what, file=info.pieces[0].extent.file, tensor=name))
        elif (whole.shape, whole.dtype) != (info.shape, info.dtype):
            kind = "dtype-mismatch" if whole.shape == info.shape else "shape-mismatch"
            what = (
                f"{name} is {whole.dtype.name}{list(whole.shape)} in the consolidated files and "
                f"{info.dtype.name}{list(info.shape)} in the shards"
            )
            found.append(finding(kind, what, file=whole.pieces[0].extent.file, tensor=name))
        elif not gaps:
            joined[name] = whole._replace(pieces=_twice(whole, info))
            if not info.shape:
                scalars.append(name)
    # Of a shard that cannot be read nobody knows what it holds, and its own finding says so.
    kind = "note" if shards.findings else "missing-tensor"
    for name in sorted(tensors.keys() - shards.tensors.keys()):
        if tensors[name].component == "model":
            file = tensors[name].pieces[0].extent.file
            what = f"{name} is in the consolidated files and not in the shards of the ranks"
            found.append(finding(kind, what, file=file, tensor=name))
    if scalars:
        what = (
            f"{counted(len(scalars), 'tensor')} without axes ({listed(sorted(scalars), 3)}): torch "
            "2.13 writes zero for them into the consolidated files; they are read from the shards"
        )
        found.append(finding("note", what))
    return joined, found


def _twice(whole: TensorInfo, shards: TensorInfo) -> list[Piece]:
    """Return the ranks' parts, and as their copies the consolidated tensor, cut as they are."""
    (one,) = whole.pieces
    parts = [p for p in shards.pieces if p.box.volume]
    if not parts:
        return [one]
    times = 1 + max(piece.replica for piece in parts)
    boxes = dict.fromkeys(piece.box for piece in parts)
    return [*parts, *(_cut(one, whole, box)._replace(replica=times) for box in boxes)]


def _cut(one: Piece, whole: TensorInfo, box: Box) -> Piece:
    """Return a box of a dense tensor as a piece of its own."""
    strides = [1] * len(whole.shape)
    for axis in range(len(whole.shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * whole.shape[axis]
    size = whole.dtype.itemsize
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    extent = Extent(one.extent.file, one.extent.offset + first * size, (last + 1 - first) * size)
    dense = last + 1 - first == box.volume
    return Piece(box, extent, strides=None if dense else tuple(strides))
