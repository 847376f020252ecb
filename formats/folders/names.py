"""What the names in a folder say: parts of one checkpoint, or checkpoints side by side.

A trainer calls the parts of a step by what is in them (`model`, `optim`, `rng`, `actor`), and
several checkpoints of one folder by when or why they were saved (`step-10`, `best`, `last`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from ftckpt.checkpoint import ImpliedCount
from ftckpt.discovery.step_names import worded_step
from ftckpt.formats.state.side_by_side import OF_PIECE, OPTIMIZERS, STATES, VERSIONS
from ftckpt.formats.trainer_dirs.names import TRAINED

# What a job trains beside its model, or for it.
COMPANIONS = ("critic", "value", "ref", "reference", "discriminator", "teacher", "target")
# What is made of a model that is trained: without it, nobody trained it as a model.
AVERAGES = ("ema",)
# Models that one job trains side by side; the trained one first, and last what may be either.
OWNERS = (*TRAINED, *COMPANIONS, "reward", *AVERAGES)
_MODELS = frozenset(
    {
        "model", "models", "module", "weights", "net", "network", "params", "pretrained",
        "backbone", "adapter", "lora", *OWNERS,
    }
)  # fmt: skip
_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"\d+")


def implied_by(path: str) -> ImpliedCount | None:
    """Return which pieces of a save a file is one of, by its path; None if it says none."""
    match = next((m for m in OF_PIECE.finditer(path) if "of" not in m[0].lower()), None)
    if match is None:
        return None
    digits = re.search(r"\d+$", match[0])
    assert digits is not None
    return ImpliedCount(path[: match.end() - len(digits[0])], path[match.end() :])


@lru_cache(maxsize=4096)
def words(name: str) -> frozenset[str]:
    """Return the words of a file's or folder's name, without what follows its last dot."""
    stem = name.rpartition(".")[0] or name
    return frozenset(_WORD.findall(stem.lower()))


def is_version(name: str) -> bool:
    """Say whether a name tells when or why something was saved: the whole of a checkpoint."""
    return bool(words(name) & VERSIONS) or worded_step(name) is not None


def is_one_of_many(name: str) -> bool:
    """Say whether a name has such a word and a number: `epoch_3`, one of a series."""
    return bool(words(name) & VERSIONS) and _NUMBER.search(OF_PIECE.sub("", name)) is not None


def role(name: str) -> str:
    """Return what a part holds, by its name: the optimizer, other state, or a model; "" if unknown.

    A name with a number other than a rank's may be one of a series, and says nothing.
    """
    found = words(name)
    if is_version(name) or _NUMBER.search(OF_PIECE.sub("", name.rpartition(".")[0] or name)):
        return ""
    if found & OPTIMIZERS:
        return "optimizer"
    if found & STATES:
        return "state"
    return owner(name) or ("model" if found & _MODELS else "")


def owner(name: str) -> str:
    """Return the model that a part belongs to where a job trains several; "" for the only one."""
    found = words(name)
    return next((one for one in OWNERS if one in found), "")
