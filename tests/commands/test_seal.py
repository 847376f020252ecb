"""`ftckpt seal`: once, again, after a change, where nothing can be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.golden import check_golden, ftckpt
from tests.commands.test_verify import DAMAGE, flip

MANIFEST = "run/step-2/ftckpt.manifest.json"


def test_seal_then_verify_by_the_manifest(here: Path) -> None:
    check_golden("seal.txt", ftckpt("seal", "run/step-2", cwd=here))
    done = ftckpt("verify", "run/step-2", "--level", "content", "--json", cwd=here)
    document = json.loads(done.stdout)
    assert (done.returncode, document["evidence"]) == (0, "manifest")
    assert document["bytes_uncovered"] == 0


def test_a_sealed_checkpoint_that_changed_is_found_where_no_crc_covers(here: Path) -> None:
    ftckpt("seal", "run/step-2", cwd=here)
    # The last byte of the archive's end record: no CRC-32 covers it.
    flip(here / "run/step-2/.metadata", 3000)
    done = ftckpt("verify", "run/step-2", cwd=here)
    assert done.returncode in (4, 7)


def test_sealing_again_changes_nothing(here: Path) -> None:
    ftckpt("seal", "run/step-2", cwd=here)
    before = (here / MANIFEST).stat().st_mtime_ns
    done = ftckpt("seal", "run/step-2", "--json", cwd=here)
    assert (done.returncode, json.loads(done.stdout)["written"]) == (0, False)
    assert (here / MANIFEST).stat().st_mtime_ns == before


def test_sealing_other_content_is_refused_without_force(here: Path) -> None:
    ftckpt("seal", "run/step-2", cwd=here)
    for path in (here / "run/step-1").iterdir():
        (here / "run/step-2" / path.name).write_bytes(path.read_bytes())
    kept = (here / MANIFEST).read_bytes()
    done = ftckpt("seal", "run/step-2", cwd=here)
    assert done.returncode == 8
    assert "--force" in done.stderr
    assert (here / MANIFEST).read_bytes() == kept
    assert ftckpt("seal", "run/step-2", "--force", cwd=here).returncode == 0
    assert ftckpt("verify", "run/step-2", "--level", "content", cwd=here).returncode == 0


def test_a_damaged_checkpoint_is_not_sealed(here: Path) -> None:
    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    done = ftckpt("seal", "run/step-2", cwd=here)
    assert done.returncode == 4
    assert "not sealed" in done.stderr
    assert not (here / MANIFEST).exists()


def test_a_root_is_refused_with_its_candidates(here: Path) -> None:
    done = ftckpt("seal", "run", cwd=here)
    assert done.returncode == 2
    assert "run/step-1" in done.stderr


def test_a_manifest_elsewhere(here: Path) -> None:
    done = ftckpt("seal", "run/step-2", "--manifest", "elsewhere.json", cwd=here)
    assert done.returncode == 0
    assert not (here / MANIFEST).exists()
    checked = ftckpt("verify", "run/step-2", "--manifest", "elsewhere.json", "--json", cwd=here)
    assert json.loads(checked.stdout)["evidence"] == "manifest"
    flip(here / "run/step-2/__0_0.distcp", 21120)
    assert ftckpt("verify", "run/step-2", "--manifest", "elsewhere.json", cwd=here).returncode == 4


def test_a_single_file_gets_its_manifest_beside_it(here: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(4, np.float32)}, here / "model.safetensors")
    assert ftckpt("seal", "model.safetensors", cwd=here).returncode == 0
    assert (here / "model.safetensors.ftckpt.json").exists()
    done = ftckpt("verify", "model.safetensors", "--level", "content", cwd=here)
    assert done.returncode == 0
    flip(here / "model.safetensors", 70)
    assert ftckpt("verify", "model.safetensors", cwd=here).returncode == 4


@pytest.mark.s3
def test_on_s3(here: Path, s3_url: str) -> None:
    from ftckpt.storage import open_store

    store = open_store(s3_url)
    for path in sorted((here / "run").rglob("*")):
        if path.is_file():
            store.put(path.relative_to(here / "run").as_posix(), path.read_bytes())
    assert ftckpt("seal", f"{s3_url}/step-2").returncode == 0
    done = ftckpt("latest", s3_url, "--level", "content")
    assert (done.returncode, done.stdout.strip()) == (0, f"{s3_url}/step-2")
