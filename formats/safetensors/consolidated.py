"""Join a consolidated DCP save with the shards that it was made of.

`HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)` leaves the shards of
all ranks in `sharded/`, below the files that it joins them to: every tensor is there twice. The
shards are what the ranks saved, so tensors are read from them; the consolidated files are second
copies, which `verify` compares. torch 2.13 writes zero for every tensor without axes when it
consolidates (and leaves some out), so the shards alone have its value.

Source: `torch/distributed/checkpoint/hf_storage.py` and `_consolidate_hf_safetensors.py`
(torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Box, Extent, Piece, TensorInfo
from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.errors import CorruptError
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.storage.source import Source

from . import dcp_shards
from .header import Header
from .names import SHARDED, shard_place
from .parse_headers import read_headers

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
            for found in dcp_shards.check_grid(names, self.headers, self.tensors):
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
        made, wrong = dcp_shards.assemble(headers)
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
