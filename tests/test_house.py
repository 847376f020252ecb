"""The house rules that a reader cannot see at a glance: who imports whom, and when."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.commands.cli import verbs

ROOT = Path(__file__).parent.parent
FLOORS = {"ftckpt": 0, "formats": 1, "commands": 2}
# The two doors of the core that look up: `python -m ftckpt`, and the Python API.
DOORS = {"ftckpt/__main__.py", "ftckpt/api.py"}
HEAVY = ("torch", "numpy", "s3fs", "fsspec", "rich", "botocore", "zstandard", "matplotlib")


def sources() -> list[Path]:
    return sorted(
        path
        for folder in FLOORS
        for path in (ROOT / folder).rglob("*.py")
        # The two links inside the core show the other floors a second time.
        if not (folder == "ftckpt" and path.relative_to(ROOT).parts[1] in FLOORS)
    )


def floor_of(module: str) -> int:
    """Return the floor of an absolute module name."""
    parts = module.split(".")
    return FLOORS.get(parts[1], 0) if parts[0] == "ftckpt" and len(parts) > 1 else 0


def imported(path: Path, tree: ast.AST) -> list[str]:
    """Return the absolute names of what a file of this project imports from this project."""
    relative = path.relative_to(ROOT).with_suffix("")
    own = relative.parts if relative.parts[0] == "ftckpt" else ("ftckpt", *relative.parts)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(own[: len(own) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from ftckpt import formats` names a module too.
            found += [".".join([*base, alias.name]) for alias in node.names]
    return [name for name in found if name.split(".")[0] == "ftckpt"]


def climbs(path: Path, text: str) -> list[str]:
    """Return what a file imports from a floor above its own."""
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    return [name for name in imported(path, ast.parse(text)) if floor_of(name) > floor]


def test_imports_point_one_way() -> None:
    paths = sources()
    assert len(paths) > 50
    for path in paths:
        if path.relative_to(ROOT).as_posix() not in DOORS:
            assert climbs(path, path.read_text()) == [], path


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ftckpt/x.py", "from ftckpt.formats.catalog import FORMATS"),
        ("ftckpt/x.py", "from ftckpt import commands"),
        ("ftckpt/x.py", "from .formats import dcp"),
        ("ftckpt/stores/x.py", "from ..formats.dcp import Dcp"),
        ("formats/x.py", "import ftckpt.commands.cli.app"),
        ("formats/x.py", "def f():\n    from ftckpt.commands.cli import render"),
    ],
)
def test_a_climb_would_be_seen(file: str, line: str) -> None:
    assert climbs(ROOT / file, line)


def test_within_a_floor_imports_are_relative() -> None:
    for path in sources():
        folder = path.relative_to(ROOT).parts[0]
        own = "ftckpt" if folder == "ftckpt" else f"ftckpt.{folder}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                # `..x` out of a folder of the core would hide that it leaves the folder.
                raise AssertionError(f"{path}: from {'.' * node.level}{node.module} (own: {own})")


def test_nothing_unpickles_by_executing() -> None:
    """No torch.load, and no pickle.load: `formats/pickles/unpickle.py` alone reads pickles."""
    forbidden = {"load", "loads", "Unpickler"}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            assert (node.value.id, node.attr) != ("torch", "load"), path
            unpickles = node.value.id in ("pickle", "_pickle", "dill", "cloudpickle", "joblib")
            restricted = path.name == "unpickle.py" and node.attr == "Unpickler"
            assert not (unpickles and node.attr in forbidden) or restricted, path


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", *(f"{verb} --help" for verb in verbs.VERBS), "help exit-codes"],
)
def test_help_imports_nothing_heavy(arguments: str) -> None:
    script = (
        "import sys\n"
        "from ftckpt.commands.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        f"finally:\n    print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout
    assert done.stderr == "[]\n"


def test_the_list_of_verbs_imports_no_verb() -> None:
    script = (
        "import sys\n"
        "from ftckpt.commands.cli.app import VERBS, main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n"
        "    loaded = {v for v in VERBS if f'ftckpt.commands.{v}' in sys.modules}\n"
        "    print(loaded or 'none', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "none\n"
