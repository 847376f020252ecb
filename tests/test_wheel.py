"""The wheel and the sdist: built offline, whole, and run from where they were unpacked."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ftckpt.commands.manual import pages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# As `python -m build` does, without its empty environments: the sdist first, the wheel out of it.
BUILD = """
import os, sys, tarfile
sys.path.insert(0, "docs/packaging")
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
import backend
out = sys.argv[1]  # each build sets the arguments anew
name = backend.build_sdist(out)
with tarfile.open(f"{out}/{name}") as archive:
    archive.extractall(f"{out}/unpacked", filter="data")
os.chdir(f"{out}/unpacked/{name.removesuffix('.tar.gz')}")
backend.build_wheel(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, made of the files that git knows, and a wheel made of the sdist."""
    pytest.importorskip("setuptools", "77")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, copy / name
        if name.startswith("tests/data/") or not os.path.lexists(source):
            continue  # megabytes that no wheel holds
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", BUILD, out],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # The checkout must not lend what an sdist lacks.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_no_more(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    version = PROJECT["project"]["version"]
    tops = {"ftckpt", f"ftckpt-{version}.dist-info", f"ftckpt-{version}.data"}
    assert {name.split("/")[0] for name in names} == tops
    assert not [name for name in names if "tests" in name or "/test_" in name]
    assert "ftckpt/py.typed" in names
    for folder, inside in (("ftckpt", ""), ("formats", "formats/"), ("commands", "commands/")):
        for path in (ROOT / folder).rglob("*"):
            place = path.relative_to(ROOT / folder).as_posix()
            linked = folder == "ftckpt" and place.startswith(("formats/", "commands/"))
            if path.suffix in (".py", ".toml") and not linked:
                assert f"ftckpt/{inside}{place}" in names
    shared = [name.partition(".data/data/")[2] for name in names if ".data/data/" in name]
    listed = PROJECT["tool"]["setuptools"]["data-files"]
    files = [
        f"{folder}/{one.name}"
        for folder, patterns in listed.items()
        for pattern in patterns
        for one in (() if pattern.startswith("build/") else ROOT.glob(pattern))
    ]
    files += [f"share/man/man{name[-1]}/{name}" for name, _ in pages()]
    assert sorted(shared) == sorted(files)


def test_the_sdist_holds_what_a_build_needs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {one.name.partition("/")[2]: one for one in archive.getmembers()}
    names = members.keys()
    # Without the links an unpacked sdist does not run, and no checker knows its packages.
    for link in ("commands", "formats"):
        found = members[f"ftckpt/{link}"]
        assert (found.issym(), found.linkname) == (True, f"../{link}")
    assert not [name for name in names if name.startswith("build/")]
    assert {
        "pyproject.toml", "README.md", "LICENSE", "ftckpt/py.typed", "commands/verify.py",
        "formats/families/llama.toml", "completions/_ftckpt",
        "tests/conftest.py", "docs/verify.md", "docs/packaging/backend.py",
        "docs/schemas/verify.schema.json",
    } <= names  # fmt: skip


def test_an_unpacked_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if p)]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import ftckpt; print(ftckpt.__file__)\n"
        "from ftckpt.__main__ import main; sys.argv[1:] = ['--version']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    place, version = done.stdout.splitlines()
    assert place == str(tmp_path / "ftckpt" / "__init__.py")
    assert version.split()[-1] == PROJECT["project"]["version"]


def test_an_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    """As pip puts it into an empty environment; what it depends on is lent by this one."""
    (path,) = built.glob("*.whl")
    pip = [str(Path(sys.base_prefix) / "bin" / "python3"), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, timeout=60).returncode:
        pytest.skip("the interpreter has no pip")
    words = ["install", "-q", "--no-deps", "--no-index", "--root-user-action=ignore"]
    place = tmp_path / "here"
    subprocess.run(
        [*pip, *words, "--ignore-installed", "--prefix", place, path],
        cwd=tmp_path, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    (packages,) = place.glob("**/*-packages")
    lent = [one for one in sys.path if one.endswith("-packages")]
    done = subprocess.run(
        [place / "bin" / "ftckpt", "verify", ROOT / "tests" / "data" / "run" / "step-1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(packages), *lent])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for shared in ("man/man1/ftckpt-verify.1", "man/man7/ftckpt-exit-codes.7"):
        assert (place / "share" / shared).exists()


def test_what_is_installed_by_default_is_light() -> None:
    project = PROJECT["project"]
    assert not [one for one in project["dependencies"] if one.startswith("torch")]
    assert len(project["optional-dependencies"]["torch"]) == 1


def test_every_package_that_is_imported_is_declared() -> None:
    from ftckpt.packages import REQUIREMENTS

    # `ftckpt.trainers` is imported by who has the Trainer that it is for.
    declared = set(REQUIREMENTS) | {"isal", "click", "ftckpt"}
    declared |= {"transformers", "lightning", "megatron"}
    for folder in ("ftckpt", "formats", "commands"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom) and not node.level
                    else []
                )
                tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
                assert tops <= declared, path


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_classifiers_name_the_versions_of_python(minor: int) -> None:
    classifiers = PROJECT["project"]["classifiers"]
    assert f"Programming Language :: Python :: 3.{minor}" in classifiers
