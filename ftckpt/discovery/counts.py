"""Counters of a save that are no steps (`epoch`), and the order that they give to siblings.

A trainer may record the epoch alone. Where siblings have it under one name, it says which is newer;
a name does not.

Averaged weights beside the weights that they were made of (`ckpt_ema_300.pth`, `ckpt300.pth`).

An average is a companion of its weights: with it or without it the newest save is the same, and gc
keeps or drops the two together.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError

from . import series
from .siblings import Looked
from .step_names import is_put_aside, stem_of, step_in_name

WORDS = frozenset({"ema", "swa", "avg", "average", "averaged", "polyak"})
# An average may have its decay in its name (guided diffusion: `ema_0.9999_010000.pt`).
_DECAY = re.compile(r"(?<=ema)[-_]?0?\.\d+|(?<=ema)[-_]?0\d{2,}(?=[-_])", re.IGNORECASE)
# What the weights may be called where the average has its own word instead.
_WEIGHTS = frozenset(
    {"model", "models", "weights", "net", "network", "params", "state", "dict", "checkpoint"}
    | {"ckpt", "step", "iter", "epoch", "raw"}
)
_Key = tuple[str, ...]


def averages_among(names: Iterable[str]) -> dict[str, str]:
    """Return each average among siblings with its weights; one whose weights are not there is none.

    The names differ in the word for an average alone, or in it and a word for the weights.
    """
    exact: dict[_Key, list[str]] = defaultdict(list)
    alike: dict[_Key, list[str]] = defaultdict(list)
    found: list[tuple[str, _Key]] = []
    for name in names:
        own = _key(_DECAY.sub("", name))
        plain = tuple(word for word in own if word not in WORDS)
        if plain != own:
            found.append((name, plain))
        else:
            exact[plain].append(name)
            alike[_bare(plain)].append(name)
    pairs = {}
    for name, plain in found:
        weights = exact.get(plain) or alike.get(_bare(plain), [])
        if len(weights) == 1:
            pairs[name] = weights[0]
    return pairs


def _key(name: str) -> _Key:
    words = re.findall(r"[a-z]+|[0-9]+", name.rpartition("/")[2].lower())
    return tuple(word.lstrip("0") or "0" if word.isdigit() else word for word in words)


def _bare(key: _Key) -> _Key:
    return tuple(word for word in key if word not in _WEIGHTS)


_COUNTS = re.compile(
    r"(?:cur|curr|current|last|start|next|finished|completed|trained|global|i|train|training)?_?"
    r"(?:epochs?|rounds?|iters?|iterations?|itr|it|steps?|updates?)(?:_?(?:idx|index|num|number|id"
    r"|done|count|trained|run|i))?"
    r"|(?:n|num)_?(?:iters?|steps?|updates?|epochs?)_?(?:done|run|trained|so_far)?",
    re.IGNORECASE,
)
# A record of a few words may hold the counter (NequIP's `progress`).
_RECORDS = frozenset(
    {"progress", "state", "train_state", "trainer_state", "meta", "info", "status", "counters"}
)
_MOST = 1 << 53
# Counters that one save gives.
_GIVEN = 8


def counts_in(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the counters among the objects of a checkpoint that records no step, by name."""
    found: dict[str, int] = {}
    for name in checkpoint.objects:
        word = name.rpartition(".")[2]
        if len(found) >= _GIVEN or not (_COUNTS.fullmatch(word) or word in _RECORDS):
            continue
        if not WORDS.isdisjoint(re.split(r"[._]", name)):  # an average counts its own updates
            continue
        try:
            value = checkpoint.load_object(name)
        except FtckptError:
            continue
        held = value if isinstance(value, dict) else {"": value}
        for key, number in held.items():
            if key and not _COUNTS.fullmatch(str(key)):
                continue
            if type(number) is int and 0 <= number < _MOST:
                found[f"{name}.{key}" if key else name] = number
    return found


