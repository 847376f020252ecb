"""The names of a Hugging Face folder: shards of weights, and what lies beside them."""

from __future__ import annotations

import re
from typing import NamedTuple

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})(?P<suffix>\.[a-z]+)")
# What lies in a model folder beside the weights and belongs to it.
_BESIDE = re.compile(
    r"[^/]+\.(json|txt|model|py|md|jinja|tiktoken|bpe)"
    r"|(LICENSE|NOTICE|README|tokenizer|vocab)[^/]*|\.gitattributes",
    re.IGNORECASE,
)


class ShardFile(NamedTuple):
    """What the name of a shard says: `model-00002-of-00003.safetensors`."""

    stem: str
    number: int
    total: int
    suffix: str

    def sibling(self, number: int) -> str:
        """Return the name of another shard of the same set."""
        return f"{self.stem}-{number:05d}-of-{self.total:05d}{self.suffix}"


def shard_name(name: str) -> ShardFile | None:
    """Return what `name` says if it is the name of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    return ShardFile(match["stem"], int(match["number"]), int(match["total"]), match["suffix"])


def is_beside(name: str) -> bool:
    """Say whether a file is of the kind that lies beside weights: configuration, a tokenizer."""
    return _BESIDE.fullmatch(name) is not None
