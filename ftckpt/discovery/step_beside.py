"""The step that a trainer writes beside a file of weights: `epoch_3.yaml` of `epoch_3.pt`.

WeNet (wenet/utils/checkpoint.py, save_checkpoint) writes what it knows of a save, its `step` among
it, into a YAML file of the same stem, because the file itself holds weights alone.
"""

from __future__ import annotations

import re

from ftckpt.checkpoint.steps import counters_in
from ftckpt.errors import FtckptError
from ftckpt.storage.store import EntryKind, join
from ftckpt.strict_json import JsonError, decode

from .roots import Candidate, Root
from .step_names import stem_of

_YAML = (".yaml", ".yml")
_JSON = ".json"
# What a trainer writes beside each save is short.
_MOST = 1 << 18
_LINE = re.compile(r"^(?:global_)?step:[ \t]*([0-9]{1,18})[ \t]*\r?$", re.MULTILINE)


def step_beside(root: Root, candidate: Candidate) -> int | None:
    """Return the step in the file of the same stem beside a candidate; None if nothing says it.

    A file that says two steps, or that cannot be read, says none.
    """
    stem = stem_of(candidate.path)
    if candidate.entry.kind is not EntryKind.FILE or stem == candidate.path:
        return None
    foreign = root.memo.setdefault("foreign", frozenset(root.foreign))
    names = [stem + suffix for suffix in (*_YAML, _JSON) if stem + suffix in foreign]
    found = {_said(root, name) for name in names}
    return found.pop() if len(found) == 1 else None


def _said(root: Root, name: str) -> int | None:
    try:
        entry = root.store.stat(join(root.base, name))
        if entry.kind is not EntryKind.FILE or entry.link is not None or entry.size > _MOST:
            return None
        raw = root.store.read(entry.path, 0, entry.size)
        if not name.endswith(_JSON):
            text = raw.decode("utf-8", "replace")
            said = {int(number) for number in _LINE.findall(text)}
        else:
            said = {number for _, number in counters_in(decode(raw))}
    except (FtckptError, JsonError):
        return None
    return said.pop() if len(said) == 1 else None
