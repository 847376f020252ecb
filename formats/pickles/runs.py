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
from typing import NamedTuple


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
_INT = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06[^\x94]{6})"
_LENGTHS = b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 256))
_INLINE = rb"\x8c(?:" + _LENGTHS + rb")\x94"
_TEXT = rb"(?:" + _REF + rb"|" + _INLINE + rb")"
_NUMBERS = (
    rb"(?:" + _INT * 2 + rb"\x86|" + _INT + rb"\x85|" + _INT * 3 + rb"\x87|\((?:" + _INT
    + rb"){4,8}+t)"
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
    _STATE + b"<f>" + _TEXT + b"<i>(?:N|" + _INT + b")<o>" + _SIZE + b"ub"
    + _STATE + b"<r>" + _TEXT + b"<b>" + _INT + b"<n>" + _INT + b"ub"
)  # fmt: skip
_MEMBERS = "dlm"
_PART = rb"(?:" + _TEXT + rb"|" + _INT + rb")"
_TUPLE = (
    rb"(?:\(" + _PART + rb"{4,64}+t|" + _PART + rb"\x85|" + _PART * 2 + rb"\x86|" + _PART * 3
    + rb"\x87)\x94"
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
    return re.compile(re.sub(rb"(?<!\\)\.", rb"[^\\x94]", run.pattern), re.DOTALL)


# What passes over many pairs; over one; over many plain ones; and what each of these holds once.
# Places have numbers of every kind, and to count exactly would take longer than all else: nothing
# that follows them takes its keys from what they memoise. Each has the last sign twice.
_KINDS: list[tuple[re.Pattern[bytes], re.Pattern[bytes] | None, re.Pattern[bytes], bytes]] = [
    (
        many := _run(_ENTRY),
        re.compile(_SLOT.sub(lambda _: _REF, _ENTRY), re.DOTALL),
        _plain(many),
        b")\x81\x94(",
    ),
    (many := _run(_ITEM), None, many, b")\x81\x94}\x94("),
]
_PATHS = re.compile(b"(?:" + _TEXT + _TUPLE + b")++", re.DOTALL)
_PLAIN_PATHS = _plain(_PATHS)
_KEYED = re.compile(_PATH, re.DOTALL)
_MEMOISED = re.compile(
    rb"(?:[^hjKMJ\x8a\x8c\x94]|" + _REF + b"|" + _INT + rb"|\x8c(?:" + _LENGTHS + rb"))*+\x94",
    re.DOTALL,
)


def find_run(data: bytes, at: int) -> PickleRun | None:
    """Return the run of pairs that begins at an opcode."""
    for many, one, plain, sign in _KINDS:
        found = many.match(data, at)
        if found is not None:
            text = found[0]
            slots = {name: _slot(ref) for name, ref in found.groupdict().items() if ref}
            members = tuple(slots.pop(name) for name in _MEMBERS if name in slots)
            keys = tuple(slots.values())
            if one is None:  # the sign is longer than any argument
                pushed, memoised = text.count(sign), text.count(b"\x94")
                return PickleRun(found.end(), pushed, memoised, False, keys, members, exact=False)
            is_plain = plain.fullmatch(text)
            pairs = text.count(sign) if is_plain else one.subn(b"", text)[1]
            return PickleRun(found.end(), 2 * pairs, _memoised(text, plain), False, keys, members)
    found = _PATHS.match(data, at)
    if found is None:
        return None
    taken = _KEYED.findall(found[0])
    keys = tuple(map(_slot, filter(None, taken)))
    return PickleRun(found.end(), 2 * len(taken), _memoised(found[0], _PLAIN_PATHS), True, keys)


def _memoised(text: bytes, plain: re.Pattern[bytes]) -> int:
    """Return how many values a run memoises."""
    if plain.fullmatch(text):
        return text.count(b"\x94")
    return _MEMOISED.subn(b"", text)[1]


def _slot(ref: bytes) -> int:
    """Return the slot that a BINGET or LONG_BINGET takes from."""
    return int.from_bytes(ref[1:], "little")
