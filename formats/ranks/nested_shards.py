"""Find the shards of several ranks inside one file's tree: per rank, or per tensor.

    {"world_size": 4, "shards": {0: {name: {"data": tensor, "dim": 0, "global_shape": …}}, 1: …}}
    {"shards": [{"model": {…}, "optimizer": {…}, "rank": 0}, …]}       or such a list by itself
    {"model": {name: [{"data": tensor, "offsets": …, "global_shape": …}, …]}}
    {"model": {name: {"global_shape": …, "dim": 0, "shards": [tensor, tensor]}}}

Each rank's part is given the form that a file of its own would have, so that one reader serves
both. Lists are common in states, and most hold layers: one is taken for the ranks' parts only where
its key, its members' recorded ranks, or offsets that differ say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError, UnsafeError, UnsupportedError
from ftckpt.formats.pickles.walk import MAX_LEAVES, Path, dotted, leaves, step_of
from ftckpt.formats.pickles.walk import at as inner_at
from ftckpt.formats.state.stored_names import MODEL
from ftckpt.formats.torch_files.values import SubclassRef, TensorRef

from .contents import is_training_state
from .recorded_job import RANKS, WORLDS
from .specs import DATA, FOR_ALL, data_key, mappings_for_all, spec_of, specs_for_all

# Keys under which the ranks' parts stand, and those of a tensor's shards beside its shape.
CONTAINERS = (
    "shards", "ranks", "rank_shards", "model_shards", "param_shards", "rank_states", "per_rank",
    "shard_states", "rank_state_dicts",
)  # fmt: skip
_PARTS = ("shards", "parts", "pieces", "partitions", "chunks", "local_shards")
_MODELS = (*MODEL, "tensors", "shards")
_RANK = re.compile(r"(?P<word>(?:rank|shard|tp|tp_rank|gpu|device|part|worker)[_-]?)?(\d{1,7})")
_MOST = 1 << 16
_DEEPEST = 8


class Inside(NamedTuple):
    """The part of one rank.

    Attributes:
        rank: whose it is.
        tree: as a file of the rank alone would hold it.
        paths: dotted path in `tree` -> path in the file, for what does not lie below `prefix`.
        prefix: where the rank's part lies; () where `paths` says it all.
        added: steps that every path in `tree` has before those below `prefix`.
    """

    rank: int
    tree: Mapping[Any, Any]
    paths: Mapping[str, Path]
    prefix: Path
    added: int

    def path(self, path: Path) -> Path:
        """Return the path in the file of a path in `tree`."""
        found = self.paths.get(dotted(path))
        return (*self.prefix, *path[self.added :]) if found is None else found


class InsideRanks(NamedTuple):
    """What a file holds.

    Attributes:
        parts: by rank.
        rest: what is not a rank's.
        by_rank: whether the file lists ranks, and not the shards of each tensor.
    """

    parts: tuple[Inside, ...]
    rest: Any
    by_rank: bool


def ranks_inside(tree: Any) -> InsideRanks | None:
    """Return the parts of several ranks that a tree holds; None where it holds no such thing.

    Raises:
        CorruptError: two parts say that they are of one rank (`wrong-rank`).
        UnsupportedError: shards of each tensor outside the model.
    """
    if not isinstance(tree, (dict, list)):
        return None
    return _by_rank(tree) or (_by_tensor(tree) if isinstance(tree, dict) else None)


# --- one part a rank ------------------------------------------------------------------------------


def _by_rank(tree: Any) -> InsideRanks | None:
    top = tree if isinstance(tree, dict) else {}
    mappings = mappings_of(top)
    places: list[Path] = [(), *((key,) for key in (*CONTAINERS, *_MODELS) if key in top)]
    for at in places:
        value = inner_at(tree, at)
        held = numbered(value, _first(top, WORLDS))
        if held is None or len(held) < 2 or not _are_shards(held, mappings):
            continue
        if not (set(at) & set(CONTAINERS) or are_called_ranks(value)):
            continue  # layers have numbers too
        rest = {key: value for key, value in top.items() if key != at[0]} if at else {}
        parts = tuple(
            _part(rank, key, member, at, mappings)
            for rank, (key, member) in sorted(held.items())
        )  # fmt: skip
        return InsideRanks(parts, rest, by_rank=True)
    return None


def _part(rank: int, key: Any, member: Any, at: Path, mappings: Mapping[str, Any]) -> Inside:
    prefix = (*at, step_of(key))
    if is_training_state(member):
        return Inside(rank, {**mappings, **member}, {}, prefix, 0)
    return Inside(rank, {**mappings, "shards": member}, {}, prefix, 1)


def numbered(value: Any, world: int | None) -> dict[int, tuple[Any, Any]] | None:
    """Return rank -> (key, member) of a list or dict of one dict a rank; None for all else."""
    members = list(value.items() if isinstance(value, dict) else enumerate(value)) if isinstance(
        value, (dict, list)) and len(value) <= _MOST else []  # fmt: skip
    found: dict[int, tuple[Any, Any]] = {}
    for key, member in members:
        rank = _rank_of(key)
        if rank is None or not isinstance(member, dict) or rank in found:
            return None
        found[rank] = (key, member)
    if not found:
        return None
    if isinstance(value, list):
        return _as_they_say(found)
    if min(found) == 1 and max(found) == len(found) == world:
        return {rank - 1: one for rank, one in found.items()}  # counted from 1
    return found


def _as_they_say(found: Mapping[int, tuple[Any, Any]]) -> dict[int, tuple[Any, Any]]:
    """Return the members of a list by the ranks that all of them record; else by their places."""
    said = [_first(member, RANKS) for _, member in found.values()]
    if None in said:
        return dict(found)
    pairs = zip(said, found.values(), strict=True)
    by_rank = {rank: one for rank, one in pairs if rank is not None}
    if len(by_rank) < len(found):
        what = "two shards of a file record that they are of one rank"
        raise CorruptError(what, kind="wrong-rank")
    return by_rank


def _first(member: Mapping[Any, Any], words: frozenset[str]) -> int | None:
    found = (v for k, v in member.items() if type(k) is str and k.lower() in words)
    return next((v for v in found if type(v) is int and 0 <= v < _MOST), None)


def are_called_ranks(value: Any) -> bool:
    """Whether keys (`rank_0`), or what every member records, say that members are of ranks."""
    members = value.items() if isinstance(value, dict) else enumerate(value)
    return all(
        (type(key) is str and (match := _RANK.fullmatch(key)) and match["word"])
        or (isinstance(member, dict) and _first(member, RANKS) is not None)
        for key, member in members
    )


def _rank_of(key: Any) -> int | None:
    if type(key) is int:
        return key if 0 <= key < _MOST else None
    match = _RANK.fullmatch(key) if type(key) is str else None
    return int(match[2]) if match else None


def _are_shards(held: Mapping[int, tuple[Any, Any]], mappings: Mapping[str, Any]) -> bool:
    """Whether at least two ranks' parts say of a tensor how it is cut."""
    told = set(specs_for_all(mappings, frozenset(mappings)))
    return sum(_claims_a_cut(member, told) for _, member in held.values()) > 1


