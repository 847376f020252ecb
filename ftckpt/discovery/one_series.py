"""One series of a root: one half of what is saved together, or one of several runs' saves.

A GAN's `G_1600.pth` is half a save without `D_1600.pth`: the newest half is the one of the newest
number that all halves have, and all of them pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import listed

from . import series
from .candidates import Walk
from .ledger import place_of
from .listing import open_part
from .roots import Candidate, Root
from .select import Check, Note, Selection, SelectionRules, select
from .step_names import stem_of
from .unordered import saved_together

_NAMED = 8


def select_series(
    root: Root, name: str, check: Check, rules: SelectionRules, note: Note = lambda _: None
) -> Selection:
    """Choose the newest checkpoint of one series of a root (see `select`).

    Args:
        root: to search.
        name: of the series as messages spell it (`G_N.pth`), without its suffix, or without its
            number (`G`).
        check: see `select`; of what is saved together every half must pass.
        rules: see `select`.
        note: see `select`.

    Raises:
        UsageError: the root has no such series, or several.
    """
    by_series: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in root.candidates:
        place = series.place_of(candidate.path)
        if place is not None:
            by_series[place.series].append(candidate)
    chosen = _named(root, name, by_series)
    halves = saved_together(root, Walk(root).look_at_nameless())
    others = sorted(halves - {chosen}) if chosen in halves else []
    one = replace(root, candidates=tuple(by_series[chosen]), memo={})
    whole = _Whole(check, {s: _by_numbers(by_series[s]) for s in others})
    return select(one, whole, rules, note, every=root.candidates)


def _named(root: Root, name: str, known: Mapping[str, object]) -> str:
    found = [one for one in known if name in (one, stem_of(one), _without_number(one))]
    if len(found) == 1:
        return found[0]
    which = "has several series" if found else "has no series"
    shown = listed(sorted(found or known), _NAMED)
    raise UsageError(f"{root.url} {which} {name}", hint=f"its series: {shown}" if shown else "")


def _without_number(name: str) -> str:
    return stem_of(name).removesuffix("N").rstrip("-_.=")


def _by_numbers(candidates: Sequence[Candidate]) -> dict[tuple[int, ...], Candidate]:
    found = ((series.place_of(c.path), c) for c in candidates)
    return {place.numbers: c for place, c in found if place is not None}


@dataclass(frozen=True)
class _Whole:
    """Checks a half, and those that are saved together with it.

    Attributes:
        check: of one checkpoint.
        others: the other series, each by its numbers.
    """

    check: Check
    others: Mapping[str, Mapping[tuple[int, ...], Candidate]]

    def __call__(self, checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
        code, message = self.check(checkpoint, root)
        if code is not ExitCode.OK:
            return code, message
        place = series.place_of(place_of(checkpoint.source))
        for name, own in self.others.items() if place is not None else ():
            half = own.get(place.numbers) if place is not None else None
            child = None if half is None else root.recognise(half)
            if child is None:
                return ExitCode.INCOMPLETE, f"it is half a save: {name} has none of its number"
            code, why = self.check(open_part(root.store, child.part), root)
            if code is not ExitCode.OK:
                return code, f"{child.candidate.path} is saved together with it: {why}"
        return ExitCode.OK, message
