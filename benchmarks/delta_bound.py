"""What coding byte by byte can reach at best, so that a ratio is judged by its own state.

The order-0 entropy of each tensor's byte planes, as they are (rotated, so that the exponent fills a
byte) or of the differences to the base, whichever is smaller. Weights that are the cast of a master
count nothing beside it, and alone the entropy of their differences as whole words, of which "did it
change?" is a part. Predictions by the optimizer's rule may go below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from delta_states import State

from ftckpt.checkpoint import Kind
from ftckpt.delta.codec.words import difference, rotate


def bound(target: State, base: State | None) -> dict[str, int]:
    """Return the bytes that such a coder needs, by class of tensor."""
    with_masters = any(info.kind is Kind.MASTER for info in target.infos.values())
    sizes: dict[str, int] = {}
    for key, info in target.infos.items():
        words = np.frombuffer(target.data[key], f"<u{info.dtype.itemsize}")
        if info.kind is Kind.PARAM and with_masters:
            bits = 0.0
        else:
            forms = [rotate(words, np.empty_like(words))]
            if base is not None:
                before = np.frombuffer(base.data[key], words.dtype)
                forms.append(difference(words, before, np.empty_like(words)))
            bits = min(map(_bits, forms))
        sizes[info.kind.value] = sizes.get(info.kind.value, 0) + int(bits * words.size / 8)
    return sizes


def _bits(words: Any) -> float:
    """Return the entropy of a word: of 2 bytes as one symbol, else of each of its bytes."""
    if words.itemsize == 2:
        return _entropy(words)
    return sum(_entropy(words.view("u1")[place :: words.itemsize]) for place in range(4))


def _entropy(symbols: Any) -> float:
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / symbols.size
    return float(-(shares * np.log2(shares)).sum())
