"""Series: siblings whose names differ in a number, as one trainer writes them.

`epoch_9` and `epoch_10` are of one series, `epoch_N`. A series says two things: the order of its
members, and that a trainer has named them. What a person named (`paper-submission`, `good`,
`step-40 (copy)`) is not the trainer's to lose, whatever step its content has, so that gc drops
members of a series alone.

Which number of a name counts is told by the word beside it. Sources of the words: Lightning's
`ModelCheckpoint`, fairseq `checkpoint_utils.py` (`checkpoint3.pt`, `checkpoint_3_1200.pt`), icefall
`checkpoint.py` (`epoch-12.pt`, `checkpoint-58.pt`), composer `checkpoint_saver.py` (`ep0-ba100`),
fvcore `checkpoint.py` (`model_0000059.pth`), mmengine `checkpoint_hook.py` (`epoch_12.pth`),
so-vits-svc `utils.py` (`G_1600.pth`), kohya `train_util.py` (`NAME-step00000200.safetensors`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ftckpt.own_files import SUFFIX, weights_of

from .step_names import finished_name, is_put_aside, stem_of, step_in_name

# The series of all names that say their step as trainers spell it: one run, however often the
# spelling changes (`checkpoint-100` of one version, `step-200` of the next).
STEPS = "step-N"

# Words beside a number that a trainer counts up.
_COUNTERS = frozenset(
    {
        "step", "steps", "global_step", "globalstep", "iter", "iters", "iteration", "iterations",
        "it", "itr", "epoch", "epochs", "ep", "e", "ba", "batch", "batches", "update", "updates",
        "checkpoint", "ckpt", "chkpt", "snapshot", "s",
    }
)  # fmt: skip
# Words beside a number that tells runs or parts apart, and no order.
_IDENTITIES = frozenset(
    {
        "run", "exp", "experiment", "seed", "fold", "rank", "part", "shard", "stage", "phase",
        "trial", "split", "node", "gpu", "worker", "lr", "job", "of", "tp", "pp", "dp", "v", "ver",
        "version",
    }
)  # fmt: skip
# Words with which trainers name what they save.
_TRAINERS = _COUNTERS | {
    "global", "model", "models", "network", "net", "weights", "state", "states", "training",
    "train", "trainer", "params", "param", "optimizer", "optim", "opt", "lora", "adapter", "unet",
    "transformer", "controlnet", "ema", "swa", "gen", "generator", "disc", "discriminator", "g",
    "d", "do", "dur", "wd", "encoder", "decoder", "actor", "critic", "policy", "pytorch", "num",
    "module", "a", "b", "pt", "pth", "tar",
}  # fmt: skip
# Words of a copy or a keepsake: a number behind them is a person's.
_PERSONS = frozenset(
    {
        "copy", "copies", "my", "backup", "bak", "old", "keep", "kept", "good", "bad", "paper",
        "milestone", "submission", "before", "after", "orig", "original", "test", "tmp", "temp",
        "merged", "consolidated", "converted", "export", "exported", "archive", "saved", "new",
        "safe", "restore", "demo", "public", "hf",
    }
)  # fmt: skip
# Measured values, which differ between siblings and say no order.
_MEASURED = frozenset(
    {
        "loss", "acc", "accuracy", "ppl", "wer", "cer", "f1", "bleu", "score", "auc", "map", "iou",
        "miou", "psnr", "reward", "metric", "val", "valid", "eval",
    }
)  # fmt: skip
# Names under which trainers load a checkpoint.
ROLES = frozenset({"last", "latest", "best", "final", "release", "initial"})
# What a trainer calls its newest save.
LAST = frozenset({"last", "latest"})

# No trainer spells a name with other characters (`step-40 (copy)`).
_PLAIN = re.compile(r"[A-Za-z0-9._=+-]+", re.ASCII)
_TOKEN = re.compile(r"(?P<word>[A-Za-z]+(?:_[A-Za-z]+)*)|(?P<number>[0-9]+(?:\.[0-9]+)?)", re.ASCII)
# Lightning's `name=value`; a file that exists already gets `-v1`.
_LOGGED = re.compile(
    r"[-_]*(?P<name>[A-Za-z][A-Za-z0-9_.]*)="
    r"(?P<value>[-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf))"
)
_AGAIN = re.compile(r"-v(?P<number>[0-9]+)$")
# No filesystem and no bucket has a longer name; Python reads no number of 5,000 digits.
_LONGEST = 1024
# As many members make a series of unknown words, if their content bears the numbers out.
_BORNE_OUT = 3


class SeriesPlace(NamedTuple):
    """The place of a name in its series.

    Attributes:
        series: the name with N for each number that counts, and without measured values.
        numbers: those that count, in their order in the name.
        counter: whether a word in the name says that they count up (`epoch_9`, not `G_9`).
    """

    series: str
    numbers: tuple[int, ...]
    counter: bool = True


@lru_cache(maxsize=1 << 16)
def place_of(name: str) -> SeriesPlace | None:
    """Return the place of a name in its series; None for a name without a number that counts.

    A number beside a counter's word counts (`epoch0-step200`: both), and one that follows it
    (`checkpoint_3_1200`). Without such a word the last number does (`G_1600`), unless it tells runs
    or parts apart (`seed42`, `fold3`).
    """
    if len(name) > _LONGEST:
        return None
    name = saved_name(name)
    stem = stem_of(name)
    suffix = name[len(stem) :]
    version: tuple[int, ...] = ()
    if "=" in stem:
        again = _AGAIN.search(stem)
        version = (0,) if again is None else (int(again["number"]),)
        stem = stem if again is None else stem[: again.start()]
    stem = _LOGGED.sub(lambda m: m[0] if _ends(m["name"].lower(), _COUNTERS) else "", stem)
    parts = _parts(stem)
    counts = [n for n, part in enumerate(parts) if part.counts]
    counter = bool(counts)
    if not counts:
        plain = [n for n, part in enumerate(parts) if part.number is not None and part.plain]
        counts = plain[-1:]
    if not counts:
        return None
    shown = "".join(
        "N" if n in counts else part.text for n, part in enumerate(parts) if not part.measured
    )
    numbers = tuple(int(parts[n].text) for n in counts)
    return SeriesPlace(shown + suffix, numbers + version, counter)


def roles_in(name: str) -> frozenset[str]:
    """Return the words in a name that say what it is for: trainers load `last`, `best` by it."""
    return ROLES & _words(stem_of(saved_name(name)))


def counts_up(name: str) -> bool:
    """Whether a name says when or why something was saved: by a counter's number, or a role."""
    place = place_of(name)
    return bool(roles_in(name)) or (place is not None and place.counter)


