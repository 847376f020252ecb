"""What docstrings, comments and pages name in backquotes exists: modules move, sentences stay."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from ftckpt.own_files import MANIFEST
from tests.test_house import ROOT, modules, parsed

_DOTTED = re.compile(r"`(ftckpt(?:\.\w+)+)(?:\(\))?`")
_FILE = re.compile(r"`((?:ftckpt|formats|commands|tests|benchmarks|completions)/[\w./-]+\.\w+)`")
# `one.name` where `one` is imported here as a module.
_OTHER = re.compile(r"`([a-z_]\w*)\.(\w+)(?:\(\))?`")


@cache
def defined(path: Path) -> frozenset[str]:
    """Return the names of a module's top level, imported ones too."""
    found: set[str] = set()
    todo: list[ast.stmt] = list(parsed(path).body)
    while todo:
        node = todo.pop()
        match node:
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.If() | ast.Try():
                todo += [*node.body, *node.orelse, *getattr(node, "finalbody", ())]
            case _:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                found |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return frozenset(found)


def stands(name: str) -> bool:
    """Return whether a dotted name is a module, or a name at the top of one and what follows it."""
    known = modules()
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = known.get(".".join(parts[:length]))
        if path is None:
            continue
        rest = parts[length:]
        # `__getattr__` gives what its module lists: `ftckpt.verify`.
        return not rest or rest[0] in defined(path) or "__getattr__" in defined(path)
    return False


def mentions(text: str, imports: dict[str, str]) -> list[str]:
    """Return what a text names of this project that does not exist."""
    named = [m[1] for m in _DOTTED.finditer(text) if m[1] != MANIFEST]
    gone = [name for name in named if not stands(name)]
    gone += [m[1] for m in _FILE.finditer(text) if not (ROOT / m[1]).exists()]
    for match in _OTHER.finditer(text):
        module = modules().get(imports.get(match[1], ""))
        if module is not None and match[2] not in defined(module):
            gone.append(f"{match[1]}.{match[2]}")
    return gone


def module_imports(name: str, path: Path) -> dict[str, str]:
    """Return local name -> module for the modules that a file imports at its top."""
    base = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    found: dict[str, str] = {}
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom):
            up = base[: len(base) - node.level + 1] if node.level else []
            place = ".".join([*up, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                if f"{place}.{alias.name}" in modules():
                    found[alias.asname or alias.name] = f"{place}.{alias.name}"
    return found


def test_what_the_code_names_exists() -> None:
    gone = {
        name: missing
        for name, path in modules().items()
        if (missing := mentions(path.read_text(), module_imports(name, path)))
    }
    assert gone == {}


def test_what_the_pages_name_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    gone = {
        str(page.relative_to(ROOT)): m for page in pages if (m := mentions(page.read_text(), {}))
    }
    assert gone == {}


@pytest.mark.parametrize(
    "text",
    [
        "See `ftckpt.discovery.strangers`.",
        "See `ftckpt.discovery.root_marker.nothing_of_that_name`.",
        "See `ftckpt/discovery/strangers.py`.",
        "See `root_marker.nothing_of_that_name`.",
    ],
)
def test_a_name_that_went_would_be_seen(text: str) -> None:
    imports = {"root_marker": "ftckpt.discovery.root_marker"}
    assert len(mentions(text, imports)) == 1
    assert mentions("See `ftckpt.discovery.root_marker`, `ftckpt/errors.py`.", imports) == []
