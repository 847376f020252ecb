"""Under which names a training job asks for a state: torch's, flattened, with the job's own keys.

A job asks for `model.layers.0.weight`, for `layers.0.weight` (torchtitan), or for
`app.model.module.layers.0.weight`; for `optim.state.layers.0.weight.exp_avg` or `optimizer.…`. A
checkpoint lists one of these. What is asked for is taken apart here: where the model or the
optimizer begins, which parameter, which state of it; wrappers' prefixes mean nothing. A name that
two tensors answer to is an error that says both.

Source: `torch/distributed/checkpoint/{_nested_dict,state_dict}.py`, 2.6 to 2.13.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import UsageError
from ftckpt.formats.pickles.walk import Path, dotted

from .stored_names import AVERAGES, MODELS, OPTIMIZERS

_STATE, _GROUPS, _MASTER = "state", "param_groups", "master_param"
_DEPTH = 4  # keys in front of a model or an optimizer
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_DDP = "module."
# `optimizer.param_groups.0.lr`, `optim.param_groups.layers.0.weight.lr`
_SETTING = re.compile(r"(?:(?P<owner>.*)\.)?param_groups\.(?P<group>.+)\.(?P<field>[A-Za-z_]\w*)")


class TensorRow(NamedTuple):
    """A tensor that a job may ask for.

    Attributes:
        key: of the content.
        listed: the name under which it is listed: as the source recorded it, else by `path`.
        path: in a state as torch's `get_state_dict` nests it.
        shape: of the tensor.
        dtype: torch's name of its type.
    """

    key: str
    listed: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


class SettingName(NamedTuple):
    """What a job calls one setting of an optimizer.

    Attributes:
        owner: the keys in front of `param_groups`.
        group: the number of the job's group, or the name of the one parameter that it is for.
        field: the setting: `lr`.
    """

    owner: str
    group: str
    field: str

    @property
    def members(self) -> str:
        """The name of the list of the group's parameters."""
        prefix = f"{self.owner}." if self.owner else ""
        return f"{prefix}{_GROUPS}.{self.group}.params"


def setting_of(asked: str) -> SettingName | None:
    """Return what a name says of an optimizer's settings; None for any other."""
    match = _SETTING.fullmatch(asked)
    return (
        None if match is None else SettingName(match["owner"] or "", match["group"], match["field"])
    )


