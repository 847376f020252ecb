"""Find the entry of a root that a user means: by its step, by its name, or the latest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.discovery.candidates import child_of_step, newest_child
from ftckpt.discovery.roots import Root
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.storage.store import join

# No step has more digits.
_DIGITS = 18


class Chosen(NamedTuple):
    """An entry that was meant.

    Attributes:
        root: of its run.
        name: of the entry, relative to that root.
    """

    root: Root
    name: str

    @property
    def path(self) -> str:
        """Path in the store, which no other entry has."""
        return join(self.root.base, self.name)

    @property
    def url(self) -> str:
        """What the user would type."""
        return self.root.store.describe(self.path)


def choose_entries(roots: Sequence[Root], which: str) -> tuple[Chosen, ...]:
    """Return the entries that a step, a name or `latest` means.

    A step means every entry of one run whose name says it, as retention keeps them together; where
    no name says it, the one whose content does.

    Args:
        roots: of the runs (`opening.open_runs`).
        which: as typed.

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
    if not found and (which == "latest" or _is_step(which)):
        found = [entry for root in roots for entry in _of_run(root, which)]
    if not found:
        raise NotFoundError(
            f"{roots[0].store.url} has no checkpoint {which}",
            hint=f"ftckpt inspect {shlex.quote(roots[0].store.url)} lists them",
        )
    _require_one_run(found, which)
    return tuple(found)


def choose_marked(
    roots: Sequence[Root], which: str, marked: Sequence[Chosen]
) -> tuple[Chosen, ...]:
    """Return those of `marked` that `which` means; what they mark need not be there any more.

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


def _require_one_run(found: Sequence[Chosen], which: str) -> None:
    if len({entry.root.base for entry in found}) > 1:
        names = ", ".join(entry.path for entry in found[:8])
        raise UsageError(f"several runs have a checkpoint {which}", hint=f"name one of: {names}")
