"""Say whether the one file of a checkpoint holds shards, by what it records itself.

A world size beside a model says nothing: one rank saves a whole model for all. It is a part where a
mapping for all tensors gives one a larger shape; and where the file records a mesh, or a job of
several ranks, and places a tensor on it, or keeps its tensors under a word for shards and no model.
So it is where the file records its own place in a grid of several ranks that share a model, under
any name (makani's utils/driver.py: `comm_grid`, `{axis: {"size": 2, "rank": 0}}`).
Without any record the pieces themselves tell it: FSDP's local state gives each parameter as what
lies on the rank of the flat one, in one dimension, and as an empty tensor where that is nothing
(torch/distributed/fsdp/_flat_param.py with `use_orig_params`; audiocraft's optim/fsdp.py).
Shards that say where they lie are merged before (`rank_inside`). The others must not pass for the
whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import at as inner_at
from ftckpt.formats.pickles.walk import dotted, leaves
from ftckpt.formats.state.stored_names import MODEL
from ftckpt.formats.torch_files.dtensor import How
from ftckpt.formats.torch_files.sharded import mesh_sizes
from ftckpt.formats.torch_files.values import TensorRef

from .contents import is_training_state
from .nested_shards import CONTAINERS, are_called_ranks, numbered
from .recorded_job import RANKS, Evidence
from .specs import (
    DATA,
    MESHES,
    PLACEMENTS,
    Spec,
    data_key,
    mappings_for_all,
    mesh_of,
    spec_of,
    specs_for_all,
)

_MODELS = (*MODEL, "tensors")
_SHARDS = (
    "shard", "shards", "model_shard", "model_shards", "local_shard", "local_shards",
    "param_shards", "weight_shards", "rank_shards", "local_state_dict", "local_tensors",
)  # fmt: skip
# More axes than any grid has.
_AXES = 16
_OF_DATA = re.compile(r"d|dp|(?:.*_)?(?:data|batch|ensemble|replica|ddp|dp)(?:_.*)?", re.IGNORECASE)


class LoneShard(NamedTuple):
    """A tensor that is not whole.

    Attributes:
        name: where it stands in the file.
        several: whether the file has the parts of other ranks too.
    """

    name: str
    several: bool


def part_in(tree: Any) -> LoneShard | None:
    """Return the first tensor of a file's tree that its own records call a shard; else None."""
    if not isinstance(tree, dict):
        return None
    alone = _ranks(tree) < 2
    found = next(_by_mapping(tree, alone=alone), None) or next(_by_entry(tree, alone=alone), None)
    found = found or (None if alone else next(_by_word(tree), None))
    return found or next(_by_grid(tree), None) or next(_by_pieces(tree), None)


def flat_weight(tree: Any) -> str:
    """Return a weight of a model whose tensors all have one dimension at most; "" if one has more.

    So do the pieces of flat parameters look. A small model may be like that, too: it takes another
    sign to tell (`part_in`, or the names of files beside it).
    """
    for key, state in _states(tree):
        found = _flat(state)
        if found:
            return dotted((key, *found)) if key else dotted(found)
    return ""


def _ranks(tree: Mapping[Any, Any]) -> int:
    """Return how many ranks the top of a file records; 1 where it records none."""
    told = Evidence("", 0)
    told.read(tree)
    meshes = (_mesh_ranks(tree[word]) for word in MESHES if word in tree)
    return max(1, told.world or 1, told.shards or 1, prod(told.groups.values()), *meshes)


def _mesh_ranks(value: Any) -> int:
    if type(value) is TensorRef:  # of the ranks themselves
        return value.numel
    if isinstance(value, Inert):
        try:
            return prod(mesh_sizes(value))
        except CorruptError:
            return 1
    if not isinstance(value, (dict, list, tuple)):
        return 1
    sizes = mesh_of({"mesh": value})
    if sizes and 0 not in sizes:
        return prod(sizes)
    # A list with rank 0 in it is of ranks; nested ones are, in whatever order.
    rows = value.values() if isinstance(value, dict) else value
    return sum(len(row) if isinstance(row, (list, tuple)) else 1 for row in rows)


def _by_mapping(tree: Mapping[Any, Any], *, alone: bool) -> Iterator[LoneShard]:
    """Yield tensors of which a mapping at the top says that they are larger, or cut."""
    for name, said in specs_for_all(tree, mappings_for_all(tree)).items():
        for stands, ref in _named(tree, name):
            spec = _spec(said, ref, name)
            if _larger(spec, ref) or (not alone and _cut(spec)):
                yield LoneShard(stands, False)
    for word in PLACEMENTS:
        if not alone and isinstance(tree.get(word), (list, tuple)):
            whole = Spec(placements=spec_of({word: tree[word]}, None, word).placements)
            for path, value in leaves({k: tree[k] for k in _MODELS if k in tree}):
                if type(value) is TensorRef and _cut(whole):
                    yield LoneShard(dotted(path), False)


def _by_grid(tree: Mapping[Any, Any]) -> Iterator[LoneShard]:
    """Yield tensors of a file that records its place in a grid of several ranks."""
    if any(_sharing(value) > 1 for value in tree.values()):
        for path, ref in leaves(tree):
            if type(ref) is TensorRef and ref.shape != ():
                yield LoneShard(dotted(path), False)


