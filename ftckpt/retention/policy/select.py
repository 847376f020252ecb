"""Find the entry of a root that a user means: by step, by name, or `latest`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.discovery.candidates import child_of_step, newest_child
from ftckpt.discovery.roots import Root
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.storage.store import join
from ftckpt.storage.suggestions import nearest_numbers

# Steps have at most this many digits.
_DIGITS = 18


class Chosen(NamedTuple):
    """A chosen entry; `name` is relative to its run's root."""

    root: Root
    name: str

    @property
    def path(self) -> str:
        """Return its unique path in the store."""
        return join(self.root.base, self.name)

    @property
    def url(self) -> str:
        """Return its path or URL as the user would type it."""
        return self.root.store.describe(self.path)


def choose_entries(roots: Sequence[Root], which: str) -> tuple[Chosen, ...]:
    """Return the entries that a step, a name or `latest` means.

    A step means every entry of one run with it in its name, because retention keeps those together;
    if no name has it, the entry whose content does.

    Raises:
        NotFoundError: the entry does not exist.
        UsageError: several runs have one.
    """
    name = which.rstrip("/")
    found = [
        Chosen(root, c.path)
        for root in roots
        for c in root.candidates
        if name in (c.path, join(root.base, c.path), root.url_of(c))
    ]
    which = "latest" if which == "newest" else which
    if not found and (which == "latest" or _is_step(which)):
        found = [entry for root in roots for entry in _of_run(root, which)]
    if not found:
        names = [c.path for root in roots for c in root.candidates if not c.staging]
        raise NotFoundError(
            f"{roots[0].store.url} has no checkpoint {which}",
            hint=nearest_of(name, names)
            or f"ftckpt ls {shlex.quote(roots[0].store.url)} lists them",
        )
    _require_one_run(found, which)
    return tuple(found)


def choose_marked(
    roots: Sequence[Root], which: str, marked: Sequence[Chosen]
) -> tuple[Chosen, ...]:
    """Return those of `marked` that `which` means; the entries themselves may be gone.

    Raises:
        NotFoundError: no entry is meant.
        UsageError: several runs have one.
    """
    name = which.rstrip("/")
    found = [m for m in marked if name in (m.name, m.path, m.url)]
    if not found and _is_step(which):
        found = [m for m in marked if step_in_name(m.name) == int(which)]
    if not found:
        return choose_entries(roots, which)
    found = list({m.path: m for m in found}.values())
    _require_one_run(found, which)
    return tuple(found)


def _of_run(root: Root, which: str) -> list[Chosen]:
    if which != "latest":
        step = int(which)
        named = [c for c in root.candidates if c.step == step and not c.staging]
        if named:
            return [Chosen(root, c.path) for c in named]
    try:
        child = newest_child(root) if which == "latest" else child_of_step(root, int(which))
    except NotFoundError:
        return []
    return [Chosen(root, child.candidate.path)]


def _is_step(which: str) -> bool:
    return which.isascii() and which.isdecimal() and len(which) <= _DIGITS


def nearest_of(name: str, names: Sequence[str]) -> str:
    """Return a hint with the names or, for a step alone, the steps that are nearest; or ""."""
    if _is_step(name):
        name, names = f"@{name}", [f"@{step}" for one in names if (step := step_in_name(one))]
    near = [one.lstrip("@") for one in nearest_numbers(name, names)]
    return f"the nearest by number: {' and '.join(near)}" if near else ""


def _require_one_run(found: Sequence[Chosen], which: str) -> None:
    if len({entry.root.base for entry in found}) > 1:
        names = ", ".join(entry.path for entry in found[:8])
        raise UsageError(f"several runs have a checkpoint {which}", hint=f"name one of: {names}")
