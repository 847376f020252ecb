"""The delta format, held to the promises of every format."""

from __future__ import annotations

import shutil
from pathlib import Path

from ftckpt.delta import NAME
from ftckpt.formats.catalog import formats
from ftckpt.formats.delta import Delta
from ftckpt.manifest.seal import seal
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made, Truth, findings_of
from tests.delta.on_disk import index_of, pack_delta, save_full, state_at, training
from tests.delta.packing import trained


class TestDelta(FormatTests):
    format = Delta(formats)
    construct = (
        "from ftckpt.formats.catalog import formats\n"
        "from ftckpt.formats.delta import Delta\n"
        "form = Delta(formats)"
    )
    # The rows of an index are a table of millions, which is checked as one.
    imports = frozenset({"numpy"})
    truncated = frozenset({"truncated-file", "bad-delta"})
    empty = frozenset({"truncated-file", "bad-delta"})
    missing = frozenset({"missing-file"})

    def make(self, root: Path) -> list[Made]:
        saves = training(2)
        first = save_full(root / "step-0", saves[0])
        whole = save_full(root / "whole", saves[1])
        target = state_at(open_checkpoint(whole))
        made = [pack_delta(root / "step-1", target, first, step=1)]
        before, after = trained()
        alone = pack_delta(root / "step-2", before, step=2, objects={"rng": b"abc"})
        made += [alone, pack_delta(root / "step-3", after, alone, step=3)]
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
        return [file.name for file in index_of(path).files]

    def test_the_index_is_what_makes_it_whole(self, made: list[Made], tmp_path: Path) -> None:
        for path, _ in made:
            copy = self._copy(path, tmp_path)
            data = (copy / NAME).read_bytes()
            for damaged in (b"", data[:-1], data[: len(data) // 2]):
                (copy / NAME).write_bytes(damaged)
                self._expect(copy, self.truncated, NAME)
            (copy / NAME).write_bytes(data)
            (copy / NAME).unlink()
            assert {f.kind for f in findings_of(self.format, copy)} == {"uncommitted"}
            (copy / NAME).write_bytes(data)
            for file in self.victims(copy):
                held = (copy / file).read_bytes()
                (copy / file).unlink()
                self._expect(copy, self.missing, file)
                (copy / file).write_bytes(held)
            seal(open_checkpoint(copy))
            (copy / NAME).unlink()
            self._expect(copy, self.missing, NAME)
