"""Steps of trainers whose store lies in a folder, with files of the same save beside it.

    step-3/weights/                        xtuner: a DCP store
    step-3/dataloader, lr_scheduler        torch.save files without a suffix
    step-3/train_state.json                written after them
    step_3/trainer/                        prime-rl: a DCP store
    step_3/orchestrator/progress.pt        of the process that makes the rollouts
    global_step_3/actor/dcp_checkpoint/    RLinf: a DCP store
    global_step_3/actor/model_state_dict/full_weights.pt    the weights a second time
    global_step_3/critic/                  the same of a critic
    global_step_3/data/data.pt             the position in the data

Sources, of 2026: xtuner/v1/train/trainer.py (`_maybe_save_dcp`); prime_rl/trainer/ckpt.py and
prime_rl/orchestrator/ckpt.py; rlinf/hybrid_engines/fsdp/strategy/base.py (`save_checkpoint`) and
rlinf/runners/reasoning_runner.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from ftckpt.discovery.recognise import Listing
from ftckpt.own_files import is_own

_DCP = "dcp_checkpoint"
_ROLES = ("actor", "critic")


class Nest(NamedTuple):
    """How one trainer lays a step out.

    Attributes:
        trainer: its name.
        stores: folders with a store: the trained model's first.
        state: names of torch.save files that belong to the step.
        copies: names of files with the weights of the store before them, written a second time.
        beside: names of other files that belong to it.
        last: the file that is written last; "" for the store's own marker.
    """

    trainer: str
    stores: tuple[str, ...]
    state: re.Pattern[str]
    copies: re.Pattern[str]
    beside: re.Pattern[str]
    last: str = ""

    def owns(self, name: str) -> bool:
        """Say whether a file outside the stores belongs to the step."""
        patterns = (self.state, self.copies, self.beside)
        return name == self.last or any(p.fullmatch(name) for p in patterns)


_NONE = re.compile(r"(?!)")
_XTUNER = Nest(
    "xtuner",
    ("weights",),
    re.compile(r"dataloader|lr_scheduler|sft_dataloader"),
    _NONE,
    re.compile(r"trainer_config\.(?:json|bin)|sft_train_state\.json"),
    "train_state.json",
)
_PRIME = Nest(
    "prime-rl", ("trainer",), re.compile(r"orchestrator/progress\.pt"), _NONE, _NONE
)  # fmt: skip
_FULL = r"model_state_dict/full_weights\.pt"
_RLINF_STEP = Nest(
    "RLinf",
    tuple(f"{role}/{_DCP}" for role in _ROLES),
    re.compile(r"data/data\.pt"),
    re.compile(rf"(?:actor|critic)/{_FULL}"),
    _NONE,
)
_RLINF_ROLE = Nest("RLinf", (_DCP,), _NONE, re.compile(_FULL), _NONE)


def nest_of(files: Collection[str], folders: Callable[[str], Collection[str]]) -> Nest | None:
    """Return how a directory is laid out, by its names alone; None if no trainer does so.

    Args:
        files: names of the files directly inside.
        folders: the names of the directories in one of them, or in the directory itself ("").
    """
    top = folders("")
    files = {name for name in files if not is_own(name)}
    if "weights" in top and (_XTUNER.last in files or {"dataloader", "lr_scheduler"} & files):
        return _XTUNER
    if "trainer" in top and ("orchestrator" in top or not files):
        return _PRIME
    if _DCP in top:
        return _RLINF_ROLE
    if any(role in top and _DCP in folders(role) for role in _ROLES):
        return _RLINF_STEP
    return None


def nest_in(listing: Listing) -> Nest | None:
    """Return how a listed directory is laid out (see `nest_of`)."""

    def folders(name: str) -> Collection[str]:
        return listing.inside(name).directories if name else listing.directories

    return nest_of(listing.files, folders)


def nest_among(names: Collection[str]) -> Nest | None:
    """Return how a directory is laid out, by the names of all files below it."""

    def folders(name: str) -> Collection[str]:
        inside = [n[len(name) + 1 :] if name else n for n in names
                  if not name or n.startswith(f"{name}/")]  # fmt: skip
        return {n.partition("/")[0] for n in inside if "/" in n}

    return nest_of([n for n in names if "/" not in n], folders)


def at(listing: Listing, folder: str) -> Listing | None:
    """Return the listing of a folder some levels below; None if it is not there."""
    for name in folder.split("/"):
        if name not in listing.directories:
            return None
        listing = listing.inside(name)
    return listing
