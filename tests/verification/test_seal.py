"""What was sealed is held against its manifest's names and sizes at every level."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.findings import Severity
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[1] / "data"
MANIFEST = "ftckpt.manifest.json"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "step-3"
    source = str(DATA / "dcp" / "fsdp2" / "step-3")
    assert ftckpt_json("convert", source, str(out), "--to", "safetensors")["result"]["code"] == 0
    assert (out / MANIFEST).exists()
    return out


@pytest.fixture
def path(converted: Path, tmp_path: Path) -> Path:
    """A sealed folder of weights, optimizer and other state, alone in its root."""
    return Path(shutil.copytree(converted, tmp_path / "root" / "step-3"))


def kinds(path: Path, level: Level) -> tuple[ExitCode, set[tuple[str, str | None]]]:
    report = verify(open_checkpoint(path), VerifyOptions(level))
    errors = {(f.kind, f.file) for f in report.findings if f.severity is Severity.ERROR}
    return report.code, errors


def lengthen(file: Path, by: bytes = b"more") -> None:
    with file.open("ab") as out:
        out.write(by)


CHANGES: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "lost weights": (
        lambda p: (p / "model.safetensors").unlink(), ("missing-file", "model.safetensors"),
    ),
    "lost optimizer": (
        lambda p: shutil.rmtree(p / "optimizer"),
        ("missing-file", "optimizer/optimizer.safetensors"),
    ),
    "lost state": (
        lambda p: shutil.rmtree(p / "ftckpt.objects"),
        ("missing-file", "ftckpt.objects/records.bin"),
    ),
    "short": (
        lambda p: os.truncate(p / "ftckpt.objects" / "records.bin", 10),
        ("truncated-file", "ftckpt.objects/records.bin"),
    ),
    "long": (
        lambda p: lengthen(p / "ftckpt.objects" / "records.bin"),
        ("trailing-bytes", "ftckpt.objects/records.bin"),
    ),
    "manifest": (lambda p: lengthen(p / MANIFEST), ("bad-manifest", MANIFEST)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_structure_calls_a_changed_listing_what_content_calls_it(name: str, path: Path) -> None:
    change, expected = CHANGES[name]
    assert kinds(path, Level.STRUCTURE) == (ExitCode.OK, set())
    change(path)
    code, found = kinds(path, Level.STRUCTURE)
    assert code is ExitCode.CORRUPT
    assert expected in found
    deeper, more = kinds(path, Level.CONTENT)
    assert deeper is code
    assert found <= more


def test_latest_walks_over_what_lost_a_sealed_file(path: Path) -> None:
    root = path.parent
    older = shutil.copytree(DATA / "dcp" / "fsdp2" / "step-3", root / "step-2")
    shutil.copytree(path, root / "step-4")
    (root / "step-4" / "model.safetensors").unlink()
    shutil.rmtree(path)
    answer = ftckpt_json("latest", str(root))
    assert answer["path"] == str(older)
    assert [one["code"] for one in answer["skipped"]] == [ExitCode.CORRUPT]


def test_gc_counts_it_as_damaged(path: Path) -> None:
    (path / "model.safetensors").unlink()
    shutil.copytree(DATA / "dcp" / "fsdp2" / "step-3", path.parent / "step-2")
    answer = ftckpt_json("gc", str(path.parent), "--keep-last", "1")
    classes = {one["name"]: one["entry_class"] for one in answer["plan"]["decisions"]}
    assert classes == {"step-3": "CORRUPT", "step-2": "COMMITTED"}


# --- a manifest that is older than the files ----------------------------------------------------


def saved_again(path: Path, *, larger: bool) -> None:
    """Save the step again over what was sealed, a minute after it was."""
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.full((300 if larger else 200,), 3.0)}, path / "model.safetensors")
    later = (path / MANIFEST).stat().st_mtime + 60
    os.utime(path / "model.safetensors", (later, later))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("larger", [False, True])
def test_a_manifest_of_an_earlier_save_is_named_and_told_how_to_renew(
    larger: bool, alone: bool, tmp_path: Path
) -> None:
    """`alone`: a seal that was killed had left it, and the files of then were gone."""
    import torch
    from safetensors.torch import save_file

    place = tmp_path / "root" / "step-3"
    place.mkdir(parents=True)
    save_file({"w": torch.ones(200)}, place / "model.safetensors")
    assert ftckpt_json("seal", str(place))["result"]["code"] == 0
    if alone:
        (place / "model.safetensors").unlink()
        assert ftckpt_json("verify", str(place))["result"]["code"] == 4
    saved_again(place, larger=larger)
    result = ftckpt_json("verify", str(place))["result"]
    assert result["code"] == 4
    assert "is older than model.safetensors: it may describe an earlier save" in result["message"]
    assert "seal --force" in result["hint"]
    if larger:
        said = ftckpt_json("latest", str(place.parent))
        assert "earlier save" in said["skipped"][0]["message"]
    assert ftckpt_json("seal", str(place))["result"]["code"] == 8
    assert ftckpt_json("seal", str(place), "--force")["result"]["code"] == 0
    assert ftckpt_json("verify", str(place), "--level", "content")["result"]["code"] == 0


def test_damage_that_changes_no_time_is_called_damage(path: Path) -> None:
    file = path / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = ftckpt_json("verify", str(path))["result"]
    assert result["code"] == 4
    assert "earlier save" not in result["message"]
    assert "do not resume" in result["hint"]
