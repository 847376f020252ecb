"""The files that trainers write last, and the signs by which each trainer is known.

A save without its last file did not finish, but only if that trainer wrote the save. One file name
does not show who did: many programs write `optimizer.pt`. So each row asks for two signs that do
not follow from each other, and all of them must be there.

Sources: `transformers/trainer.py` (`_save` writes `training_args.bin` with the weights, before
`_save_optimizer_and_scheduler`, `_save_rng_state` and, last, `trainer_state.json`);
`cosmos_rl/utils/checkpoint.py` (`save_checkpoint`: a marker of each rank since 2026, none before);
`olmo_core/train/checkpoint.py` (`_save_train_state`, then `_save_metadata` last).
The last files of the trainers in `nested` stand there, with the rest of their layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from ftckpt.errors import IncompleteError

TRAINER = "the Hugging Face Trainer"
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"


class Mark(NamedTuple):
    """What one trainer writes last.

    Attributes:
        trainer: its name.
        signs: patterns of names in the directory, a folder's with a slash; each must be there.
        last: the file that is written last; `{}` stands for a rank.
        of_ranks: pattern of the files of ranks that have such a file each, with the group `rank`;
            "" where one file is for all. Without any mark the save may be of a version that wrote
            none.
    """

    trainer: str
    signs: tuple[str, ...]
    last: str
    of_ranks: str = ""


_RNG = r"rng_state(?:_\d+)?\.pth"
_OF_FSDP = r"(?:pytorch_model_fsdp|optimizer)_\d+/"
MARKS = (
    # Whatever else the Trainer saves comes after its arguments.
    Mark(
        TRAINER,
        (
            re.escape(ARGUMENTS),
            rf"optimizer\.pt|scheduler\.pt|{_RNG}|global_step\d{{1,18}}/|{_OF_FSDP}",
        ),
        STATE,
    ),
    Mark(TRAINER, (r"scheduler\.pt", _RNG), STATE),
    # accelerate's folders, and the schedule as the Trainer spells it: accelerate's is a `.bin`.
    Mark(TRAINER, (_OF_FSDP, r"scheduler\.pt"), STATE),
    Mark(
        "cosmos-rl",
        (r"cosmos_config", r"extra_info_rank_\d{1,7}\.pth"),
        ".rank_{}_complete",
        r"(?:model|optimizer|scheduler|extra_info)_rank_(?P<rank>\d{1,7})\.pth",
    ),
)
# A script's own arguments, which it may save under the Trainer's name.
_OF_SCRIPT = b"argparse\nNamespace"


class Unmarked(NamedTuple):
    """A save that did not finish: who writes it, and which last file is not there."""

    trainer: str
    file: str

    @property
    def message(self) -> str:
        """Say so in a sentence."""
        whose = "each rank writes its own last" if "rank_" in self.file else "writes it last"
        return f"{self.file} is not there: {self.trainer} {whose}, so the save did not finish"

    def error(self) -> IncompleteError:
        """Return the same as an error."""
        hint = "an earlier checkpoint is complete"
        return IncompleteError(self.message, hint=hint, kind="uncommitted", file=self.file)


def unmarked(
    files: Collection[str], folders: Collection[str], head: Callable[[str, int], bytes]
) -> Unmarked | None:
    """Return the trainer whose save a directory holds without its last file; None for none.

    Args:
        files: the names of the files directly in it.
        folders: the names of the directories.
        head: reads up to the first bytes of a file.
    """
    for mark in MARKS:
        if mark.last in files or not _shown(mark, files, folders, head):
            continue
        if not mark.of_ranks:
            return Unmarked(mark.trainer, mark.last)
        found = (re.fullmatch(mark.of_ranks, name) for name in files)
        ranks = sorted({int(match["rank"]) for match in found if match})
        lacking = [rank for rank in ranks if mark.last.format(rank) not in files]
        if lacking and len(lacking) < len(ranks):
            return Unmarked(mark.trainer, mark.last.format(lacking[0]))
    return None


def _shown(
    mark: Mark,
    files: Collection[str],
    folders: Collection[str],
    head: Callable[[str, int], bytes],
) -> bool:
    """Say whether a directory has all signs of a trainer (for the arguments, see `unmarked`)."""
    names = [*files, *(f"{folder}/" for folder in folders)]
    if not all(any(re.fullmatch(sign, name) for name in names) for sign in mark.signs):
        return False
    arguments = re.escape(ARGUMENTS) in mark.signs
    return not (arguments and _OF_SCRIPT in head(ARGUMENTS, 4096))


def marks_beside(names: Collection[str]) -> list[str]:
    """Return the last files of ranks among the names of a directory: they belong to the save."""
    patterns = [re.escape(m.last).replace(r"\{\}", r"\d{1,7}") for m in MARKS if m.of_ranks]
    return [name for name in names if any(re.fullmatch(p, name) for p in patterns)]
