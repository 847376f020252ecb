"""Read an optimizer's settings from a checkpoint, to predict one step from another.

Every trainer keeps them as torch does, in `param_groups`; by number with the names of the group's
parameters, or flattened under the name of each parameter. What is not understood says nothing:
settings only guide guesses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta.codec.fit_predictor import FitSettings
from ftckpt.delta.pack.pair import DeltaPair
from ftckpt.errors import FtckptError, UnavailableError
from ftckpt.formats.pickles.walk import dotted
from ftckpt.transfer.content import Content

from .objects import StateObjects
from .paths import recorded_paths

_FIELD = re.compile(
    r"(?:.*\.)?param_groups\.(?P<group>.+?)\."
    r"(?P<field>lr|betas|eps|weight_decay|momentum|params)(?:\.(?P<index>\d+))?"
)
# A parameter without a name: the group's number and the place in it.
_NUMBERED = re.compile(r"\d+\.\d+")


@dataclass
class _Group:
    """One parameter group."""

    numbers: dict[str, float] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def take(self, name: str, index: str | None, value: object, label: str) -> None:
        """Take one leaf of the group; `label` stands before the names of its model's tensors."""
        if name == "params":
            self.names.update(label + v for v in _flat(value) if isinstance(v, str))
            return
        numbers = [v for v in _flat(value) if type(v) in (int, float)]
        for place, number in enumerate(numbers, int(index or 0)):
            assert isinstance(number, (int, float))
            self.numbers[f"beta{place + 1}" if name == "betas" else name] = float(number)


def settings_of(target: Checkpoint, base: Checkpoint | None) -> Callable[[DeltaPair], FitSettings]:
    """Return the settings of the optimizer that led to `target`, for each tensor.

    Args:
        target: the checkpoint that is to be predicted.
        base: the one that it is predicted from; None where there is none.
    """
    step = _step(target)
    before = None if base is None else _step(base)
    known = FitSettings(step=step)
    if step is not None and before is not None and step > before:
        known = known._replace(distance=step - before)
    by_name: dict[str, FitSettings] = {}
    groups = _groups(target) if base is not None else {}
    made = {name: _settings(known, group) for name, group in groups.items()}
    for name, group in groups.items():
        by_name |= dict.fromkeys(group.names or {name}, made[name])
    if made:
        shared = [
            s for s in FitSettings._fields if len({getattr(one, s) for one in made.values()}) == 1
        ]
        first = next(iter(made.values()))
        known = known._replace(**{name: getattr(first, name) for name in shared})

    def of(pair: DeltaPair) -> FitSettings:
        name = pair.kin[1]
        if name not in by_name and _NUMBERED.fullmatch(name) is not None:
            name = name.partition(".")[0]
        return by_name.get(name, known)

    return of


def _groups(checkpoint: Checkpoint) -> dict[str, _Group]:
    recorded = recorded_paths(checkpoint)
    objects = StateObjects(Content.of(checkpoint), recorded.nested_objects())
    groups: dict[str, _Group] = {}
    for name in checkpoint.objects:
        for path, value in _leaves(objects, name):
            match = _FIELD.fullmatch(path)
            if match is not None:
                label = recorded.homes.label(recorded.objects.get(name, ()))
                mine = f"{label}." if label else ""
                group = groups.setdefault(mine + match["group"], _Group())
                group.take(match["field"], match["index"], value, mine)
    return groups


def _leaves(objects: StateObjects, name: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves of one object; nothing more where it cannot be read.

    Raises:
        UnavailableError: storage failed, which says nothing of what the object holds.
    """
    if not re.search(r"optim|param_groups", name):
        return
    try:
        for leaf in objects.fields(name):
            yield dotted(leaf.path), leaf.value.value
    except UnavailableError:
        raise
    except FtckptError:
        return


def _settings(known: FitSettings, group: _Group) -> FitSettings:
    found = group.numbers.get
    return known._replace(
        beta1=found("beta1", known.beta1),
        beta2=found("beta2", known.beta2),
        eps=found("eps", known.eps),
        lr=found("lr"),
        weight_decay=found("weight_decay"),
        momentum=found("momentum"),
    )


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _step(checkpoint: Checkpoint) -> int | None:
    try:
        return checkpoint.step
    except FtckptError:
        return None
