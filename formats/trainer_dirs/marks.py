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
from ftckpt.findings import Finding, finding

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


class MarkedSave(NamedTuple):
    """A save of a trainer that marks its end.

    Attributes:
        trainer: its name.
        lacks: the last file that is not there; "" if the save finished.
        marks: the last files that are there.
        beside: further files of the trainer.
        of_ranks: whether each rank has such a file.
    """

    trainer: str
    lacks: str
    marks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    of_ranks: bool = False

    @property
    def notes(self) -> list[Finding]:
        """A warning if no rank has marked its end: versions before 2026 write no marks."""
        if self.marks or self.lacks:
            return []
        what = (
            f"no rank has marked the end of its save: {self.trainer} of 2026 does, and takes no"
            " save without; an older one does not"
        )
        return [finding("state-unknown", what)]

    def error(self) -> IncompleteError:
        """Return that it did not finish, as an error."""
        who = self.trainer
        if self.of_ranks:
            who = f"each rank of {who}"
        return IncompleteError(
            f"{self.lacks} is not there: {who} writes it last, so the save did not finish",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=self.lacks,
        )


def marked(
    files: Collection[str], folders: Collection[str], head: Callable[[str, int], bytes]
) -> MarkedSave | None:
    """Return what the trainer of a directory's save marks; None if no trainer is shown.

    Args:
        files: the names of the files directly in it.
        folders: the names of the directories.
        head: reads up to the first bytes of a file.
    """
    for mark in MARKS:
        if not _shown(mark, files, folders, head):
            continue
        if not mark.of_ranks:
            there = mark.last in files
            return MarkedSave(mark.trainer, "" if there else mark.last, (mark.last,) * there)
        found = (re.fullmatch(mark.of_ranks, name) for name in files)
        ranks = sorted({int(match["rank"]) for match in found if match})
        own = {rank: mark.last.format(rank) for rank in ranks}
        held = tuple(name for name in own.values() if name in files)
        lacking = [name for name in own.values() if name not in files] if held else []
        beside = (name for name in files if any(re.fullmatch(s, name) for s in mark.signs))
        others = tuple(name for name in beside if not re.fullmatch(mark.of_ranks, name))
        return MarkedSave(mark.trainer, lacking[0] if lacking else "", held, others, True)
    return None


def _shown(
    mark: Mark,
    files: Collection[str],
    folders: Collection[str],
    head: Callable[[str, int], bytes],
) -> bool:
    """Say whether a directory has all signs of a trainer (for the arguments, see `marked`)."""
    names = [*files, *(f"{folder}/" for folder in folders)]
    if not all(any(re.fullmatch(sign, name) for name in names) for sign in mark.signs):
        return False
    arguments = re.escape(ARGUMENTS) in mark.signs
    return not (arguments and _OF_SCRIPT in head(ARGUMENTS, 4096))
