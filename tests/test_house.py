"""The house rules that a reader cannot see at a glance: who imports whom, and when."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from ftckpt.commands.cli import verbs

ROOT = Path(__file__).parent.parent
FLOORS = {"ftckpt": 0, "formats": 1, "commands": 2}
# What of the core looks up: `python -m ftckpt`, and the operations.
DOORS = ("ftckpt/__main__.py", "ftckpt/operations/")
# The packages from the ground up: each imports from those before it, lazily and for types too.
LEVELS = (
    "ground", "workers", "storage", "checkpoint", "digests", "inspection", "manifest",
    "discovery", "verification", "planning", "transfer", "comparison", "loading", "delta",
    "retention",
    "replication", "parts", "capabilities", "health", "alerting", "joblogs", "replay", "guard",
    "formats.pickles", "formats.torch_files", "formats.state",
    "formats.huggingface", "formats.quantised", "formats.dcp", "formats.ranks",
    "formats.safetensors", "formats.torch_checkpointing", "formats.torchsave", "formats.lora",
    "formats.families", "formats.megatron", "formats.deepspeed", "formats.nvrx", "formats.orbax",
    "formats.trainer_dirs", "formats.folders", "formats.delta", "formats", "operations", "doors",
    "torch", "trainers", "commands",
)  # fmt: skip
# Modules that lie loose in `ftckpt/`, and the level of each.
LOOSE = {
    **dict.fromkeys(("errors", "extents", "findings", "own_files", "strict_json"), "ground"),
    **dict.fromkeys(
        ("amounts", "observer", "packages", "plugins", "progress", "reports", "version"), "ground"
    ),
    "hook": "replay",
    **dict.fromkeys(("__main__", "demonstration"), "doors"),
}
# What still climbs. A pair goes when its import is cut; none is added.
CLIMBS = {
    ("doors", "commands"),  # `python -m ftckpt`
    ("discovery", "retention"),
    ("discovery", "verification"),
    ("formats.delta", "formats"),
    ("formats.families", "formats.megatron"),
    ("formats.pickles", "formats.torch_files"),
}
# Circles of modules that are left, by what they share; none is added.
CIRCLES = {
    frozenset(
        f"ftckpt.formats.{one}"
        for one in (
            "pickles.names", "pickles.sniff", "pickles.unpickle", "torch_files.legacy_stream",
            "torch_files.storages", "torch_files.stream", "torch_files.table",
            "torch_files.plain_pickle",
        )
    ),
}  # fmt: skip
TWICE = 0  # public class names of more than one class
HEAVY = ("torch", "numpy", "s3fs", "fsspec", "rich", "botocore", "zstandard", "matplotlib")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def walked(path: Path) -> list[ast.AST]:
    """Return every import and attribute of a file; going over all trees takes seconds each time."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


@cache
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


def imported(path: Path, nodes: Iterable[ast.AST]) -> list[str]:
    """Return the absolute names of what a file of this project imports from this project."""
    relative = path.relative_to(ROOT).with_suffix("")
    own = relative.parts if relative.parts[0] == "ftckpt" else ("ftckpt", *relative.parts)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(own[: len(own) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from ftckpt import formats` names a module too.
            found += [".".join([*base, alias.name]) for alias in node.names]
    return [name for name in found if name.split(".")[0] == "ftckpt"]


def climbs(path: Path, nodes: Iterable[ast.AST]) -> list[str]:
    """Return what a file imports from a floor above its own."""
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    return [name for name in imported(path, nodes) if floor_of(name) > floor]


def test_imports_point_one_way() -> None:
    paths = sources()
    assert len(paths) > 50
    for path in paths:
        if not path.relative_to(ROOT).as_posix().startswith(DOORS):
            assert climbs(path, walked(path)) == [], path


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
    assert climbs(ROOT / file, ast.walk(ast.parse(line)))


@cache
def modules() -> dict[str, Path]:
    """Return every module of the product by its absolute name; a package by its own name."""
    found = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "ftckpt" else ("ftckpt", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports, where it is loaded, lazily, or for its types alone."""
    known = modules()
    edges: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for one in imported(path, walked(path)):
            # `from package import attribute` ends in a name that is no module.
            end = one if one in known else one.rpartition(".")[0]
            if end in known and end != name:
                edges[name].add(end)
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of names of which each reaches every other one."""
    back: dict[str, set[str]] = {name: set() for name in edges}
    for name, ends in edges.items():
        for end in ends:
            back[end].add(name)
    found: list[set[str]] = []
    left = set(edges)
    while left:
        start = left.pop()
        group = reach(start, edges) & reach(start, back) | {start}
        left -= group
        if len(group) > 1:
            found.append(group)
    return found


def reach(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return the names that one leads to."""
    seen: set[str] = set()
    left = [start]
    while left:
        fresh = edges[left.pop()] - seen
        seen |= fresh
        left += fresh
    return seen


def test_circles_would_be_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_new_circle_of_modules() -> None:
    assert {frozenset(group) for group in circles(graph())} == CIRCLES


def level(module: str) -> str:
    """Return the name in `LEVELS` that a module belongs to."""
    parts = module.split(".")[1:] or ["doors"]
    if parts[0] == "formats" and len(parts) > 1 and (ROOT / "formats" / parts[1]).is_dir():
        return f"formats.{parts[1]}"
    return parts[0] if parts[0] in LEVELS else LOOSE[parts[0]]


def test_packages_stand_on_one_another() -> None:
    """A package imports from those before it in `LEVELS`; what `CLIMBS` lists is to be cut."""
    place = {name: number for number, name in enumerate(LEVELS)}
    climbing = {
        (level(one), level(other))
        for one, others in graph().items()
        for other in others
        if place[level(one)] < place[level(other)]
    }
    assert climbing == CLIMBS


@cache
def folders() -> dict[Path, list[str]]:
    """Return the modules of each folder of the product and the tests, without `__init__`."""
    found: dict[Path, list[str]] = defaultdict(list)
    for path in [*sources(), *(ROOT / "tests").rglob("*.py")]:
        if path.stem != "__init__" and "data" not in path.relative_to(ROOT).parts:
            found[path.parent].append(path.stem)
    return found


def test_no_module_repeats_its_folder_or_its_neighbour() -> None:
    repeated = [
        folder / name
        for folder, names in folders().items()
        if folder.relative_to(ROOT).parts[0] != "tests"
        for name in names
        if name.startswith((f"{folder.name}_", *(f"{one}_" for one in names)))
    ]
    assert repeated == []


def test_the_tree_is_what_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    # Python runs `sitecustomize` by its name alone; its folder is no package and is carried too.
    assert sorted(listed) == sorted(
        {name if path.stem == "__init__" else name.rpartition(".")[0]
         for name, path in modules().items()}
    )  # fmt: skip


def test_a_public_class_name_means_one_class() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for path in sources():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    twice = [name for name, paths in places.items() if len(paths) > 1]
    assert len(twice) <= TWICE, sorted(twice)


def test_within_a_floor_imports_are_relative() -> None:
    for path in sources():
        folder = path.relative_to(ROOT).parts[0]
        own = "ftckpt" if folder == "ftckpt" else f"ftckpt.{folder}"
        for node in walked(path):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                # `..x` out of a folder of the core would hide that it leaves the folder.
                raise AssertionError(f"{path}: from {'.' * node.level}{node.module} (own: {own})")


def test_nothing_unpickles_by_executing() -> None:
    """No torch.load, and no pickle.load: `formats/pickles/unpickle.py` alone reads pickles."""
    forbidden = {"load", "loads", "Unpickler"}
    for path in sources():
        for node in walked(path):
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
