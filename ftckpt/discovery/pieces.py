"""Files that are one rank's piece of a save, by their names, in a layout that no format knows.

    weights_tp_rank_world_size=0_2_pp_rank_world_size=1_2.pth    picotron
    model_tp0_pp1.pt, optimizer_tp0_pp1_zo0.pt                   InternEvo
    ckpt_mp0_v1.tar, ckpt_mp1_v1.tar                             makani

A piece opens as a file of its own and is not a save, let alone the newest. Known
layouts are read as the folder that they lie in, or as a step (`is_file_of_step`); what is left here
is named, and none of it is a candidate.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from ftckpt.storage.state_files import without_numbers

from .step_names import FILE_OF_ROLE, SUFFIXES, is_file_of_step

# A word for a place in a grid of ranks, what counts there, and the numbers: `tp_rank_00`, `mp0`,
# `rank_world_size=0_2`, `rank_0_of_2`, `-0-of-2`.
_PLACE = re.compile(
    r"(?<![a-z])(?:rank|shard|tp|pp|mp|dp|cp|zo|gpu|proc(?:ess)?)"
    r"(?:[-_]?(?:rank|world[-_]?size|size))*[-_=]?(?P<rank>\d+)"
    r"(?:(?:(?<=size=\d)|(?<=size=\d\d)|[-_]of)[-_]?(?P<world>\d+))?(?![a-z0-9])"
    r"|(?<![a-z0-9])(?P<piece>\d+)[-_]of[-_](?P<pieces>\d+)(?![a-z0-9])",
    re.IGNORECASE,
)


# A folder with what one rank saves of each step. Sweeps call folders by other numbers (`gpu0`).
_FOLDER = re.compile(
    r"(?:[a-z]+[-_])*rank[-_=]?(\d+)|(?:(?:tp|pp|mp)[-_=]?(\d+))(?:[-_](?:tp|pp|mp)[-_=]?\d+)*",
    re.IGNORECASE,
)


def is_folder_of_rank(name: str) -> bool:
    """Whether a folder's name says a rank."""
    return _FOLDER.fullmatch(name) is not None


def folders_of_ranks(names: Iterable[str]) -> list[str]:
    """Return the names of folders that differ in the rank alone; none where only one does."""
    found = {name: match for name in sorted(names) if (match := _FOLDER.fullmatch(name))}
    shapes = {without_numbers(name) for name in found}
    places = [(int(match[1] or match[2]),) for match in found.values()]
    return list(found) if len(shapes) == 1 and _are_numbered(places) else []


def pieces_among(names: Iterable[str]) -> frozenset[str]:
    """Return the files among names that are pieces: several differ in the place alone.

    One alone is a piece where its name says that there are more; else it may be what the first rank
    saves for all.
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    told = set()
    for name in names:
        if not name.endswith(SUFFIXES) or is_file_of_step(name) or FILE_OF_ROLE.fullmatch(name):
            continue
        places = list(_PLACE.finditer(name))
        if places:
            groups[_PLACE.sub("@", name)][name] = tuple(_number(place) for place in places)
            if any(int(place["world"] or place["pieces"] or 1) > 1 for place in places):
                told.add(name)
    return frozenset(told.union(*(g for g in groups.values() if _are_numbered(g.values()))))


def _are_numbered(places: Collection[tuple[int, ...]]) -> bool:
    """Whether several are numbered as ranks are: from 0, or from 1 without a gap.

    A LoRA's rank is a number of another kind: `lora_rank8`, `lora_rank16`.
    """
    numbers = {number for place in places for number in place}
    return len(places) > 1 and (0 in numbers or numbers == set(range(1, len(numbers) + 1)))


def _number(place: re.Match[str]) -> int:
    return int(place["rank"] or place["piece"])
