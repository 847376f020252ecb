"""The names of the files and folders that a trainer puts into one directory (see `bundle`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

STATE = "trainer_state.json"
OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.(?:pt|bin)")
OTHER = re.compile(
    r"(?P<label>scheduler(?:_\d+)?|sampler(?:_\d+)?|dl_state_dict(?:_\d+)?|scaler|training_args"
    r"|custom_checkpoint_\d+)\.(?:pt|bin|pkl)"
)
RNG = re.compile(
    r"(?P<label>rng_state(?:_(?P<trainer>\d+))?\.pth|random_states_(?P<rank>\d+)\.pkl)"
)
FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
DEEPSPEED = re.compile(r"global_step(\d+)")
# accelerate's own files of ranks, where FSDP saves without torch's distributed checkpoints.
OF_RANK = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank\d+\.bin")
# What only the Trainer writes, and before trainer_state.json.
OF_TRAINER = re.compile(r"optimizer\.pt|scheduler\.pt|rng_state(?:_\d+)?\.pth")


def is_state(name: str) -> bool:
    """Say whether a file holds state beside the weights: the optimizer's, the scheduler's, RNG."""
    return name == STATE or any(p.fullmatch(name) for p in (OPTIMIZER, OTHER, RNG))


def fits_here(form: str, names: Iterable[str]) -> bool:
    """Say whether a format reads weights among the files of a trainer's directory.

    Rank files of other trainers have their state inside, and files beside them mean other things.
    """
    return form != "ranks" or any(OF_RANK.fullmatch(name) for name in names)
