"""Compare the RNG states of ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import stream_payload
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding

_RNG = re.compile(r"rng|random", re.IGNORECASE)
_RANK = re.compile(r"(?:rank[_.]?|shard_|\[)?(\d+)$")


def check_rng(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the RNG states of different ranks, if they are tensors: none may be equal."""
    states: dict[str, dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, info in checkpoint.tensors.items():
        match = _RANK.search(info.name)
        if not match or not _RNG.search(key) or info.nbytes > 1 << 16 or len(info.pieces) != 1:
            continue
        try:
            data = b"".join(stream_payload(checkpoint.source, checkpoint.payload(info.pieces[0])))
        except FtckptError:
            continue  # the checks before this one report it
        states[key[: len(key) - len(match[0])]][data].append(key)
    for family in states.values():
        for keys in family.values():
            if len(keys) > 1:
                yield finding(
                    "equal-rng",
                    f"{len(keys)} ranks share one RNG state ({', '.join(keys[:3])}): they draw "
                    "the same numbers",
                    tensor=keys[0],
                )
