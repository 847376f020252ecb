"""Find the path of keys that leads to each tensor in a nested training state.

A state that one file or one distributed checkpoint holds is nested by a path of keys. A source that
recorded its paths keeps them. Every other gets the paths that torch's own
`get_state_dict` gives, which all of our readers take apart again by their first key:

    ("model", <name>)
    ("optimizer", "state", <name>, "exp_avg")       … "exp_avg_sq", "master_param", "step"
    ("ema", <name>), (<extra component>, <name>)

Put tensors and objects together into one nested state, path by path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint, Kind, tensor_key
from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.walk import Path, dotted
from ftckpt.formats.state.stored_names import place
from ftckpt.formats.state.wrappers import NO_HOMES, Homes, find_homes, names_of
from ftckpt.transfer.content import Content, TargetTensor

if TYPE_CHECKING:
    from .write_coded import CodedContent


_SAYING = (("params",), ("param_names",))
LEAVES = {
    Kind.EXP_AVG: "exp_avg",
    Kind.EXP_AVG_SQ: "exp_avg_sq",
    Kind.MASTER: "master_param",
}


def owner_of(content: Content, key: str) -> str:
    """Return the key of the tensor whose bytes a tensor shares; its own where it shares none."""
    owner = content.tensors.get(content.aliases.get(key, key))
    mine = content.tensors[key]
    same = owner is not None and (owner.shape, owner.dtype) == (mine.shape, mine.dtype)
    return owner.key if owner is not None and same else key


class RecordedPaths(NamedTuple):
    """Paths that the source itself recorded.

    Attributes:
        tensors: by key.
        objects: by name.
        homes: the models and optimizers below wrappers in these paths.
        named: paths of numbered states with the names of parameters, by key, where the source's
            objects (`param_names`) say these.
    """

    tensors: Mapping[str, Path]
    objects: Mapping[str, Path]
    homes: Homes = NO_HOMES
    named: Mapping[str, Path] = {}

    @property
    def flat(self) -> bool:
        """Whether the source keeps its tensors at the top, under dotted names (torchtitan)."""
        return any(len(path) == 1 for path in self.tensors.values())

    def nested_objects(self) -> Mapping[str, Path]:
        """Return the objects' paths in a state that is nested as torch's `get_state_dict` nests it.

        What the source flattened is nested, and the wrappers of one model's optimizer are gone.
        """
        if self.homes.found:
            return {name: self.homes.plain(path) for name, path in self.objects.items()}
        if not self.flat:
            return self.objects
        groups = "optimizer.param_groups."
        return {
            name: ("optimizer", "param_groups", name.removeprefix(groups))
            if name.startswith(groups)
            else path
            for name, path in self.objects.items()
        }


def with_aliases(content: Content) -> Content:
    """Return `content` with a tensor for every tied weight that the source does not store.

    Megatron's last stage has a copy of the embedding, and a pipeline of one stage none; elsewhere
    the model's state names both.
    """
    tensors = dict(content.tensors)
    for key, owner in content.aliases.items():
        wanted = tensors.get(owner)
        if key not in tensors and wanted is not None and wanted.component == "model":
            tensors[key] = wanted._replace(name=key)
    return replace(content, tensors=tensors)


@runtime_checkable
class RecordsPaths(Protocol):
    """A checkpoint whose files record where everything stands in the saved state."""

    def recorded_paths(self) -> RecordedPaths:
        """Return the paths; they stay when the checkpoint is written in another format."""

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return the objects that are byte items by themselves: name -> transforms.

        Such an item is a torch.save stream of its own, and can be copied as it is.
        """


def recorded_paths(checkpoint: Checkpoint) -> RecordedPaths:
    """Return the paths that a checkpoint recorded; none where it recorded none."""
    if isinstance(checkpoint, RecordsPaths):
        return checkpoint.recorded_paths()
    return RecordedPaths({}, {})


def recorded_items(checkpoint: Checkpoint) -> Mapping[str, tuple[str, ...]]:
    """Return the objects that are byte items by themselves (see `RecordsPaths`)."""
    return checkpoint.recorded_items() if isinstance(checkpoint, RecordsPaths) else {}


@runtime_checkable
class NestsOwn(Protocol):
    """A checkpoint of a file a rank, in which tensors of one rank alone are nested."""

    def own_paths(self) -> Mapping[str, Path]:
        """Return where these stand below `rank0`, `rank1`, ..., by key."""


