"""The states that optimizers keep of a parameter: what each one is, and what its shape must be.

One table for every reader and every operation. A tensor of a checkpoint has a `Kind` of its own
only where all formats know it (masters, Adam's two moments); every other state is named
`<parameter>.<state>`, and this table says what it is.

Sources: torch 2.13 `optim/*.py`; transformers 5.23 `optimization.py` (Adafactor); bitsandbytes 0.50
`optim/optimizer.py`; torchao 0.18 `optim/subclass_*.py`; megatron-core 0.16.1 `optimizer/`;
pytorch-optimizer 4.1 and schedulefree 1.4.

Find the masters that stand for weights which are not stored, as ZeRO 3 leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from .pieces import Kind

Shape = tuple[int, ...]
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"


class StateShape(StrEnum):
    """The shape of a state, given that of its parameter `(..., r, c)`."""

    SAME = "same"
    ROWS = "rows"  # `(..., r)` or `(..., r, 1)`: a second moment's rows
    COLUMNS = "columns"  # `(..., c)` or `(..., 1, c)`
    SQUARE = "square"  # `(n, n)` for one axis of n
    BLOCKS = "blocks"  # one number a block of the parameter's elements, in C order
    SCALAR = "scalar"
    OWN = "own"  # of its own: a table of codes, a history


class KnownState(NamedTuple):
    """One state of an optimizer.

    Attributes:
        title: what it is, for people.
        shape: its shape, given its parameter's.
        kind: `OTHER` unless it has one of its own.
        moment: whether it is what the optimizer has learnt, so that a restart without it differs.
        unsigned: whether none of its values is ever negative.
        matrices: whether an optimizer keeps it of matrices alone.
        slot: the state whose part it is: a row and a column factor make one second moment.
        weights: whether it is weights that the model does not hold: an average, or what an average
            is made of. An evaluation may need them, and a checkpoint without them has lost them.
    """

    title: str
    shape: StateShape
    kind: Kind = Kind.OTHER
    moment: bool = True
    unsigned: bool = False
    slot: str = ""
    matrices: bool = False
    weights: bool = False


_MASTER = KnownState("master weights", StateShape.SAME, Kind.MASTER, moment=False)
_STEP = KnownState("counter", StateShape.SCALAR, moment=False)


def _same(
    title: str, *, unsigned: bool = False, slot: str = "", weights: bool = False
) -> KnownState:
    return KnownState(title, StateShape.SAME, unsigned=unsigned, slot=slot, weights=weights)


def _factors(stem: str, title: str, slot: str) -> dict[str, KnownState]:
    alone = slot not in ("exp_avg_sq", "variance")  # these are whole where nothing is factored
    rows = KnownState(f"{title}: rows", StateShape.ROWS, unsigned=True, slot=slot, matrices=alone)
    columns = rows._replace(title=f"{title}: columns", shape=StateShape.COLUMNS)
    return {stem.format("row"): rows, stem.format("col"): columns}


STATES: Mapping[str, KnownState] = {
    **dict.fromkeys(("master_param", "master_weight", "fp32_param", "param"), _MASTER),
    # Adam and what follows it
    "exp_avg": KnownState("first moment", StateShape.SAME, Kind.EXP_AVG),
    "exp_avg_sq": KnownState(
        "second moment", StateShape.SAME, Kind.EXP_AVG_SQ, unsigned=True, slot="exp_avg_sq"
    ),
    "max_exp_avg_sq": _same("largest second moment", unsigned=True),  # amsgrad
    "exp_inf": _same("largest gradient", unsigned=True),  # Adamax
    "exp_avg_slow": _same("slow first moment"),  # AdEMAMix
    "exp_avg_diff": _same("moment of gradient differences"),  # Adan
    "previous_grad": _same("last gradient"),  # Adan
    "last_grad": _same("last gradient"),  # MARS
    "z": _same("iterate", weights=True),  # schedule-free
    # SGD, Muon, RMSprop, Adagrad, Adadelta, ASGD, Rprop
    "momentum_buffer": _same("momentum"),
    "momentum": _same("momentum"),
    "square_avg": _same("second moment", unsigned=True),
    "grad_avg": _same("mean gradient"),
    "acc_delta": _same("squared updates", unsigned=True),
    "sum": _same("squared gradients"),
    "ax": _same("averaged weights", weights=True),
    **dict.fromkeys(
        ("slow_param", "slow_params", "slow_buffer", "lookahead_params"),
        _same("slow weights", weights=True),  # Lookahead, Ranger
    ),
    "prev": _same("last gradient"),
    "step_size": _same("step size", unsigned=True),
    # Adafactor (torch's, transformers') and CAME: a matrix's second moment in two factors
    **_factors("{}_var", "second moment", "variance"),
    "variance": _same("second moment", unsigned=True, slot="variance"),
    **_factors("exp_avg_sq_{}", "second moment", "exp_avg_sq"),
    **_factors("exp_avg_res_{}", "residual", "exp_avg_res"),
    # Shampoo and SOAP: a square matrix for each axis, in a list or numbered
    "pre_cond": KnownState("preconditioner", StateShape.SQUARE, matrices=True),
    "inv_pre_cond": KnownState("inverse preconditioner", StateShape.SQUARE, matrices=True),
    "GG": KnownState("preconditioner", StateShape.SQUARE, matrices=True),
    "Q": KnownState("eigenvectors", StateShape.SQUARE, matrices=True),
    # bitsandbytes: codes, the largest value of each block, and the code's table
    "state1": _same("first state"),
    "state2": _same("second state"),
    "absmax1": KnownState("scales of state1", StateShape.BLOCKS, slot="state1"),
    "absmax2": KnownState("scales of state2", StateShape.BLOCKS, slot="state2"),
    **{
        f"qmap{i}": KnownState(f"code of state{i}", StateShape.OWN, slot=f"state{i}")
        for i in (1, 2)
    },
    **{
        f"{new}max{i}": KnownState(f"scale of state{i}", StateShape.SCALAR, slot=f"state{i}")
        for new in ("", "new_")
        for i in (1, 2)
    },
    **{
        name: KnownState("norms of the last steps", StateShape.OWN, moment=False)
        for name in ("unorm_vec", "gnorm_vec")
    },
    # Prodigy and D-Adaptation may keep these of every n-th element alone
    "s": KnownState("weighted gradients", StateShape.OWN),
    "p0": KnownState("first weights", StateShape.OWN),
    # L-BFGS keeps one state for all parameters, under the first one's number
    "d": KnownState("direction, of all parameters", StateShape.OWN),
    "prev_flat_grad": KnownState("last gradient, of all parameters", StateShape.OWN),
    "old_dirs": KnownState("history, of all parameters", StateShape.OWN),
    "old_stps": KnownState("history, of all parameters", StateShape.OWN),
    "ro": KnownState("history, of all parameters", StateShape.OWN),
    "al": KnownState("history, of all parameters", StateShape.OWN, moment=False),
    **{
        name: KnownState("number", StateShape.SCALAR, moment=False)
        for name in ("RMS", "eta", "mu", "mu_product", "H_diag", "t")
    },
    **dict.fromkeys(("step", "steps", "func_evals", "n_iter"), _STEP),
}
# The parts of a state that is a tensor subclass: torchao's `OptimState8bit` and its kin.
_PARTS = frozenset({"codes", "scale", "qmap"})
# bitsandbytes keeps what FSDP must not gather one level deeper.
_INSIDE = frozenset({"__bnb_optimizer_quant_state__"})
# Averages of weights have names of many kinds: `ema`, `ema_param`, `swa_weights`, `shadow`.
_AVERAGE = r"(?:ema|swa|shadow|averaged?|polyak)(?:$|[_0-9])|param_(?:ema|avg)"
KINDS: Mapping[str, Kind] = {
    name: state.kind for name, state in STATES.items() if state.kind is not Kind.OTHER
}


class NamedState(NamedTuple):
    """What a tensor of an optimizer is by its name.

    Attributes:
        parameter: the name of its parameter; "" where the name is that of a state alone.
        leaf: what follows it, as stored: `exp_avg.codes`, `Q.0`.
        state: its row of the table; None where the table has none.
        part: of a subclass: `codes`, `scale` or `qmap`; else "".
    """

    parameter: str
    leaf: str
    state: KnownState | None
    part: str = ""

    @property
    def slot(self) -> str:
        """The state that it is, or is a part of."""
        if self.state is not None and self.state.slot:
            return self.state.slot
        return _stem(self.leaf.split("."))


def named_state(name: str, parameters: Container[str] = ()) -> NamedState:
    """Take a name apart: `layers.0.weight.momentum_buffer`.

    Args:
        name: of a tensor of kind `OTHER` in an optimizer.
        parameters: names that are known; the longest of them with which the name begins is its
            parameter. Without one, the table decides, and then the last dot.
    """
    words = name.split(".")
    for end in range(len(words) - 1, 0, -1):
        head = ".".join(words[:end])
        if head in parameters:
            return _of(head, words[end:])
    end = len(words) - 1
    while end > 0 and (words[end].isdecimal() or words[end] in _PARTS):
        end -= 1
    if _stem(words[end:]) not in STATES:
        end = len(words) - 1
    elif end > 0 and words[end - 1] in _INSIDE:
        end -= 1
    return _of(".".join(words[:end]), words[end:])


def is_numbered(name: str) -> bool:
    """Say whether an optimizer knows a parameter by its number: `3`, or `0.3` within a group."""
    return re.fullmatch(_NUMBER, name) is not None


def holds_weights(named: NamedState) -> bool:
    """Say whether a state is weights that the model does not hold; by its name if it is unknown."""
    if named.state is not None:
        return named.state.weights
    words = f"{named.parameter}.{named.leaf}".lower().split(".")
    return any(re.match(_AVERAGE, word) for word in words)


def _of(parameter: str, words: list[str]) -> NamedState:
    part = words[-1] if len(words) > 1 and words[-1] in _PARTS else ""
    return NamedState(parameter, ".".join(words), STATES.get(_stem(words)), part)


def _stem(words: list[str]) -> str:
    """Return the word of the table: without what holds it, and without the number of its axis."""
    inner = words[1:] if len(words) > 1 and words[0] in _INSIDE else words
    word = inner[0]
    return word if word in STATES else word.rstrip("0123456789").rstrip("_")


def parameter_shapes(states: Mapping[str, Shape]) -> Iterator[Shape]:
    """Yield the shapes that known states give their parameter; nothing where none tells one.

    Args:
        states: of one parameter, by what follows its name.
    """
    rows: dict[str, Shape] = {}
    columns: dict[str, Shape] = {}
    for leaf, shape in states.items():
        _, _, state, part = _of("", leaf.split("."))
        if state is None or part in ("scale", "qmap"):
            continue
        if state.shape is StateShape.SAME:
            yield shape
        elif state.shape is StateShape.ROWS:
            rows[state.slot] = shape
        elif state.shape is StateShape.COLUMNS:
            columns[state.slot] = shape
    for slot in rows.keys() & columns.keys():
        whole = _outer(rows[slot], columns[slot])
        if whole is not None:
            yield whole


def _outer(rows: Shape, columns: Shape) -> Shape | None:
    """Return the shape of which two factors are: torch keeps the axis of 1, others drop it."""
    if len(rows) != len(columns) or not rows:
        return None
    if len(rows) > 1 and rows[-1] == 1 and columns[-2] == 1 and rows[:-2] == columns[:-2]:
        return (*rows[:-1], columns[-1])
    return (*rows, columns[-1]) if rows[:-1] == columns[:-1] else None


class DescribedTensor(Protocol):
    """A tensor that says of what it is."""

    @property
    def component(self) -> str:
        """As `TensorInfo` has it."""

    @property
    def name(self) -> str:
        """As `TensorInfo` has it."""

    @property
    def kind(self) -> Kind:
        """As `TensorInfo` has it."""


def masters_alone(tensors: Mapping[str, DescribedTensor], aliases: Mapping[str, str]) -> list[str]:
    """Return the keys of masters of parameters whose weights are not among the tensors.

    Masters that a state has by numbers name no parameter, and are left out.

    Args:
        tensors: by key.
        aliases: key -> key of the tensor that owns the same bytes (tied weights).
    """
    masters = {key: one.name for key, one in tensors.items() if one.kind is Kind.MASTER}
    if not masters:
        return []
    weights = {one.name for one in tensors.values() if one.component == "model"}
    # Of tied weights one may be stored, and the masters of both.
    for key, owner in aliases.items():
        names = {tensors[one].name for one in (key, owner) if one in tensors}
        if names & weights:
            weights |= names
    return [key for key, name in masters.items() if name not in weights and not is_numbered(name)]
