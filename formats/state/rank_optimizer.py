"""The optimizer's state in one rank's file: which tensor belongs to which parameter.

`torch.optim.Optimizer.state_dict` gives `{"state": {id: {name: tensor}}, "param_groups": […]}` with
integer ids; FSDP's `optim_state_dict` has parameter names in place of the ids.

Place local shards of FSDP2 by the DTensors of their optimizer.

RLinf's `checkpoint_rank_R.pt` holds each parameter's local tensor, and the optimizer's state_dict
as it is: numbered, with DTensors. A moment has its parameter's mesh and placements, which are the
shard's too if the number means exactly one parameter.

Source: rlinf/hybrid_engines/fsdp/strategy/checkpoint.py (`checkpoint_format="local_shard"`).
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint.optimizer_states import StateShape, named_state, parameter_shapes
from ftckpt.formats.pickles.walk import step_of
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed
from ftckpt.formats.torch_files.values import TensorRef

from .param_ids import Shape, names_of_ids


class OptimizerValue(NamedTuple):
    """One value of the optimizer's state.

    Attributes:
        parameter: the name of its parameter, or `<group>.<position>` where that is not proven.
        leaf: `exp_avg`, `step`, …
        path: where it stands in the file's tree.
        value: as pickled.
    """

    parameter: str
    leaf: str
    path: tuple[str | int, ...]
    value: Any


def is_optimizer(tree: Any) -> bool:
    """Say whether a value is a torch optimizer's state_dict."""
    return (
        isinstance(tree, dict)
        and isinstance(tree.get("state"), dict)
        and isinstance(tree.get("param_groups"), (list, dict))
    )


def states(
    tree: Mapping[str, Any], weights: Sequence[tuple[str, Held]], read: Any
) -> Iterator[OptimizerValue]:
    """Yield the values of one optimizer's state_dict.

    Args:
        tree: see `is_optimizer`.
        weights: the model's tensors in the same rank, in the order of its state_dict.
        read: `HeldReader.read` of the file.
    """
    entries = state_entries(tree)
    names = parameter_names(entries, tree["param_groups"], weights, read)
    for key, state in entries.items():
        for leaf, value in state.items():
            yield OptimizerValue(
                names[key], str(step_of(leaf)), ("state", step_of(key), step_of(leaf)), value
            )


def state_entries(tree: Mapping[str, Any]) -> dict[int | str, dict[Any, Any]]:
    """Return the state of each parameter by its id or name.

    Other keys are left out, unhashed: hashing a tuple nested a million deep ends the process.
    """
    return {
        key: value
        for key, value in tree["state"].items()
        if isinstance(key, (int, str)) and isinstance(value, dict)
    }


def parameter_names(
    entries: Mapping[int | str, Mapping[Any, Any]],
    param_groups: Any,
    weights: Sequence[tuple[str, Held]],
    read: Any,
) -> dict[Hashable, str]:
    """Return a name for each key of the state."""
    groups = _groups(param_groups)
    positions = {
        i: f"{number}.{place}"
        for number, (ids, _) in enumerate(groups)
        for place, i in enumerate(ids)
    }
    given = {
        i: name
        for ids, names in groups
        if len(names) == len(ids)
        for i, name in zip(ids, names, strict=True)
    }
    if set(entries) <= set(given):  # torch >= 2.6, where the optimizer was given names
        return {key: given[key] for key in entries}
    if not any(isinstance(key, int) for key in entries):
        return {key: str(step_of(key)) for key in entries}
    shapes: dict[Hashable, Shape] = {}
    sharded = blind = False
    for key, state in entries.items():
        held = {leaf: found for leaf, value in _flat(state) if (found := read(value)) is not None}
        local = any(isinstance(found, (Distributed, Listed)) for found in held.values())
        shape, known = _parameter_shape(held, local=local)
        if shape is not None:
            shapes[key] = shape
            blind |= not known
        sharded |= local
    # Buffers stay whole where parameters are sharded, so they cannot be what an id means.
    candidates = [
        (name, _fingerprint(held))
        for name, held in weights
        if not sharded or isinstance(held, (Distributed, Listed))
    ]
    # A state that nobody knows may be of another shape than its parameter: then only a model all of
    # whose tensors are trained leaves no choice.
    if blind and sum(len(ids) for ids, _ in groups) != len(candidates):
        return {key: positions.get(key, str(step_of(key))) for key in entries}
    proven = names_of_ids([ids for ids, _ in groups], shapes, candidates)
    if proven is not None:
        return {key: proven.get(key, positions.get(key, str(step_of(key)))) for key in entries}
    return {key: positions.get(key, str(step_of(key))) for key in entries}


