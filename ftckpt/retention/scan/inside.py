"""Another run inside an entry: gc drops whole directories, and would drop that too.

`OUT=$CKPT/sft` is a common line in scripts. What lies inside has pins, rules and a log of its own,
which the plan of this root does not read. Parts of one checkpoint have names of steps as well
(DeepSpeed's tags, roots of Megatron below a model's name), and an entry that stays for nothing
fills the disk: one step alone counts only where a checkpoint lies in a checkpoint that does not
know its files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ftckpt.discovery.open_part import open_part
from ftckpt.discovery.pointers import FILES
from ftckpt.discovery.step_names import step_in_name, worded_step
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import FOLDER
from ftckpt.storage.store import Entry, EntryKind

from .entries import EntryClass
from .entry import ScannedEntry

# What ftckpt keeps in a root alone, never in a checkpoint.
_OF_ROOTS = frozenset({"root.json", "pins", "tags", "leases"})
# Converters that know no step write `step_5/policy/weights/iter_0000000`.
_OF_PARTS = (0, 1)
# A tag of DeepSpeed in a checkpoint of a trainer: the two count differently.
_TAG = "global_step"


class Suspects(NamedTuple):
    """What lies inside an entry and has the name of a step.

    Attributes:
        root: the path of what has pins, tags or the like of its own; "" without one.
        several: paths of steps beside each other, but that of the entry's own step.
        alone: paths of other steps that have none beside them.
    """

    root: str
    several: Sequence[str] = ()
    alone: Sequence[str] = ()


def with_run(found: ScannedEntry, files: Iterable[Entry]) -> ScannedEntry:
    """Return an entry that gc may drop with what lies in it of another run.

    Raises:
        UnavailableError, DeniedError: it could not be read.
    """
    contents = found.entry.contents
    if contents is None or found.entry.entry_class in (EntryClass.FOREIGN, EntryClass.TRASH):
        return found
    run = run_inside(found, files)
    return found.now(contents=replace(contents, run=run)) if run else found


def run_inside(found: ScannedEntry, files: Iterable[Entry]) -> str:
    """Return the path of a checkpoint or root of another run inside an entry; "" if none shows.

    Args:
        found: the entry.
        files: all of its files.

    Raises:
        UnavailableError, DeniedError: it could not be read.
    """
    if found.place.kind is not EntryKind.DIRECTORY:
        return ""
    suspects = suspects_in((file.path for file in files), found.place.path)
    if suspects.root:
        return suspects.root
    several = list(_checkpoints(found, suspects.several))
    alone = list(_checkpoints(found, suspects.alone)) if found.child is not None else []
    if not several and not alone:
        return ""
    members = _members(found)
    if members is None:  # nothing tells whose they are
        alone = []
    for path in (*several, *alone):
        if not any(member.startswith(path + "/") for member in members or ()):
            return path
    return ""


def suspects_in(paths: Iterable[str], base: str) -> Suspects:
    """Return what the names of an entry's files show.

    Args:
        paths: of the files.
        base: of the entry.
    """
    own = step_in_name(base.rpartition("/")[2])
    below: dict[str, dict[int, str]] = defaultdict(dict)
    pointed = False
    for path in paths:
        folders = path[len(base) + 1 :].split("/")
        name = folders.pop()
        pointed |= not folders and name in FILES
        for place, folder in enumerate(folders):
            if folder == FOLDER:
                if (*folders[place + 1 :], name)[0] in _OF_ROOTS:
                    return Suspects("/".join([base, *folders[:place]]))
                break
            step = worded_step(folder)
            if step is not None:
                above = "/".join(folders[:place])
                below[above].setdefault(step, "/".join([base, *folders[: place + 1]]))
    several: list[str] = []
    alone: list[str] = []
    for above, steps in below.items():
        others = [path for step, path in sorted(steps.items()) if step != own]
        if len(steps) > 1:
            several += others
            continue
        part = own is None or next(iter(steps)) in _OF_PARTS
        tag = not above and (pointed or any(p.startswith(f"{base}/{_TAG}") for p in others))
        if not part and not tag:
            alone += others
    return Suspects("", several, alone)


def _checkpoints(found: ScannedEntry, paths: Iterable[str]) -> Iterator[str]:
    """Yield those of some directories that a format knows; `samples/step_100` is none."""
    for path in paths:
        with suppress(NotFoundError):
            if found.root.ask(Entry(path, 0, None, EntryKind.DIRECTORY)) is not None:
                yield path


def _members(found: ScannedEntry) -> list[str] | None:
    """Return the paths of the files of an entry's checkpoint; None if nothing shows them."""
    if found.child is None:
        return None
    try:
        members = open_part(found.root.store, found.child.part).members()
        return [f"{found.place.path}/{name}" for name in members]
    except (CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError):
        return None
