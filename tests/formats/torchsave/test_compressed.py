"""torch.save files that were compressed as a whole: read as what is in them, in bounded room."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import pytest
import zstandard

from ftckpt.discovery.roots import _may_be_checkpoint
from ftckpt.errors import CorruptError, ExitCode, NoResourceError, UnsafeError, UnsupportedError
from ftckpt.formats.torch_files import compression
from ftckpt.formats.torchsave import TorchSave
from ftckpt.storage import open_store
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made, findings_of, listing_of_path, open_path
from tests.data.by_hand import make_by_hand
from tests.formats.ranks.jobs import truth_file
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
NAMES = ("ckpt_100.pt.zst", "ckpt_100.pt.lz4", "ckpt_100.pt.gz")


class TestCompressed(FormatTests):
    format = TorchSave()
    truncated = frozenset({"bad-transform", "bad-zip"})
    empty = frozenset({"bad-zip"})

    def make(self, root: Path) -> list[Made]:
        truth = truth_file(DATA / "truth.safetensors")
        folder = Path(shutil.copytree(DATA / "compressed", root / "compressed"))
        return [Made(folder / name, truth) for name in NAMES]

    def victims(self, path: Path) -> list[str]:
        return [path.name]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (50, 100, 200):
        make_by_hand.compressed(tmp_path / "root", step)
    for name in (
        "ckpt_50.pt.zst",
        "ckpt_50.pt.lz4",
        "ckpt_100.pt.gz",
        "ckpt_100.pt.lz4",
        "ckpt_200.pt.zst",
        "ckpt_200.pt.gz",
    ):
        (tmp_path / "root" / name).unlink()
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    compression._held.clear()


def plain() -> bytes:
    return zstandard.ZstdDecompressor().decompress((DATA / "compressed" / NAMES[0]).read_bytes())


def code_of(*arguments: str | Path) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


def test_every_verb_takes_it_for_a_checkpoint_of_its_root(root: Path, tmp_path: Path) -> None:
    newest = root / "ckpt_200.pt.lz4"
    for level in ("content", "values"):
        answer = ftckpt_json("latest", str(root), "--level", level)
        assert (answer["path"], answer["step"]) == (str(newest), 200)
    assert ftckpt_json("inspect", str(newest))["format"] == "torchsave"
    assert code_of("diff", root / "ckpt_100.pt.zst", root / "ckpt_100.pt.zst") == 0
    assert code_of("convert", newest, tmp_path / "out", "--to", "safetensors") == 0
    assert code_of("verify", tmp_path / "out", "--level", "content") == 0
    assert code_of("seal", newest) == 0
    assert (root / "ckpt_200.pt.lz4.ftckpt.json").exists()
    assert code_of("verify", newest, "--level", "content") == 0
    assert code_of("gc", root, "--keep-last", "2", "--apply") == 0
    kept = ["ckpt_100.pt.zst", newest.name, newest.name + ".ftckpt.json"]
    assert sorted(p.name for p in root.glob("ckpt*")) == kept


def test_the_seal_is_of_the_file_as_it_lies_there(root: Path) -> None:
    file = root / "ckpt_100.pt.zst"
    assert code_of("seal", file) == 0
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert code_of("verify", file, "--level", "content") == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_damage(name: str, tmp_path: Path) -> None:
    good = (DATA / "compressed" / name).read_bytes()
    file = tmp_path / name
    passed = []
    for offset in range(0, len(good), 97):
        data = bytearray(good)
        data[offset] ^= 4
        file.write_bytes(data)
        compression._held.clear()
        try:
            code = verify(open_checkpoint(file), VerifyOptions(level=Level.CONTENT)).code
        except (CorruptError, UnsafeError) as error:
            code = error.exit_code
        if code is ExitCode.OK:
            passed.append(offset)
    # gzip's header holds a time, a system and hints, which no content depends on.
    assert all(name.endswith(".gz") and offset < 10 for offset in passed)


def test_without_a_checksum_the_records_show_the_damage(tmp_path: Path) -> None:
    data = plain()
    at = data.index(b"data/0")
    broken = bytearray(data)
    broken[at + 200] ^= 1
    file = tmp_path / "ckpt_1.pt.zst"
    file.write_bytes(zstandard.ZstdCompressor().compress(bytes(broken)))
    report = verify(open_checkpoint(file), VerifyOptions(level=Level.CONTENT))
    assert report.code is ExitCode.CORRUPT


@pytest.mark.parametrize("rest", [b"left behind", b"\x28\xb5\x2f\xfd"])
def test_what_follows_the_last_frame_is_damage(rest: bytes, tmp_path: Path) -> None:
    file = tmp_path / NAMES[0]
    file.write_bytes((DATA / "compressed" / NAMES[0]).read_bytes() + rest)
    assert [f.kind for f in findings_of(TorchSave(), file)] == ["bad-transform"]


def test_frames_one_after_another_are_one_file(tmp_path: Path) -> None:
    data, half = plain(), len(plain()) // 2
    pack = zstandard.ZstdCompressor().compress
    skipped = b"\x50\x2a\x4d\x18\5\0\0\0hello"
    (tmp_path / "a.pt.zst").write_bytes(skipped + pack(data[:half]) + pack(data[half:]))
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    for file in sorted(tmp_path.iterdir()):
        assert open_path(TorchSave(), file).step == 100


def test_a_name_that_is_wrong_is_read_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.pt.lz4").write_bytes(plain())
    (tmp_path / "b.pt.gz").write_bytes((DATA / "compressed" / NAMES[0]).read_bytes())
    for file in sorted(tmp_path.iterdir()):
        assert open_path(TorchSave(), file).step == 100


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_ALWAYS", 1 << 20)
    monkeypatch.setattr(compression, "_LOOK", 1 << 20)
    file = tmp_path / "bomb.pt.zst"
    said = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    stream = zstandard.ZstdCompressor().compressobj()
    silent = stream.compress(bytes(256 << 20)) + stream.flush()
    for data in (said, silent):
        file.write_bytes(data)
        with pytest.raises(UnsafeError, match="unfolds to more than"):
            open_path(TorchSave(), file)


def test_a_stream_that_unfolds_far_comes_in_bounded_parts() -> None:
    stream = zstandard.ZstdCompressor(level=19).compressobj()
    data = stream.compress(bytes(512 << 20)) + stream.flush()
    codec = compression.codec_of(data)
    assert codec is not None
    sizes = [len(part) for part in compression.undo(codec, [data], file="x")]
    assert sum(sizes) == 512 << 20
    assert max(sizes) <= 96 << 20


def test_no_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstatvfs

    def nearly_full(number: int) -> os.statvfs_result:
        told = list(real(number))
        told[4] = 100
        return os.statvfs_result(told)

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    file = Path(shutil.copy(DATA / "compressed" / NAMES[0], tmp_path))
    with pytest.raises(NoResourceError, match="free") as caught:
        open_path(TorchSave(), file)
    assert "TMPDIR" in caught.value.hint


def test_lz4_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(UnsupportedError) as caught:
        open_path(TorchSave(), DATA / "compressed" / NAMES[1])
    assert caught.value.hint == "pip install lz4"


def test_a_window_beyond_what_memory_allows_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_window", lambda: 1 << 10)
    file = Path(shutil.copy(DATA / "compressed" / NAMES[0], tmp_path))
    with pytest.raises(NoResourceError, match="longer window"):
        open_path(TorchSave(), file)


def test_few_unpacked_files_are_kept_and_one_that_was_let_go_is_made_again(root: Path) -> None:
    for step in range(300, 700, 100):
        shutil.copy(root / "ckpt_100.pt.zst", root / f"ckpt_{step}.pt.zst")
    opened = [open_path(TorchSave(), file) for file in sorted(root.iterdir())]
    assert len(compression._held) == 2
    for checkpoint in opened:
        assert verify(checkpoint, VerifyOptions(level=Level.CONTENT)).code is ExitCode.OK
    assert len(compression._held) == 2


def test_other_compressed_files_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv.gz").write_bytes(gzip.compress(b"step,loss\n"))
    entry = open_store(str(tmp_path)).stat("metrics.csv.gz")
    assert TorchSave().recognise(listing_of_path(tmp_path / "metrics.csv.gz")) is None
    assert not _may_be_checkpoint("metrics.csv.gz", entry, None)
