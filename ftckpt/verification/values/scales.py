"""Check what the scales of quantised weights may be.

NaN and infinity are found where all tensors are checked; here are the rules of a scheme: a scale of
zero would make zeros of a block of weights, and a negative one turn their signs.

Compare the RNG states of ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.quantised import ScaleRule
from ftckpt.checkpoint.read_tensor import raw_dtype, stream_payload
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.workers.limits import RateLimit

_NAN_OF_E8M0 = 0xFF


def check_scale(
    checkpoint: Checkpoint, info: TensorInfo, rule: ScaleRule, limiter: RateLimit | None
) -> Iterator[Finding]:
    """Yield where values of a scale are none that its scheme has (`bad-scale`).

    Args:
        checkpoint: that holds it.
        info: the scale.
        rule: what its values may be.
        limiter: bounds the rate of reading.
    """
    import numpy as np

    if rule is ScaleRule.ANY or not info.dtype.itemsize:
        return
    bits = 8 * info.dtype.itemsize
    sign = np.uint64(1) << np.uint64(bits - 1)
    zeros = negative = codes = 0
    for piece in info.pieces:
        payload = checkpoint.payload(piece)
        for block in stream_payload(checkpoint.source, payload, limiter):
            items = np.frombuffer(block, raw_dtype(info.dtype.itemsize))
            if info.dtype.family == "uint":
                codes += int(np.count_nonzero(items == _NAN_OF_E8M0))
            elif info.dtype.name != "float8_e8m0fnu":
                plain = items & items.dtype.type(int(sign) - 1)
                zeros += int(np.count_nonzero(plain == 0))
                negative += int(np.count_nonzero((items != plain) & (plain != 0)))
    found = []
    if rule is ScaleRule.EXPONENT and codes:
        found.append(f"{codes} values that are the NaN of E8M0")
    if rule is ScaleRule.POSITIVE and zeros:
        found.append(f"{zeros} zeros")
    if negative and info.dtype.family == "float":
        found.append(f"{negative} negative values")
    for what in found:
        yield finding(
            "bad-scale",
            f"{info.key} holds {what}: the weights of those blocks are lost",
            file=info.pieces[0].extent.file,
            tensor=info.key,
        )


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
