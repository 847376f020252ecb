"""What the leaves of a training state in JAX are: weights, an optimizer's states, all else.

A flax TrainState, and most trainers, keep weights below `params` and optax's state below
`opt_state`. Optax keeps a moment as a tree that mirrors the weights:
`opt_state.1.0.mu.dense.kernel` is the first moment of `params.dense.kernel`. A state counts as one
only if a weight of that path has its shape. Any other tree of a weight's path, whatever its shape,
is a state of the name above it: `opt_state.0.v_row.dense.kernel` is `dense.kernel.v_row`.

What `convert --to orbax` finds no place for in such a state lies below `ftckpt`, with its component
and kind: `ftckpt.optimizer.other.param_groups.0.lr`.

Source: optax 0.2 `transforms/_accumulation.py`, `_src/transform.py`; flax
`training/train_state.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.formats.state.stored_names import AVERAGES, MODEL, NETWORK, OPTIMIZERS

Path = tuple[str, ...]
Shape = tuple[int, ...]

_PARAMS = "params"
HOME = "ftckpt"
_BUFFERS = frozenset(("batch_stats",))
_KINDS = frozenset(str(kind) for kind in Kind)
_STATES = {
    "mu": (Kind.EXP_AVG, ""),
    "nu": (Kind.EXP_AVG_SQ, ""),
    "trace": (Kind.OTHER, "momentum_buffer"),
    "master_params": (Kind.MASTER, ""),
}


class StateLeaf(NamedTuple):
    """What one leaf is; see `TensorInfo`."""

    component: str
    kind: Kind
    name: str


def roles_of(shapes: Mapping[tuple[str, Path], Shape]) -> dict[tuple[str, Path], StateLeaf]:
    """Return what each leaf of all trees of a step is, by item and path.

    Of several trees one may be a training state; the others are then components of their names.
    Else an item is the first word of its paths.
    """
    items = {item for item, _ in shapes}
    training = {item for item, path in shapes if path[0] == _PARAMS and len(path) > 1}
    if len(items) < 2 or len(training) == 1:
        [one] = training if len(items) > 1 else items or {""}
        inner = leaves_of({path: shape for (item, path), shape in shapes.items() if item == one})
        return {
            (item, path): inner[path]
            if item == one
            else StateLeaf(f"extra:{item}", Kind.OTHER, ".".join(path))
            for item, path in shapes
        }
    whole = leaves_of({(item, *path): shape for (item, path), shape in shapes.items()})
    return {(item, path): whole[item, *path] for item, path in shapes}


def leaves_of(shapes: Mapping[Path, Shape]) -> dict[Path, StateLeaf]:
    """Return what each leaf is, by its path in the tree.

    Args:
        shapes: of all arrays, by path.
    """
    model = _model_in(shapes)
    params = {path[1:]: shape for path, shape in shapes.items() if path[0] == model and path[1:]}
    found = {path: _leaf(path, shape, params, model) for path, shape in shapes.items()}
    # Two states of one parameter (an optimizer inside another) have no name of their own.
    uses = Counter(found.values())
    return {
        path: leaf if uses[leaf] == 1 else StateLeaf(leaf.component, Kind.OTHER, ".".join(path))
        for path, leaf in found.items()
    }


def _model_in(paths: Iterable[Path]) -> str:
    """Return the key that the model lies below; "" where the model is at the top."""
    tops = {path[0] for path in paths if len(path) > 1}
    known = [key for key in (_PARAMS, *MODEL) if key in tops] or [k for k in NETWORK if k in tops]
    return known[0] if known else ""


def _is_component(name: str) -> bool:
    return name in ("model", "optimizer", "ema") or name.startswith("extra:")


def parameter_and_leaf(name: str, parameters: Container[str]) -> tuple[str, str]:
    """Split `layers.0.weight.step` into a parameter and the state's name; "" for no parameter.

    Only what `leaves_of` reads back so: the name is one word, and no moment's.
    """
    parameter, _, leaf = name.rpartition(".")
    if leaf == "momentum_buffer":
        leaf = "trace"
    elif leaf in _STATES or leaf.isdecimal():
        return "", ""
    return (parameter, leaf) if parameter in parameters else ("", "")


def _leaf(path: Path, shape: Shape, params: Mapping[Path, Shape], model: str) -> StateLeaf:
    top, rest = path[0], path[1:]
    if top == HOME and len(path) > 3 and path[2] in _KINDS and _is_component(path[1]):
        return StateLeaf(path[1], Kind(path[2]), ".".join(path[3:]))
    if top in OPTIMIZERS and rest:
        for at, word in enumerate(rest):
            known = _STATES.get(word)
            of = rest[at + 1 :]
            if known is not None and of and params.get(of) == shape:
                kind, state = known
                return StateLeaf("optimizer", kind, ".".join((*of, state) if state else of))
            if known is None and of in params and not word.isdecimal():
                return StateLeaf("optimizer", Kind.OTHER, ".".join((*of, word)))
        return StateLeaf("optimizer", Kind.OTHER, ".".join(path))
    if not model:
        return StateLeaf("model", Kind.PARAM, ".".join(path))
    if top == model and rest:
        return StateLeaf("model", Kind.PARAM, ".".join(rest))
    if top in AVERAGES and params.get(rest) == shape:
        return StateLeaf("ema", Kind.PARAM, ".".join(rest))
    if top in _BUFFERS and rest:
        return StateLeaf("model", Kind.BUFFER, ".".join(path))
    return StateLeaf("extra:state", Kind.OTHER, ".".join(path))
