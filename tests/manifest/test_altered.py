"""A sealed file that changed is damage, also where the change makes it look hostile."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

import ftckpt as api
from ftckpt.digests.blocks import Block, BlockDigest, BlockFailure, hash_or_fail
from ftckpt.errors import CorruptError, ExitCode, FtckptError, UnsafeError
from ftckpt.manifest import altered, seal
from ftckpt.manifest.locate import find
from tests import campaign
from tests.builders.checkpoints import flip, open_checkpoint

DATA = Path(__file__).parents[1] / "data"
SAMPLES = {
    "dcp": DATA / "dcp/hsdp/step-3",
    "torchsave": DATA / "optimizers/torchao_int8.pt",
    "safetensors": DATA / "trainer_dirs/trainer/model.safetensors",
    "bundle": DATA / "trainer_dirs/accelerate",
    "ranks": DATA / "ranks/fsdp1/actor",
}


def copied(kind: str, to: Path) -> Path:
    """Return a sealed copy."""
    source = SAMPLES[kind]
    if source.is_dir():
        shutil.copytree(source, to)
    else:
        shutil.copy(source, to)
    api.seal(str(to))
    return to


def code_of(path: Path, level: str) -> ExitCode:
    try:
        return api.verify(str(path), level=level).code
    except FtckptError as error:
        return error.exit_code


def members(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in files if not p.name.endswith("ftckpt.manifest.json")]


@pytest.mark.parametrize("kind", SAMPLES)
def test_no_flipped_bit_of_a_sealed_file_is_called_hostile(kind: str, tmp_path: Path) -> None:
    name = SAMPLES[kind].name
    path = copied(kind, tmp_path / name)
    choose = random.Random(kind)
    files = members(path)
    for file in choose.sample(files, min(len(files), campaign.examples(2, 100))):
        data = file.read_bytes()
        for _ in range(campaign.examples(6, 300)):
            at = choose.randrange(len(data))
            flip(file, at, choose.randrange(8))
            assert code_of(path, "content") is ExitCode.CORRUPT, (file.name, at)
            assert code_of(path, "structure") in (ExitCode.OK, ExitCode.CORRUPT), (file.name, at)
            file.write_bytes(data)
    assert code_of(path, "content") is ExitCode.OK


def looking_hostile(path: Path) -> int:
    """Flip a bit of a zip's header so that the archive is refused; return where."""
    file = path / "__1_0.distcp"
    at = file.read_bytes().index(b"PK\x03\x04") + 18  # the compressed size of the first record
    flip(file, at, 3)
    return at


def test_the_same_bit_is_hostile_without_a_seal(tmp_path: Path) -> None:
    path = Path(shutil.copytree(SAMPLES["dcp"], tmp_path / "step-3"))
    looking_hostile(path)
    assert code_of(path, "structure") is ExitCode.UNSAFE
    report = api.verify(str(path))
    # What was sealed with it stays hostile: nothing changed since.
    seal.seal(open_checkpoint(path))
    assert api.verify(str(path)).code is report.code is ExitCode.UNSAFE
    assert [f.kind for f in api.verify(str(path)).findings if f.code is ExitCode.UNSAFE] == [
        f.kind for f in report.findings if f.code is ExitCode.UNSAFE
    ]


def test_the_finding_says_what_changed_and_why_it_is_refused(tmp_path: Path) -> None:
    path = copied("dcp", tmp_path / "step-3")
    looking_hostile(path)
    report = api.verify(str(path), level="structure")
    (found,) = [f for f in report.findings if f.code is ExitCode.CORRUPT]
    assert (found.kind, found.file, found.offset) == ("bad-digest", "__1_0.distcp", 0)
    assert "differs from the manifest" in found.message
    assert "contradicts the directory" in found.message


def test_latest_walks_back_over_it(tmp_path: Path) -> None:
    for step in (2, 3):
        shutil.copytree(DATA / "dcp/hsdp/step-3", tmp_path / f"step-{step}")
    api.seal(str(tmp_path / "step-3"))
    looking_hostile(tmp_path / "step-3")
    chosen = api.latest(str(tmp_path), level="content")
    assert chosen.path == f"{tmp_path}/step-2"
    assert [s.code for s in chosen.skipped] == [ExitCode.CORRUPT]
    (tmp_path / "step-3" / "ftckpt.manifest.json").unlink()
    chosen = api.latest(str(tmp_path), level="content")
    assert [s.code for s in chosen.skipped] == [ExitCode.UNSAFE]
    stopped = api.latest(str(tmp_path), level="content", stop_at_unsafe=True)
    assert stopped.code is ExitCode.UNSAFE


def test_repair_mends_it(tmp_path: Path) -> None:
    path = copied("dcp", tmp_path / "step-3")
    shutil.copytree(path, tmp_path / "replica")
    looking_hostile(path)
    api.repair(str(path), str(tmp_path / "replica"))
    assert code_of(path, "content") is ExitCode.OK


def test_a_hostile_file_in_place_of_a_sealed_one_is_damage_and_cannot_be_sealed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(4)}, path)
    api.seal(str(path))
    path.write_bytes((DATA / "hostile/zip/evil-pickle.pt").read_bytes())
    assert code_of(path, "content") is ExitCode.CORRUPT
    with pytest.raises(CorruptError, match="nothing was executed"):
        api.seal(str(path), force=True)
    (tmp_path / "model.pt.ftckpt.json").unlink()
    assert code_of(path, "content") is ExitCode.UNSAFE
    with pytest.raises(UnsafeError):
        api.seal(str(path))


def test_a_bit_that_flips_on_the_way_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied("dcp", tmp_path / "step-3")
    source = open_checkpoint(path).source
    manifest = find(source)
    assert manifest is not None
    answers = iter([True, False])  # the first reading is wrong, the second right

    def wrong_once(block: Block) -> BlockDigest | BlockFailure:
        found = hash_or_fail(block)
        if isinstance(found, BlockDigest) and next(answers, False):
            return found._replace(digest=bytes(16))
        return found

    monkeypatch.setattr(altered, "hash_or_fail", wrong_once)
    assert altered.altered(source, manifest, ".metadata") is None
    answers = iter([True, True])
    assert altered.altered(source, manifest, ".metadata") is not None
    assert altered.altered(source, manifest, "no such file") is None