def with_places(looked: Sequence[Looked], counts: Mapping[str, Mapping[str, int]]) -> list[Looked]:
    """Return candidates with the places that their counters give to those without a step.

    Where siblings have steps, the counter says between which of them. Where none has one, all that
    may be the newest need the counter: each of a series, what a trainer calls the last, and what
    has the name of a series without its number. Of a series no two may have one value: it is a
    setting of the run then, or was begun again.

    Args:
        looked: all candidates whose headers were read.
        counts: of those without a step in their content, by path.
    """
    there = [one for one in looked if one.error is None and not is_put_aside(one.candidate.path)]
    open_ = [one for one in there if one.known_step is None and one.place is None]
    open_ = [one for one in open_ if counts.get(one.candidate.path)]
    if not open_ or len(there) < 2:
        return list(looked)
    stepped = [one for one in there if one.known_step is not None]
    asked = stepped if stepped else [one for one in there if _may_be_newest(one, there)]
    key = _shared(asked, open_, counts)
    if not key:
        return list(looked)
    told = sorted(
        (counts[one.candidate.path][key], one.known_step)
        for one in stepped
        if one.known_step is not None and key in counts.get(one.candidate.path, {})
    )
    places = {
        one.candidate.path: _place(counts[one.candidate.path][key], told)
        for one in open_
        if key in counts[one.candidate.path]
    }
    return [
        one._replace(place=places[one.candidate.path], astray=False)
        if places.get(one.candidate.path) is not None
        else one
        for one in looked
    ]


def is_unnumbered(name: str, others: Sequence[str]) -> bool:
    """Whether a name is that of a numbered sibling without its number (`checkpoint.pth`)."""
    if re.search(r"\d", stem_of(name)) or series.roles_in(name):
        return False
    own = _letters(name)
    return any(re.search(r"\d", stem_of(o)) and _letters(o) == own for o in others if o != name)


def _letters(name: str) -> str:
    kept = re.sub(r"[-_.=]+|\d+k?(?![a-z])", "", stem_of(name).lower())
    return re.sub(r"\d+", "", kept) + name[len(stem_of(name)) :]


def _may_be_newest(one: Looked, there: Sequence[Looked]) -> bool:
    name = one.candidate.path
    if not series.is_trainers(name):
        return False
    roles = series.roles_in(name)
    if roles:
        return bool(roles & {"last", "latest"})
    if series.place_of(name) is not None:
        return True
    return is_unnumbered(name, [other.candidate.path for other in there])


def _shared(
    asked: Sequence[Looked], open_: Sequence[Looked], counts: Mapping[str, Mapping[str, int]]
) -> str:
    """Return the counter that all who are asked have, and one to be placed; "" for none."""
    own = [counts.get(one.candidate.path, {}) for one in asked]
    some = Counter(key for one in open_ for key in counts[one.candidate.path])
    for key in sorted(some, key=lambda name: (-some[name], name)):
        if asked and all(key in held for held in own) and _tells(asked, key, counts):
            return key
    return ""


def _tells(asked: Sequence[Looked], key: str, counts: Mapping[str, Mapping[str, int]]) -> bool:
    values: dict[str, list[int]] = defaultdict(list)
    steps = defaultdict[int, set[int | None]](set)
    for one in asked:
        name, value = one.candidate.path, counts[one.candidate.path][key]
        place = series.place_of(name)
        if step_in_name(name) is not None or (place is not None and not series.roles_in(name)):
            values[series.STEPS if place is None else place.series].append(value)
        steps[value].add(one.known_step)
    if any(one.known_step is not None for one in asked):
        ordered = [max(s for s in steps[v] if s is not None) for v in sorted(steps)]
        alone = all(len(said) == 1 for said in steps.values())
        return alone and ordered == sorted(set(ordered))
    several = {one.candidate.path for one in asked}
    distinct = all(len(set(own)) == len(own) for own in values.values())
    return distinct and len(several) > 1 and len(steps) > 1


def _place(value: int, told: Sequence[tuple[int, int | None]]) -> float | None:
    if not told or (len(told) > 1 and all(known == step for known, step in told)):
        return float(value)  # the counter is what the siblings count as their step
    at = bisect_left([known for known, _ in told], value)
    if at < len(told) and told[at][0] == value:
        return float(told[at][1] or 0)
    before = told[at - 1] if at else None
    return (before[1] or 0) + 0.5 if before is not None else (told[0][1] or 0) - 0.5
