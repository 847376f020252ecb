"""Pointers in a root: files and links in which a trainer says which checkpoint is the newest.

A pointer is a hint and never the answer: it is written after the save and can be lost, stale or
ahead. Sources: DeepSpeed `engine.py` (`latest`) and its universal converter (`latest_universal`);
Megatron-LM `checkpointing.py` and verl (`latest_checkpointed_iteration.txt`: an iteration in
decimal, or `release`); DLRover (`dlrover_latest.txt`: a step).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.storage.store import Entry, EntryKind, Store

# What `ftckpt promote` writes by itself, and no framework: the name of a checkpoint.
GOOD = "last-known-good"

_TAGS = frozenset({"latest", "latest_universal", GOOD})
STEPS = frozenset({"latest_checkpointed_iteration.txt", "dlrover_latest.txt", "latest_step.txt"})
FILES = _TAGS | STEPS
_MAX_BYTES = 4096


class Pointer(NamedTuple):
    """What a pointer says.

    Attributes:
        name: the file or link, relative to the root.
        says: its text, or where the link leads.
        target: the candidate that is meant, relative to the root; None where there is none.
        step: the step that it says, by text or by the target's name; None where it says none.
    """

    name: str
    says: str
    target: str | None
    step: int | None

    @property
    def means_step(self) -> bool:
        """Whether it says a step and no name: every checkpoint of that step is meant."""
        return self.name in STEPS and self.says.isdecimal() and self.step is not None

    @property
    def dangling(self) -> bool:
        """Whether it points to nothing."""
        return self.target is None


def links_beside(store: Store, base: str, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the links of a root that lead, or once led, to a name beside them.

    Args:
        store: where the root lies.
        base: path of the root in the store.
        entries: what lies directly in the root, by name.
    """
    found = {}
    here = store.local_path(base)
    for name, entry in entries.items():
        if entry.link is None:
            continue
        directory, _, target = entry.link.rstrip("/").rpartition("/")
        same = directory in ("", ".") or (
            here is not None and os.path.realpath(os.path.join(here, directory)) == _real(here)
        )
        if same and target and (target in entries or entry.kind is EntryKind.SPECIAL):
            found[name] = target
    return found


@lru_cache(maxsize=8)
def _real(path: str) -> str:
    return os.path.realpath(path)


def is_pointer(name: str, entry: Entry, links: Mapping[str, str]) -> bool:
    """Say whether a name in a root is a pointer: a known file, or one of `links_beside`."""
    return name in links or (entry.kind is EntryKind.FILE and name in FILES)


def read_pointers(
    store: Store,
    entries: Mapping[str, Entry],
    links: Mapping[str, str],
    steps: Mapping[str, int | None],
) -> list[Pointer]:
    """Read every pointer of a root.

    Args:
        store: where the root lies.
        entries: what lies directly in the root, by name.
        links: see `links_beside`.
        steps: the candidates, with the step that each name says.
    """
    found = []
    for name, entry in sorted(entries.items()):
        if name in links:
            target = links[name] if links[name] in steps else None
            found.append(Pointer(name, entry.link or "", target, steps.get(links[name])))
        elif is_pointer(name, entry, links):
            found.append(_read(store, name, entry, steps))
    return found


def _read(store: Store, name: str, entry: Entry, steps: Mapping[str, int | None]) -> Pointer:
    try:
        raw = store.read(entry.path, 0, min(entry.size, _MAX_BYTES))
    except (CorruptError, UnsafeError):  # rewritten under our hands, or no file any more
        raw = b""
    text = raw.decode("utf-8", "backslashreplace").strip()
    if name in STEPS and text.isascii() and text.isdecimal() and len(text) <= 18:
        step = int(text)
        return Pointer(name, text, next((p for p, s in steps.items() if s == step), None), step)
    tag = text.rstrip("/").rpartition("/")[2]
    target = tag if tag in steps else None
    return Pointer(name, text, target, steps.get(tag))
