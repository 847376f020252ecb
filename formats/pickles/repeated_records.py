r"""Pass over long runs of alike records in a pickle at once, for `pickle_keys`.

Metadata of 100,000 tensors is twelve million opcodes, and a walk in Python takes half a
microsecond for each. Nearly all of them belong to three kinds of pairs in a dict that torch writes
for DCP: a name and its tensor, an index and its place, a name and its path. A regular expression
passes over a thousand such pairs in less than a millisecond.

A run is spelled in protocol 4 or later, and every opcode of it is compared. It leaves keys and
values on the stack, as the walk would. What it memoises:
- texts, and instances and sizes, which are built by calls, weigh at most `CALLED`; so do tuples of
  numbers, of which there are eight at most;
- the properties of all tensors of a run are taken from the same slots of the memo, which the walk
  weighs: three of them, and two flags, weigh less than four times `CALLED`;
- a path may take anything from the memo: what a run of paths memoises counts as too heavy.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from .numbers import INT, MORE, THREE, TWO


class PickleRun(NamedTuple):
    """A run that was found.

    Attributes:
        end: where it ends.
        pushed: how many values it leaves on the stack: keys and values in turn.
        memoised: how many values it memoises.
        paths: whether it is one of paths.
        keys: slots of the memo that are used as keys.
        members: slots of the memo whose values are put into one tuple, three of them.
        exact: whether `memoised` is right; else it is the most that it can be.
    """

    end: int
    pushed: int
    memoised: int
    paths: bool
    keys: tuple[int, ...]
    members: tuple[int, ...] = ()
    exact: bool = True


_SLOT = re.compile(rb"<(\w)>")
_REF = rb"(?:h.|j.{4})"
_LENGTHS = b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 256))
_INLINE = rb"\x8c(?:" + _LENGTHS + rb")\x94"
_TEXT = rb"(?:" + _REF + rb"|" + _INLINE + rb")"
_NUMBERS = (
    rb"(?:" + TWO + rb"\x86|" + INT + rb"\x85|" + THREE + rb"\x87|\(" + MORE + rb"t)"
)  # fmt: skip
_SIZE = _REF + rb"(?:" + _NUMBERS + rb"\x94\x85\x94R\x94)?+"  # built, or taken from the memo
_NEW = _REF + rb"\)\x81\x94"
_STATE = _NEW + rb"\}\x94\("
# A letter in brackets stands for a slot of the memo that is the same in all records of a run.
_CHUNK = _STATE + b"<o>" + _SIZE + b"<s>" + _SIZE + b"ub"
# Groups stand outside of what is repeated possessively: there Python's `re` may lose them.
_CHUNKS = rb"(?:" + _SLOT.sub(lambda _: _REF, _CHUNK) + rb")++"
_ENTRY = (
    _INLINE + _STATE + b"<p>" + _NEW + rb"\(<d><l>\x89<m>\x89t\x94b<z>" + _SIZE + rb"<c>\]\x94"
    + rb"(?:(?=\(" + _CHUNKS + rb"e)\(|(?=" + _CHUNKS + rb"a))" + _CHUNK
    + rb"(?:" + _CHUNK + rb")*+[ea]ub"
)  # fmt: skip
_ITEM = (
    _STATE + b"<f>" + _TEXT + b"<i>(?:N|" + INT + b")<o>" + _SIZE + b"ub"
    + _STATE + b"<r>" + _TEXT + b"<b>" + INT + b"<n>" + INT + b"ub"
)  # fmt: skip
_MEMBERS = "dlm"
_PART = rb"(?:" + _TEXT + rb"|" + INT + rb")"
_TUPLE = (
    rb"(?:\(" + _PART + rb"{4,64}+t|" + _PART + rb"(?:\x85|" + _PART + rb"(?:\x86|" + _PART
    + rb"\x87)))\x94"
)  # fmt: skip
_PATH = rb"(?:(" + _REF + rb")|" + _INLINE + rb")" + _TUPLE


def _run(pair: bytes) -> re.Pattern[bytes]:
    """Return what matches many pairs: the first of them gives the slots that all share."""
    met: set[bytes] = set()

    def slot(found: re.Match[bytes]) -> bytes:
        name = found[1]
        if name in met:
            return b"(?P=" + name + b")"
        met.add(name)
        return b"(?P<" + name + b">" + _REF + b")"

    return re.compile(_SLOT.sub(slot, pair + b"(?:" + pair + b")*+"), re.DOTALL)


def _plain(run: re.Pattern[bytes]) -> re.Pattern[bytes]:
    """Return what matches a run that has no byte in its arguments that looks like MEMOIZE."""
    pattern = run.pattern.replace(b"|\x94.{148}", b"")
    return re.compile(re.sub(rb"(?<!\\)\.", rb"[^\\x94]", pattern), re.DOTALL)


# What a plain entry holds once, and a place twice: the latter is longer than any argument.
_SIGN = b")\x81\x94("
_PLACE = b")\x81\x94}\x94("
_ENTRIES = _run(_ENTRY)
_PLAIN_ENTRIES = _plain(_ENTRIES)
_PLACES = _run(_ITEM)
_PATHS = re.compile(b"(?:" + _TEXT + _TUPLE + b")++", re.DOTALL)
_PLAIN_PATHS = _plain(_PATHS)
_KEYED = re.compile(_PATH, re.DOTALL)
_MEMOISED = re.compile(
    rb"(?:[^hjKMJ\x8a\x8c\x94]|" + _REF + b"|" + INT + rb"|\x8c(?:" + _LENGTHS + rb"))*+\x94",
    re.DOTALL,
)


def find_run(data: bytes, at: int) -> PickleRun | None:
    """Return the run of pairs that begins at an opcode."""
    found = _PLAIN_ENTRIES.match(data, at)  # nearly all are: they are counted at once
    if found is not None and _ENTRIES.match(data, found.end()) is None:
        return _entries(found, found[0].count(_SIGN), found[0].count(b"\x94"))
    found = _ENTRIES.match(data, at)
    if found is not None:
        return _entries(found, _one_entry().subn(b"", found[0])[1], _memoised(found[0]))
    found = _PLACES.match(data, at)
    if found is not None:
        # They have numbers of every kind, and to count exactly would take longer than all else:
        # nothing that follows them takes its keys from what they memoise.
        text, keys = found[0], tuple(map(_slot, found.groups()))
        memoised = text.count(b"\x94")
        return PickleRun(found.end(), text.count(_PLACE), memoised, False, keys, exact=False)
    found = _PATHS.match(data, at)
    if found is None:
        return None
    taken = _KEYED.findall(found[0])
    keys = tuple(map(_slot, filter(None, taken)))
    plain = _PLAIN_PATHS.fullmatch(found[0])
    memoised = found[0].count(b"\x94") if plain else _memoised(found[0])
    return PickleRun(found.end(), 2 * len(taken), memoised, True, keys)


@cache
def _one_entry() -> re.Pattern[bytes]:
    return re.compile(_SLOT.sub(lambda _: _REF, _ENTRY), re.DOTALL)


def _entries(found: re.Match[bytes], pairs: int, memoised: int) -> PickleRun:
    slots = {name: _slot(ref) for name, ref in found.groupdict().items()}
    members = tuple(slots.pop(name) for name in _MEMBERS)
    return PickleRun(found.end(), 2 * pairs, memoised, False, tuple(slots.values()), members)


def _memoised(text: bytes) -> int:
    """Return how many values a run memoises, whatever its arguments hold."""
    return _MEMOISED.subn(b"", text)[1]


def _slot(ref: bytes) -> int:
    """Return the slot that a BINGET or LONG_BINGET takes from."""
    return int.from_bytes(ref[1:], "little")
