"""Find models, optimizers and averages below the keys under which a trainer wraps its state.

`dcp.save({"app": AppState(model, optimizer)})` of torch's own tutorial puts them below `app`.
Others use `trainer`, `fsdp_checkpoint`, or a key for each of several models (`actor`, `critic`).
The keys are anybody's, so what lies below a key decides:

- An optimizer has `param_groups`, as `Optimizer.state_dict` and torch's `get_state_dict` give it,
  or a known name and `state`.
- A model has a known name and holds no optimizer, or its tensors have the names of the parameters
  that an optimizer keeps state of.

An optimizer belongs to the model whose key is nearest to its own. Where several models fit equally
well, nothing is decided: their tensors stay unexplained, and the resume check names them.

Of several models, each is named by its keys (`actor`), and its tensors have that name in front:
`actor.layers.0.weight`.

Source: `torch/distributed/checkpoint/{state_dict,_traverse}.py`, 2.4 to 2.13.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.names import unwrapped

from .stored_names import AVERAGES, KNOWN, MODELS, NETWORKS, OPTIMIZERS, StoredName, place

if TYPE_CHECKING:
    from ftckpt.formats.pickles.walk import Path

Shape = tuple[int, ...]

# Keys at which a model or an optimizer begins; deeper ones would be somebody's to fill the memory.
_DEPTH = 8
_GROUPS, _STATE = "param_groups", "state"
# Words of a key that say what it holds, not whose it is (`actor_model`, `optim_actor`).
_WORDS = re.compile(r"[a-z0-9]+")
_ROLES = frozenset(
    ("model", "module", "net", "network", "optimizer", "optimizers", "optim", "opt", "state")
) | {"dict", "adam", "adamw"}


class Home(NamedTuple):
    """Where one model, optimizer or average begins.

    Attributes:
        component: `model`, `optimizer` or `ema`.
        label: the model's name; empty where there is one model.
    """

    component: str
    label: str = ""


@dataclass(frozen=True)
class Homes:
    """All of a training state; empty where everything lies at the top under the known names.

    Attributes:
        found: path of keys -> what begins there.
        wrappers: the keys around all models, the longest path first.
    """

    found: Mapping[Path, Home] = field(default_factory=dict)
    wrappers: Sequence[Path] = ()

    def above(self, path: Path) -> Path:
        """Return the path of the home that a tensor or object lies in; empty without one."""
        if self.found:
            for length in range(1, min(len(path), _DEPTH + 1)):
                if path[:length] in self.found:
                    return path[:length]
        return ()

    def place(self, stored: str, path: Path, dtype: DType) -> StoredName:
        """Classify a tensor as `stored_names.place` does, with the name inside its model."""
        home = self.above(path)
        if not home:
            return place(stored, path, dtype)
        return place("", (self.found[home].component, *path[len(home) :]), dtype)

    def label(self, path: Path) -> str:
        """Return the name of the model that a tensor or object belongs to; empty without one."""
        home = self.above(path)
        return self.found[home].label if home else ""

    def plain(self, path: Path) -> Path:
        """Return where a part of a model's or optimizer's state stands without wrappers.

        Of several models, each keeps its place: two optimizers cannot share one.
        """
        home = self.above(path)
        if not home or self.labels or self.of("optimizer") > 1:
            return path
        return (self.found[home].component, *path[len(home) :])

    def of(self, component: str) -> int:
        """Return how many there are of a component."""
        return sum(1 for home in self.found.values() if home.component == component)

    def without_wrapper(self, path: Path) -> Path:
        """Return a path without the keys around all models."""
        for wrapper in self.wrappers:
            if path[: len(wrapper)] == wrapper and len(path) > len(wrapper):
                return path[len(wrapper) :]
        return path

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the models, if there are several."""
        return tuple(dict.fromkeys(h.label for h in self.found.values() if h.label))


NO_HOMES = Homes()


def find_homes(tensors: Mapping[Path, Shape], objects: Iterable[Path]) -> Homes:
    """Find every home in a state.

    Args:
        tensors: path -> shape of its tensors.
        objects: the paths of its other values.
    """
    paths = {path: shape for path, shape in tensors.items() if len(path) > 1}
    optimizers = _optimizers(paths, objects)
    tops = {path[0] for path in paths}
    known = all((path[0],) == path and path[0] in OPTIMIZERS for path in optimizers)
    whole = bool(tops & MODELS)
    named = tops <= KNOWN and (whole or not tops & NETWORKS)
    if known and named and len(tops & MODELS) < 2 and len(tops & AVERAGES) < 2:
        return NO_HOMES
    return _Search(paths, optimizers).homes()


