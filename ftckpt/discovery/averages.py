"""Averaged weights beside the weights that they were made of (`ckpt_ema_300.pth`, `ckpt300.pth`).

An average is a companion of its weights: with it or without it the newest save is the same, and gc
keeps or drops the two together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

WORDS = frozenset({"ema", "swa", "avg", "average", "averaged", "polyak"})
# An average may have its decay in its name (guided diffusion: `ema_0.9999_010000.pt`).
_DECAY = re.compile(r"(?<=ema)[-_]?0?\.\d+|(?<=ema)[-_]?0\d{2,}(?=[-_])", re.IGNORECASE)
# What the weights may be called where the average has its own word instead.
_WEIGHTS = frozenset(
    {"model", "models", "weights", "net", "network", "params", "state", "dict", "checkpoint"}
    | {"ckpt", "step", "iter", "epoch", "raw"}
)
_Key = tuple[str, ...]


def averages_among(names: Iterable[str]) -> dict[str, str]:
    """Return each average among siblings with its weights; one whose weights are not there is none.

    The names differ in the word for an average alone, or in it and a word for the weights.
    """
    exact: dict[_Key, list[str]] = defaultdict(list)
    alike: dict[_Key, list[str]] = defaultdict(list)
    found: list[tuple[str, _Key]] = []
    for name in names:
        own = _key(_DECAY.sub("", name))
        plain = tuple(word for word in own if word not in WORDS)
        if plain != own:
            found.append((name, plain))
        else:
            exact[plain].append(name)
            alike[_bare(plain)].append(name)
    pairs = {}
    for name, plain in found:
        weights = exact.get(plain) or alike.get(_bare(plain), [])
        if len(weights) == 1:
            pairs[name] = weights[0]
    return pairs


def _key(name: str) -> _Key:
    words = re.findall(r"[a-z]+|[0-9]+", name.rpartition("/")[2].lower())
    return tuple(word.lstrip("0") or "0" if word.isdigit() else word for word in words)


def _bare(key: _Key) -> _Key:
    return tuple(word for word in key if word not in _WEIGHTS)
