"""The pages for users: every recipe runs as it is pasted, and the site builds without a warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ftckpt.manifest.seal import seal
from tests.builders.checkpoints import flip, open_checkpoint, save_dcp
from tests.formats.adapters.samples import base_of, in_training, unpacked

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REAL = ROOT.parent / "shared" / "checkpoints"
DATA = ROOT / "tests" / "data"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The root that each page calls `run`: an archive of real checkpoints, or a step and its name there.
FRAMEWORKS: dict[str, str | tuple[Path, str]] = {
    "fsdp2": "dcp_torch26_fsdp2_async",
    "torchtitan": "dcp_fsdp2_titan",
    "megatron": "mcore_torchdist_tp2dp2_fullyreshard_bf16",
    "deepspeed": "ds_z2_w2_bf16",
    "hugging-face": (DATA / "trainer_dirs" / "trainer", "checkpoint-2"),
    "lightning": "lightning_ddp",
    "verl": "verl_fsdp",
    "jax": (DATA / "orbax" / "manager", ""),
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def pasted(page: Path, where: Path) -> None:
    """Run all lines of a page in one shell, each of which must succeed."""
    bin_ = where / ".bin"
    bin_.mkdir()
    shim = bin_ / "ftckpt"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m ftckpt "$@"\n')
    shim.chmod(0o755)
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "sh"))
    path = os.pathsep.join((str(bin_), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=where,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{page.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_recipe_of_a_framework_runs_as_pasted(name: str, tmp_path: Path) -> None:
    source = FRAMEWORKS[name]
    if isinstance(source, tuple):
        shutil.copytree(source[0], tmp_path / "run" / source[1])
    else:
        archive = REAL / f"{source}.tar.xz"
        if not archive.exists():
            pytest.skip("the real checkpoints are not here")
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path, filter="data")
        (tmp_path / source / "ckpt").rename(tmp_path / "run")
    pasted(DOCS / "frameworks" / f"{name}.md", tmp_path)


@pytest.mark.parametrize("page", sorted((DOCS / "tasks").glob("*.md")), ids=lambda page: page.stem)
def test_a_task_runs_as_pasted(page: Path, tmp_path: Path) -> None:
    for step in (1000, 2000, 3000):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    if page.stem == "newest-is-damaged":
        seal(open_checkpoint(tmp_path / "run" / "step-3000"))
        shutil.copytree(tmp_path / "run", tmp_path / "tier2")
        victim = tmp_path / "run" / "step-3000" / "__0_0.distcp"
        flip(victim, victim.stat().st_size // 3)
    if page.stem == "merge-a-lora":
        case = unpacked(tmp_path / "samples") / "lora"
        shutil.copytree(base_of(case), tmp_path / "base")
        shutil.copytree(case / "adapter", tmp_path / "adapter")
        shutil.rmtree(tmp_path / "run")
        in_training(case, tmp_path / "run" / "step-1000")
    if page.stem == "fp8-and-back":
        shutil.copytree(DATA / "quantised" / "fp8-block", tmp_path / "deepseek")
    pasted(page, tmp_path)


def test_every_page_of_a_framework_is_tried() -> None:
    assert {page.stem for page in (DOCS / "frameworks").glob("*.md")} == set(FRAMEWORKS)


def test_the_messages_that_are_explained_are_said() -> None:
    said = "\n".join(
        path.read_text()
        for folder in ("ftckpt", "formats", "commands")
        for path in (ROOT / folder).rglob("*.py")
    )
    table = (DOCS / "troubleshooting.md").read_text().partition("## By message")[2]
    messages = re.findall(r"^\| (`[^|]+`)", table, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in re.split(r"[…`,]", message):
            assert len(part.strip()) < 5 or part.strip() in said, message


def test_the_python_of_the_pages_is_python() -> None:
    for page in (*(DOCS / "frameworks").glob("*.md"), DOCS / "sealing.md"):
        for text in blocks(page, "python"):
            compile(text, str(page), "exec")


def test_the_list_for_language_models_names_every_page() -> None:
    text = (DOCS / "llms.txt").read_text()
    own = {"index.md", "development.md"}
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name in own or name.startswith("packaging/") or f"({name})" in text, name


def test_links_of_all_pages_lead_somewhere() -> None:
    for page in (*DOCS.rglob("*.md"), DOCS / "llms.txt"):
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in link and not link.startswith("verbs/"):
                assert (page.parent / link).exists(), f"{page.relative_to(DOCS)}: {link}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / ".mkdocs.yml"),
         "-d", str(tmp_path / "site")],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert (tmp_path / "site" / "verbs" / "verify.html").exists()
