"""Compressed rank files are one set; compressed safetensors and `.bin` are what is in them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import pytest
import torch
import zstandard
from safetensors.torch import save_file

from ftckpt.errors import CorruptError, ExitCode, UnsafeError
from ftckpt.formats.ranks import Ranks
from ftckpt.formats.safetensors import Safetensors
from ftckpt.formats.torch_files import compression
from ftckpt.formats.torchsave import TorchSave
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made, findings_of, listing_of_path, open_path
from tests.data.by_hand import make_by_hand
from tests.formats.ranks.jobs import truth_file, truth_of
from tests.formats.ranks.test_by_hand import rng_truth, truth_in
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
    "gz": lambda data: gzip.compress(data, mtime=0),
}


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    compression._held.clear()


def pack(file: Path, kind: str) -> Path:
    """Compress a file in place, as the command line does it."""
    packed = file.with_name(f"{file.name}.{kind}")
    packed.write_bytes(PACKERS[kind](file.read_bytes()))
    file.unlink()
    return packed


def pack_all(folder: Path, kind: str) -> Path:
    for file in sorted(folder.glob("*.pt*")):
        pack(file, kind)
    return folder


def code_of(*arguments: str | Path) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


class TestRanks(FormatTests):
    format = Ranks()
    truncated = frozenset({"bad-transform", "bad-zip"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        made = []
        for layout, kind in (("entries", "zst"), ("recorded", "gz"), ("specs", "lz4")):
            folder = Path(shutil.copytree(DATA / layout, root / layout))
            truth = truth_in(DATA, layout)
            if layout == "entries":
                truth |= rng_truth(folder, 2)
            made.append(Made(pack_all(folder, kind), truth))
        stages = Path(shutil.copytree(DATA / "stages", root / "stages"))
        return [*made, Made(pack_all(stages, "zst"), truth_file(DATA / "truth.safetensors"))]

    def victims(self, path: Path) -> list[str]:
        return sorted(p.name for p in path.glob("*.pt*"))


WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


class TestSafetensors(FormatTests):
    format = Safetensors()
    truncated = frozenset({"bad-transform", "bad-header", "truncated-file"})
    empty = frozenset({"bad-header", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        truth = {name: truth_of(value) for name, value in WEIGHTS.items()}
        made = []
        for kind in PACKERS:
            save_file(WEIGHTS, root / "model.safetensors")
            made.append(Made(pack(root / "model.safetensors", kind), truth))
        return made

    def victims(self, path: Path) -> list[str]:
        return [path.name]


@pytest.mark.parametrize("kind", PACKERS)
def test_a_set_is_divided_anew_and_written_plain(kind: str, tmp_path: Path) -> None:
    make_by_hand.make(tmp_path / "in", 4)
    folder, plain = tmp_path / "in" / "recorded", tmp_path / "plain"
    shutil.copytree(folder, plain)
    pack_all(folder, kind)
    assert code_of("diff", folder, plain) == 0
    for name, source in (("ours", folder), ("theirs", plain)):
        assert code_of("reshard", source, tmp_path / name, "--tp", "2") == 0
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.pt*"))
    assert files == ["shard_0_of_2.pt", "shard_1_of_2.pt"]
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


def test_damage_in_a_set(tmp_path: Path) -> None:
    def checked(folder: Path) -> ExitCode:
        compression._held.clear()
        try:
            return verify(open_checkpoint(folder), VerifyOptions(level=Level.CONTENT)).code
        except (CorruptError, UnsafeError) as error:
            return error.exit_code

    folder = pack_all(Path(shutil.copytree(DATA / "entries", tmp_path / "set")), "zst")
    assert checked(folder) is ExitCode.OK
    file = folder / "shard_00001.pt.zst"
    good = file.read_bytes()
    for at in range(0, len(good), 211):
        data = bytearray(good)
        data[at] ^= 4
        file.write_bytes(data)
        assert checked(folder) is not ExitCode.OK, at
    file.unlink()
    report = verify(open_checkpoint(folder), VerifyOptions())
    assert report.code is ExitCode.INCOMPLETE
    (lost,) = (f for f in report.findings if f.kind == "missing-rank")
    assert "shard_00001.pt.zst" in (lost.file or lost.message)


def test_a_seal_of_a_set_names_the_damaged_file(tmp_path: Path) -> None:
    folder = pack_all(Path(shutil.copytree(DATA / "entries", tmp_path / "set")), "gz")
    assert code_of("seal", folder) == 0
    assert code_of("verify", folder, "--level", "content") == 0
    file = folder / "shard_00001.pt.gz"
    data = bytearray(file.read_bytes())
    data[4] ^= 1  # the time in gzip's header, on which no content depends
    file.write_bytes(data)
    answer = ftckpt_json("verify", str(folder), "--level", "content")
    assert answer["result"]["code"] == ExitCode.CORRUPT
    assert file.name in {Path(f["file"]).name for f in answer["findings"] if f.get("file")}


def test_a_file_that_lies_there_both_ways_is_read_as_it_was(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "entries", tmp_path / "set"))
    for file in sorted(folder.glob("*.pt")):
        Path(f"{file}.zst").write_bytes(PACKERS["zst"](file.read_bytes())[:-9])
    checkpoint = open_path(Ranks(), folder)
    assert [name for name in checkpoint.members() if name.endswith(".zst")] == []
    assert list(checkpoint.check()) == []


def test_a_root_of_compressed_stages(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for step in (100, 200):
        make_by_hand.stages(root, step)
    pack_all(root, "lz4")
    answer = ftckpt_json("latest", str(root), "--level", "content")
    assert answer["step"] == 200
    (root / "checkpoint_step200_stage1.pt.lz4").unlink()
    assert ftckpt_json("latest", str(root))["step"] == 100


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_bin_file_is_looked_into(kind: str, legacy: bool, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.randn(300, 300)}, file, _use_new_zipfile_serialization=not legacy)
    packed = pack(file, kind)
    assert set(open_path(TorchSave(), packed).tensors) == {"w"}
    found = TorchSave().recognise(listing_of_path(packed))
    assert found is not None
    assert ftckpt_json("inspect", str(packed))["format"] == "torchsave"
    other = tmp_path / f"firmware.bin.{kind}"
    for content in (b"", b"no checkpoint" * 100, bytes(100)):
        other.write_bytes(PACKERS[kind](content))
        assert TorchSave().recognise(listing_of_path(other)) is None
        other.write_bytes(content)
        assert TorchSave().recognise(listing_of_path(other)) is None


def test_a_bomb_in_any_of_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_ALWAYS", 1 << 20)
    monkeypatch.setattr(compression, "_LOOK", 1 << 20)
    bomb = gzip.compress(bytes(64 << 20))
    bomb = gzip.compress(bomb + bytes(256 << 20))
    (tmp_path / "set").mkdir()
    for rank in range(2):
        (tmp_path / "set" / f"rank_{rank}.pt.gz").write_bytes(bomb)
    (tmp_path / "model.safetensors.gz").write_bytes(bomb)
    assert [f.code for f in findings_of(Ranks(), tmp_path / "set")] == [ExitCode.UNSAFE]
    found = findings_of(Safetensors(), tmp_path / "model.safetensors.gz")
    assert [f.code for f in found] == [ExitCode.UNSAFE]
