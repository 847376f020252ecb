"""Divide plain tensors of rank files over other ranks, and update what the files record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Box, Kind
from ftckpt.checkpoint.sharding import Split as Cut
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.pickles.walk import at as inner_at
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .checkpoint import RankPlaces, RanksCheckpoint
from .names import Role, rank_file
from .objects import Renumbering
from .specs import data_key, mappings_for_all
from .splits import cut_of
from .tensors import RankSplit


def splits_of(content: Content) -> Mapping[str, RankSplit]:
    """Return how the source's plain tensors are cut; nothing where it has none of that kind."""
    checkpoint = content.checkpoint
    return checkpoint.splits if type(checkpoint) is RanksCheckpoint else {}


def split_of(content: Content, wanted: TargetTensor) -> RankSplit | None:
    """Return how a tensor that is to be written was cut in the source."""
    splits = splits_of(content)
    key = wanted.copies[0].key if len(wanted.copies) == 1 else wanted.key
    split = splits.get(key) or splits.get(content.aliases.get(wanted.key, wanted.key))
    return split if split is not None and split.shape == wanted.shape else None


def wish_for_ranks(content: Content, request: LayoutRequest) -> LayoutRequest:
    """Return a request whose `dp` is the number of ranks.

    Raises:
        UsageError: tensor ranks for tensors that are no plain shards, or two numbers of ranks.
        UnsupportedError: nothing says how plain shards are cut (`unknown-rule`).
    """
    if request.tp is None:
        return request
    if not splits_of(content):
        if request.tp == 1:
            return request
        if type(content.checkpoint) is RanksCheckpoint:
            _require_no_stages(content.checkpoint)
        _require_known(content)
        raise UsageError(
            "--tp divides plain tensors along the axes that are recorded of them, or by --rules;"
            " of these nothing says how they are cut",
            hint="--dp N divides DTensors along the first axis, as FSDP2 does",
        )
    if request.dp is not None and min(request.dp, request.tp) > 1:
        raise UsageError(
            "plain rank files are divided over one group of ranks: --tp and --dp are two",
            hint="give one of them",
        )
    return replace(request, dp=max(request.tp, request.dp or 1))


def require_divisible(content: Content, world: int) -> None:
    """Refuse plain tensors for another number of ranks that nothing says how to divide.

    Raises:
        UnsupportedError: of the first such tensor (`unknown-rule`), or of a grid of ranks.
    """
    checkpoint = content.checkpoint
    if type(checkpoint) is not RanksCheckpoint:
        return
    _require_one_group(content, checkpoint)
    if world == checkpoint.topology.world_size:
        return
    _require_no_stages(checkpoint)
    _require_known(content)


def _require_one_group(content: Content, checkpoint: RanksCheckpoint) -> None:
    for key, split in checkpoint.splits.items():
        info = checkpoint.tensors.get(key)
        replicas = info is not None and any(piece.replica for piece in info.pieces)
        if key in content.tensors and split.dim is not None and (split.dim < 0 or replicas):
            raise UnsupportedError(
                f"{key} is cut over a grid of ranks, or kept in copies by data-parallel ranks:"
                " plain files are divided over one group",
                hint=_JOIN,
                kind="unknown-rule",
                tensor=key,
            )


def _require_no_stages(checkpoint: RanksCheckpoint) -> None:
    if any((file := rank_file(name)) and file.staged for name in checkpoint.streams):
        raise UnsupportedError(
            "pipeline stages saved by hand cannot be divided anew: nothing says which layers a new"
            " stage would hold, nor under which numbers its optimizer",
            hint=_JOIN,
        )


_JOIN = "ftckpt convert SRC DST --to safetensors (or torchsave) joins them to one checkpoint"


def _require_known(content: Content) -> None:
    checkpoint = content.checkpoint
    alone = {
        info.name: key
        for key, info in checkpoint.tensors.items()
        if info.component.startswith("extra:rank") and info.kind is not Kind.OTHER
    }
    lost = next((name for name, key in alone.items() if key in content.tensors), None)
    if lost is not None:
        raise UnsupportedError(
            f"nothing says how {lost} is divided over the ranks ({len(alone)} such tensors)",
            hint="--rules FILE.toml says it; docs/rules.md shows the form",
            kind="unknown-rule",
            tensor=lost,
        )


def shard_box(shape: tuple[int, ...], cut: Cut | None, world: int, rank: int) -> Box:
    """Return the box of a tensor that a rank holds, of one that is cut in no blocks."""
    offsets, sizes = [0] * len(shape), list(shape)
    if cut is not None and cut.axis is not None and world > 1:
        start, stop = even_rows(sizes[cut.axis], world, rank)
        offsets[cut.axis], sizes[cut.axis] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


class BesideTensors:
    """What stood beside the shards of a source, said of the new ones."""

    def __init__(self, content: Content, places: RankPlaces, world: int) -> None:
        """Take the places of the tensors in the files of a rank."""
        self._content, self._places, self._world = content, places, world
        self._numbers = Renumbering(content.topology.world_size or world, world)
        self._named: dict[str, tuple[str, Path]] = {}
        self._tops: dict[Role, tuple[Any, list[str]]] = {}
        for key, (role, path, owner) in places.found.items():
            if owner is None and path:
                self._named.setdefault(str(path[-1]), (key, path))
                tree = places.tree(key)
                if role not in self._tops and tree is not None:
                    self._tops[role] = tree, sorted(mappings_for_all(tree))

    def of(self, key: str, path: Path, rank: int) -> Iterator[tuple[Path, Any]]:
        """Yield (path, value) of what stands beside a tensor in its entry."""
        tree = self._places.tree(key)
        try:
            entry = None if tree is None else inner_at(tree, path[:-1])
        except KeyError:
            return
        own = data_key(entry)
        if not isinstance(entry, dict) or not own or own != path[-1]:
            return
        box = self._box(key, rank)
        for word, value in entry.items():
            if word != own and type(word) is str:
                said = self._numbers.spec({word: value}, box.offsets, box.sizes, 0, rank)
                yield (*path[:-1], word), said[word]

    def for_all(self, rank: int) -> Iterator[tuple[Role, Path, Any]]:
        """Yield (role, path, value) of the mappings for all tensors at the top of a file."""
        for role, (tree, words) in self._tops.items():
            for word in words:
                made = {}
                for name, said in tree[word].items():
                    key, _ = self._named.get(name, ("", ()))
                    box = self._box(key, rank) if key else Box((), ())
                    record = self._numbers.spec({word: said}, box.offsets, box.sizes, 0, rank)
                    made[name] = record[word]
                yield role, (word,), made

    def _box(self, key: str, rank: int) -> Box:
        wanted = self._content.tensors[key]
        split = split_of(self._content, wanted)
        cut = None if split is None or split.dim is None else cut_of(split)
        return shard_box(wanted.shape, cut, self._world, rank)
