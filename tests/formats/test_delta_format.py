"""The delta format, held to the promises of every format."""

from __future__ import annotations

import shutil
from pathlib import Path

from ftckpt.delta import NAME
from ftckpt.formats.delta import Delta
from tests.checkpoints import open_checkpoint
from tests.delta.on_disk import index_of, pack_upon, save_full, state_at, training
from tests.delta.packing import trained
from tests.format_suite import FormatTests, Made, Truth


class TestDelta(FormatTests):
    format = Delta()
    # The rows of an index are a table of millions, which is checked as one.
    imports = frozenset({"numpy"})
    truncated = frozenset({"truncated-file", "bad-delta"})
    empty = frozenset({"truncated-file", "bad-delta"})
    missing = frozenset({"missing-file", "uncommitted"})

    def make(self, root: Path) -> list[Made]:
        saves = training(2)
        first = save_full(root / "step-0", saves[0])
        whole = save_full(root / "whole", saves[1])
        target = state_at(open_checkpoint(whole))
        made = [pack_upon(root / "step-1", target, first, step=1)]
        before, after = trained()
        alone = pack_upon(root / "step-2", before, step=2, objects={"rng": b"abc"})
        made += [alone, pack_upon(root / "step-3", after, alone, step=3)]
        truths = []
        for path, state in zip(made, (target, before, after), strict=True):
            truth = {
                key: Truth(info.dtype.name, info.shape, state.data[key])
                for key, info in state.infos.items()
            }
            truths.append(Made(path, truth))
        return truths

    def _copy(self, path: Path, tmp_path: Path) -> Path:
        """Copy the bases too: damage is done to a delta that can be read."""
        copy = super()._copy(path, tmp_path)
        for other in path.parent.iterdir():
            if other != path:
                shutil.copytree(other, copy.parent / other.name)
        return copy

    def victims(self, path: Path) -> list[str]:
        return [NAME, *(file.name for file in index_of(path).files)]
