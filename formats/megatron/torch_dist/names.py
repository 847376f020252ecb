"""Map the names that torch_dist stores to logical tensors.

On disk the layers of one kind, and the experts, are stacked: `decoder.layers.mlp.linear_fc1.weight`
has a leading axis of layers, `decoder.layers.mlp.experts.experts.linear_fc1.weight` axes of layers
and of experts. A store that is not homogeneous writes the numbers into the names instead.

    decoder.layers.mlp.experts.experts.linear_fc1.weight          stacked over layers and experts
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight      one of them
    decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight    its logical name

Source: `sharded_state_dict` in megatron/core/transformer/{transformer_block,moe/experts}.py,
`ChainedOptimizer.sharded_state_dict` in megatron/core/optimizer/optimizer.py.

Pieces of logical tensors that Megatron's torch_dist stores in another form.

None of them copies: each finds the item, the part of the global tensor, and the element of the
item with which it begins, when it is asked for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from operator import add
from typing import NamedTuple

from ftckpt.checkpoint import Box, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.optimizer_states import STATES, named_state
from ftckpt.formats.state.stored_names import place
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.workers.budget import demand

Numbers = tuple[int, ...]


# One stored piece, and which row of it.
_Place = tuple[int, int]
# A chunk of more layers and experts than any network has is somebody's way to fill the memory.
_MOST_ROWS = 1 << 22


def rows_of(stored: LazyPieces, lead: Numbers) -> Mapping[Numbers, LazyPieces] | None:
    """Return the pieces of every row of a stack: of every place on its leading axes.

    A row that no piece reaches is left out. None where a piece leaves the leading axes, which no
    row would show, or is a flat range over several rows.

    Args:
        stored: the pieces of the stack.
        lead: lengths of its leading axes.
    """
    axes = len(lead)
    if isinstance(stored, FlatShardPieces) and any(n != 1 for n in stored.shard[:axes]):
        return None
    one = (1,) * axes
    found: dict[Numbers, list[_Place]] = defaultdict(list)
    reached = 0
    for index in range(len(stored)):
        offsets, sizes = stored.box(index)
        if len(offsets) != len(sizes):
            return None
        begin, count = offsets[:axes], sizes[:axes]
        if count == one:
            found[begin].append((index, 0))
            continue
        reached += prod(count)
        if len(count) != axes or reached > _MOST_ROWS:
            return None
        for row, at in enumerate(product(*map(range, begin, map(add, begin, count)))):
            found[at].append((index, row))
    if any(at >= length for numbers in found for at, length in zip(numbers, lead, strict=True)):
        return None
    return {at: RowPieces(stored, axes, places) for at, places in found.items()}


class RowPieces(LazyPieces):
    """The pieces of one row of a stack, without the leading axes."""

    __slots__ = ("_axes", "_places", "_stored")

    def __init__(self, stored: LazyPieces, axes: int, places: Sequence[_Place]) -> None:
        """Keep which stored pieces reach the row, and at which of their rows."""
        self._stored = stored
        self._axes = axes
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def box(self, index: int) -> Box:
        """Return the box of one piece in the row."""
        offsets, sizes = self._stored.box(self._places[index][0])
        return Box(offsets[self._axes :], sizes[self._axes :])

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        stored, row = self._places[index]
        box = self.box(index)
        piece = self._stored.piece(stored)
        return piece._replace(box=box, first=piece.first + row * box.volume)


class Joined(LazyPieces):
    """The pieces of tensors of one shape that follow each other along the first axis."""

    __slots__ = ("_parts", "_rows")

    def __init__(self, parts: Sequence[Sequence[Piece]], rows: int) -> None:
        """Keep the parts, each `rows` long on the first axis."""
        self._parts = parts
        self._rows = rows

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def box(self, index: int) -> Box:
        """Return the box of one piece in the whole."""
        return self.piece(index).box

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        begin = 0
        for part in self._parts:
            if index < len(part):
                piece = part[index]
                offsets, sizes = piece.box
                return piece._replace(box=Box((offsets[0] + begin, *offsets[1:]), sizes))
            index -= len(part)
            begin += self._rows
        raise IndexError(index)


class FlatShardPieces(LazyPieces):
    """The pieces of a tensor that is stored by shards, each flat (`fully_sharded_model_space`).

    A tensor of shape [X, Y], divided over a grid of x by y shards, is stored with shape
    [x, y, X/x * Y/y]: where in the grid, and which element of the shard in C order.
    """

    __slots__ = ("_stored", "shard")

    def __init__(self, stored: LazyPieces, shard: Numbers) -> None:
        """Keep the stored pieces and the shape of one shard."""
        self._stored = stored
        self.shard = shard

    def __len__(self) -> int:
        return len(self._stored)

    def box(self, index: int) -> Box:
        """Return the box of the shard that one piece is a part of."""
        offsets = self._stored.box(index).offsets
        starts = tuple(at * size for at, size in zip(offsets[:-1], self.shard, strict=True))
        return Box(starts, self.shard)

    def piece(self, index: int) -> Piece:
        """Return one piece, a flat range of its shard; see `LazyPieces.piece`."""
        offsets, sizes = self._stored.box(index)
        flat = (offsets[-1], offsets[-1] + sizes[-1])
        return self._stored.piece(index)._replace(box=self.box(index), flat=flat)


def shard_shape(stored: Sequence[int], shape: Sequence[int]) -> Numbers | None:
    """Return the shape of one shard of a tensor of `shape` that is stored as a grid.

    None where `stored` is not such a grid.
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    shard = tuple(n // g for g, n in zip(grid, shape, strict=True))
    return shard if prod(shard) == stored[-1] else None


CHAINED = re.compile(r"chained_\d+\.")
# Gate and up of a gated MLP where they are stored apart (`singleton_local_shards`).
_HALVES = ("_w", "_v")
# Of the model's tensors, those that no optimizer updates.
BUFFERS = (".expert_bias", ".local_tokens_per_expert")
# More layers and experts than any network has would only be somebody's way to fill the memory.
_MOST_VIEWS = 1 << 20
_VIEW_BYTES = 1 << 10


class NamePattern(NamedTuple):
    """A logical name with places for numbers."""

    pattern: str  # for `%`, with a `%d` for each leading axis of the stored tensor
    axes: int = 0  # how many leading axes are numbers of the name

    def name(self, numbers: tuple[int, ...]) -> str:
        """Return the logical name of one layer, or of one expert of it."""
        return self.pattern % numbers


def spelling(name: str) -> NamePattern:
    """Return what the stored name of a parameter stands for."""
    words = name.replace("%", "%%").split(".")
    parts: list[str] = []
    axes = 0
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        expert = word == "experts" and index > 0 and words[index - 1] == "experts"
        parts.append("local_experts" if expert else word)
        if (expert or word == "layers") and following and not following.isdecimal():
            parts.append("%d")
            axes += 1
    return NamePattern(".".join(parts), axes)


class StoredForm(NamedTuple):
    """How a parameter is stored."""

    layers: bool = True  # whether the layers are stacked on a leading axis
    experts: bool = True  # whether the experts are
    halves: bool = False  # whether gate and up of a gated MLP are two stored tensors


def form_of(stored: str) -> StoredForm:
    """Return how a parameter of this stored name is stored; true of what it has none of."""
    words = stored.split(".")
    numbered = {"layers": False, "experts": False}
    for index, word in enumerate(words[:-1]):
        stack = word == "layers" or (word == "experts" and words[index - 1 : index] == [word])
        if stack and words[index + 1].isdecimal():
            numbered[word] = True
    halves = stored.endswith(_HALVES) and ".linear_fc1." in stored
    return StoredForm(not numbered["layers"], not numbered["experts"], halves)


def stored_place(name: str, form: StoredForm) -> tuple[str, tuple[int, ...]]:
    """Return the stored name of a logical tensor, and its place on the leading axes.

    The inverse of `spelling`, but for halves.
    """
    words = name.split(".")
    parts: list[str] = []
    numbers: list[int] = []
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        expert = word == "local_experts" and before == "experts"
        stacked = form.experts if before == "local_experts" else form.layers
        if before in ("layers", "local_experts") and word.isdecimal() and stacked:
            numbers.append(int(word))
        else:
            parts.append("experts" if expert else word)
    return ".".join(parts), tuple(numbers)


def halves_of(stored: str) -> tuple[str, str]:
    """Return the names under which gate and up are stored apart."""
    gate, up = _HALVES
    return stored + gate, stored + up


def logical(stored: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Return the logical tensors by key: one for each layer and expert.

    What cannot be taken apart (a stack without the axes, a chunk that leaves it, two stored tensors
    with one meaning) stays as it is stored, so that the checks see and name it.

    Raises:
        NoResourceError: there are more than the memory budget holds.
    """
    whole = [_placed(info) for info in stored]
    spelt = [_spelt(info) for info in whole]
    count = sum(prod(info.shape[: s.axes]) for info, s in zip(whole, spelt, strict=True))
    demand(count * _VIEW_BYTES, f"the index of {count} tensors")
    tensors: dict[str, TensorInfo] = {}
    for info, said in zip(whole, spelt, strict=True):
        views = _views(info, said)
        if tensors.keys() & views.keys():
            kept = info._replace(component="extra:stored", name=info.stored_name)
            views = {kept.key: kept}
        tensors.update(views)
    return joined_halves(tensors)


def _placed(info: TensorInfo) -> TensorInfo:
    """Say what a stored tensor is where the plain reader cannot know it."""
    if info.component == "model" and info.name.endswith(BUFFERS):
        return info._replace(kind=Kind.BUFFER)
    # The number of the optimizer that holds the state: a parameter has one optimizer.
    prefix = CHAINED.match(info.stored_name)
    if prefix is not None:
        found = place(info.stored_name[prefix.end() :], (), info.dtype)
        info = info._replace(component=found.component, kind=found.kind, name=found.name)
    if info.component == "optimizer" and info.kind is Kind.OTHER:
        leaf, _, weight = info.name.partition(".")
        if weight and weight.rpartition(".")[2] not in STATES:
            return info._replace(name=state_name(weight, leaf))
    return info


def state_name(weight: str, leaf: str) -> str:
    """Return the name of a state of a weight that has no kind of its own.

    Megatron stores the state first (`optimizer.state.momentum_buffer.decoder…`). A state that the
    table of states knows follows its weight, as in every format; another keeps Megatron's order.
    """
    return f"{weight}.{leaf}" if leaf in STATES else f"{leaf}.{weight}"


def _spelt(info: TensorInfo) -> NamePattern:
    """Return how its views are called; its own name where it lacks the axes for them."""
    said = spelling(info.name)
    lead = info.shape[: said.axes]
    if len(lead) == said.axes and prod(lead) <= _MOST_VIEWS:
        return said
    return NamePattern(info.name.replace("%", "%%"))


def _views(info: TensorInfo, said: NamePattern) -> dict[str, TensorInfo]:
    lead, shape = info.shape[: said.axes], info.shape[said.axes :]
    assert isinstance(info.pieces, LazyPieces)
    rows = rows_of(info.pieces, lead) if lead else None
    missing = RowPieces(info.pieces, len(lead), ())
    if rows is None:
        whole = info._replace(name=info.name if lead else said.name(()))
        return {whole.key: whole}
    prefix = tensor_key(info.component, info.kind, "")
    views: dict[str, TensorInfo] = {}
    for at in product(*map(range, lead)):  # perhaps a hundred thousand: built without `_replace`
        name = said.name(at)
        views[prefix + name] = TensorInfo(
            info.component,
            name,
            info.kind,
            shape,
            info.dtype,
            rows.get(at, missing),
            info.stored_name,
        )
    return views


def joined_halves(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Put gate and up, where they are two stored tensors, into one logical tensor."""
    joined: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        own = named_state(info.name) if info.kind is Kind.OTHER else None
        leaf = f".{own.leaf}" if own is not None and own.state is not None else ""
        whole = key.removesuffix(leaf)
        stem, end = whole[:-2], whole[-2:]
        if end not in _HALVES or ".linear_fc1." not in key or stem + leaf in tensors:
            joined[key] = info
            continue
        halves = [tensors.get(stem + end + leaf) for end in _HALVES]
        gate, up = halves
        if (
            gate is None
            or up is None
            or (gate.shape, gate.dtype) != (up.shape, up.dtype)
            or not info.shape  # counters
        ):
            joined[key] = info
        elif end == _HALVES[0]:
            shape = (2 * info.shape[0], *info.shape[1:])
            pieces = Joined((gate.pieces, up.pieces), info.shape[0])
            name = info.name.removesuffix(leaf)[:-2] + leaf
            joined[stem + leaf] = info._replace(name=name, shape=shape, pieces=pieces)
    return joined
