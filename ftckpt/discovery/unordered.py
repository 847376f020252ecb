"""Checkpoints of a root whose content says no order: what their names say, else a pointer.

A name is never newer because it sorts first: without a number, a role or a pointer that tells, the
answer is that nobody knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from ftckpt.errors import FtckptError, UnverifiedError, UsageError
from ftckpt.findings import listed

from . import series
from .averaged import averaged_series
from .counts import is_unnumbered
from .listing import open_part
from .roots import Root
from .siblings import NO_STEP, Looked

_NAMED = 4
# A series is compared with as many others: a root of as many kinds of files is not one run.
_COMPARED = 16


def in_order(root: Root, looked: Sequence[Looked]) -> Iterator[Looked]:
    """Yield readable checkpoints without a step, the newest first.

    First what a trainer calls the last, then its series by the numbers in the names, then others,
    and what it calls the final, the best or the initial one. What has the name of a series without
    a number, or what the series holds, stands beside the series: it may be older or newer. Where
    several stand at one place in this order, the one that a pointer names comes first; without a
    pointer an error comes instead, and nothing after it.
    """
    ranks: dict[int, dict[str, list[Looked]]] = defaultdict(lambda: defaultdict(list))
    for one in looked:
        name = one.candidate.path
        place = series.place_of(name)
        ranks[_rank(name, root, looked)][name if place is None else place.series].append(one)
    pointed = {pointer.target for pointer in root.pointers}
    for _, groups in sorted(ranks.items()):
        for group in groups.values():
            group.sort(key=lambda one: series.newest_first(one.candidate.path))
        if len(groups) > 1:
            every = [one for group in groups.values() for one in group]
            first = [one for one in every if one.candidate.path in pointed]
            if len(first) == 1:
                yield first[0]
            url = root.url_of(every[0].candidate)
            yield every[0]._replace(child=None, error=_unknown(url, groups))
            return
        for group in groups.values():
            for _, beside in groupby(group, lambda one: series.newest_first(one.candidate.path)):
                at_one_place = list(beside)
                if len(at_one_place) == 1:
                    yield at_one_place[0]
                    continue
                first = [one for one in at_one_place if one.candidate.path in pointed]
                if len(first) == 1:
                    yield first[0]
                url = root.url_of(at_one_place[0].candidate)
                names = [one.candidate.path for one in at_one_place]
                yield at_one_place[0]._replace(child=None, error=_unknown(url, names))
                return


def outside(looked: Sequence[Looked]) -> list[Looked]:
    """Return the newest of each series whose newest member has no step, if others have one.

    `epoch_3.pt` may be older or newer than `step_1999.pt`: two counters give no order between them.
    Where another member of its series has a higher number and a step, the order is known; and a
    number that is a step of the others counts what they count (`ema_2000.pt`, `step_2000.pt`).
    What has lost the step that its siblings have, and has no place among them, is one of these; and
    so is what has their name without a number.
    """
    steps = {one.known_step for one in looked}
    places = series.members({one.candidate.path: one.known_step for one in looked})
    newest: dict[str, tuple[series.SeriesPlace, Looked]] = {}
    for one in looked:
        path = one.candidate.path
        place = places.get(path)
        if place is None:
            alone = series.place_of(path)
            lone = alone is not None and alone.counter and series.is_trainers(path)
            place = alone if lone and not series.roles_in(path) else None
        if place is None or place.series == series.STEPS or one.error is not None:
            continue
        if one.astray:
            continue
        above = newest.get(place.series)
        if above is None or place.numbers > above[0].numbers:
            newest[place.series] = place, one
    names = [one.candidate.path for one in looked if one.known_step is not None]
    astray = [one for one in looked if one.astray and one.error is None and not one.damaged]
    astray += [
        one
        for one in looked
        if one.rank == NO_STEP and one not in astray and is_unnumbered(one.candidate.path, names)
    ]
    return astray + [
        one
        for place, one in newest.values()
        if one.known_step is None and one.place is None and steps.isdisjoint(place.numbers)
    ]


def between(root: Root, stepped: Looked, apart: Sequence[Looked]) -> Iterator[Looked]:
    """Yield the newest of a root where series without a step stand beside one that has it.

    The one that a pointer names, and then an error: that a name has a step does not make it newer.
    The times of the files are said and decide nothing: a copy has those of the copying.
    """
    pointed = {pointer.target for pointer in root.pointers}
    first = [one for one in (stepped, *apart) if one.candidate.path in pointed]
    if len(first) == 1:
        yield first[0]
    url = root.url_of(stepped.candidate)
    others = listed([one.candidate.path for one in apart], _NAMED)
    times = [(one.candidate.entry.mtime or 0, one) for one in (stepped, *apart)]
    youngest = max(times, key=lambda pair: pair[0])
    hint = "name one of them"
    if youngest[0] and sum(time == youngest[0] for time, _ in times) == 1:
        hint += f"; by the time of its file {youngest[1].candidate.path} is the youngest"
    error = UnverifiedError(
        f"whether {url} is the newest is not known: nothing says the step of {others}", hint=hint
    )
    yield stepped._replace(child=None, error=error)


def _rank(name: str, root: Root, looked: Sequence[Looked]) -> int:
    rank = rank_by_name(name)
    if rank != _OTHER or not series.is_trainers(name):
        return rank
    numbered = [one for one in looked if rank_by_name(one.candidate.path) == _SERIES]
    if is_unnumbered(name, [one.candidate.path for one in numbered]):
        return _SERIES
    own = next(one for one in looked if one.candidate.path == name)
    newest = min(numbered, key=lambda one: series.newest_first(one.candidate.path), default=None)
    if newest is None or own.error is not None or newest.error is not None:
        return rank
    held = _content(root, own).keys()
    return _SERIES if held and held == _content(root, newest).keys() else rank


_SERIES, _OTHER = 1, 2


def rank_by_name(name: str) -> int:
    """Return the place of a name among those that nothing else orders, the first 0."""
    if not series.is_trainers(name):
        return _OTHER
    roles = series.roles_in(name)
    if roles:
        return 0 if roles & series.LAST else 3 if "final" in roles else 4
    return _SERIES if series.place_of(name) is not None else _OTHER


def _unknown(url: str, groups: Collection[str]) -> FtckptError:
    names = listed(sorted(groups), _NAMED)
    return UnverifiedError(
        f"whether {url} is the newest is not known: no step is in {names}, and their names give no "
        "order",
        hint="name one of them, or a series of them with --series NAME",
    )


def paired(root: Root, looked: Sequence[Looked]) -> Looked | None:
    """Return a candidate with the reason why none of a root is a checkpoint alone; None if one is.

    Series that are saved together (a GAN's `G_1600.pth` and `D_1600.pth`) have their numbers in
    common, and their content is of one step as far as it says. Copies of one save are no halves,
    nor are weights beside the whole of the same.
    """
    by_series = _members(looked)
    first = _first_together(root, by_series)
    if not first:
        return None
    newest = _newest_whole([by_series[name] for name in first])
    hint = "none of their numbers has all of them"
    if newest is not None:
        hint = "the newest that are there together, by their headers: " + ", ".join(
            root.url_of(by_series[name][newest].candidate) for name in sorted(first)
        )
    hint += "; --series NAME prints the newest whole one of a series"
    some = by_series[min(first)]
    one = some[max(some)]
    error = UsageError(
        f"{root.url_of(one.candidate)} is half a save: {listed(sorted(first), _NAMED)} are "
        "saved together",
        hint=hint,
    )
    return one._replace(child=None, error=error)


def newest_together(root: Root, looked: Sequence[Looked]) -> tuple[list[Looked], list[Looked]]:
    """Return what makes the newest whole save, where each file is half of one (`paired`).

    Returns:
        its files; and the later ones, of which the other half is not there or cannot be read.
    """
    by_series = _members(looked)
    first = sorted(_first_together(root, by_series))
    newest = _newest_whole([by_series[name] for name in first])
    whole = [] if newest is None else [by_series[name][newest] for name in first]
    every = (pair for name in first for pair in by_series[name].items())
    return whole, [one for n, one in every if newest is None or n > newest]


def _newest_whole(halves: Sequence[Mapping[tuple[int, ...], Looked]]) -> tuple[int, ...] | None:
    sound = [{n for n, one in own.items() if one.error is None} for own in halves]
    return max(set.intersection(*sound), default=None) if sound else None


def averages_by_value(root: Root, looked: Sequence[Looked]) -> list[Looked]:
    """Return the averages of other weights that their values show, the newest first."""
    by_series: dict[str, dict[tuple[int, ...], Looked]] = defaultdict(dict)
    for one in looked:
        place = series.place_of(one.candidate.path)
        if place is not None and place.series != series.STEPS:
            by_series[place.series][place.numbers] = one
    by_series = {name: own for name, own in by_series.items() if len(own) > 1}
    return [
        one
        for name in sorted(averaged_series(root, by_series) if len(by_series) > 1 else ())
        for _, one in sorted(by_series[name].items(), reverse=True)
    ]


def saved_together(root: Root, looked: Sequence[Looked]) -> frozenset[str]:
    """Return the series that are saved together (see `paired`); none if each stands alone."""
    return frozenset(_first_together(root, _members(looked)))


def _members(looked: Sequence[Looked]) -> dict[str, dict[tuple[int, ...], Looked]]:
    by_series: dict[str, dict[tuple[int, ...], Looked]] = defaultdict(dict)
    places = series.members({one.candidate.path: one.known_step for one in looked})
    for one in looked:
        place = places.get(one.candidate.path)
        if place is not None and place.series != series.STEPS:
            by_series[place.series][place.numbers] = one
    return by_series


def _first_together(
    root: Root, by_series: Mapping[str, Mapping[tuple[int, ...], Looked]]
) -> set[str]:
    """Return series that are saved together; none if each stands alone."""
    groups: list[set[str]] = []
    averages = averaged_series(root, by_series) if len(by_series) > 1 else frozenset()
    for name, own in sorted(by_series.items()):
        if name in averages:
            continue
        for group in groups[:_COMPARED]:
            if _are_halves(root, by_series[min(group)], own):
                group.add(name)
                break
        else:
            groups.append({name})
    return next((group for group in groups if len(group) > 1), set())


def _are_halves(
    root: Root, own: Mapping[tuple[int, ...], Looked], theirs: Mapping[tuple[int, ...], Looked]
) -> bool:
    """Whether the newest save that can be read of both shows halves; True if none can be read."""
    common = own.keys() & theirs.keys()
    for number in sorted(common, reverse=True):
        one, other = own[number], theirs[number]
        if one.error is not None or other.error is not None:
            continue
        if None not in (one.step, other.step) and one.step != other.step:
            return False
        mine, its = _content(root, one), _content(root, other)
        if mine.keys() == its.keys():
            return mine != its
        return not (mine.keys() <= its.keys() or its.keys() <= mine.keys())
    return bool(common)


_Key = tuple[str, tuple[int, ...]]


def _content(root: Root, looked: Looked) -> Mapping[_Key, tuple[int | None, ...]]:
    """Return the CRCs of each tensor, by its name and shape; nothing if it cannot be read."""
    assert looked.child is not None
    crcs: dict[str, list[int | None]] = defaultdict(list)
    try:
        opened = open_part(root.store, looked.child.part)
        for record in opened.records():
            crcs[record.owner].append(record.crc32)
        return {(key, info.shape): tuple(crcs[key]) for key, info in opened.tensors.items()}
    except FtckptError:
        return {}
