"""Is everything there, once, and of one save? Names, sizes, headers, counters; no tensor bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.coverage import check_coverage
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.manifest import is_own
from ftckpt.progress import Counter
from ftckpt.roots import step_in_name
from ftckpt.steps import SCALARS_A_FILE, mixed_steps
from ftckpt.store import EntryKind
from ftckpt.stores import is_leftover

# Files that hold tensors or state, for "this file shows no step"; the rest is configuration.
_DATA = re.compile(r"\.(?:distcp|pt|pth|bin|ckpt|safetensors|pkl)$")
_STRAYS_NAMED = 10


def check_structure(checkpoint: Checkpoint, counter: Counter) -> Iterator[Finding]:
    """Yield every defect of structure, the cheapest first.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    yield from checkpoint.notes
    yield from _check_files(checkpoint)
    yield from checkpoint.check(counter)
    yield from _check_tensors(checkpoint, counter)
    yield from _check_steps(checkpoint)


def _check_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Members must be there and readable; others are strays, and named."""
    source = checkpoint.source
    members = set(checkpoint.members())
    for name in sorted(members):
        entry = source.entries.get(name)
        if entry is None:
            yield finding("missing-file", f"{name} is missing", file=name)
        elif entry.kind is EntryKind.SPECIAL:
            yield finding("special-file", f"{name} is not a regular file", file=name)
        elif entry.archived:
            yield finding(
                "archived-object", f"{name} is in an archive tier: restore it first", file=name
            )
    strays = [n for n in source.entries if n not in members and not is_own(n)]
    for name in strays[:_STRAYS_NAMED]:
        left = " (left by a write that was killed)" if is_leftover(name) else ""
        yield finding("stray-file", f"{name} is part of nothing here{left}", file=name)
    if len(strays) > _STRAYS_NAMED:
        more = len(strays) - _STRAYS_NAMED
        yield finding("stray-file", f"{more} more files are part of nothing here")


def _check_tensors(checkpoint: Checkpoint, counter: Counter) -> Iterator[Finding]:
    counter.start("tensors", len(checkpoint.tensors), "tensors")
    sizes = {name: entry.size for name, entry in checkpoint.source.entries.items()}
    for key, info in checkpoint.tensors.items():
        counter.add(1)
        try:
            yield from _check_tensor(key, info, sizes)
        except FtckptError as error:
            yield from_error(error, tensor=key)


def _check_tensor(key: str, info: TensorInfo, sizes: dict[str, int]) -> Iterator[Finding]:
    pieces = list(info.pieces)
    for gap in check_coverage(info.shape, pieces):
        piece = None if gap.piece is None else pieces[gap.piece]
        yield finding(
            gap.kind,
            f"{key}: {gap.message}",
            tensor=key,
            file=None if piece is None else piece.extent.file,
            rank=None if piece is None else piece.rank,
        )
    itemsize = info.dtype.bits
    for piece in pieces:
        place = piece.extent
        size = sizes.get(place.file)
        if size is None:
            yield finding(
                "missing-file", f"{place.file} is missing", file=place.file, rank=piece.rank
            )
        elif place.end > size:
            yield finding(
                "truncated-file",
                f"{place.file} ends at byte {size}, {key} needs it up to {place.end}",
                file=place.file,
                tensor=key,
                rank=piece.rank,
                offset=place.offset,
                length=place.length,
            )
        elements = piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]
        needed = (elements * itemsize + 7) // 8
        if not piece.packed and piece.strides is None and needed != place.length:
            yield finding(
                "size-mismatch",
                f"{key} needs {needed} bytes and has {place.length}",
                file=place.file,
                tensor=key,
                rank=piece.rank,
                offset=place.offset,
                length=place.length,
            )


def _check_steps(checkpoint: Checkpoint) -> Iterator[Finding]:
    scalars = list(checkpoint.scalars(SCALARS_A_FILE))
    files = [n for n in checkpoint.members() if _DATA.search(n)]
    holding = [n for n in files if (e := checkpoint.source.entries.get(n)) and e.size]
    yield from mixed_steps(scalars, holding)
    said = step_in_name(checkpoint.source.name)
    step = checkpoint.step
    if said is not None and step is not None and said != step:
        yield finding(
            "step-name",
            f"the name {checkpoint.source.name} says step {said}, the content says {step}",
        )
