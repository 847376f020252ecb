"""Files of different names that make up one step, in a directory that other steps share.

    model_000030.pt, meta_000030.json, optim_000030_rank0.pt, optim_000030_rank1.pt   nanochat
    model_000030.pt, meta_000030.json, optim_000030.pt                  nanochat until late 2025
    model030000.pt, ema_0.9999_030000.pt, opt030000.pt                  guided-diffusion

A name alone may be of any program (`model_0000059.pth` is a whole checkpoint of detectron2's), so
files are a set only if two of them, of different names, have the same digits. A rank's optimizer is
one by its name: no program keeps a whole checkpoint under it.

Sources: nanochat/checkpoint_manager.py (`save_checkpoint`); guided_diffusion/train_util.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

_DIGITS = r"(?P<step>\d{1,15})"


class _Kind(NamedTuple):
    """How one program names the files of a step.

    Attributes:
        model: pattern of the weights' file, with the group `step`.
        others: patterns of the rest; the group `rank` for a file of each rank.
        likely: what probably lies beside the weights; `{}` stands for the digits.
        main: the weights' file; `{}` stands for the digits.
    """

    model: str
    others: tuple[str, ...]
    likely: tuple[str, ...]
    main: str


_KINDS = (
    _Kind(
        rf"model_{_DIGITS}\.pt",
        (
            rf"meta_{_DIGITS}\.json",
            rf"optim_{_DIGITS}\.pt",
            rf"optim_{_DIGITS}_rank(?P<rank>\d{{1,7}})\.pt",
        ),
        ("meta_{}.json", "optim_{}.pt", "optim_{}_rank0.pt"),
        "model_{}.pt",
    ),
    _Kind(
        r"model(?P<step>\d{6,15})\.pt",
        (r"opt(?P<step>\d{6,15})\.pt", r"ema_\d?\.\d+_(?P<step>\d{6,15})\.pt"),
        ("opt{}.pt", "ema_0.9999_{}.pt"),
        "model{}.pt",
    ),
)


class SetMember(NamedTuple):
    """What a file's name says of its set.

    Attributes:
        kind: the number of the program that names files so.
        digits: of the step, as they are written.
        place: the pattern that the name fits: 0 for the weights, else from 1.
        rank: the number of the rank; None where the file is not a rank's.
    """

    kind: int
    digits: str
    place: int
    rank: int | None = None

    @property
    def step(self) -> int:
        """The step."""
        return int(self.digits)

    @property
    def model(self) -> str:
        """The name of the weights' file of the same step."""
        return _KINDS[self.kind].main.format(self.digits)


def set_member(name: str) -> SetMember | None:
    """Return what a name says if it may be of a set; None if it cannot."""
    for number, kind in enumerate(_KINDS):
        for place, pattern in enumerate((kind.model, *kind.others)):
            if match := re.fullmatch(pattern, name):
                rank = match.groupdict().get("rank")
                return SetMember(number, match["step"], place, int(rank) if rank else None)
    return None


def set_around(name: str, is_beside: Callable[[str], bool]) -> SetMember | None:
    """Return what a name says if its file is one of a set; None if nothing beside it shows that.

    Args:
        name: of a file.
        is_beside: whether a file of a name lies in the same directory.
    """
    member = set_member(name)
    if member is None or member.rank is not None:
        return member
    kind = _KINDS[member.kind]
    likely = (one.format(member.digits) for one in (*kind.likely, kind.main))
    return member if any(one != name and is_beside(one) for one in likely) else None


def set_of(member: SetMember, names: Iterable[str]) -> dict[str, SetMember]:
    """Return the files of one set among the names of a directory."""
    found = {name: other for name in names if (other := set_member(name)) is not None}
    mine = (member.kind, member.digits)
    return {n: other for n, other in found.items() if (other.kind, other.digits) == mine}


def sets_among(names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the files of sets: name -> the name that stands for the set, and the step.

    The weights' file stands for it, else the first of the others that may be a checkpoint.
    """
    groups: dict[tuple[int, str], dict[str, SetMember]] = {}
    for name in names:
        if (member := set_member(name)) is not None:
            groups.setdefault((member.kind, member.digits), {})[name] = member
    found: dict[str, tuple[str, int]] = {}
    for held in groups.values():
        places = {member.place for member in held.values()}
        if len(places) < 2 and all(member.rank is None for member in held.values()):
            continue
        states = [name for name in held if not name.endswith(".json")] or list(held)
        first = min(states, key=lambda n: (held[n].place, held[n].rank or 0, n))
        found |= {name: (first, held[name].step) for name in held}
    return found