def own_paths(checkpoint: Checkpoint) -> Mapping[str, Path]:
    """Return the paths of tensors that one rank alone has; none where nothing tells them."""
    return checkpoint.own_paths() if isinstance(checkpoint, NestsOwn) else {}


@runtime_checkable
class HoldsInside(Protocol):
    """A checkpoint with objects that are records of tensors: torchao's subclasses."""

    @property
    def tensors_inside(self) -> Mapping[str, str]:
        """Key of each tensor that lies in such a record -> name of the object."""


def carried_inside(content: Content) -> dict[str, str]:
    """Return the tensors that objects of `content` carry as they are: key -> name of the object.

    Raises:
        UnsupportedError: a record is to be carried, and a tensor in it is changed or left out.
    """
    checkpoint = content.checkpoint
    inside = checkpoint.tensors_inside if isinstance(checkpoint, HoldsInside) else {}
    found = {key: name for key, name in inside.items() if name in content.objects}
    for key, name in found.items():
        wanted, info = content.tensors.get(key), checkpoint.tensors[key]
        same = wanted is not None and wanted.name == info.name
        if wanted is None or not same or (wanted.dtype, wanted.shape) != (info.dtype, info.shape):
            raise UnsupportedError(
                f"{key} lies in {name}, a tensor subclass, and cannot be changed or left out alone",
                hint=f"leave {name} out with --drop as a whole",
                tensor=key,
            )
    return found


def coded_in(content: Content) -> list[CodedContent]:
    """Return the tensor subclasses cut over ranks that `content` has from its source.

    Raises:
        UnsupportedError: a tensor inside one is changed, renamed or left out alone.
    """
    if not getattr(content.checkpoint, "coded", None):
        return []
    from .write_coded import coded_contents  # few checkpoints have some

    return coded_contents(content)


def without_records(content: Content, coded: Iterable[CodedContent]) -> Content:
    """Return `content` without the records of shards, in whose place new ones are written."""
    names = {one.name for one in coded}
    held = {name: info for name, info in content.objects.items() if name not in names}
    return replace(content, objects=held)


def tensor_paths(
    content: Content, recorded: RecordedPaths, *, flat: bool = False
) -> tuple[dict[str, Path], list[str]]:
    """Return key -> path for the tensors of `content`, and the keys that no path leads back to.

    Args:
        content: what is to be written.
        recorded: paths that stay as they are. Those below wrappers stay only if they still show
            what each tensor is: without its optimizer, nothing may tell a model from other state.
        flat: whether the others are to stand at the top, under dotted names.

    Raises:
        UnsupportedError: names with a wrapper's prefix, which no reader would give back.
    """
    parameters = {
        wanted.name
        for wanted in content.tensors.values()
        if wanted.component == "model" or wanted.kind in LEAVES
    }
    paths: dict[str, Path] = {}
    lost: list[str] = []
    kept = recorded.tensors if _leads_back(content, recorded) else {}
    _require_bare(w for key, w in content.tensors.items() if key not in kept)
    for key, wanted in content.tensors.items():
        path = kept.get(key)
        if path is None:
            path = _nested(wanted, parameters)
            if flat:
                path = (dotted(path[1:] if wanted.component == "model" else path),)
            found = place(str(path[0]), path, wanted.dtype)
            if tensor_key(found.component, found.kind, found.name) != key:
                lost.append(key)
                continue
        paths[key] = path
    return paths, lost


def torch_paths(content: Content) -> dict[str, Path]:
    """Return key -> path in a state as torch's `get_state_dict` nests it, whatever was recorded."""
    parameters = {
        wanted.name
        for wanted in content.tensors.values()
        if wanted.component == "model" or wanted.kind in LEAVES
    }
    return {key: _nested(wanted, parameters) for key, wanted in content.tensors.items()}


def _leads_back(content: Content, recorded: RecordedPaths) -> bool:
    """Return whether a reader finds every tensor again by the recorded paths of what is left."""
    if recorded.named and not _still_named(content, recorded):
        return False
    if not recorded.homes.found:
        return True
    paths = {**recorded.tensors, **recorded.named}
    left = {k: (p, content.tensors[k]) for k, p in paths.items() if k in content.tensors}
    objects = [path for name, path in recorded.objects.items() if name in content.objects]
    homes = find_homes({path: wanted.shape for path, wanted in left.values()}, objects)
    rows = [(dotted(path), path, wanted.dtype) for path, wanted in left.values()]
    names = names_of(rows, homes)
    return all(key == tensor_key(*found) for key, found in zip(left, names, strict=True))