def names_of(rows: Sequence[tuple[str, Path, DType]], homes: Homes) -> list[StoredName]:
    """Return component, kind and logical name of each tensor (stored name, path, dtype).

    Prefixes of wrapping modules (`module.`, `_orig_mod.`) are taken off in each model by itself.
    """
    places = [homes.place(*row) for row in rows]
    if any(
        len(path) > 1 and one.component == "model" for one, (_, path, _) in _pairs(places, rows)
    ):
        # The model has a key of its own, so a tensor that stands beside it is none of its weights.
        places = [
            _beside(one.name) if len(path) == 1 and one.component == "model" else one
            for one, (_, path, _) in _pairs(places, rows)
        ]
    text = "\n".join(["", *(found.name for found in places)])  # most checkpoints have no prefix
    bare = any(sign in text for sign in ("\nmodule.", "_orig_mod", "_wrapped_module"))
    if not bare and not homes.labels:
        return places
    labels = [homes.label(path) for _, path, _ in rows] if homes.labels else [""] * len(rows)
    own: dict[tuple[str, str], list[str]] = defaultdict(list)
    if bare:
        for found, label in zip(places, labels, strict=True):
            own[found.component, label].append(found.name)
    names = {group: unwrapped(all_) for group, all_ in own.items()}
    out = []
    for found, label in zip(places, labels, strict=True):
        name = names[found.component, label][found.name] if bare else found.name
        out.append(found._replace(name=f"{label}.{name}" if label else name))
    return out


_pairs = partial(zip, strict=True)


def _beside(name: str) -> StoredName:
    """Return what a tensor at the top is that is not of the model: state of its own name."""
    first, _, rest = name.partition(".")
    return StoredName(f"extra:{first}", Kind.OTHER, rest or first)


def _optimizers(tensors: Iterable[Path], objects: Iterable[Path]) -> dict[Path, set[str]]:
    """Return where optimizers begin, and the parameters that flat groups name.

    Flat groups are of `flatten_optimizer_state_dict`: `param_groups.<parameter>.lr`.
    """
    found: dict[Path, set[str]] = defaultdict(set)
    for path in objects:
        for at, key in enumerate(path[1:_DEPTH], 1):
            if key == _GROUPS and at + 1 < len(path):
                found[path[:at]].update()
                break
            if isinstance(key, str) and key.startswith(f"{_GROUPS}."):
                found[path[:at]].add(key.removeprefix(f"{_GROUPS}.").rpartition(".")[0])
                break
    for path in tensors:
        for at, key in enumerate(path[: _DEPTH - 1]):
            if key in OPTIMIZERS and _parameter(path[at + 1 :]):
                found[path[: at + 1]].update()
                break
    return found


def _parameter(rest: Path) -> str:
    """Return the parameter in what lies below an optimizer's key; empty for anything else."""
    if len(rest) > 2 and rest[0] == _STATE:
        return str(rest[1])
    first = str(rest[0]) if rest else ""
    return first.removeprefix(f"{_STATE}.").rpartition(".")[0] if first[:6] == "state." else ""


