"""The names of safetensors weights, and what they say of a folder.

Names alone decide here: `<stem>.safetensors`, or shards `<stem>-00001-of-00003.safetensors` with
`<stem>.safetensors.index.json`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import COMPRESSED as PACKED
from ftckpt.discovery.recognise import Listing
from ftckpt.formats.huggingface.index import shard_name
from ftckpt.formats.state.side_by_side import is_among_saves, saves_beside

_SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
SUFFIX = ".safetensors"
COMPRESSED = tuple(SUFFIX + packed for packed in PACKED)
OPTIMIZER = "optimizer/"
COMPONENTS = "ftckpt.components/"
SHARDED = "sharded"
INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[^/]+)?\.json")


class ShardName(NamedTuple):
    """What a shard's name says: which rank wrote it, and which part of the model it is."""

    rank: int  # from 1
    part: int  # from 1, or from 0 as the trainer numbers them
    total: int

    @property
    def file(self) -> str:
        """Return the name."""
        return f"shard-{self.rank:05d}-model-{self.part:05d}-of-{self.total:05d}.safetensors"


def shard_place(name: str) -> ShardName | None:
    """Return what `name` says if it is the name of a rank's shard."""
    match = _SHARD.fullmatch(name)
    return ShardName(*map(int, match.groups())) if match else None


def evidence(listing: Listing) -> tuple[str, CommitState] | None:
    """Return why a listing is a safetensors checkpoint, and what its names say of the commit."""
    if listing.single:
        return _evidence_in_file(listing)
    names = listing.files
    if ".metadata" in names:
        return None
    top = [n for n in names if n.endswith(SUFFIX)]
    loose = [n for n in top if shard_place(n) is None and shard_name(n) is None]
    if _are_steps(loose, listing) or saves_beside(listing):
        return None
    weights = [n for n in top if shard_place(n) is None]
    indexes = [n for n in names if INDEX.fullmatch(n)]
    # An index, and shards, are of the folder whatever lies beside.
    if top and not indexes and loose == top and is_among_saves(listing):
        return None
    if indexes:
        return f"has {min(indexes)}", CommitState.COMMITTED
    if weights:
        shards = [s for s in map(shard_name, weights) if s is not None]
        whole = all(s.total == 1 for s in shards) and not _shards_below(listing)
        single = len(shards) < len(weights)
        state = CommitState.NO_MARKER if single or whole else CommitState.UNCOMMITTED
        return f"has {min(weights)}", state
    if top:
        return f"has {min(top)}", CommitState.NO_MARKER
    for folder in (OPTIMIZER, COMPONENTS):
        if folder[:-1] in listing.directories:
            inside = [n for n in listing.inside(folder[:-1]).files if INDEX.fullmatch(n)]
            if inside:
                return f"has {folder}{min(inside)} and no weights", CommitState.COMMITTED
    inside = _shards_below(listing)
    # torch makes no other directory there: beside others it is a child of that name.
    if inside and all(d == SHARDED or d.startswith(".") for d in listing.directories):
        reason = f"has {SHARDED}/{min(inside)} and nothing consolidated"
        return reason, CommitState.UNCOMMITTED
    return None


def _are_steps(names: Collection[str], listing: Listing) -> bool:
    """Say whether files side by side are checkpoints of several steps, and so a root.

    Two of them have one name but for a number that it calls a step or an epoch, or one of them has
    none (the last of the run). kohya's scripts leave the word out for an epoch: then its own fields
    in the header show whose number it is.
    """
    bases: dict[str, set[str]] = {}
    own: dict[str, set[str]] = {}
    for name in names:
        stem = name.removesuffix(SUFFIX)
        if match := _STEP.fullmatch(stem):
            bases.setdefault(match["base"], set()).add(stem)
        elif match := _EPOCH.fullmatch(stem):
            own.setdefault(match["base"], set()).add(stem)
    for base, found in own.items():
        series = base in bases or base + SUFFIX in names or len(found) > 1
        if series and b'"ss_' in listing.head(min(found) + SUFFIX, _HEAD):
            bases.setdefault(base, set()).update(found)
    return any(len(found) > 1 or base + SUFFIX in names for base, found in bases.items())


# kohya-ss/sd-scripts library/train_util.py (`get_step_ckpt_name`, `get_epoch_ckpt_name`).
_STEP = re.compile(r"(?P<base>.+?)[-_](?:step|epoch|iter|iteration)s?[-_]?\d{1,15}")
_EPOCH = re.compile(r"(?P<base>.+)-\d{6}")
_HEAD = 4096


def _shards_below(listing: Listing) -> list[str]:
    """Return the names of what ranks wrote below, to be consolidated here."""
    if SHARDED not in listing.directories:
        return []
    return [name for name in listing.inside(SHARDED).files if shard_place(name)]


def _evidence_in_file(listing: Listing) -> tuple[str, CommitState] | None:
    name = listing.single
    if name.endswith((SUFFIX, *COMPRESSED)):
        return f"ends in {name[name.rindex(SUFFIX) :]}", CommitState.NO_MARKER
    from .header import MAX_HEADER, PREFIX

    head = listing.head(name, PREFIX + 1)
    length = int.from_bytes(head[:PREFIX], "little")
    if head[PREFIX:] == b"{" and length <= min(MAX_HEADER, listing.files[name].size):
        return "begins with a length and a JSON header", CommitState.NO_MARKER
    return None
