"""An opened universal checkpoint, and how one is opened (see `deepspeed_universal`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftckpt.checkpoint.rules import Rules
from ftckpt.errors import IncompleteError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import STATE, TMP, ZERO, FileRole, deepspeed_files
from ftckpt.formats.deepspeed.parse_files import DeepSpeedParser
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .parameters import Parameters, parameter_files


@dataclass(kw_only=True, repr=False)
class UniversalCheckpoint(DeepSpeedCheckpoint):
    """An opened universal checkpoint; `stage`, `grid` and `groups` are the source's."""

    format: ClassVar[str] = "deepspeed-universal"

    @property
    def loads_at_any_world(self) -> bool:
        """That is what it is for."""
        return True


def open_universal(source: Source, rules: Rules | None) -> UniversalCheckpoint:
    """Parse the pickles of all files (see `DeepSpeedUniversal.open`)."""
    files = deepspeed_files(source.entries)
    if not files and any(name.startswith(f"{TMP}/") for name in source.entries):
        raise IncompleteError(
            f"{TMP}/ is there and the model's files are not: the conversion did not finish",
            hint="convert the source again",
            kind="uncommitted",
            file=TMP,
        )
    with no_gc():  # many small records live until the end: collecting them costs triple
        opening = DeepSpeedParser(source, rules, (FileRole.MODEL,))
        weights = opening.weights()
        parameters = Parameters(opening, weights)
        return opening.checkpoint(
            UniversalCheckpoint,
            weights,
            parameters.tensors,
            steps=parameters.steps(),
            others=[f"{ZERO}/{STATE}", *(f.path for f in parameter_files(source.entries))],
        )
