"""Sort what one `torch.save` file holds: the model, the optimizer, averages, everything else.

Trainers save one dict and agree on little but its words. Exact words at the top decide; a dict that
has none of them and holds tensors is a bare state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Kind, Piece, StepRole, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.names import unwrapped
from ftckpt.checkpoint.steps import role_of
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import MAX_DEPTH, Path, dotted, field_names, leaves, step_of
from ftckpt.formats.pickles.walk import at as inner_at
from ftckpt.formats.ranks.lone_shards import part_in
from ftckpt.formats.ranks.specs import DATA, data_key, spec_of
from ftckpt.formats.state.rank_optimizer import (
    is_optimizer,
    misnumbered,
    parameter_names,
    state_entries,
)
from ftckpt.formats.state.stored_names import (
    AVERAGES,
    MODEL,
    NETWORK,
    OPTIMIZERS,
    StoredName,
    is_generator,
    place,
)
from ftckpt.formats.torch_files.inner import inner_kind, inner_tensors, outer_view, shown_suffix
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.inspection.training_state import about

# Names of state that one file may give; more are of no use to anyone.
MAX_NAMES = 4096
_MAX_MODULES = 1_000_000
# States in states under words for a model; deeper ones are a model's own.
_DEPTH = 4
# What an average keeps beside the averaged weights (torch_ema, diffusers' `EMAModel`).
_AVERAGED = ("shadow_params", "shadow", "averaged_params", "ema_params")
_DECAYS = ("decay", "ema_decay", "beta", "num_updates", "optimization_step", "n_averaged")
# DTensor and ShardedTensor, whatever the torch release calls their module.
_DISTRIBUTED = "torch.distributed."
_SHARDED = "torch.distributed._shard.sharded_tensor"


class TreeTensor(NamedTuple):
    """One tensor: what it is, where the file keeps it, and its view of a storage."""

    where: StoredName
    stored_name: str
    ref: TensorRef

    def info(self, stream: TorchStream) -> TensorInfo:
        """Return the tensor as a checkpoint lists it; `stream` is the file that holds it."""
        span = self.ref.span(stream.storages)
        strides = None if self.ref.dense else self.ref.strides
        piece = Piece(Box.whole(self.ref.shape), span, None, strides)
        component, kind, name = self.where
        stored = "" if self.stored_name == name else self.stored_name
        return TensorInfo(component, name, kind, self.ref.shape, self.ref.dtype, (piece,), stored)


class TreeStepNumber(NamedTuple):
    """A number of the non-tensor state that is a step by its name, or as what `role` says."""

    name: str
    value: float
    optimizer: bool
    role: StepRole | None = None


class TrainingTree:
    """What one file holds.

    Attributes:
        tensors: all tensors, in the file's order.
        objects: name -> path in the tree, one for each key at the top that is not a tensor.
        names: dotted names of the non-tensor state, as deep as they are known.
        numbers: step counters among it.
        remarks: what a reader should know, in sentences.
        contradictions: what cannot be so, in sentences.
    """

    def __init__(
        self,
        stream: TorchStream,
        *,
        label: str = "",
        role: str = "",
        weights: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Sort the tree of `stream`.

        Args:
            stream: the parsed file.
            label: what the whole file is called, where its own tree does not say (`scheduler`).
            role: `model`, `optimizer`, or `state` where the file's name decides; else the tree.
            weights: (name, what has its shape) of parameters that lie in other files.

        Raises:
            UnsupportedError: it holds one rank's shard of a distributed tensor.
            UnsafeError: it unfolds to more state than a checkpoint has.
        """
        self.tensors: list[TreeTensor] = []
        self.objects: dict[str, Path] = {}
        self.names: list[str] = []
        self.numbers: list[TreeStepNumber] = []
        self.remarks: list[str] = []
        self.contradictions: list[str] = []
        self._stream = stream
        self._label = label
        self._elsewhere = weights
        self._weights: list[tuple[str, TensorRef]] = []
        tree = stream.tree
        if not role and _is_random("", tree):
            self._state(tree, ())
        elif role == "model" or (not role and _is_value(tree)):
            self._model(tree, (), "model")
        elif role == "optimizer" or (not role and is_optimizer(tree)):
            self._optimizers(tree, ())
        elif not role and type(tree) in (tuple, list) and _holds_tensors(tree):
            self._sequence(tree)
        elif role == "state" or not isinstance(tree, dict):
            self._state(tree, ())
        else:
            part = part_in(tree)
            if part is not None:
                raise self._several(part.name) if part.several else self._one_shard(part.name)
            self._top(tree)

    # --- the top --------------------------------------------------------------------------------

    def _top(self, tree: dict[Any, Any], at: Path = (), label: str = "") -> None:
        """Sort the keys of a state: known words first, and below any other what its content shows.

        `label` is the key of one of several models; their tensors have it in front of their names.
        """
        optimizers = {
            k
            for k in tree
            if k in OPTIMIZERS or _is_all_optimizers(tree[k]) or _holds_moments_alone(tree[k])
        }
        mixed = {k for k in tree if k not in optimizers and _holds_an_optimizer(tree[k])}
        averages = {k for k in tree if _is_average(k, tree[k])}
        others = optimizers | averages | mixed
        models = [k for k in MODEL if k in tree and k not in others and _is_model(tree[k])]
        # No word makes a model of what holds an optimizer, an average or a generator.
        nested = [k for k in models if _is_nested_state(tree[k])] if len(at) < _DEPTH else []
        models = [k for k in models if k not in nested]
        labels = {k: "" if number == 0 else f"extra:{k}" for number, k in enumerate(models)}
        wrappers = [] if models or at else _wrappers(tree)
        if not models and not wrappers:
            rest = [k for k in tree if k not in others and k not in nested]
            if len(at) < _DEPTH:
                nested += [
                    k
                    for k in rest
                    if _is_nested_state(tree[k]) and not _is_random(str(step_of(k)), tree[k])
                ]
                rest = [k for k in rest if k not in nested]
            if not others and not nested and any(_is_weight(tree[k]) for k in rest):
                self._bare(tree, at, label)
                return
            models = [k for k in NETWORK if k in rest and _is_model(tree[k])]
            models = models or [k for k in rest if _is_unnamed_model(k, tree[k])]
            if not models and not others and not nested and _holds_tensors(tree):
                self._bare(tree, at, label)
                return
            labels = {k: "" if len(models) == 1 else str(step_of(k)) for k in models}
        wrappers += [k for k in nested if k not in wrappers]
        # The model first, whatever the order of keys: the optimizer's names come from it.
        for key in models:
            extra = labels[key].startswith("extra:")
            named = label if extra else ".".join(filter(None, (label, labels[key])))
            component = labels[key] if extra else "model"
            self._model(tree[key], (*at, step_of(key)), component, named)
        for key in wrappers:
            own, self._weights = self._weights, [] if not models else self._weights
            self._top(tree[key], (*at, step_of(key)), str(key) if len(wrappers) > 1 else label)
            self._weights = own + self._weights
        for key, value in tree.items():
            if key in labels or key in wrappers:
                continue
            if key in optimizers:
                self._optimizers(value, (*at, step_of(key)), key if len(optimizers) > 1 else "")
            elif key in averages:
                self._model(value, (*at, key), "ema", label)
            elif key in mixed:
                self._sequence(value, (*at, step_of(key)))
            else:
                self._state(value, (*at, step_of(key)))

    def _bare(self, tree: dict[Any, Any], at: Path = (), label: str = "") -> None:
        """Sort a state_dict by itself; what holds generators alone is state beside it."""
        weights = {k: v for k, v in tree.items() if not _is_random(str(step_of(k)), v)}
        self._model(weights, at, "model", label)
        for key in tree.keys() - weights.keys():
            self._state(tree[key], (*at, step_of(key)))

    def _sequence(self, tree: Sequence[Any], at: Path = ()) -> None:
        """Sort a tuple or list, in which an index stands for a name.

        3D Gaussian splatting saves `((degree, xyz, …, optimizer's state_dict, scale), iteration)`.
        """
        members = list(_members(tree, at))
        marked = any(type(m) is TensorRef and m.parameter for _, m in members)
        models = {path for path, m in members if _is_state_dict(m) and not is_optimizer(m)}
        rest: list[tuple[Path, Any]] = []
        for path, member in members:
            label = "" if len(models) == 1 else dotted(path)
            if path in models and _is_training_state(member):
                self._top(member, path, label)
            elif path in models and not _is_random("", member):
                self._model(member, path, "model", label)
            elif _is_weight(member) and (_is_parameter(member) if marked else not models):
                self._model(member, path, "model", dotted(path))
            else:
                rest.append((path, member))
        many = sum(is_optimizer(one) for _, one in rest) > 1
        for path, member in rest:  # the optimizer's names come from the weights
            if is_optimizer(member):
                self._optimizers(member, path, dotted(path) if many else "")
            else:
                self._state(member, path, f"item.{dotted(path)}")
                self._iteration(member, f"item.{dotted(path)}")

    def _iteration(self, value: Any, name: str) -> None:
        """Take a number without a name for the step where the file's name says the same one."""
        said = map(int, re.findall(r"\d{1,18}", self._stream.file.rpartition("/")[2]))
        if type(value) is int and value in said:
            self.numbers.append(TreeStepNumber(name, float(value), False, StepRole.ITERATION))

    # --- weights --------------------------------------------------------------------------------

    def _model(self, tree: Any, at: Path, component: str, label: str = "") -> None:
        found: list[tuple[str, str, TensorRef]] = []
        inside: dict[str, str] = {}  # name -> the part of a record that it is
        for path, value in _model_leaves(tree):
            name = ".".join(map(str, path)) or "tensor"
            if _is_part_of_more(tree, path, value):
                raise self._one_shard(".".join(map(str, path[:-1])))
            parts = list(self._parts(value, name))
            record = _is_record(value)
            class_ = value.type_name if record else ""
            called = {suffix: name + shown_suffix(class_, suffix) for suffix, _ in parts}
            found += [
                (called[suffix], _stands((*at, *path), suffix, record=record), ref)
                for suffix, ref in parts
            ]
            if record:  # what its parts do not say: the class, sizes of blocks
                inside |= {
                    called[suffix]: suffix.rpartition(".")[2] or "tensor" for suffix, _ in parts
                }
                self._object((*at, *path), ".".join(map(str, (*at, *path))))
            elif not parts and path:
                beside = (*at, *path) if component == "ema" else path
                self._object((*at, *path), ".".join(map(str, beside)))
                if any(str(key).endswith("_extra_state") for key in path):
                    # What a module's get_extra_state returned: DeePMD keeps its step there
                    # (deepmd/pt/train/wrapper.py).
                    self._number(".".join(map(str, path)), value)
        names = unwrapped(name for name, _, _ in found)
        for stored, shown, ref in found:
            name = f"{label}.{names[stored]}" if label else names[stored]
            if label and stored == "tensor" and _is_value(tree):
                name = label
            kind = _kind(name, ref)
            if stored in inside:
                kind = inner_kind(inside[stored], kind)
            self.tensors.append(TreeTensor(StoredName(component, kind, name), shown, ref))
            if component == "model" and kind is Kind.PARAM:
                self._weights.append((name, ref))

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, TensorRef]]:
        """Yield (suffix, view) of what a tensor consists of; nothing where it has no bytes."""
        if type(value) is TensorRef:
            if self._stream.storages[value.key].inline is None:
                yield (".conj" if value.conj else ".neg" if value.neg else ""), value
        elif type(value) is Composite:
            for part, inner in value.parts.items():
                if type(inner) is TensorRef:
                    yield f".{part}", inner
        elif isinstance(value, Inert) and value.qualname.startswith(_SHARDED):
            raise self._one_shard(name)
        elif type(value) is SubclassRef:
            if value.type_name.startswith(_DISTRIBUTED):
                raise self._one_shard(name)
            for suffix, inner in inner_tensors(value):
                yield from ((suffix, inner),) if suffix else self._parts(inner, name)

    def _one_shard(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._stream.file} holds one rank's shard of {name}",
            hint="name its directory: the files of all ranks are read as one where their names are"
            " known, like shard_0_of_8.pt or model_rank_0.pt (docs/formats.md)",
            file=self._stream.file,
            tensor=name,
        )

    def _several(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._stream.file} holds the shards of several ranks, and does not say all that"
            f" merging {name} needs",
            hint="a shard that is saved with its global_shape, and its dim, placements or offsets,"
            " is merged (docs/rules.md)",
            file=self._stream.file,
            tensor=name,
        )

    # --- the optimizer --------------------------------------------------------------------------

    def _optimizers(self, tree: Any, at: Path, label: str = "") -> None:
        """Sort one or several optimizers; `label` is the key of one of several."""
        every = list(_find_optimizers(tree, at))
        own = f"{label}." if label else ""
        for number, (path, optimizer) in enumerate(every):
            self._optimizer(optimizer, path, f"{own}{number}." if len(every) > 1 else own)
        if every:
            return
        if _is_flat_optimizer(tree):
            self._flat_optimizer(tree, at)
        else:
            self._state(tree, at, "optimizer")

    def _flat_optimizer(self, tree: Mapping[str, Any], at: Path) -> None:
        """Take what torch's `flatten_optimizer_state_dict` gives: `state.<parameter>.exp_avg`."""
        found: list[tuple[StoredName, str, TensorRef]] = []
        for key, value in tree.items():
            parts = list(self._parts(value, key))
            for suffix, ref in parts:
                stands = _stands((*at, key), suffix, record=_is_record(value))
                found.append((place("", ["optimizer", key + suffix], ref.dtype), stands, ref))
            if not parts or _is_record(value):
                self._object((*at, key), f"{self._of(at)}.{key}")
                self._name(f"{self._of(at)}.{key}", value, optimizer=True)
        bare = unwrapped(where.name for where, _, _ in found)
        for where, stands, ref in found:
            named = where._replace(name=bare[where.name])
            self.tensors.append(TreeTensor(named, stands, ref))

    def _optimizer(self, tree: Mapping[Any, Any], at: Path, prefix: str) -> None:
        entries = state_entries(tree)
        names = parameter_names(entries, tree["param_groups"], self._candidates(), _plain_view)
        self.contradictions += misnumbered(entries, tree["param_groups"])
        known = {name for name, _ in (*self._weights, *self._elsewhere)}
        bare = unwrapped(name for key, name in names.items() if isinstance(key, str))
        proven = True
        for key, state in entries.items():
            name = bare.get(names[key], names[key])
            if name not in known and not isinstance(key, str):
                name, proven = prefix + name, False
            for path, value in leaves(state):
                if _is_told_to_be_part(state, path, value):
                    raise self._one_shard(name)
                leaf = ".".join(map(str, path))
                where = (*at, "state", step_of(key), *path)
                parts = list(self._parts(value, leaf))
                for suffix, ref in parts:
                    found = place("", ["optimizer", "state", name, leaf + suffix], ref.dtype)
                    shown = _stands(where, suffix, record=_is_record(value))
                    self.tensors.append(TreeTensor(found, shown, ref))
                if (not parts or _is_record(value)) and path:
                    self._object((*at, "state"), f"{self._of(at)}.state")
                if not parts and path:
                    self._name(f"optimizer.state.{name}.{leaf}", value, optimizer=True)
        if not proven:
            self.remarks.append(
                "the optimizer numbers its parameters and no single assignment to names of the"
                " model is proven: its state is named <group>.<position>"
            )
        for key in tree:
            if key != "state":
                # A learning rate may be a tensor; those of several optimizers would share a key.
                groups = "" if prefix or key != "param_groups" else key
                label = f"{self._of(at)}.{step_of(key)}"
                self._state(tree[key], (*at, step_of(key)), label, groups)

    def _of(self, at: Path) -> str:
        return ".".join(map(str, at)) or self._label or "optimizer"

    def _candidates(self) -> Sequence[tuple[str, Any]]:
        """Weights that an optimizer can number: each parameter once, as `parameters()` gives it."""
        seen: set[tuple[Any, ...]] = set()
        once: list[tuple[str, Any]] = list(self._elsewhere)
        for name, ref in self._weights:
            place_ = (ref.key, ref.storage_offset, ref.shape, ref.strides)
            if place_ not in seen:
                seen.add(place_)
                once.append((name, ref))
        return once

    # --- everything else ------------------------------------------------------------------------

    def _state(self, tree: Any, at: Path, label: str = "", groups: str = "") -> None:
        label = label or ".".join(map(str, at)) or self._label or "state"
        for path, value in leaves(tree):
            name = ".".join([label, *map(str, path)])
            if _is_told_to_be_part(tree, path, value):
                raise self._one_shard(name)
            for suffix, ref in self._parts(value, name):
                component, _, rest = (name + suffix).partition(".")
                where = StoredName(f"extra:{component}", Kind.OTHER, rest or component)
                if groups:
                    own = ".".join([groups, *map(str, path)]) + suffix
                    where = StoredName("optimizer", Kind.OTHER, own)
                shown = _stands((*at, *path), suffix, record=_is_record(value))
                self.tensors.append(TreeTensor(where, shown, ref))
        self._object(at, label)
        self._name(label, tree)
        for inner in field_names(tree):
            if len(self.names) >= MAX_NAMES:
                break
            self.names.append(f"{label}.{inner}")
        for path, value in leaves(tree):
            self._number(".".join([label, *map(str, path)]), value)

    def _object(self, path: Path, name: str) -> None:
        self.objects.setdefault(name, path)

    def _name(self, name: str, value: Any, *, optimizer: bool = False) -> None:
        if len(self.names) < MAX_NAMES:
            self.names.append(name)
        if optimizer:
            self._number(name, value, optimizer=True)

    def _number(self, name: str, value: Any, *, optimizer: bool = False) -> None:
        if type(value) not in (int, float) or len(self.numbers) >= MAX_NAMES:
            return
        if role_of(name, optimizer=optimizer) is not None:
            # NaN and integers beyond any counter would break arithmetic further on.
            bounded = float(min(max(value, -1e18), 1e18))
            if bounded == bounded:
                self.numbers.append(TreeStepNumber(name, bounded, optimizer))


