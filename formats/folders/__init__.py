"""A folder whose sub-folders and files hold one checkpoint together, for any trainer.

    step30/model_and_optim/    a DCP store                     (OLMo-core)
    step30/train/rank0.pt      of each rank
    step_30/policy/weights/model/, policy/optimizer/optim/     (NeMo-RL)
    step_30/train_dataloader.pt
    005000/pretrained_model/, training_state/                  (LeRobot)
    CKPT+2025-06-15+10-00-00+00/model.ckpt, optimizer.ckpt     (SpeechBrain)

No trainer is known here: the parts are what other formats recognise, and the folder is one
checkpoint where its own name tells a step, or where the names in it tell parts (`names.role`) and
no series of steps. So this format is asked last. What holds tensors and is of no part is named
(`unknown-part`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.storage.source import Source

if TYPE_CHECKING:
    from ftckpt.formats.trainer_dirs.checkpoint import BundleCheckpoint


class Folder:
    """The format of a folder of parts (see the module's docstring)."""

    name = "bundle"

    def __init__(self, formats: Callable[[], Sequence[Format]]) -> None:
        """Read the parts by `formats`, in their order."""
        self._formats = formats

    def recognise(self, listing: Listing) -> Recognition | None:
        """Go by the folder's own name and the names in it; look into it only where they fit."""
        if listing.single:
            return None
        from .parts import recognised

        return recognised(listing, self._formats())

    def open(self, source: Source) -> BundleCheckpoint:
        """Open every part.

        Raises:
            IncompleteError, CorruptError, UnsafeError: a part cannot be opened.
            UnsupportedError: parts hold tensors of the same names, and nothing says what for.
        """
        from .reader import open_folder

        return open_folder(source, self._formats())
