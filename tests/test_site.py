"""The pages for users: every recipe runs as it is pasted, and the site builds without a warning."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ftckpt.manifest.seal import seal
from tests.builders.archives import extract
from tests.builders.checkpoints import flip, open_checkpoint, save_dcp
from tests.formats.lora.samples import base_of, in_training, unpacked

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REAL = ROOT.parent / "shared" / "checkpoints"
DATA = ROOT / "tests" / "data"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The root that each page calls `run`: an archive of real checkpoints, or a step and its name there.
FRAMEWORKS: dict[str, str | tuple[Path, str]] = {
    "fsdp2": "dcp_torch26_fsdp2_async",
    "torchtitan": (DATA / "families" / "torchtitan", ""),
    "megatron": "mcore_torchdist_tp2dp2_fullyreshard_bf16",
    "deepspeed": "ds_z2_w2_bf16",
    "hugging-face": (DATA / "trainer_dirs" / "trainer", "checkpoint-2"),
    "lightning": "lightning_ddp",
    "verl": "verl_fsdp",
    "jax": (DATA / "orbax" / "manager", ""),
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def pasted(page: Path, where: Path, command_folder: Path) -> None:
    """Run all lines of a page in one shell, each of which must succeed."""
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "sh"))
    path = os.pathsep.join((str(command_folder), os.environ["PATH"]))
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
def test_the_recipe_of_a_framework_runs_as_pasted(
    name: str, tmp_path: Path, command_folder: Path
) -> None:
    source = FRAMEWORKS[name]
    if isinstance(source, tuple):
        shutil.copytree(source[0], tmp_path / "run" / source[1])
        if name == "torchtitan":
            said = json.loads((DATA / "families" / "torchtitan.json").read_text())
            (tmp_path / "config.json").write_text(json.dumps(said["config"]))
    else:
        archive = REAL / f"{source}.tar.xz"
        if not archive.exists():
            pytest.skip("the real checkpoints are not here")
        extract(archive, tmp_path)
        (tmp_path / source / "ckpt").rename(tmp_path / "run")
    pasted(DOCS / "frameworks" / f"{name}.md", tmp_path, command_folder)


@pytest.mark.parametrize("page", sorted((DOCS / "tasks").glob("*.md")), ids=lambda page: page.stem)
def test_a_task_runs_as_pasted(page: Path, tmp_path: Path, command_folder: Path) -> None:
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
        extract(DATA / "adapters" / "bridge_adapters.tar.xz", tmp_path / "samples" / "bridge")
        bridge = tmp_path / "samples" / "bridge"
        shutil.copytree(bridge / "lora" / "iter_0000001", tmp_path / "bridge" / "iter_0001000")
        shutil.copy(bridge / "base" / "hf" / "config.json", tmp_path / "bridge")
    if page.stem == "ship-a-torchtitan-run":
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(DATA / "families" / "torchtitan", tmp_path / "run")
        said = json.loads((DATA / "families" / "torchtitan.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(said["config"]))
    if page.stem == "fp8-and-back":
        shutil.copytree(DATA / "quantised" / "fp8-block", tmp_path / "deepseek")
    pasted(page, tmp_path, command_folder)


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


def test_links_out_of_the_pages_are_few_and_encrypted() -> None:
    """A page loads nothing from elsewhere, and names only hosts that are known here."""
    hosts = {"s3.example.org", "docs.nvidia.com", "github.com"}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for scheme, host in re.findall(r"\b(https?)://([\w.-]+)", page.read_text()):
            local = host.startswith(("127.", "localhost"))
            assert local or (scheme == "https" and host in hosts), f"{page.name}: {host}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_first_pages_lead_somewhere(name: str) -> None:
    """mkdocs checks the pages below docs, their anchors too."""
    text = (ROOT / name).read_text()
    for link, _, anchor in (one.partition("#") for one in re.findall(r"\]\(([^)\s]+)\)", text)):
        target = ROOT / (link or name)
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)", target.read_text() if anchor else "", re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not anchor or anchor in slugs, f"{link}#{anchor}"


def test_the_incident_of_the_readme_is_what_happens(tmp_path: Path) -> None:
    """The pictures are drawn again from a real run; only the numbers may differ."""
    spec = spec_from_file_location("incident", DOCS / "incident.py")
    assert spec is not None
    assert spec.loader is not None
    incident = module_from_spec(spec)
    spec.loader.exec_module(incident)
    lines = incident.recorded(tmp_path)
    assert lines[-1] == ("good", "run7/step-20")
    for name, columns in incident.PICTURES.items():
        kept = (DOCS / name).read_text()
        # Digests are those of this machine's arithmetic, and offsets move by what pickle remembers.
        made, known = (re.sub(r"\b[0-9a-f]{5,8}\b", "", text)
                       for text in (incident.drawn(lines, columns), kept))  # fmt: skip
        assert made == known, f"run: python docs/incident.py ({name})"
        assert len(kept) < 60_000
        assert "prefers-color-scheme: dark" in kept
        assert name in (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / ".mkdocs.yml"),
         "-d", str(place)],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert (site / "index.html").exists()
    assert (site / "verbs" / "verify.html").exists()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"<(?:script|img|iframe)[^>]*\bsrc=[\"']?(?:https?:)?//", text), page
        assert not re.search(r"<td><code>[^<]*\\\|", text), f"{page.name}: a backslash is shown"
        assert not re.search(r"<link[^>]*stylesheet[^>]*href=[\"']?(?:https?:)?//", text), page


# What a stranger types, and where the recipe is. Written down before the search was tried.
TASKS = {
    "restart on fewer GPUs": ["tasks/restart-on-fewer-gpus.html"],
    "resume with half the GPUs": ["tasks/restart-on-fewer-gpus.html"],
    "newest is damaged": ["tasks/newest-is-damaged.html"],
    "corrupt checkpoint": ["tasks/newest-is-damaged.html"],
    "merge a LoRA": ["tasks/merge-a-lora.html", "convert.html"],
    "merge lora adapter": ["tasks/merge-a-lora.html", "convert.html"],
    "keep three and every thousandth": ["tasks/keep-some.html"],
    "delete old checkpoints": ["tasks/keep-some.html"],
    "ship a torchtitan run": ["tasks/ship-a-torchtitan-run.html"],
    "torchtitan weights safetensors": ["tasks/ship-a-torchtitan-run.html"],
    "is my resume exact": ["tasks/is-my-resume-exact.html"],
    "deterministic resume": ["tasks/is-my-resume-exact.html"],
    "copy to a bucket and prove it": ["tasks/copy-to-a-bucket.html"],
    "upload to s3": ["tasks/copy-to-a-bucket.html"],
    "how often to save": ["tasks/how-often-to-save.html"],
    "checkpoint interval": ["tasks/how-often-to-save.html"],
    "what changed between two": ["tasks/what-changed.html"],
    "compare two checkpoints": ["tasks/what-changed.html"],
    "how do I restart on fewer GPUs": ["tasks/restart-on-fewer-gpus.html"],
    "is the newest one damaged": ["tasks/newest-is-damaged.html"],
    "what has changed between the two": ["tasks/what-changed.html"],
    "seal while saving with FSDP2": ["sealing.html"],
    "FSDP2 save": ["frameworks/fsdp2.html"],
}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_stranger_finds_each_task_as_the_first_or_second_hit(site: Path) -> None:
    done = subprocess.run(
        ["node", str(ROOT / "tests" / "site_search.js"), str(site)],
        input=json.dumps(list(TASKS)), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    for (query, wanted), found in zip(TASKS.items(), json.loads(done.stdout), strict=True):
        assert set(wanted) & set(found[:2]), f"{query}: {found[:4]}"
