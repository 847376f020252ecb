"""The files that commit a DCP checkpoint: `.metadata`, or `__R.metadata` for each rank."""

from __future__ import annotations

from ftckpt.errors import CorruptError, FtckptError, IncompleteError
from ftckpt.storage.source import Source
from ftckpt.workers.memory import demand

from .metadata import DcpMetadata, merge, parse_metadata
from .names import DATA, MARKER, RANK_METADATA

# Parsed metadata is this many times its size, measured with 100,000 tensors in 200,000 pieces.
METADATA_GROWTH = 10


def read_metadata(source: Source) -> tuple[DcpMetadata, tuple[str, ...]]:
    """Return the metadata, merged where each rank wrote its own, and the files that it is in.

    Raises:
        IncompleteError: there is none (`uncommitted`).
        CorruptError, UnsafeError, NoResourceError: it cannot be trusted, or is too large.
    """
    if MARKER in source.entries:
        return _parsed(source, MARKER), (MARKER,)
    ranks = sorted(
        (n for n in source.entries if RANK_METADATA.search(n) and "/" not in n),
        key=lambda n: int(RANK_METADATA.search(n)[1]),  # type: ignore[index]
    )
    if not ranks:
        raise _uncommitted(source)
    return merge({name: _parsed(source, name) for name in ranks}), tuple(ranks)


def _parsed(source: Source, name: str) -> DcpMetadata:
    size = source.size(name)
    if size == 0:
        raise CorruptError(f"{name} is empty", kind="truncated-file", file=name)
    demand(size * METADATA_GROWTH, f"the metadata {name} of {size >> 20} MiB")
    with source.open(name) as reader:
        return parse_metadata(reader.read(0, size), name)


def _uncommitted(source: Source) -> IncompleteError:
    data = sorted(n for n in source.entries if DATA.search(n))
    temporary = f"{MARKER}.tmp"
    message = f"{MARKER} is absent: the save did not finish, or is still being written"
    hint = "wait for the save, or use an earlier checkpoint"
    if temporary in source.entries:
        from .checks import check_tiling

        try:
            meta = _parsed(source, temporary)
            whole = not any(f.code for f in check_tiling(meta, source))
        except FtckptError:
            whole = False
        if whole:
            message = (
                f"{MARKER} is absent, but {temporary} is complete and fits the data files: "
                "the save died between its last two acts"
            )
            hint = f"renaming {temporary} to {MARKER} commits it; verify it afterwards"
    return IncompleteError(
        f"{message} ({len(data)} data files)", hint=hint, kind="uncommitted", file=MARKER
    )
