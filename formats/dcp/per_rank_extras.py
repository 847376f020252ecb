"""What each rank saves for itself beside the store (see `OF_RANK` for who does, and the names)."""

from __future__ import annotations

from collections.abc import Iterator

from ftckpt.findings import Finding, finding
from ftckpt.storage.source import Source

from .names import OF_RANK

# More ranks than this are not named one by one.
_MOST = 10_000


def own_files(source: Source) -> dict[str, int]:
    """Return the files of ranks beside a store, and whose each is, by rank."""
    found = {
        name: int(match["rank"]) for name in source.entries if (match := OF_RANK.fullmatch(name))
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[1], pair[0])))


def lost_own_files(source: Source, world: int) -> Iterator[Finding]:
    """Yield the ranks whose file is missing where others have one of that name.

    Args:
        source: the checkpoint.
        world: the number of ranks by the data files, which may be more: a rank that only holds
            replicas writes none.
    """
    series: dict[str, dict[int, str]] = {}
    for name, rank in own_files(source).items():
        series.setdefault(OF_RANK.sub(r"\g<before>", name), {})[rank] = name
    for held in series.values():
        ranks = max(world, 1 + max(held))
        example = held[min(held)]
        match = OF_RANK.fullmatch(example)
        assert match is not None
        for rank in range(min(ranks, _MOST)):
            if rank not in held:
                number = f"{rank:0{len(match['rank'])}d}" if _padded(held) else str(rank)
                name = f"{match['before']}{match['tag']}{number}.pt"
                what = f"{name} is missing: what rank {rank} of {ranks} saved for itself"
                yield finding("missing-rank", what, file=name, rank=rank)


def _padded(held: dict[int, str]) -> bool:
    """Say whether ranks are written with zeros before them."""
    lengths = {
        rank: len(match["rank"])
        for rank, name in held.items()
        if (match := OF_RANK.fullmatch(name))
    }
    return any(length > len(str(rank)) for rank, length in lengths.items())
