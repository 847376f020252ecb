"""Refuse keys that collide on purpose, before a dict or set compares them.

The hash of a number is its remainder modulo 2**61 - 1, and that of a tuple or frozenset is a sum of
its members: an attacker can write a hundred thousand keys of one hash, which a dict compares
pairwise inside the C unpickler. Texts and bytes are hashed with a secret of this process.

A pickle with many keys that are not texts is loaded with rewritten key opcodes: their operands go
through a persistent id, so Python checks the keys and then does the opcodes' work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ftckpt.errors import UnsafeError

from .keys import FRAME, key_opcodes

# Maximum number of different keys with one hash: -1 and -2 share one, and so do 64 tuples of six.
MOST = 64

_TEXTS = frozenset({str, bytes, bool, float, type(None)})
# By identity, or none at all.
_OWN: tuple[Any, ...] = (object.__hash__, None)

# The replacement of each opcode: LIST or a tuple, BINPERSID.
_WRITTEN = {
    ord("u"): b"l\x86Q",  # SETITEMS: (target, [key, value, ...])
    ord("s"): b"\x87Q",  # SETITEM: (target, key, value)
    ord("d"): b"lQ",  # DICT: [key, value, ...]
    0x90: b"l\x86Q",  # ADDITEMS: (target, [item, ...])
    0x91: b"lQ",  # FROZENSET: [item, ...]
}


class Keys:
    """Counts the different keys of each hash."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Any]] = {}

    def check(self, keys: Iterable[Any]) -> None:
        """Count keys of bounded size that are about to be hashed.

        Raises:
            UnsafeError: far more of them collide than by chance (`unsafe-pickle`).
        """
        for key in keys:
            kind = type(key)
            if kind in _TEXTS or getattr(kind, "__hash__", None) in _OWN:
                continue
            value = hash(key)
            if value == key:  # a small number has no other of its hash but by being large
                continue
            same = self._seen.setdefault(value, [])
            if not any(one is key or one == key for one in same):
                same.append(key)
                if len(same) > MOST:
                    raise UnsafeError(
                        f"a pickle uses more than {MOST} keys of one hash, which none does by"
                        " chance: comparing them can take for ever",
                        kind="unsafe-pickle",
                        hint="treat the file as hostile: find out who wrote it",
                    )


def guarded(
    data: bytes, end: int, persistent: Callable[[Any], Any]
) -> tuple[bytes, Callable[[Any], Any]]:
    """Return a pickle that checks its keys while it is loaded, and its persistent-id resolver.

    `end` is the number of bytes that may be executed; `persistent` resolves the pickle's own ids.
    """
    places = [at for at in key_opcodes(data[:end]) if at < end]
    pieces, done = [], 0
    for at in places:
        if data[at] == FRAME:  # its length would be wrong
            pieces.append(data[done:at])
            done = at + 9
        elif data[at] in _WRITTEN:
            pieces += [data[done:at], _WRITTEN[data[at]]]
            done = at + 1
    kinds = iter([data[at] for at in places if data[at] != FRAME])
    keys = Keys()

    def resolve(pid: Any) -> Any:
        return _resolve(kinds, pid, keys, persistent)

    return b"".join([*pieces, data[done:end]]), resolve


def _resolve(kinds: Iterator[int], pid: Any, keys: Keys, persistent: Callable[[Any], Any]) -> Any:
    """Do what the next of the opcodes did."""
    kind = next(kinds)
    if kind not in _WRITTEN:
        return persistent(pid)
    target: Any = None
    if kind == ord("s"):
        target, key, value = pid
        keys.check([key])
        target[key] = value
        return target
    items = pid
    if kind in (ord("u"), 0x90):
        target, items = pid
    if kind in (0x90, 0x91):
        keys.check(items)
        if kind == 0x91:
            return frozenset(items)
        for item in items:
            target.add(item)
        return target
    if len(items) % 2:
        raise pickle.UnpicklingError("odd number of items")
    keys.check(items[::2])
    if target is None:
        target = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key] = value
    return target
