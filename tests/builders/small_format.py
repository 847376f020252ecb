"""A format of a few bytes, so that roots are tried by the hundred: `{"step": 3}` in `marker`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ftckpt.checkpoint import Checkpoint, CommitState, Scalar, StepRole
from ftckpt.discovery import resolve as opening
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.roots import Root
from ftckpt.errors import CorruptError, ExitCode, IncompleteError
from ftckpt.formats.folders import Folder
from ftckpt.formats.trainer_dirs.checkpoint import BundleCheckpoint
from ftckpt.storage import StoreOptions
from ftckpt.storage.source import Source

MARKER, DATA = "marker", "data"


class SmallCheckpoint(Checkpoint):
    format = "small"
    state = "good"
    said: int | None = None

    def scalars(self, limit: int) -> Iterator[Scalar]:
        if self.said is not None:
            yield Scalar(MARKER, "step", self.said, StepRole.ITERATION)

    def members(self) -> Iterable[str]:
        return [MARKER]

    def load_object(self, name: str) -> Any:
        raise KeyError(name)


class Small:
    """Counts what it opened, so that a test can say what must not be opened."""

    name = "small"

    def __init__(self) -> None:
        self.opened: list[str] = []

    def recognise(self, listing: Listing) -> Recognition | None:
        if MARKER in listing.files:
            return Recognition(self.name, "has a marker", CommitState.COMMITTED)
        if DATA in listing.files:
            return Recognition(self.name, "has data", CommitState.UNCOMMITTED)
        return None

    def open(self, source: Source) -> Checkpoint:
        self.opened.append(source.name)
        if MARKER not in source.entries:
            raise IncompleteError(f"{source.url} has no marker")
        try:
            content = json.loads(source.read(MARKER))
        except ValueError as error:
            raise CorruptError(f"{source.url} has a damaged marker") from error
        checkpoint = SmallCheckpoint(source=source, tensors={}, objects={})
        checkpoint.said, checkpoint.state = content["step"], content["state"]
        return checkpoint


def write(root: Path, name: str, step: int | None, state: str = "good") -> None:
    """Write a checkpoint; `state` is what `check` says of it, or `torn` or `damaged`."""
    (root / name).mkdir(parents=True)
    if state == "torn":
        (root / name / DATA).write_text("half")
    elif state == "damaged":
        (root / name / MARKER).write_text("{")
    else:
        (root / name / MARKER).write_text(json.dumps({"step": step, "state": state}))


def check(checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
    """Say what the checkpoint's `state` says: `good`, or the name of an exit code."""
    if isinstance(checkpoint, BundleCheckpoint):
        return max(check(part.checkpoint, root) for part in checkpoint.parts)
    assert isinstance(checkpoint, SmallCheckpoint)
    if checkpoint.state == "good":
        return ExitCode.OK, "good"
    return ExitCode[checkpoint.state], f"it is {checkpoint.state}"


def read(root: Path | str, small: Small | None = None) -> Root:
    """Read a root with this one format, and with folders of its checkpoints."""
    one = small or Small()
    return opening.open_root(
        opening.locate(str(root), StoreOptions()), [one, Folder(lambda: [one])]
    )