def _by_pieces(tree: Mapping[Any, Any]) -> Iterator[LoneShard]:
    """Yield weights whose siblings are pieces in one dimension, some of them without an element.

    Another state in the file (the best one, gathered) may have the same names in their own shapes.
    """
    states = [(key, state, _flat(state)) for key, state in _states(tree)]
    for key, state, path in states:
        if not path:
            continue
        refs = dict(_refs(state))
        empty = any(ref.shape == (0,) for ref in refs.values())
        name = dotted((key, *path)) if key else dotted(path)
        if empty or any(_are_shapes_of(refs, whole) for whole in _every_state(tree)):
            yield LoneShard(name, False)


def _states(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the models of a tree with their keys; the tree itself if it is one."""
    if not isinstance(tree, dict):
        return
    keys = [key for key in MODEL if isinstance(tree.get(key), dict)]
    yield from ((key, tree[key]) for key in keys)
    if not keys:
        yield "", tree


def _every_state(tree: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    level: list[Any] = [tree]
    for _ in range(3):
        level = [v for one in level for v in list(one.values())[:64] if isinstance(v, dict)]
        yield from level


def _are_shapes_of(pieces: Mapping[tuple[Any, ...], TensorRef], whole: Mapping[Any, Any]) -> bool:
    """Whether a state has each name of the pieces, and larger tensors of more dimensions."""
    refs = {path: whole.get(path[0]) for path in pieces if len(path) == 1}
    return len(refs) == len(pieces) and (
        all(type(w) is TensorRef and w.numel >= pieces[p].numel for p, w in refs.items())
        and any(type(w) is TensorRef and len(w.shape) > 1 for w in refs.values())
    )


def _refs(state: Any) -> Iterator[tuple[tuple[Any, ...], TensorRef]]:
    for path, value in leaves(state):
        if type(value) is TensorRef and value.dtype.family in ("float", "complex"):
            yield path, value


def _flat(state: Any) -> tuple[Any, ...]:
    """Return the path of a weight of a state in which no tensor has two dimensions; () if one has.

    A layer's weight has two or more, but those of norms, so that two of them are asked for.
    """
    refs = list(_refs(state))
    named = [path for path, ref in refs if str(path[-1]).endswith("weight") and ref.shape != ()]
    if len(named) < 2 or any(len(ref.shape) > 1 for _, ref in refs):
        return ()
    return named[0]


def _sharing(value: Any) -> int:
    """Return how many ranks of a grid share a model; 1 for anything else.

    Ranks along an axis of the data have the whole model each.
    """
    value = value.state if isinstance(value, Inert) else value
    if not isinstance(value, dict) or not 0 < len(value) <= _AXES:
        return 1
    ranks = 1
    for axis, place in value.items():
        size, rank = (place.get("size"), place.get("rank")) if isinstance(place, dict) else (0, 0)
        if type(size) is not int or type(rank) is not int or not 0 <= rank < size:
            return 1
        ranks *= 1 if _OF_DATA.fullmatch(str(axis)) else size
    return ranks


def _named(tree: Mapping[Any, Any], name: str) -> Iterator[tuple[str, TensorRef]]:
    for key, value in ((None, tree), *tree.items()):
        ref = value.get(name) if isinstance(value, dict) else None
        if type(ref) is TensorRef:
            yield name if key is None else f"{key}.{name}", ref


def _by_entry(tree: Mapping[Any, Any], *, alone: bool) -> Iterator[LoneShard]:
    """Yield tensors of the model beside which stands how they are cut."""
    listed = {key for key in CONTAINERS if len(numbered(tree.get(key), None) or ()) > 1}
    own = {key: tree[key] for key in (*_MODELS, *_SHARDS, *CONTAINERS) if key in tree}
    for path, value in leaves(own):
        if type(value) is not TensorRef or len(path) < 2 or path[-1] not in DATA:
            continue
        try:
            entry = inner_at(own, path[:-1])
        except KeyError:  # inside a pickled module
            continue
        if data_key(entry) != path[-1]:
            continue
        ranked = not alone or path[0] in listed or not RANKS.isdisjoint(entry)
        if ranked and _cut(_spec(entry, value, str(path[-2]))):
            yield LoneShard(dotted(path[:-1]), path[0] in listed)


def _by_word(tree: Mapping[Any, Any]) -> Iterator[LoneShard]:
    """Yield tensors that a key calls shards or that lie under ranks, where no model is beside."""
    held = {key: value for key, value in tree.items() if isinstance(value, (dict, list))}
    for key in (*_MODELS, *CONTAINERS):
        value = held.get(key)
        ranks = numbered(value, None)
        if ranks is None or len(ranks) < 2:
            continue
        states = key in CONTAINERS and any(is_training_state(m) for _, m in ranks.values())
        if states or are_called_ranks(value):
            yield from _tensors(key, value, several=True)
    if any(key in held and next(_tensors(key, held[key]), None) for key in _MODELS):
        return
    for key in _SHARDS:
        if key in held:
            several = numbered(held[key], None) is not None
            yield from _tensors(key, held[key], several=several)


def _tensors(key: str, value: Any, *, several: bool = False) -> Iterator[LoneShard]:
    for path, ref in leaves(value):
        if type(ref) is TensorRef and ref.shape != ():
            yield LoneShard(dotted((key, *path)), several)


def _spec(said: Any, ref: TensorRef, name: str) -> Spec:
    try:
        return spec_of(said, ref.shape, name)
    except CorruptError:
        return Spec()  # it speaks of something else


def _larger(spec: Spec, ref: TensorRef) -> bool:
    return spec.shape is not None and spec.shape != ref.shape


def _cut(spec: Spec) -> bool:
    """Whether it is placed as a shard; one whose whole shape is known is so by that alone."""
    if spec.shape is not None:
        return False
    return spec.offsets is not None or any(p.how is How.SHARD for p in spec.placements or ())