def _still_named(content: Content, recorded: RecordedPaths) -> bool:
    """Return whether what is left says the names of numbered states, as the source does."""
    from .param_ids import states_fit  # only for an optimizer that numbers its states

    sayers = {n for n, path in recorded.objects.items() if path[-1:] in _SAYING}
    whole = sayers <= content.objects.keys() and recorded.named.keys() <= content.tensors.keys()
    return whole and states_fit(content.tensors, recorded.named)


def is_divided(wanted: TargetTensor) -> bool:
    """Return whether FSDP2 divides a tensor: parameters, and what an optimizer keeps of each."""
    state = wanted.component in ("model", "optimizer", "ema") and wanted.kind is not Kind.BUFFER
    return state and bool(wanted.shape) and 0 not in wanted.shape


def _require_bare(tensors: Iterable[TargetTensor]) -> None:
    names = [wanted.name for wanted in tensors if wanted.component == "model"]
    for name, bare in unwrapped(names).items():
        if name != bare:
            raise UnsupportedError(
                f"{name} begins as a wrapper spells it: it would be read back as {bare}",
                hint="take the prefix off with --rename: the model's own state_dict has none",
                tensor=name,
            )


def _nested(wanted: TargetTensor, parameters: Iterable[str]) -> Path:
    component, name, kind = wanted.component, wanted.name, wanted.kind
    if component == "optimizer":
        if kind in LEAVES:
            return ("optimizer", "state", name, LEAVES[kind])
        if name.startswith("param_groups."):  # a learning rate that is a tensor
            steps = name.split(".")[1:]
            return ("optimizer", "param_groups", *(int(s) if s.isdecimal() else s for s in steps))
        parameter, leaf = _parameter_of(name, parameters)
        return ("optimizer", "state", parameter, leaf) if parameter else ("optimizer", leaf)
    if component.startswith("extra:"):
        # The kind is part of the key and not of a path: it becomes part of the name.
        return (component.removeprefix("extra:"), wanted.key.removeprefix(f"{component}:"))
    return (component, name)


def _parameter_of(name: str, parameters: Iterable[str]) -> tuple[str, str]:
    """Split `layers.0.weight.step` where the name of the parameter ends."""
    at = len(name)
    while (at := name.rfind(".", 0, at)) > 0:
        if name[:at] in parameters:
            return name[:at], name[at + 1 :]
    parameter, _, leaf = name.rpartition(".")
    return parameter, leaf


IsList = Callable[[Path], bool]


class _Inner(dict[str | int, Any]):
    """A container of the state, told from a dict that is a value in it."""


class NestedState:
    """A tree of containers with values at its leaves."""

    def __init__(self) -> None:
        self._root = _Inner()

    def put(self, path: Path, value: Any) -> bool:
        """Put a value at a path; False where something stands there or on the way."""
        inner = self._root
        for step in path[:-1]:
            found = inner.setdefault(step, _Inner())
            if type(found) is not _Inner:
                return False
            inner = found
        if path[-1] in inner:
            return False
        inner[path[-1]] = value
        return True

    def below(self, path: Path) -> set[str | int]:
        """Return the steps that lead on from a path; none where nothing stands there."""
        inner: Any = self._root
        for step in path:
            inner = inner.get(step) if type(inner) is _Inner else None
        return set(inner) if type(inner) is _Inner else set()

    def settled(self, is_list: IsList, is_tuple: IsList | None = None) -> Any:
        """Return the state as plain dicts, and lists or tuples where these say so of a path.

        The whole is a dict unless both are given. What has gaps stays a dict: a place may be any
        number, and nothing says what filled it.
        """
        if is_tuple is None:
            return _settled(self._root, (), lambda path: bool(path) and is_list(path), _never)
        return _settled(self._root, (), is_list, is_tuple)


def _never(_: Path) -> bool:
    return False


def _settled(value: Any, path: Path, is_list: IsList, is_tuple: IsList) -> Any:
    """Recursion goes as deep as a path is long, which its readers bound."""
    if type(value) is not _Inner:
        return value
    made = {
        step: _settled(member, (*path, step), is_list, is_tuple) for step, member in value.items()
    }
    if set(made) != set(range(len(made))):
        return made
    if is_tuple(path):
        return tuple(made[i] for i in range(len(made)))
    return [made[i] for i in range(len(made))] if is_list(path) else made
