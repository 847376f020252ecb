"""Record finished blocks, one line each, so that a killed run can go on.

A line is written after the block's bytes. It may survive them (a power cut), so the bytes are
hashed again before a line is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.own_files import FOLDER, own_path
from ftckpt.strict_json import decode
from ftckpt.transfer.layout import Elements, Layout, Literal, OutputFile, Stored, Zeros
from ftckpt.transfer.places import place_of

from .blocks import BlockMade, Sum

SCHEMA = 1
_STEP = 4 << 20


def fingerprint(checkpoint: Checkpoint, layout: Layout) -> str:
    """Return a digest of all that decides the result's bytes: source files and layout.

    What tensors are computed from beside the source (an adapter) counts with its content.
    """
    import xxhash

    # Times may be equal in two places (an archive keeps seconds), and sizes are in two steps.
    state = xxhash.xxh3_128(repr(place_of(checkpoint.source)).encode())
    entries = checkpoint.source.entries
    for name in sorted(checkpoint.members()):
        entry = entries.get(name)
        seen = None if entry is None else (entry.size, entry.mtime, entry.etag)
        state.update(repr((name, seen)).encode())
    for other in checkpoint.made_from:
        _digest_content(state, other)
    state.update(layout_digest(layout).encode())
    digest: str = state.hexdigest()
    return digest


def layout_digest(layout: Layout) -> str:
    """Return a digest of the files of a layout, and of what each is made."""
    import xxhash

    state = xxhash.xxh3_128()
    for file in (*layout.files, *layout.commit):
        state.update(repr(("file", file.path, file.size)).encode())
        _digest_segments(state, file)
    digest: str = state.hexdigest()
    return digest


def _digest_content(state: Any, checkpoint: Checkpoint) -> None:
    """Take in the bytes of all files of a checkpoint."""
    source = checkpoint.source
    for name in sorted(source.entries.keys() & set(checkpoint.members())):
        size = source.size(name)
        state.update(repr(("made from", name, size)).encode())
        with source.open(name) as reader:
            for at in range(0, size, _STEP):
                state.update(reader.read(at, min(_STEP, size - at)))


def _digest_segments(state: Any, file: OutputFile) -> None:
    for segment in file.segments:
        if isinstance(segment, Literal):
            state.update(segment.data)
        elif isinstance(segment, Elements):
            shard = segment.shard
            what = (shard.shape, shard.dtype.name, shard.fills, segment.start, segment.stop)
            state.update(repr(what).encode())
        elif isinstance(segment, (Stored, Zeros)):
            state.update(repr(segment).encode())
        else:
            state.update(repr((type(segment).__name__, segment.ranges)).encode())


def header(plan: str, place: str = "") -> bytes:
    """Return the first line of a journal.

    Args:
        plan: fingerprint of the transfer.
        place: what the staging place is called, where parts build in it.
    """
    return _line({"schema": SCHEMA, "transfer": plan} | ({"place": place} if place else {}))


def read_place(data: bytes) -> str:
    """Return what a staging place is called by its journal; "" where no part has begun it."""
    try:
        return str(decode(data.partition(b"\n")[0]).get("place", ""))
    except (ValueError, AttributeError):
        return ""


def announced(files: Iterable[str]) -> bytes:
    """Return the second line of a transfer's marker in an object store: what it writes."""
    return json.dumps({"files": sorted(files)}).encode() + b"\n"


def read_announced(marker: bytes) -> frozenset[str]:
    """Return what a transfer says in its marker that it writes, relative to its destination.

    Raises:
        ValueError: the marker does not say it.
        UnsafeError: it names what is not below its destination, or ftckpt's own records there.
    """
    try:
        files = frozenset(decode(marker.split(b"\n")[1])["files"])
        for path in files:
            if own_path(path, "", named_by="the marker of a transfer").split("/")[0] == FOLDER:
                raise UnsafeError(
                    f"the marker of a transfer names {path!r}, which no transfer builds: nothing is"
                    " touched",
                    kind="unsafe-path",
                )
        return files
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError("the marker of a transfer is damaged") from error


def line(made: BlockMade) -> bytes:
    """Return the line of one block."""
    row = {
        "file": made.file,
        "block": made.number,
        "digest": made.digest.hex(),
        "sums": [list(part) for part in made.sums],
    }
    return _line(row | ({"note": made.note} if made.note else {}))


def shown_line(inode: int) -> bytes:
    """Return the line that says which directory or file is about to get the destination's name."""
    return _line({"shown": inode})


def read_shown(data: bytes) -> int | None:
    """Return the inode of what was about to be shown; None where no run came as far."""
    for text in reversed(data.split(b"\n")):
        if text.startswith(b'{"shown"'):
            try:
                return int(decode(text)["shown"])
            except (ValueError, TypeError, KeyError):
                continue
    return None


def read_plan(data: bytes) -> str | None:
    """Return the fingerprint in a journal's first line; None where it is torn or not understood."""
    try:
        head = decode(data.partition(b"\n")[0])
        return str(head["transfer"]) if head["schema"] == SCHEMA else None
    except (ValueError, TypeError, KeyError):
        return None


def read_blocks(data: bytes) -> Iterable[BlockMade]:
    """Yield the blocks of a journal; a line that is torn or not understood counts for nothing."""
    for text in data.split(b"\n")[1:]:
        try:
            row = decode(text)
            sums = tuple(Sum(int(a), int(b), int(c)) for a, b, c in row["sums"])
            digest, note = bytes.fromhex(row["digest"]), str(row.get("note", ""))
            yield BlockMade(str(row["file"]), int(row["block"]), digest, sums, note)
        except (ValueError, TypeError, KeyError, FtckptError):
            continue


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
