"""The names of a Hugging Face folder: shards of weights, and what lies beside them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

# Five digits are the rule: Kimi-K2 has `model-1-of-61`, and DeepSeek-V3 `model-00001-of-000163`.
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>[0-9]{1,18})-of-(?P<total>[0-9]{1,18})(?P<suffix>\.[a-z]+)"
)
# `model_weight_pp-rank-0-of-1_tp-rank-0-of-2` (nanotron) is a rank's, and no index will follow.
_RANK = re.compile(r".*(?:[0-9]-of-[0-9].*|rank)")
_DIGITS = 5
_MAX_COUNTED = 1_000_000
# What lies in a model folder beside the weights and belongs to it.
_BESIDE = re.compile(
    r"[^/]+\.(json|txt|model|py|md|jinja|tiktoken|bpe)"
    r"|(LICENSE|NOTICE|README|tokenizer|vocab)[^/]*|\.gitattributes",
    re.IGNORECASE,
)


class ShardFile(NamedTuple):
    """What the name of a shard says: `model-00002-of-00003.safetensors`.

    Attributes:
        stem: what all shards of the set begin with.
        number: of this shard.
        total: how many the name says that there are.
        suffix: with its dot.
        digits: to how many digits the number and the total are filled with zeros.
    """

    stem: str
    number: int
    total: int
    suffix: str
    digits: tuple[int, int] = (_DIGITS, _DIGITS)

    def sibling(self, number: int) -> str:
        """Return the name of another shard of the same set."""
        width, of = self.digits
        return f"{self.stem}-{number:0{width}d}-of-{self.total:0{of}d}{self.suffix}"


def shard_name(name: str) -> ShardFile | None:
    """Return what `name` says if it is the name of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None or _RANK.fullmatch(match["stem"]):
        return None
    number, total = match["number"], match["total"]
    digits = _filled(number), _filled(total)
    return ShardFile(match["stem"], int(number), int(total), match["suffix"], digits)


def _filled(digits: str) -> int:
    """Return to how many digits a number is filled; 1 where it seems to be not filled at all."""
    return len(digits) if digits.startswith("0") or len(digits) >= _DIGITS else 1


def lost_numbers(numbers: Collection[int], total: int) -> list[int]:
    """Return the numbers that a set of shards lacks, in order; the first million at most.

    A set of N is numbered 1..N (transformers), 0..N-1 of N (Ring, MiniMax) or 0..N of N (gpt-oss:
    three files, of which the names say two).
    """
    first = 0 if 0 in numbers else 1
    last = total if first or total in numbers else total - 1
    return [n for n in range(first, min(last, _MAX_COUNTED) + 1) if n not in numbers]


def is_beside(name: str) -> bool:
    """Say whether a file is of the kind that lies beside weights: configuration, a tokenizer."""
    return _BESIDE.fullmatch(name) is not None
