"""Check that everything is present, once, and of one save; reads no tensor bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint, CommitState, Piece, TensorInfo
from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.checkpoint.steps import SCALARS_A_FILE, mixed_steps
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.own_files import MANIFEST, is_own
from ftckpt.progress import Counter
from ftckpt.storage import is_leftover
from ftckpt.storage.source import followed_links
from ftckpt.storage.store import EntryKind

# Files that hold tensors or state, for "this file shows no step"; the rest is configuration.
_DATA = re.compile(r"\.(?:distcp|pt|pth|bin|ckpt|safetensors|pkl)$")
_STRAYS_NAMED = 10

# Up to this many files that a listing lacks are asked for one by one; a stale one shows by then.
_ASKED_FOR = 16


def check_structure(checkpoint: Checkpoint, counter: Counter) -> Iterator[Finding]:
    """Yield every defect of structure, the cheapest first.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    lost: set[str] = set()
    for found in _check(checkpoint, counter):
        lost.add(found.kind)
        yield _weighed(checkpoint, found, lost)


def _weighed(checkpoint: Checkpoint, found: Finding, kinds: set[str]) -> Finding:
    """Return a finding as the commit state weighs it.

    A rank's file that is missing is damage where the save is known to have finished. Elsewhere it
    may still be written, and so may the elements that nothing holds without it.
    """
    marked = (
        checkpoint.commit.state is CommitState.COMMITTED or MANIFEST in checkpoint.source.entries
    )
    if marked or found.code is not ExitCode.CORRUPT:
        return found
    absent = found.kind == "missing-rank" or (found.kind == "hole" and "missing-rank" in kinds)
    return replace(found, code=ExitCode.INCOMPLETE) if absent else found


def _check(checkpoint: Checkpoint, counter: Counter) -> Iterator[Finding]:
    yield from checkpoint.notes
    members = set(checkpoint.members())
    yield from _check_members(checkpoint, members)
    told = {f.kind for f in checkpoint.notes}
    reported: set[tuple[str, str | None]] = set()
    for found in checkpoint.check(counter):
        reported.add((found.kind, found.file))
        yield found
    if "link-followed" not in told | {kind for kind, _ in reported}:
        yield from followed_links(checkpoint.source, members)
    yield from _check_strays(checkpoint, members, {file for _, file in reported})
    yield from _check_tensors(checkpoint, counter, reported)
    yield from _check_steps(checkpoint)


def _check_members(checkpoint: Checkpoint, members: set[str]) -> Iterator[Finding]:
    """Members must be there and readable."""
    absent = sorted(members - checkpoint.source.entries.keys())
    for name in absent[:_ASKED_FOR]:
        checkpoint.source.require_absent(name)
    for name in sorted(members):
        entry = checkpoint.source.entries.get(name)
        if entry is None:
            yield finding("missing-file", f"{name} is missing", file=name)
        elif entry.kind is EntryKind.SPECIAL:
            yield finding("special-file", f"{name} is not a regular file", file=name)
        elif entry.archived:
            yield finding(
                "archived-object", f"{name} is in an archive tier: restore it first", file=name
            )


def _check_strays(
    checkpoint: Checkpoint, members: set[str], reported: set[str | None]
) -> Iterator[Finding]:
    """Name the files that are part of nothing; the format may know more of some."""
    strays = [
        n
        for n in checkpoint.source.entries
        if n not in members and n not in reported and not is_own(n)
    ]
    for name in strays[:_STRAYS_NAMED]:
        left = " (left by a write that was killed)" if is_leftover(name) else ""
        yield finding("stray-file", f"{name} is part of nothing here{left}", file=name)
    if len(strays) > _STRAYS_NAMED:
        more = len(strays) - _STRAYS_NAMED
        yield finding("stray-file", f"{more} more files are part of nothing here")


def _check_tensors(
    checkpoint: Checkpoint, counter: Counter, reported: set[tuple[str, str | None]]
) -> Iterator[Finding]:
    """Coverage of every tensor, and every extent against its file."""
    counter.start("tensors", len(checkpoint.tensors), "tensors")
    entries = checkpoint.source.entries
    beyond: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for key, info in checkpoint.tensors.items():
        counter.add(1)
        try:
            pieces = list(info.pieces)
            yield from _check_coverage(key, info, pieces)
            for piece in pieces:
                entry = entries.get(piece.extent.file)
                if entry is None or piece.extent.end > entry.size:
                    beyond[piece.extent.file].append((key, piece))
                yield from _check_length(key, info, piece)
        except FtckptError as error:
            yield from_error(error, tensor=key)
    for file, held in beyond.items():
        entry = entries.get(file)
        kind = "missing-file" if entry is None else "truncated-file"
        if (kind, file) not in reported:
            yield _cut_short(file, None if entry is None else entry.size, held)


def _check_coverage(key: str, info: TensorInfo, pieces: list[Piece]) -> Iterator[Finding]:
    for gap in check_coverage(info.shape, pieces):
        piece = None if gap.piece is None else pieces[gap.piece]
        yield finding(
            gap.kind,
            f"{key}: {gap.message}",
            tensor=key,
            file=None if piece is None else piece.extent.file,
            rank=None if piece is None else piece.rank,
        )


def _check_length(key: str, info: TensorInfo, piece: Piece) -> Iterator[Finding]:
    """A dense piece that is stored raw has just the bytes that its elements need."""
    elements = piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]
    needed = info.dtype.nbytes(elements)
    if not piece.packed and piece.strides is None and needed != piece.extent.length:
        yield finding(
            "size-mismatch",
            f"{key} needs {needed} bytes and has {piece.extent.length}",
            file=piece.extent.file,
            tensor=key,
            rank=piece.rank,
            offset=piece.extent.offset,
            length=piece.extent.length,
        )


def _cut_short(file: str, size: int | None, held: list[tuple[str, Piece]]) -> Finding:
    """One finding for a file, however many tensors it cuts off."""
    key, first = min(held, key=lambda pair: pair[1].extent.offset)
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    if size is None:
        return finding(
            "missing-file", f"{file} is missing, with {key}{more}", file=file, rank=first.rank
        )
    end = max(piece.extent.end for _, piece in held)
    return finding(
        "truncated-file",
        f"{file} ends at byte {size} of {end}: {key}{more} cut off",
        file=file,
        tensor=key,
        rank=first.rank,
        offset=size,
        length=end - size,
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