def are_saves(names: Iterable[str]) -> bool:
    """Whether siblings are saves of one run: one counts up, or their numbers are those of steps.

    Ranks and shards are counted from 0 or 1: `model_0` and `model_1` may be parts of one save,
    `model_100` and `model_200` are two.
    """
    every = list(names)
    if any(counts_up(name) for name in every):
        return True
    numbers = {place.numbers[0] for place in members(dict.fromkeys(every)).values()}
    return len(numbers) > 1 and min(numbers) > len(numbers)


def is_trainers(name: str) -> bool:
    """Whether a name is made of the words that trainers name their saves with, roles among them."""
    name = saved_name(name)
    if step_in_name(name) is not None:
        return True
    stem = stem_of(name)
    if _PLAIN.fullmatch(stem) is None:
        return False
    return _words(_LOGGED.sub("", stem)) <= _TRAINERS | ROLES | _IDENTITIES | _MEASURED


def members(steps: Mapping[str, int | None]) -> dict[str, SeriesPlace]:
    """Return the members of the series among siblings, by name.

    A name that says its step as trainers spell it is one by itself. Others need words that trainers
    use, and a sibling that differs in the number alone, or one with the same number in another
    series (the last pair of a GAN). Where nothing in the root has such
    words, a series of other words (a run's name) counts if it has at least three members and their
    steps are a linear function of the number: then the number is a counter of the trainer's.

    Args:
        steps: each name with the step in its content, else in its name; None without one.
    """
    found: dict[str, SeriesPlace] = {}
    known: dict[str, dict[str, SeriesPlace]] = defaultdict(dict)
    others: dict[str, dict[str, SeriesPlace]] = defaultdict(dict)
    for name in steps:
        if is_put_aside(saved_name(name)):
            continue
        step = step_in_name(saved_name(name))
        if step is not None:
            found[name] = SeriesPlace(STEPS, (step,))
        elif not roles_in(name) and (place := place_of(name)) is not None:
            kind = known if is_trainers(name) else others
            kind[place.series][name] = place
    numbers = {name: {p.numbers for p in siblings.values()} for name, siblings in known.items()}
    series_with = Counter(chain.from_iterable(numbers.values()))
    for name, siblings in known.items():
        if len(numbers[name]) > 1 or any(series_with[one] > 1 for one in numbers[name]):
            found |= siblings
    if found:
        return found
    for siblings in others.values():
        if _PERSONS.isdisjoint(_words(next(iter(siblings)))) and _borne_out(siblings, steps):
            found |= siblings
    return found


