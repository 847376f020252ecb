"""What the leaves of a training state in JAX are: weights, an optimizer's states, all else.

A flax TrainState, and most trainers, keep weights below `params` and optax's state below
`opt_state`. Optax keeps a moment as a tree that mirrors the weights:
`opt_state.1.0.mu.dense.kernel` is the first moment of `params.dense.kernel`. A state counts as one
only if a weight of that path has its shape.

Source: optax 0.2 `transforms/_accumulation.py`, `_src/transform.py`; flax
`training/train_state.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Kind

Path = tuple[str, ...]
Shape = tuple[int, ...]

_PARAMS = "params"
_OPTIMIZERS = frozenset(("opt_state", "optimizer_state", "optimizer", "opt"))
_AVERAGES = frozenset(("ema_params", "ema"))
_BUFFERS = frozenset(("batch_stats",))
_STATES = {
    "mu": (Kind.EXP_AVG, ""),
    "nu": (Kind.EXP_AVG_SQ, ""),
    "trace": (Kind.OTHER, "momentum_buffer"),
}


class StateLeaf(NamedTuple):
    """What one leaf is; see `TensorInfo`."""

    component: str
    kind: Kind
    name: str


def leaves_of(shapes: Mapping[Path, Shape]) -> dict[Path, StateLeaf]:
    """Return what each leaf is, by its path in the tree.

    Args:
        shapes: of all arrays, by path.
    """
    whole = any(path[0] == _PARAMS and len(path) > 1 for path in shapes)
    params = {path[1:]: shape for path, shape in shapes.items() if path[0] == _PARAMS and path[1:]}
    found = {path: _leaf(path, shape, params, whole=whole) for path, shape in shapes.items()}
    # Two states of one parameter (an optimizer inside another) have no name of their own.
    uses = Counter(found.values())
    return {
        path: leaf if uses[leaf] == 1 else StateLeaf(leaf.component, Kind.OTHER, ".".join(path))
        for path, leaf in found.items()
    }


def _leaf(path: Path, shape: Shape, params: Mapping[Path, Shape], *, whole: bool) -> StateLeaf:
    top, rest = path[0], path[1:]
    if top in _OPTIMIZERS and rest:
        for at, word in enumerate(rest):
            known = _STATES.get(word)
            of = rest[at + 1 :]
            if known is not None and of and params.get(of) == shape:
                kind, state = known
                return StateLeaf("optimizer", kind, ".".join((*of, state) if state else of))
        return StateLeaf("optimizer", Kind.OTHER, ".".join(path))
    if not whole:
        return StateLeaf("model", Kind.PARAM, ".".join(path))
    if top == _PARAMS and rest:
        return StateLeaf("model", Kind.PARAM, ".".join(rest))
    if top in _AVERAGES and params.get(rest) == shape:
        return StateLeaf("ema", Kind.PARAM, ".".join(rest))
    if top in _BUFFERS and rest:
        return StateLeaf("model", Kind.BUFFER, ".".join(path))
    return StateLeaf("extra:state", Kind.OTHER, ".".join(path))
