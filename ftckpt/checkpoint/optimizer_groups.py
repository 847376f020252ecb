"""Tell the parameters that an optimizer treats otherwise from those that have lost a state.

A mixed optimizer treats one sort of parameters as Lion does, with one moment, and the rest as Adam
does, with two. Its `param_groups` say which: torch keeps them as a list with the parameters of each
group by number or name, or flattened, by the number of the group or the name of each parameter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.errors import FtckptError

from .optimizer_states import is_numbered, named_state

_GROUPS = re.compile(
    r"(?:(?P<owner>.*)\.)?param_groups(?:\.(?P<group>.+?)\.(?P<field>[A-Za-z_]\w*)(?:\.\d+)?)?"
)
_RANK = re.compile(r"rank_\d+\.?")
_STATE = re.compile(r"(?:(?P<owner>.*?)\.)?state\.(?P<rest>.+)")
_LAYER = r"(?:^|(?<=\.))[0-9]+(?=\.)"
# What says which algorithm is meant; rates, decay and other strengths differ within one too.
_ALGORITHM = re.compile(r"beta|momentum|amsgrad|algo|optim|type|method|muon|lion|adam|sgd|^use_")
_OWN = frozenset({"params", "param_names"})  # the members, and not a setting
_MOST_VALUES = 20_000  # of groups by parameter, in which each value is a record of its own

_Settings = frozenset[tuple[str, str]]


class _Group(NamedTuple):
    """One group: its settings, and its members as they stand there, with their places."""

    owner: str
    number: str
    settings: _Settings
    members: list[Any]


def of_other_groups(
    less: Collection[str], more: Collection[str], checkpoint: Checkpoint
) -> set[str]:
    """Return the parameters that have fewer states than others because of the group they are in.

    That shows where the optimizer's groups have other settings for them than for all others: other
    fields, betas or algorithm. A group of the same settings has lost something. Where a checkpoint
    has no groups, or none that names a parameter, names decide: all of a sort have fewer.

    Args:
        less: names of the parameters with fewer states.
        more: names of those with all.
        checkpoint: whose groups are read, if there are any of `less`.
    """
    if not less:
        return set()
    groups = _groups_of(checkpoint)
    if groups and len({one.settings for one in groups}) == 1:
        return set()
    settings = _by_parameter(groups, checkpoint, {*less, *more})
    if not settings:
        return _by_names(less, more)
    if not settings.keys() >= set(more):  # theirs may be any
        return set()
    usual = {one for name in more for one in settings[name]}
    return {name for name in less if name in settings and not settings[name] & usual}


def given(checkpoint: Checkpoint) -> int | None:
    """Return how many parameters the optimizers' groups list; None where no group lists any.

    What a model has besides are buffers, or frozen: the optimizer never had a state of it.
    """
    listed = {
        (one.owner, one.number, place): member
        for one in _groups_of(checkpoint)
        for place, member in enumerate(one.members)
    }
    known = all(type(member) in (int, str) for member in listed.values())
    return len(listed) if listed and known else None


def _by_names(less: Collection[str], more: Collection[str]) -> set[str]:
    """Return those of sorts of which none has more; what is lost is lost of one here and there."""
    whole = {_sort_of(name) for name in more} | {""}
    apart = {name for name in less if _sort_of(name) not in whole}
    mixed = len({_sort_of(name) for name in apart}) < len(apart)
    return apart if mixed else set()


def _sort_of(name: str) -> str:
    """Return what parameters of one sort have in common; "" where the name does not tell."""
    if is_numbered(name):
        return name.rpartition(".")[0]
    return re.sub(_LAYER, "#", name)


def _groups_of(checkpoint: Checkpoint) -> list[_Group]:
    """Return the groups of all optimizers; none where they cannot be read."""
    found: list[_Group] = []
    flat: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name in checkpoint.objects:
        match = _GROUPS.fullmatch(name)
        if match is None:
            continue
        owner = _RANK.sub("", match["owner"] or "", count=1)
        if match["group"] is not None:
            flat[owner, match["group"]].append((match["field"], name))
            continue
        try:
            tree = checkpoint.load_object(name)
        except FtckptError:
            return []
        listed = [*tree.values()] if isinstance(tree, dict) else tree
        for number, group in enumerate(listed if isinstance(listed, (list, tuple)) else ()):
            if isinstance(group, dict):
                found.append(_group(owner, str(number), group))
    values = sum(map(len, flat.values())) <= _MOST_VALUES
    for (owner, group_name), fields in flat.items():
        read: dict[str, Any] = {}
        for field, name in fields:
            wanted = field == "params" or (values and _ALGORITHM.search(field))
            try:
                value = checkpoint.load_object(name) if wanted else None
            except FtckptError:
                return []
            held = read.setdefault(field, value)
            if held is not value and isinstance(value, str):  # one name a record
                read[field] = [*(held if isinstance(held, list) else [held]), value]
        if "params" not in read:
            read["params"] = [group_name]
        found.append(_group(owner, group_name, read))
    return found


def _group(owner: str, number: str, read: Mapping[Any, Any]) -> _Group:
    fields = {str(key): value for key, value in read.items()}
    settings = frozenset(
        (key, _shown(value) if _ALGORITHM.search(key) else "")
        for key, value in fields.items()
        if key not in _OWN
    )
    members = fields.get("params")
    return _Group(owner, number, settings, members if isinstance(members, list) else [members])


def _shown(value: object) -> str:
    flat = value if isinstance(value, (list, tuple)) else [value]
    plain = (bool, int, float, str, type(None))
    return str([repr(one) if isinstance(one, plain) else type(one).__name__ for one in flat])


def _by_parameter(
    groups: Collection[_Group], checkpoint: Checkpoint, names: Collection[str]
) -> dict[str, set[_Settings]]:
    """Return the settings of each parameter of which a group tells; of each rank's groups."""
    found: dict[str, set[_Settings]] = defaultdict(set)
    stored = _stored(checkpoint) if groups else {}
    for group in groups:
        for place, member in enumerate(group.members):
            text = str(member)
            known = stored.get((group.owner, text)) or stored.get(("", text)) or set()
            tried = (text,) if type(member) is str else (f"{group.number}.{place}", text)
            named = known or {one for one in tried if one in names}
            if len(named) == 1:
                found[named.pop()].add(group.settings)
    return {name: found[name] for name in found if name in names}


def _stored(checkpoint: Checkpoint) -> dict[tuple[str, str], set[str]]:
    """Return the name of a parameter by its optimizer and how that calls it in its file.

    Without an optimizer it stands for that of any.
    """
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for info in checkpoint.tensors.values():
        match = _STATE.fullmatch(info.stored_name) if info.component == "optimizer" else None
        if match is None:
            continue
        name, called = info.name, match["rest"].rpartition(".")[0]
        if info.kind is Kind.OTHER:
            named = named_state(name)
            name, called = named.parameter, match["rest"].removesuffix(f".{named.leaf}")
        for owner in {match["owner"] or "", ""}:
            found[owner, called].add(name)
    return found