def _members(tree: Sequence[Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what tuples and lists hold that is itself no tuple or list with tensors in it."""
    for index, member in enumerate(tree):
        path = (*at, index)
        if type(member) in (tuple, list) and len(path) < MAX_DEPTH and _holds_tensors(member):
            yield from _members(member, path)
        else:
            yield path, member


def _is_record(value: Any) -> bool:
    """Whether a tensor is of a class that keeps more than the tensors inside it."""
    return type(value) is SubclassRef and not value.type_name.startswith(_DISTRIBUTED)


def _stands(path: Path, suffix: str, *, record: bool) -> str:
    """Return the stored name of a part: of a record it is never the record's own."""
    return ".".join(map(str, path)) + ((suffix or ".tensor") if record else "")


def _wrappers(tree: dict[Any, Any]) -> list[str]:
    """Return the keys under which whole states lie; none where one lies at the top."""
    return [
        key
        for key, inside in tree.items()
        if type(key) is str
        and isinstance(inside, dict)
        and not is_optimizer(inside)
        and any(_is_state_dict(inside.get(word)) for word in MODEL)
    ]


def _is_all_optimizers(value: Any) -> bool:
    """Whether a value is an optimizer's state_dict, or a few of them under names or in a list."""
    if is_optimizer(value):
        return True
    members = value.values() if isinstance(value, dict) else value
    held = isinstance(value, (dict, list)) and 0 < len(value) <= 64
    return held and all(is_optimizer(member) for member in members)


def _holds_moments_alone(value: Any) -> bool:
    """Whether each tensor of a dict lies below the name of an optimizer's state, and one does."""
    if not isinstance(value, dict):
        return False
    held = [path for path, member in leaves(value) if _is_value(member)]
    return bool(held) and all(any(key in _MOMENTS for key in path) for path in held)


def _is_average(key: Any, value: Any) -> bool:
    """Whether a value holds averaged weights: by its key, or by what is kept beside them."""
    if key in AVERAGES:
        return _holds_tensors(value)
    return (
        isinstance(value, dict)
        and any(word in value and _holds_tensors(value[word]) for word in _AVERAGED)
        and any(type(value.get(word)) in (int, float, TensorRef) for word in _DECAYS)
    )


def _is_model(value: Any) -> bool:
    return _is_state_dict(value) and not _is_random("", value)


def _is_nested_state(value: Any) -> bool:
    """Whether what lies under a word for a model holds more than weights (NequIP's `state_dict`).

    A `state_dict` gives its tensors by dotted names; an optimizer, an average or a generator has a
    key of its own.
    """
    return isinstance(value, dict) and any(
        _is_all_optimizers(member)
        or _holds_moments_alone(member)
        or (not _is_value(member) and _is_average(key, member))
        or _is_random(str(step_of(key)), member)
        for key, member in value.items()
    )


def _holds_an_optimizer(value: Any) -> bool:
    """Whether a tuple or list has an optimizer's state_dict somewhere among other things."""
    return type(value) in (tuple, list) and any(map(bool, _find_optimizers(value, ())))


def _is_training_state(value: Any) -> bool:
    """Whether a dict has a model under a known word, or an optimizer's state_dict below it."""
    return isinstance(value, dict) and (
        any(_is_state_dict(value.get(word)) for word in MODEL)
        or any(map(bool, _find_optimizers(value, ())))
    )


def _is_parameter(value: Any) -> bool:
    return type(value) is TensorRef and value.parameter


def _is_state_dict(value: Any) -> bool:
    """Whether a value has weights below keys: a single tensor has none."""
    return (isinstance(value, dict) or _is_module(value)) and _holds_tensors(value)


_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_avgs", "exp_avg_sqs"}
)
_OF_ONE_RANK = r"rank_?\d{1,7}"


def _is_unnamed_model(key: Any, value: Any) -> bool:
    """Whether a key that no list has holds a model, as its content shows and its name allows."""
    if not _is_state_dict(value) or about(str(step_of(key)))[0] != "other":
        return False
    if re.fullmatch(_OF_ONE_RANK, str(key)):  # what the writer keeps of one rank alone
        return False
    return any(_is_weight(member) for _, member in _model_leaves(value))


def _is_weight(value: Any) -> bool:
    """Whether a value may be a parameter: a tensor of more than one number, and no generator's."""
    if type(value) is TensorRef:
        floats = value.dtype.family in ("float", "complex")
        return value.numel != 1 and (
            floats or not is_generator("rng", value.dtype.name, value.shape)
        )
    return _is_value(value)


def _is_random(name: str, value: Any) -> bool:
    """Whether a value holds the states of random generators, and no other tensor."""
    held = [(path, member) for path, member in leaves(value) if _is_value(member)]
    return bool(held) and all(
        type(member) is TensorRef
        and is_generator(".".join([name, *map(str, path)]), member.dtype.name, member.shape)
        for path, member in held
    )


def _is_flat_optimizer(tree: Any) -> bool:
    return (
        isinstance(tree, dict)
        and bool(tree)
        and all(type(key) is str and key.startswith(("state.", "param_groups.")) for key in tree)
    )


def _is_part_of_more(tree: Any, path: Path, value: Any) -> bool:
    """Whether what stands beside a tensor says that it is a shard of a larger one."""
    if type(value) is not TensorRef or not path or path[-1] not in DATA:
        return False
    try:
        entry = inner_at(tree, path[:-1])
    except KeyError:  # inside a pickled module
        return False
    if data_key(entry) != path[-1]:
        return False
    shape = spec_of(entry, value.shape, str(path[-2:-1])).shape
    return shape is not None and shape != value.shape


def _is_told_to_be_part(tree: Any, path: Path, value: Any) -> bool:
    """Like `_is_part_of_more`, of state in which a shape alone may mean anything."""
    if type(value) is not TensorRef or not path or path[-1] not in DATA:
        return False
    try:
        entry = inner_at(tree, path[:-1])
        spec = spec_of(entry, value.shape, str(path[-1])) if data_key(entry) else None
    except (KeyError, CorruptError):
        return False
    return spec is not None and spec.tells and spec.shape != value.shape


def _is_value(tree: Any) -> bool:
    return type(tree) in (TensorRef, Composite, SubclassRef) or _is_module(tree)


def _is_module(value: Any) -> bool:
    return isinstance(value, Inert) and isinstance(value.get("_parameters"), dict)


def _holds_tensors(tree: Any) -> bool:
    return any(_is_value(value) for _, value in leaves(tree))


def _model_leaves(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what a state_dict or a pickled module holds, by parameter name."""
    for path, value in leaves(tree):
        if _is_module(value):
            yield from ((path + inner, member) for inner, member in _module_leaves(value))
        else:
            yield path, value


def _module_leaves(module: Inert) -> Iterator[tuple[Path, Any]]:
    """Yield parameters and buffers as `Module.state_dict` would order and name them."""
    stack: list[tuple[Path, Inert]] = [((), module)]
    for _ in range(_MAX_MODULES):
        if not stack:
            return
        path, module = stack.pop()
        for group in ("_parameters", "_buffers"):
            members = module.get(group)
            for name, value in members.items() if isinstance(members, dict) else ():
                if value is not None:
                    yield (*path, step_of(name)), value
        children = module.get("_modules")
        below = [
            ((*path, step_of(name)), child)
            for name, child in (children.items() if isinstance(children, dict) else ())
            if _is_module(child) and len(path) < 64
        ]
        stack += reversed(below)


def _find_optimizers(tree: Any, at: Path) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield every optimizer state_dict in `tree`: itself, or below names and list indices."""
    if is_optimizer(tree):
        yield at, tree
    elif len(at) < 5 and _is_container(tree) and len(tree) <= 64:
        members = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in members:
            yield from _find_optimizers(value, (*at, step_of(key)))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list)) or type(value) is tuple  # a view is a tuple, too


def _plain_view(value: Any) -> TensorRef | None:
    """Return a tensor, or for one of a subclass what has its shape."""
    view = outer_view(value) if type(value) is SubclassRef else None
    if view is not None and type(value.base) is Composite:
        return TensorRef("", 0, view[0], (), view[1])
    return value if type(value) is TensorRef else None


def _kind(name: str, ref: TensorRef) -> Kind:
    if ref.parameter:
        return Kind.PARAM
    return _model_kind(name, ref.dtype)


def _model_kind(name: str, dtype: DType) -> Kind:
    return place("", ["model", name], dtype).kind
