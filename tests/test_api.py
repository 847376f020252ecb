"""The Python API, as docs/python.md shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ftckpt
from ftckpt.comparison import Choice, Reading
from ftckpt.errors import ExitCode, UsageError
from ftckpt.transfer.request.renaming import parse_renames, rename
from ftckpt.verification import Level, VerifyOptions
from tests.builders.checkpoints import flip, save_dcp


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("api")
    save_dcp(root / "step-7")
    return root


def test_all_that_is_promised_is_there() -> None:
    for name in ftckpt.__all__:
        assert getattr(ftckpt, name) is not None
    assert dir(ftckpt) == sorted(ftckpt.__all__)
    with pytest.raises(AttributeError):
        _ = ftckpt.nothing


def test_importing_is_cheap() -> None:
    script = "import ftckpt, sys; print([m for m in sys.modules if m.startswith('ftckpt.')])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_open_inspect_verify_seal_latest(root: Path, tmp_path: Path) -> None:
    for path in (f"{root}/step-7", f"{root}@7", f"{root}@latest"):
        checkpoint = ftckpt.open_checkpoint(path)
        assert (checkpoint.step, checkpoint.format) == (7, "dcp")
    with pytest.raises(UsageError):
        ftckpt.open_checkpoint(str(root))
    assert ftckpt.inspect(checkpoint).tensors == 4
    assert ftckpt.verify(f"{root}/step-7").code is ExitCode.OK
    sealed = ftckpt.seal(f"{root}/step-7", f"{tmp_path}/m.json")
    assert Path(sealed.url).exists()
    found = ftckpt.latest(str(root), VerifyOptions(Level.CONTENT))
    assert (found.code, found.path, found.step) == (ExitCode.OK, f"{root}/step-7", 7)


def test_diff(root: Path, tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    same = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7")
    assert (same.code, same.total.tensors, same.evidence) == (ExitCode.OK, 4, {"read": 4})
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    report = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7", Reading(jobs=2))
    assert (report.code, report.total.changed) == (ExitCode.CORRUPT, 1)
    trusting = Reading(trust_recorded=True)
    report = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7", trusting)
    assert (report.code, report.evidence) == (ExitCode.OK, {"crc32": 4})
    model = Choice(components=["model"])
    renamed = ftckpt.diff(f"{root}/step-7", f"{root}/step-7", choice=model, derive=lambda c: rename(
        c, parse_renames('[[rename]]\nfrom = "layers.*"\nto = "h.*"', "here")))  # fmt: skip
    assert renamed.total.counts == {"missing": 4, "added": 4}


def test_a_verdict_is_returned_not_raised(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    assert ftckpt.verify(f"{tmp_path}/step-7").code is ExitCode.CORRUPT
    said: list[str] = []
    options = VerifyOptions(Level.CONTENT)
    found = ftckpt.latest(str(tmp_path), options, wait=1, note=said.append)
    assert (found.code, found.path) == (ExitCode.CORRUPT, None)
    assert len(said) == 1


def test_copy_and_repair(root: Path, tmp_path: Path) -> None:
    copy = ftckpt.copy(f"{root}@7", f"{tmp_path}/")
    assert (copy.url, copy.evidence) == (f"{tmp_path}/step-7", "crc32")
    ftckpt.copy(copy.url, f"{tmp_path}/replica")
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    looked = ftckpt.repair(copy.url, f"{tmp_path}/replica", dry_run=True)
    assert [(block.file, block.why) for block in looked.blocks] == [(file.name, "differs")]
    assert ftckpt.repair(copy.url, f"{tmp_path}/replica").done
    assert ftckpt.verify(copy.url).code is ExitCode.OK


def test_convert_and_reshard(root: Path, tmp_path: Path) -> None:
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.request.narrowing import Only, only

    whole = ftckpt.convert(f"{root}/step-7", f"{tmp_path}/four", wishes=LayoutRequest(dp=4))
    assert (whole.format, whole.files) == ("dcp", 5)
    assert whole.proof is not None
    weights = ftckpt.convert(
        ftckpt.open_checkpoint(f"{tmp_path}/four"),
        f"{tmp_path}/weights",
        "safetensors",
        derive=lambda content: only(content, Only.MODEL),
    )
    assert weights.proof is not None
    assert weights.proof.objects == 0 < whole.proof.objects
    assert ftckpt.verify(f"{tmp_path}/weights").code is ExitCode.OK
