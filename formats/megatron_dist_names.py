"""How Megatron's torch_dist spells tensors, and which logical tensors a stored one stands for.

On disk the layers of one kind, and the experts, are stacked: `decoder.layers.mlp.linear_fc1.weight`
has a leading axis of layers, `decoder.layers.mlp.experts.experts.linear_fc1.weight` axes of layers
and of experts. A store that is not homogeneous writes the numbers into the names instead.

    decoder.layers.mlp.experts.experts.linear_fc1.weight          stacked over layers and experts
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight      one of them
    decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight    its logical name

Source: `sharded_state_dict` in megatron/core/transformer/{transformer_block,moe/experts}.py,
`ChainedOptimizer.sharded_state_dict` in megatron/core/optimizer/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Kind, TensorInfo, tensor_key
from ftckpt.memory import demand

from .dcp_names import place
from .dcp_tensors import LazyPieces
from .megatron_dist_pieces import Joined, Row, rows_of

CHAINED = re.compile(r"chained_\d+\.")
# Gate and up of a gated MLP where they are stored apart (`singleton_local_shards`).
_HALVES = ("_w", "_v")
# Of the model's tensors, those that no optimizer updates.
_BUFFERS = (".expert_bias", ".local_tokens_per_expert")
# More layers and experts than any network has would only be somebody's way to fill the memory.
_MOST_VIEWS = 1 << 20
_VIEW_BYTES = 1 << 10


class Spelling(NamedTuple):
    """A logical name with places for numbers.

    Attributes:
        pattern: for `%`, with a `%d` for each leading axis of the stored tensor.
        axes: how many leading axes are numbers of the name.
    """

    pattern: str
    axes: int = 0

    def name(self, numbers: tuple[int, ...]) -> str:
        """Return the logical name of one layer, or of one expert of it."""
        return self.pattern % numbers


def spelling(name: str) -> Spelling:
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
    return Spelling(".".join(parts), axes)


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
    return _joined(tensors)


def _placed(info: TensorInfo) -> TensorInfo:
    """Say what a stored tensor is where the plain reader cannot know it."""
    if info.component == "model" and info.name.endswith(_BUFFERS):
        return info._replace(kind=Kind.BUFFER)
    # The number of the optimizer that holds the state: a parameter has one optimizer.
    prefix = CHAINED.match(info.stored_name)
    if prefix is None:
        return info
    found = place(info.stored_name[prefix.end() :], (), info.dtype)
    return info._replace(component=found.component, kind=found.kind, name=found.name)


def _spelt(info: TensorInfo) -> Spelling:
    """Return how its views are called; its own name where it lacks the axes for them."""
    said = spelling(info.name)
    lead = info.shape[: said.axes]
    if len(lead) == said.axes and prod(lead) <= _MOST_VIEWS:
        return said
    return Spelling(info.name.replace("%", "%%"))


def _views(info: TensorInfo, said: Spelling) -> dict[str, TensorInfo]:
    lead, shape = info.shape[: said.axes], info.shape[said.axes :]
    assert isinstance(info.pieces, LazyPieces)
    rows = rows_of(info.pieces, lead) if lead else None
    missing = Row(info.pieces, len(lead), ())
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


def _joined(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Put gate and up, where they are two stored tensors, into one logical tensor."""
    joined: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        stem, end = key[:-2], key[-2:]
        if end not in _HALVES or ".linear_fc1." not in key or stem in tensors:
            joined[key] = info
            continue
        halves = [tensors.get(stem + end) for end in _HALVES]
        gate, up = halves
        if gate is None or up is None or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            joined[key] = info
        elif end == _HALVES[0] and info.shape:
            shape = (2 * info.shape[0], *info.shape[1:])
            pieces = Joined((gate.pieces, up.pieces), info.shape[0])
            joined[stem] = info._replace(name=info.name[:-2], shape=shape, pieces=pieces)
    return joined