def _claims_a_cut(member: Any, told: set[str]) -> bool:
    try:
        return _says_a_cut(member, told)
    except CorruptError:
        return True  # and is told as damage where the part is read


def _says_a_cut(member: Any, told: set[str]) -> bool:
    own = specs_for_all(member, mappings_for_all(member))
    for path, value in leaves(member):
        if type(value) is SubclassRef and value.type_name.startswith("torch.distributed."):
            return True
        if type(value) is TensorRef and path:
            name = str(path[-1])
            entry = inner_at(member, path[:-1])
            if data_key(entry) == name and spec_of(entry, value.shape, name).tells:
                return True
            if name in told or (name in own and spec_of(own[name], value.shape, name).tells):
                return True
    return False


def mappings_of(top: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the mappings for all tensors (`global_shapes`) that stand beside the ranks' parts."""
    if not FOR_ALL.keys() & {key for key in top if type(key) is str}:
        return {}
    names: dict[str, Any] = {}
    for path, value in leaves(dict(top)):
        if type(value) is TensorRef and path:
            names.setdefault(str(path[-1]), value)
            names.setdefault(str(path[-2:-1] and path[-2]), value)
    every = {**top, "ranks' tensors": names}
    return {key: top[key] for key in mappings_for_all(every)}


# --- one list a tensor ----------------------------------------------------------------------------


Members = dict[int, tuple[Path, dict[str, Any]]]


def _by_tensor(tree: dict[Any, Any]) -> InsideRanks | None:
    mappings = mappings_of(tree)
    said = specs_for_all(mappings, frozenset(mappings))
    lists = dict(_shard_lists(tree, said))
    if not any(len(members) > 1 for members in lists.values()):
        return None
    owners = {str(path[0]) if len(path) > 1 and path[0] in _MODELS else "" for path in lists}
    lost = next((path for path in lists if len(path) > 1 and path[0] not in _MODELS), None)
    if len(owners) > 1 or lost is not None:
        name = dotted(lost or next(iter(lists)))
        raise UnsupportedError(
            f"{name} is a list of shards, and so are tensors elsewhere in the file: which of them"
            " is the model is not known",
            tensor=name,
        )
    (owner,) = owners
    at = (owner,) if owner else ()
    states: dict[int, dict[str, Any]] = {}
    paths: dict[int, dict[str, Path]] = {}
    whole = {path: _whole(value, path) for path, value in _beside(tree, at, lists)}
    for path, members in {**lists, **whole}.items():
        name = dotted(path[len(at) :])
        for rank, (where, entry) in members.items():
            states.setdefault(rank, {})[name] = entry
            paths.setdefault(rank, {})[f"shards.{name}.{data_key(entry)}"] = where
    taken = {path[0] for path in (*lists, *whole)}
    parts = tuple(
        Inside(rank, {"shards": states[rank]}, paths[rank], (), 0) for rank in sorted(states)
    )
    rest = {key: value for key, value in tree.items() if step_of(key) not in taken}
    return InsideRanks(parts, rest, by_rank=False)


def _whole(value: TensorRef, path: Path) -> Members:
    return {0: (path, {"data": value, "global_shape": list(value.shape), "dim": None})}


def _beside(tree: Any, at: Path, lists: Mapping[Path, Members]) -> Iterator[tuple[Path, TensorRef]]:
    """Yield plain tensors of the model: there is one of each, so it is the whole of it.

    Raises:
        UnsupportedError: anything else stands there, which would be lost.
    """
    for path, value in leaves(inner_at(tree, at), at):
        if any(path[:end] in lists for end in range(len(path) + 1)):
            continue
        if type(value) is TensorRef and (at or len(path) == 1):
            yield path, value
        elif at:
            raise UnsupportedError(
                f"{dotted(path)} stands among lists of shards and is none", tensor=dotted(path)
            )


def _shard_lists(tree: Any, said: Mapping[str, Any]) -> Iterator[tuple[Path, Members]]:
    """Yield (path, shards) of every list of entries that say how they are cut."""
    todo: list[tuple[Path, Any]] = [((), tree)]
    for at, value in todo:  # grows as it is gone through
        if not isinstance(value, dict) or len(at) > _DEEPEST:
            continue
        for key, member in value.items():
            if not isinstance(member, (dict, list)) or not member:
                continue
            path = (*at, step_of(key))
            told = said.get(str(path[-1])) or said.get(dotted(path[1:])) or {}
            members = _members_in(member, path, told)
            if members:
                yield path, members
            elif len(todo) < MAX_LEAVES:
                todo.append((path, member))
            else:
                raise UnsafeError(
                    "a pickle unfolds to far more state than a checkpoint has",
                    kind="unsafe-pickle",
                )


def _members_in(value: Any, at: Path, told: Mapping[str, Any]) -> Members:
    try:
        return _members(value, at, told)
    except CorruptError:
        if at[0] in _MODELS or len(at) == 1:
            raise
        return {}  # other state may have the same words


def _members(value: Any, at: Path, told: Mapping[str, Any]) -> Members:
    """Return rank -> (path of the tensor, entry) of one tensor's shards; nothing for all else."""
    beside, name = dict(told), dotted(at)
    word = next((w for w in _PARTS if isinstance(value, dict) and w in value), "")
    if word:
        own = {k: v for k, v in value.items() if type(k) is str and k != word and k not in DATA}
        beside.update(own)
        value, at = value[word], (*at, word)
    if not isinstance(value, (dict, list)) or not 0 < len(value) <= _MOST:
        return {}
    found: Members = {}
    specs = []
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        plain = type(member) is TensorRef
        rank, own = _rank_of(key), {"data": member} if plain else member
        if rank is None or not isinstance(own, dict):
            return {}
        entry = {**beside, **own}
        tensor = data_key(entry)
        if not tensor or "name" in own or "fqn" in own:
            return {}
        spec = spec_of(entry, entry[tensor].shape, name)
        if not spec.tells:
            return {}
        specs.append((spec, entry[tensor].shape))
        recorded = None if plain else _first(own, RANKS)
        rank = rank if recorded is None else recorded
        if rank in found:
            what = f"two shards of {name} are of one rank, {rank}"
            raise CorruptError(what, kind="wrong-rank", tensor=name)
        step = (*at, step_of(key))
        found[rank] = (step if plain else (*step, tensor), entry)
    if len({spec.shape for spec, _ in specs}) > 1:
        return {}
    boxes = {(spec.offsets, shape) for spec, shape in specs}
    apart = len(boxes) == len(specs) and all(spec.offsets is not None for spec, _ in specs)
    called = bool(word) or bool(told) or are_called_ranks(value)
    return found if called or apart or len(found) == 1 else {}