def bare(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    if "_orig_mod" in name or "_wrapped_module" in name:
        name = _WRAPPERS.sub("", name)
    while name.startswith(_DDP) and len(name) > len(_DDP):
        name = name.removeprefix(_DDP)
    return name


class AskedNames:
    """Finds what a job asks for.

    Args:
        rows: the tensors.
        objects: names of other values.
    """

    def __init__(self, rows: Sequence[TensorRow], objects: Iterable[str] = ()) -> None:
        self.rows = rows
        self.objects = frozenset(objects)
        self._by_key = {row.key: row for row in rows}
        self._exact: dict[str, str] = {}
        self._models: dict[str, list[str]] = defaultdict(list)
        self._states: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._averages: dict[str, list[str]] = defaultdict(list)
        self._masters: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            self._exact.setdefault(dotted(row.path), row.key)
        for row in rows:
            self._exact[row.listed] = row.key
        own = [dotted(row.path[1:]) for row in rows if row.path[0] == "model"]
        plain = unwrapped(own)
        first = {name.partition(".")[0] for name in plain.values() if "." in name}
        inner = len(first) == 1 and bool(first & MODELS) and all("." in n for n in plain.values())
        self._inner = f"{next(iter(first))}." if inner else ""
        for row in rows:
            head, *rest = row.path
            if head == "model":
                self._models[bare(dotted(tuple(rest)))].append(row.key)
            elif head == "ema":
                self._averages[bare(dotted(tuple(rest)))].append(row.key)
            elif head == "optimizer" and rest[:1] == [_STATE] and len(rest) > 2:
                self._states[bare(str(rest[1])), dotted(tuple(rest[2:]))].append(row.key)
                if rest[2] == _MASTER:
                    self._masters[bare(str(rest[1]))].append(row.key)

        self._parameters = frozenset(name for name, _ in self._states)

    def __contains__(self, asked: str) -> bool:
        return self.find(asked) is not None

    def row(self, key: str) -> TensorRow:
        """Return the row of a tensor."""
        return self._by_key[key]

    def find(self, asked: str) -> str | None:
        """Return the key of the tensor that a job asks for; None where there is none.

        Raises:
            UsageError: two tensors answer to the name.
        """
        exact = self._exact.get(asked)
        if exact is not None:
            return exact
        found = dict.fromkeys(self._candidates(asked))
        if not found:  # ZeRO 3 keeps a weight as its master alone
            found = dict.fromkeys(self._candidates(asked, self._masters))
        if len(found) > 1:
            names = " and ".join(f"{self._by_key[key].listed}" for key in list(found)[:3])
            raise UsageError(
                f"{asked} may mean {names}",
                hint="ask for it as the checkpoint lists it",
                tensor=asked,
            )
        return next(iter(found), None)

    def find_object(self, asked: str) -> str | None:
        """Return the name of a value other than a tensor; None without one.

        Raises:
            UsageError: two values answer to the name.
        """
        if asked in self.objects:
            return asked
        found = []
        for _, rest in _cuts(asked):
            found += [rest] if rest in self.objects else []
            found += [f"{head}.{rest}" for head in _SCHEDULERS if f"{head}.{rest}" in self.objects]
        if asked.partition(".")[0] not in _SCHEDULERS:
            found = [name for name in found if name.partition(".")[0] not in _SCHEDULERS]
        found = list(dict.fromkeys(found))
        if len(found) > 1:
            raise UsageError(f"{asked} may mean {found[0]} and {found[1]}", tensor=asked)
        return next(iter(found), None)

    def step_of(self, asked: str) -> str | None:
        """Return the parameter of which a job asks the step; None where it asks another thing."""
        for key, rest in _cuts(asked):
            if key in OPTIMIZERS and rest.endswith(".step"):
                name = rest.removeprefix(f"{_STATE}.").removesuffix(".step")
                for one in self._named(name):
                    if one in self._models or one in self._parameters:
                        return one
        return None

    def parameter(self, asked: str) -> str:
        """Return how this module calls a parameter of the job's optimizer."""
        named = self._named(asked)
        return next((n for n in named if n in self._models or n in self._parameters), bare(asked))

    def _candidates(
        self, asked: str, weights: Mapping[str, Sequence[str]] | None = None
    ) -> Iterator[str]:
        weights = self._models if weights is None else weights
        marked = False
        for key, rest in _cuts(asked):
            if key in OPTIMIZERS:
                marked = True
                yield from self._of_optimizer(rest)
            elif key in AVERAGES:
                marked = True
                yield from self._averages.get(bare(rest), ())
            elif key in MODELS:
                for name in self._named(rest):
                    yield from weights.get(name, ())
        if not marked:
            for name in self._named(asked):
                yield from weights.get(name, ())

    def _named(self, name: str) -> Iterator[str]:
        """Yield the forms of a parameter's name that the source may have."""
        plain = bare(name)
        yield plain
        head, _, rest = plain.partition(".")
        if head in MODELS and rest:
            yield bare(rest)
        if self._inner:
            yield self._inner + plain

    def _of_optimizer(self, rest: str) -> Iterator[str]:
        rest = rest.removeprefix(f"{_STATE}.")
        at = len(rest)
        while (at := rest.rfind(".", 0, at)) > 0:
            name, leaf = rest[:at], rest[at + 1 :]
            for one in self._named(name):
                yield from self._states.get((one, leaf), ())


_SCHEDULERS = ("lr_scheduler", "scheduler", "lr_schedulers", "sched")


def _cuts(asked: str) -> Iterator[tuple[str, str]]:
    """Yield each of the first keys of a name, and what follows it."""
    rest = asked
    for _ in range(_DEPTH):
        key, dot, rest = rest.partition(".")
        if not dot:
            return
        yield key, rest


def similar(asked: str, names: AskedNames) -> list[str]:
    """Return listed names that are like one that was not found."""
    from difflib import get_close_matches

    last = asked.rpartition(".")[2]
    near = [row.listed for row in names.rows if row.listed.endswith(last)][:256]
    return get_close_matches(asked, near, n=3, cutoff=0.6)
