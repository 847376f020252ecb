"""Pointers in a root: files and links in which a trainer names the newest checkpoint.

A pointer is only a hint: it is written after the save and can be lost, stale or ahead. Sources:
DeepSpeed `engine.py` (`latest`) and its universal converter (`latest_universal`); Megatron-LM
`checkpointing.py` and verl (`latest_checkpointed_iteration.txt`: an iteration in decimal, or
`release`); DLRover (`dlrover_latest.txt`: a step); SkyRL (`latest_ckpt_global_step.txt`: a step);
Megatron-Bridge `checkpointing.py` (`latest_train_state.pt`: a copy of the checkpoint's
`train_state.pt`, which holds its step). Those that are read, and that no verb moves: fvcore
`checkpoint.py` (`last_checkpoint`: a base name) and mmengine `checkpoint_hook.py` (the same: a
path); nanotron `serialize/main.py` (`latest.txt`: the name of a step); composer
`checkpoint_saver.py` (`latest-rank0.pt.symlink`: a path); Ray Train `checkpoint_manager.py`
(`checkpoint_manager_snapshot.json`).

A run may have a pointer under any other name (k-diffusion `train.py`: `model_state.json`; DeePMD:
`checkpoint`). It orders nothing, and gc keeps what it names (`small_texts`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.errors import CorruptError, FtckptError, NotFoundError, UnsafeError
from ftckpt.own_files import SUFFIX, is_own
from ftckpt.storage.state_files import is_text, without_numbers
from ftckpt.storage.store import Entry, EntryKind, Store
from ftckpt.strict_json import JsonError, decode

from .listing import open_part
from .recognise import UnopenedPart

# The pointer of `ftckpt promote`, which no framework writes: the name of a checkpoint.
GOOD = "last-known-good"

_TAGS = frozenset({"latest", "latest_universal", GOOD})
STEPS = frozenset(
    {
        "latest_checkpointed_iteration.txt", "dlrover_latest.txt", "latest_step.txt",
        "latest_ckpt_global_step.txt",
    }
)  # fmt: skip
# Pointers that are a copy of a file in the checkpoint.
COPIES = {"latest_train_state.pt": "train_state.pt"}
FILES = _TAGS | STEPS | COPIES.keys()
# Read alone: what a trainer expects in them differs (a name, a path, JSON).
_LAST, SNAPSHOT, _TEXT, _LINK_TEXT = (
    "last_checkpoint", "checkpoint_manager_snapshot.json", "latest.txt", ".symlink",
)  # fmt: skip
_MAX_BYTES = 4096
# No filesystem has a longer name; a longer text, or one of several lines, is not a pointer's.
_LONGEST = 255
_MAX_SNAPSHOT = 1 << 20
# Texts that may be a pointer of any name: the smallest of a root, and no larger ones.
_TEXTS, _MAX_TEXT = 64, 1 << 14
_TEXT_SUFFIXES = frozenset({"", "json", "txt", "yaml", "yml"})
# A string, and the colon behind one that is a key.
_QUOTED = re.compile(r"""(["'])([^"'\\\n]+)\1(\s*:)?""")


class Pointer(NamedTuple):
    """The content of a pointer.

    Attributes:
        name: the file or link, relative to the root.
        says: its text, or the link's target.
        target: the candidate that it means, relative to the root; None without one.
        step: its step, by text or by the target's name; None without one.
        leaves: whether it is a link to a file outside the root, which is not read.
        no_candidate: whether what it names is there, under a name that no candidate has.
    """

    name: str
    says: str
    target: str | None
    step: int | None
    leaves: bool = False
    no_candidate: bool = False

    @property
    def means_step(self) -> bool:
        """Whether it holds a step and no name: it means every checkpoint of that step."""
        return _by_step(self.name) and self.says.isdecimal() and self.step is not None

    @property
    def dangling(self) -> bool:
        """Whether its target does not exist."""
        return self.target is None and not self.no_candidate


def links_beside(store: Store, base: str, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the links of a root that lead, or once led, to a name beside them.

    `base` is the root's path in the store; `entries` lie directly in it, by name.
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
    """Whether a name in a root is a pointer: a known file, or one of `links_beside`."""
    alone = name in (_LAST, SNAPSHOT, _TEXT) or name.endswith(_LINK_TEXT)
    known = name in FILES or (alone and entry.link is None)
    return name in links or (entry.kind is EntryKind.FILE and known)


def read_pointers(
    store: Store,
    base: str,
    entries: Mapping[str, Entry],
    links: Mapping[str, str],
    steps: Mapping[str, int | None],
    ask: Callable[[Entry], UnopenedPart | None],
) -> list[Pointer]:
    """Read every pointer of a root.

    `steps` are the candidates with the steps in their names; `links` come from `links_beside`;
    `base` is the root's path in the store; `ask` recognises one directory or file.
    """
    found = []
    for name, entry in sorted(entries.items()):
        if name in links:
            found.append(_named(name, entry.link or "", links[name], steps, entries))
        elif not is_pointer(name, entry, links):
            continue
        elif _leaves(store, base, entry):
            found.append(Pointer(name, (entry.link or "")[:_LONGEST], None, None, leaves=True))
        elif name not in FILES:
            found += _read_alone(name, entry, store, steps, entries)
        else:
            text = _copied_step(store, entry, ask) if name in COPIES else text_of(store, entry)
            found.append(_pointer(name, text, steps, entries))
    return found


def _read_alone(
    name: str,
    entry: Entry,
    store: Store,
    steps: Mapping[str, int | None],
    entries: Mapping[str, Entry],
) -> Iterator[Pointer]:
    """Yield what a file names that no verb moves.

    Any program may write a `latest.txt` or a `.symlink`: it is a pointer where it names something
    that is there, or a number.
    """
    if name == SNAPSHOT:
        text = next((one for one in named_in_snapshot(store, entry) if one in steps), "")
    else:
        text = text_of(store, entry)
    pointer = _pointer(name, text, steps, entries)
    if text and (name == _LAST or pointer.target is not None or text.isdecimal()):
        yield pointer


def named_in_snapshot(store: Store, entry: Entry) -> list[str]:
    """Return the names in Ray's snapshot, the latest first: Ray has deleted all others itself."""
    if entry.link is not None or entry.size > _MAX_SNAPSHOT:
        return []
    try:
        said = decode(store.read(entry.path, 0, entry.size))
    except (CorruptError, UnsafeError, JsonError):
        return []
    said = said if isinstance(said, dict) else {}
    others = said.get("checkpoint_results")
    results = [said.get("latest_checkpoint_result"), said.get("best_checkpoint_result")]
    results += others if isinstance(others, list) else []
    names = (one.get("checkpoint_dir_name") for one in results if isinstance(one, dict))
    return list(dict.fromkeys(_base_name(n) for n in names if isinstance(n, str) and n))


def small_texts(store: Store, entries: Mapping[str, Entry]) -> dict[str, frozenset[str]]:
    """Return the values of the small texts of a root, in each of which a trainer may name a save.

    A value is a string of JSON, what follows a key in YAML, or a line. A path counts by its last
    name. Texts whose names differ in numbers alone are those of saves, and no pointers.

    `entries` are those of which `may_name` is true, by name.

    Raises:
        UnavailableError, DeniedError: one could not be read.
    """
    texts = [(entry.size, name) for name, entry in entries.items()]
    alike = Counter(without_numbers(name) for _, name in texts)
    found = {}
    for size, name in sorted(one for one in texts if alike[without_numbers(one[1])] == 1)[:_TEXTS]:
        try:
            raw = store.read(entries[name].path, 0, size)
        except (CorruptError, NotFoundError, UnsafeError):  # it is being written anew
            continue
        if is_text(raw):
            found[name] = frozenset(_values(raw.decode("utf-8", "replace")))
    return found


def may_name(name: str, entry: Entry) -> bool:
    """Say whether what lies in a root is a small text, in which a trainer may name a save."""
    plain = entry.kind is EntryKind.FILE and entry.link is None and not entry.archived
    suffix = name.rpartition(".")[2].lower() if "." in name else ""
    known = name in FILES or name == SNAPSHOT or is_own(name) or name.endswith(SUFFIX)
    return plain and not known and suffix in _TEXT_SUFFIXES and 0 < entry.size <= _MAX_TEXT


def _values(text: str) -> set[str]:
    values = {said for _, said, key in _QUOTED.findall(text) if not key}
    for line in text.splitlines():
        values |= {line, re.split(r"[:=]\s|^\s*-\s", line)[-1]}
    return {_base_name(value.strip()) for value in values}


def stem(name: str) -> str:
    """Return a name without its suffix."""
    return name.rpartition(".")[0] or name


def _base_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _by_step(name: str) -> bool:
    return name in STEPS or name in COPIES


def _copied_step(store: Store, entry: Entry, ask: Callable[[Entry], UnopenedPart | None]) -> str:
    """Return the step in a copied file, in decimal; "" without one."""
    from ftckpt.checkpoint.read_tensor import read_tensor  # few roots have such a pointer

    try:
        part = ask(entry)
        checkpoint = None if part is None else open_part(store, part)
        info = None if checkpoint is None else checkpoint.tensors.get("step")
        if checkpoint is None or info is None or info.numel != 1:
            return ""
        value = decode_scalar(info.dtype, read_tensor(checkpoint, "step"))
    except FtckptError:
        return ""
    return str(int(value)) if value is not None and value.is_integer() else ""


def _leaves(store: Store, base: str, entry: Entry) -> bool:
    """Whether a file is a link out of the root: its text may be anything that the user can read."""
    here, local = store.local_path(base), store.local_path(entry.path)
    if entry.link is None or here is None or local is None:
        return False
    return not os.path.realpath(local).startswith(_real(here).rstrip("/") + "/")


def text_of(store: Store, entry: Entry) -> str:
    """Return the text of a pointer: at most one line, as long as a name can be.

    Of a path that is longer the name at its end counts. What cannot be a name, such as another
    file's content, is never quoted: the answer says how long it is.
    """
    try:
        raw = store.read(entry.path, 0, min(entry.size, _MAX_BYTES))
    except (CorruptError, UnsafeError):  # rewritten meanwhile, or not a file any more
        raw = b""
    text = raw.decode("utf-8", "backslashreplace").strip()
    if len(text.encode()) > _LONGEST:
        text = text.rstrip("/").rpartition("/")[2]
    if len(text.encode()) > _LONGEST or any(ord(c) < 32 or ord(c) == 127 for c in text):
        return f"({entry.size} bytes that are no name)"
    return text


def _pointer(
    name: str, text: str, steps: Mapping[str, int | None], entries: Mapping[str, Entry]
) -> Pointer:
    if (
        (name in STEPS or name in COPIES)
        and text.isascii()
        and text.isdecimal()
        and len(text) <= 18
    ):
        step = int(text)
        return Pointer(name, text, next((p for p, s in steps.items() if s == step), None), step)
    return _named(name, text, _base_name(text), steps, entries)


def _named(
    name: str,
    says: str,
    meant: str,
    steps: Mapping[str, int | None],
    entries: Mapping[str, Entry],
) -> Pointer:
    """Return a pointer to a name. A name that no candidate has may still be there."""
    if meant in steps:
        return Pointer(name, says, meant, steps[meant])
    there = entries.get(meant)
    stands = there is not None and not there.dangling and there.kind is not EntryKind.SPECIAL
    return Pointer(name, says, None, None, no_candidate=stands and meant != name)