class _Search:
    """The tensors of a state by the keys they stand below."""

    def __init__(self, tensors: Mapping[Path, Shape], optimizers: Mapping[Path, set[str]]) -> None:
        keys = {key for path in tensors for key in path[:_DEPTH][:-1]}
        self._models = MODELS if keys & MODELS else NETWORKS
        self._around = {path[:n] for path in optimizers for n in range(1, len(path))}
        self._trained = {path: set(names) for path, names in optimizers.items()}
        # By parameter: of models, averages and others, and of an optimizer's moments.
        self._shapes: dict[Path, dict[str, Shape]] = defaultdict(dict)
        self._moments: dict[Path, dict[str, Shape]] = defaultdict(dict)
        self._roles: dict[Path, str] = {}
        self._held: set[Path] = set()  # optimizers with tensors
        for path, shape in tensors.items():
            at = self._named(path)
            if at in self._trained:
                self._held.add(at)
                name = _parameter(path[len(at) :])
                if name:
                    self._trained[at].add(name)
                if name and str(path[-1]).endswith("exp_avg"):
                    self._moments[at][name] = shape
            elif len(at) <= _DEPTH:
                self._shapes[at][".".join(map(str, path[len(at) :]))] = shape
        for held in (self._shapes, self._moments):
            for at, shapes in held.items():
                names = unwrapped(shapes)
                held[at] = {names[name]: shape for name, shape in shapes.items()}

    def _named(self, path: Path) -> Path:
        """Return the outermost key with a known meaning; without one, that above the tensor."""
        for at in range(1, min(len(path), _DEPTH + 1)):
            here, key = path[:at], path[at - 1]
            if here in self._trained:
                return here
            if here not in self._around and (key in self._models or _is_average(key)):
                self._roles[here] = "model" if key in self._models else "ema"
                return here
        return path[:-1]

    def homes(self) -> Homes:
        owners = {path: self._owner(path) for path in self._trained}
        for path, owner in owners.items():
            if owner and self._fits(path, owner) and self._roles.get(owner) != "ema":
                self._roles[owner] = "model"
        models = [path for path, role in self._roles.items() if role == "model"]
        averages = [path for path, role in self._roles.items() if role == "ema"]
        alone = [path for path in owners if not models and path in self._held]
        labels = _labels(models, averages) if len(models) > 1 else dict.fromkeys(models, "")
        if len(models) < 2 and len(averages) > 1:
            labels |= _labels(averages, [])
        if len(alone) > 1:
            labels |= _labels(alone, [])
        found = {path: Home("model", labels[path]) for path in models}
        found |= {path: Home("ema", labels.get(path, "")) for path in averages}
        for path, owner in owners.items():
            if owner or not models:
                found[path] = Home("optimizer", labels.get(owner or path, ""))
        shared = _shared([path[:-1] for path in models or alone])
        wrappers = [shared[:n] for n in range(len(shared), 0, -1)]
        return Homes(found, wrappers)

    def _fits(self, optimizer: Path, model: Path) -> bool:
        names = self._trained[optimizer]
        return bool(names) and self._shapes[model].keys() >= set(unwrapped(names).values())

    def _same_shapes(self, optimizer: Path, model: Path) -> bool:
        shapes = self._shapes[model]
        return all(shapes.get(n) == shape for n, shape in self._moments[optimizer].items())

    def _named_parameters(self, optimizer: Path) -> bool:
        return not all(name.isdecimal() for name in self._trained[optimizer])

    def _owner(self, optimizer: Path) -> Path:
        """Return the model of an optimizer; empty where none or more than one is as likely."""
        models = [p for p in self._shapes if self._roles.get(p) != "ema"]
        fitting = [p for p in models if self._fits(optimizer, p)]
        fitting = [p for p in fitting if self._same_shapes(optimizer, p)] or fitting
        if not fitting and (optimizer[-1] in OPTIMIZERS or not self._named_parameters(optimizer)):
            # It numbers its parameters, or has none: only a known name shows a model.
            fitting = [p for p in models if p in self._roles]
        if not fitting:
            return ()
        near = min(_distance(optimizer, p) for p in fitting)
        best = [p for p in fitting if _distance(optimizer, p) == near]
        best = [p for p in best if p in self._roles] or best
        if len(best) > 1:
            best = [p for p in best if _whose(p) == _whose(optimizer)]
        return best[0] if len(best) == 1 else ()


def _distance(one: Path, other: Path) -> int:
    """Return the number of keys from one path up to the shared ones, and down to the other."""
    return len(one) + len(other) - 2 * len(_shared([one, other]))


def _is_average(key: str | int) -> bool:
    return key in AVERAGES or (isinstance(key, str) and "ema" in _WORDS.findall(key.lower()))


def _whose(path: Path) -> frozenset[str]:
    """Return the words of the last key that say whose it is: `actor` of `actor_optimizer`."""
    return frozenset(_WORDS.findall(str(path[-1]).lower())) - _ROLES


def _labels(paths: Sequence[Path], more: Sequence[Path]) -> dict[Path, str]:
    """Name each path by its keys, without those that all share and those that say only a role."""
    shared = len(_shared([path[:-1] for path in (*paths, *more)]))

    def short(path: Path) -> str:
        rest = path[shared:]
        if len(rest) > 1 and path[-1] in KNOWN:
            rest = rest[:-1]
        return ".".join(map(str, rest))

    def full(path: Path) -> str:
        return ".".join(map(str, path[shared:]))

    once = all(len({short(p) for p in group}) == len(group) for group in (paths, more))
    return {path: (short if once else full)(path) for path in (*paths, *more)}


def _shared(paths: Sequence[Path]) -> Path:
    """Return the keys that all paths begin with."""
    first, last = (min(paths, key=_text), max(paths, key=_text)) if paths else ((), ())
    return first[: next(_differ(first, last), min(len(first), len(last)))]


def _text(path: Path) -> list[str]:
    return list(map(str, path))


def _differ(first: Path, last: Path) -> Iterator[int]:
    pairs = zip(first, last, strict=False)
    return (at for at, (one, other) in enumerate(pairs) if str(one) != str(other))