def misnumbered(entries: Iterable[int | str], param_groups: Any) -> Iterator[str]:
    """Yield why an optimizer's numbers cannot be as torch gives them: each one is in one group.

    Within a group torch takes a parameter twice, and only warns. `state_dict` keeps a key of the
    state that is not a parameter as it is: `optimizer.state["global"]`.
    """
    counts = Count(i for group, _ in _groups(param_groups) for i in dict.fromkeys(group))
    twice = [i for i, count in counts.items() if count > 1]
    if twice:
        yield f"parameter {step_of(twice[0])} stands in two of the optimizer's groups"
    stray = [i for i in entries if type(i) is int and i not in counts]
    if stray and counts and all(type(i) is int for i in counts):
        yield f"the optimizer has a state of parameter {step_of(stray[0])}, which no group has"


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of one parameter's state, those one level deeper among them."""
    for leaf, value in state.items():
        if isinstance(value, dict) and isinstance(leaf, str):
            yield from ((f"{leaf}.{step_of(inner)}", one) for inner, one in value.items())
        else:
            yield str(step_of(leaf)), value


def _parameter_shape(held: Mapping[str, Held], *, local: bool) -> tuple[Shape | None, bool]:
    """Return the shape that a state gives its parameter, and whether the table of states says so.

    None where nothing tells one: two states differ, or there is none but numbers.
    """
    known = named = False
    told: set[Shape] = set()
    if local:  # two parameters must agree in the shard's shape too, which factors do not tell
        for leaf, found in held.items():
            state = named_state(f".{leaf}").state
            known |= state is not None and state.shape is StateShape.SAME
            if state is not None and state.shape is StateShape.SAME:
                told.add(_fingerprint(found))
    else:
        told = set(parameter_shapes({leaf: found.shape for leaf, found in held.items()}))
        known = bool(told)
    if known:
        return (told.pop() if len(told) == 1 else None), True
    named = all(named_state(f".{leaf}").state is not None for leaf in held)
    best = max(held.values(), key=lambda h: len(h.shape), default=None)
    if named or best is None or not best.shape:
        return None, True
    return _fingerprint(best), False


def _groups(param_groups: Any) -> list[tuple[list[Hashable], list[str]]]:
    found: list[tuple[list[Hashable], list[str]]] = []
    for group in param_groups if isinstance(param_groups, list) else ():
        ids = group.get("params") if isinstance(group, dict) else None
        names = group.get("param_names") if isinstance(group, dict) else None
        ids = [i for i in ids if isinstance(i, (int, str))] if isinstance(ids, list) else []
        texts = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
        found.append((ids, texts))
    return found


def _fingerprint(held: Held) -> Shape:
    """Global and local shape in one: two parameters must agree in both."""
    if isinstance(held, Distributed):
        return (*held.shape, -1, *held.local.shape)
    if isinstance(held, Listed):
        return (*held.shape, -1, *(n for _, ref in held.shards for n in ref.shape))
    return held.shape


VERSION = "fsdp_version"
OPTIMIZERS = "optimizers"


def is_local(tree: Any) -> bool:
    """Say whether a rank's file has local shards of FSDP beside its optimizers."""
    return isinstance(tree, dict) and VERSION in tree and isinstance(tree.get(OPTIMIZERS), list)


def placed(
    optimizers: Sequence[Any],
    weights: Sequence[tuple[str, Held]],
    read: Callable[[Any], Held | None],
) -> Mapping[str, Distributed]:
    """Return name -> the weight as a part of its DTensor, for those whose place is proven.

    Args:
        optimizers: the state_dicts of all optimizers.
        weights: the local tensors, in the order of the model's state_dict.
        read: `HeldReader.read` of the file.
    """
    if len(optimizers) != 1 or not is_optimizer(optimizers[0]):
        return {}

    def local(value: Any) -> Held | None:
        held = read(value)
        return held.local if isinstance(held, Distributed) else held

    entries = state_entries(optimizers[0])
    names = parameter_names(entries, optimizers[0]["param_groups"], weights, local)
    by_name = dict(weights)
    found: dict[str, Distributed] = {}
    for key, state in entries.items():
        weight = by_name.get(names[key])
        moments = [m for m in map(read, state.values()) if isinstance(m, Distributed)]
        if type(weight) is not TensorRef or not moments:
            continue
        first = moments[0]
        places = {(m.shape, m.placements, m.mesh, m.local.shape) for m in moments}
        if len(places) == 1 and first.local.shape == weight.shape:
            found[names[key]] = first._replace(local=weight, dtype=weight.dtype, record=None)
    return found