def newest_first(name: str) -> tuple[float, ...]:
    """Return a sort key that puts the highest number of a series first, and no number last."""
    place = place_of(name)
    return (math.inf,) if place is None else tuple(-number for number in place.numbers)


def _borne_out(siblings: Mapping[str, SeriesPlace], steps: Mapping[str, int | None]) -> bool:
    """Whether the steps in the content are a linear function of the last number in the name."""
    points: dict[int, int] = {}
    for name, place in siblings.items():
        step = steps[name]
        if step is None or points.setdefault(place.numbers[-1], step) != step:
            return False
    if len(points) < _BORNE_OUT or any(len(p.numbers) > 1 for p in siblings.values()):
        return False
    (x0, y0), (x1, y1), *rest = sorted(points.items())
    rises = y1 > y0
    return rises and all((y - y0) * (x1 - x0) == (y1 - y0) * (x - x0) for x, y in rest)


class _Part(NamedTuple):
    """One stretch of a stem: a word, a number, or what lies between.

    Attributes:
        number: the number; None for anything else.
        counts: whether a counter's word says that it counts.
        plain: whether it may count where no word says so.
        measured: whether it belongs to a measured value, which siblings differ in.
    """

    text: str
    number: float | None = None
    counts: bool = False
    plain: bool = False
    measured: bool = False


def _parts(stem: str) -> list[_Part]:
    found: list[_Part] = []
    at, word, counting = 0, "", False
    tokens = list(_TOKEN.finditer(stem))
    for n, token in enumerate(tokens):
        between = stem[at : token.start()]
        at = token.end()
        if between:
            found.append(_Part(between))
        text = token[0]
        if token["word"] is not None:
            word, counting = text.lower(), False
            found.append(_Part(text))
            continue
        after = ""
        if not word and n + 1 < len(tokens) and tokens[n + 1].start() == token.end():
            after = (tokens[n + 1]["word"] or "").lower()  # `12epoch`
        whole = "." not in text
        counting = whole and (counting or bool(_ends(word, _COUNTERS) or _ends(after, _COUNTERS)))
        measured = not counting and bool(_ends(word, _MEASURED))
        if measured:  # with its name, and what lies around that
            found[-3:] = [p._replace(measured=p.number is None) for p in found[-3:]]
        plain = whole and not _ends(word, _IDENTITIES)
        found.append(_Part(text, float(text), counting, plain, measured))
        word = "" if not counting else word
    if at < len(stem):
        found.append(_Part(stem[at:]))
    return found


def _ends(word: str, known: frozenset[str]) -> str:
    """Return the longest ending of a word that is known: `global_step` or `step`; "" for none."""
    pieces = word.split("_") if word else []
    for first in range(len(pieces)):
        ending = "_".join(pieces[first:])
        if ending in known:
            return ending
    return ""


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def saved_name(name: str) -> str:
    """Return a name as its save has it: without what says that it is unfinished or thinned."""
    name = name.rpartition("/")[2].removesuffix(SUFFIX)
    name = weights_of(name) or name
    return finished_name(name)
