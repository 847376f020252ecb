"""Check what a pickle will use as keys, before the unpickler hashes it.

Python computes the hash of a tuple anew each time, member by member. A pickle of a few hundred
bytes can make a tuple that holds another one twice, sixty levels deep: as a dict key or set item it
keeps the C unpickler busy for ever, and no signal handler of Python runs meanwhile. Equality costs
the same.

So the pickle is walked first, opcode by opcode, with a weight in place of every value: how many
values its hash would visit. A weight is never less than the truth:
- a tuple or frozenset weighs the sum of its members, counted as often as it holds them;
- what a call returns weighs `CALLED`: stand-ins return records with a hash of their own, or tuples
  that `limited` has checked;
- everything else is one value; a large integer is as many as its words.

Sources: CPython's `Modules/_pickle.c` (the opcodes, the stack with its marks, the memo).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.errors import UnsafeError

from .numbers import INT, MORE, THREE, TWO

if TYPE_CHECKING:
    from .repeated_records import PickleRun

# Fewer colliding keys cost nothing that matters.
FEW = 1000
# What one key may weigh. Real keys are texts, numbers, and tuples of a few of them.
LIMIT = 2048
_MOST = LIMIT + 1  # the walk counts no further
CALLED = 32
# What a call without arguments weighs: it makes a record, each with a hash of its own, or always
# the same value. Told apart from sums by its identity.
_RECORD = 32.0
# What `limited` lets through: a torch.Size has at most 64 numbers.
_BUILT = 256

_KEY = rb"X(?:\x01\x00{3}.|\x02\x00{3}..|\x03\x00{3}...|\x04\x00{3}....|\x05\x00{3}.{5})"
_EARLY = 256
_BLURRED = 1 << 62  # above every slot
# What lies in a slot that a tensor may have filled: perhaps a text, and no tuple of which many can
# collide. No sum of other weights is the same.
_TENSOR_WEIGHT = 128.5
_LIGHT = 8

# Opcodes that push a value of weight 1, by the length of their argument.
_PLAIN = dict.fromkeys(b"N]})\x88\x89\x8f\x97", 0) | {
    ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8,
}  # fmt: skip
# Opcodes that push a text or bytes, by the length of the length that follows.
_COUNTED = {
    0x8C: 1, ord("C"): 1, ord("U"): 1, ord("X"): 4, ord("B"): 4, ord("T"): 4, 0x8D: 8, 0x8E: 8,
    0x96: 8,
}  # fmt: skip
_LINES = {ord("S"): 1, ord("V"): 1, ord("F"): 1, ord("I"): 1, ord("L"): 1, ord("c"): 2}
FRAME = 0x95
_SKIPPED = {0x80: 1, FRAME: 8, 0x98: 0}
_EXTENSIONS = {0x82: 1, 0x83: 2, 0x84: 4}


# What bytes begin with that may be a pickle, or an archive that holds one.
NESTED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\3\4")
_NO_ROOM = 64 << 20  # bytes that a bytearray may lack at the end of a cut file
_BYTES = frozenset(b"BC\x8e\x96TU")
_MOST_NESTED = 1 << 16


class Checked(NamedTuple):
    """How far a pickle was walked.

    Attributes:
        end: how many bytes were checked.
        stopped: whether the last of them is STOP. Where it is not, the unpickler must not go on.
        nested: (start, end) of bytes in it that begin as a pickle, or as an archive.
        suspects: how many keys are tuples, sets, large numbers, or what a call returns: Python
            hashes these by sums that anybody can solve, so that different ones may collide.
    """

    end: int
    stopped: bool
    nested: tuple[tuple[int, int], ...]
    suspects: int = 0


class NoRoomError(MemoryError):
    """A bytearray or the memo would be far longer than the pickle.

    Attributes:
        at: where its opcode begins.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


def check_keys(data: bytes) -> Checked:
    """Walk a pickle up to its STOP, or to what the unpickler cannot pass either.

    Raises:
        UnsafeError: a key would take unbounded time (`unsafe-pickle`).
        NoRoomError: a bytearray or the memo would be far longer than the pickle.
    """
    return _known(data) if len(data) <= _SMALL else _checked(data)


def _checked(data: bytes) -> Checked:
    if len(data) >= _LARGE:
        try:
            return _walked(data, _Walk(runs=True))
        except UnsafeError:  # perhaps it only takes what lies between heavy values for heavy
            pass
    return _walked(data, _Walk())


def _walked(data: bytes, walk: _Walk) -> Checked:
    try:
        return Checked(walk.walk(data), True, tuple(walk.nested), walk.suspects)
    except (IndexError, ValueError):  # it ends early, its stack is empty, an unknown opcode
        return Checked(walk.at, False, tuple(walk.nested), walk.suspects)


def key_opcodes(data: bytes) -> list[int]:
    """Return where a pickle hashes keys, names a persistent id or begins a frame, in order."""
    walk = _Walk(whole=True)
    with suppress(IndexError, ValueError):
        walk.walk(data)
    return walk.hashing


# Tensors of one shape, each with a pickle of its own, have one and the same.
_SMALL = 1024
# In a smaller pickle the expressions for runs take longer to compile than they save, and so does
# the one for tensors.
_LARGE = 1 << 20
_FOR_TENSORS = 16 << 10
_known = lru_cache(maxsize=1024)(_checked)


class _Walk:
    """One pass over a pickle.

    Attributes:
        at: where the last opcode began.
        nested: see `Checked`.
        suspects: see `Checked`.
        hashing: see `key_opcodes`; only where nothing is passed over (`whole`).
    """

    def __init__(self, *, runs: bool = False, whole: bool = False) -> None:
        self.at = 0
        self.nested: list[tuple[int, int]] = []
        self.suspects = 0
        self.hashing: list[int] = []
        self.whole = whole
        self._runs = runs
        self._memo: dict[int, float] = {}  # only what weighs more than one value
        # Slots that runs filled: where they begin and end, and what each of them weighs at most.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._weights: list[float] = []

    def walk(self, data: bytes) -> int:
        """Return where the pickle ends; see `check_keys`."""
        stack: list[float] = []
        push, pop = stack.append, stack.pop
        marks: list[int] = []
        memo = self._memo
        runs, take, begins = self._runs, self._take, self._begins
        memoised = -1  # MEMOIZE counts by itself; -1: it was not met
        numbered = False
        least: float = 1  # what late memo slots weigh where tensors were passed over
        plain, counted, end = _PLAIN, _COUNTED, len(data)
        tensor = _nothing if self.whole or end < _FOR_TENSORS else _tensor(end).match
        at = 0
        while True:
            self.at = at
            op = data[at]
            if op == 0x28:  # MARK
                if data[at + 1] == 0x28 and (found := tensor(data, at)) is not None:
                    one, two, three = found.groups()
                    get = memo.get
                    if max(get(one[0], 1), get(two[0], 1), get(three[0], 1)) <= _LIGHT:
                        stack[-1] = CALLED
                        numbered, least = True, _TENSOR_WEIGHT
                        at = found.end()
                        continue
                marks.append(len(stack))
                at += 1
                if runs and (run := take(data, at, memoised, stack)) is not None:
                    at, memoised = run.end, memoised + run.memoised
            elif op in plain:
                push(1)
                at += 1 + plain[op]
            elif op == 0x68 or op == 0x6A or op == 0x67:  # BINGET, LONG_BINGET, GET
                if op == 0x68:
                    index, at = data[at + 1], at + 2
                elif op == 0x6A:
                    index, at = int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
                else:
                    line = self._line(data, at)
                    index, at = int(data[at + 1 : line]), line + 1
                weight = memo.get(index, 1)
                if begins:
                    weight = self._weigh(index)
                push(least if index >= _EARLY and weight < least else weight)
            elif op == 0x71 or op == 0x72 or op == 0x70:  # BINPUT, LONG_BINPUT, PUT
                if op == 0x71:
                    index, at = data[at + 1], at + 2
                elif op == 0x72:
                    index, at = int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
                else:
                    line = self._line(data, at)
                    index, at = int(data[at + 1 : line]), line + 1
                # A slot takes an opcode to fill, and the memo is as long as the highest says.
                if index > end + _EARLY:
                    raise NoRoomError(self.at)
                numbered = True
                weight = stack[-1]
                if weight > 1 or index in memo:
                    memo[index] = weight
            elif op == 0x94:  # MEMOIZE
                memoised += 1
                at += 1
                if stack[-1] > 1:
                    memo[memoised] = stack[-1]
                    if runs and (run := take(data, at, memoised, stack)) is not None:
                        at, memoised = run.end, memoised + run.memoised
            elif op in counted:
                begin = at + 1 + counted[op]
                at = begin + int.from_bytes(data[at + 1 : begin], "little")
                if op == 0x96 and at - end > _NO_ROOM:
                    # CPython frees a bytearray that it has no memory for with a count that it never
                    # set, and may complain about it on stderr.
                    raise NoRoomError(self.at)
                push(1)
                if op in _BYTES and data.startswith(NESTED, begin):
                    if len(self.nested) == _MOST_NESTED:
                        raise UnsafeError(
                            f"a pickle holds more than {_MOST_NESTED} others", kind="unsafe-pickle"
                        )
                    self.nested.append((begin, at))
            elif op == 0x85:  # TUPLE1
                stack[-1] = min(stack[-1] + 1, _MOST)
                at += 1
            elif op == 0x86:
                last = pop()
                stack[-1] = min(stack[-1] + last + 1, _MOST)
                at += 1
            elif op == 0x87:
                last = pop() + pop()
                stack[-1] = min(stack[-1] + last + 1, _MOST)
                at += 1
            elif op == 0x74 or op == 0x91:  # TUPLE, FROZENSET
                mark = marks.pop()
                if op == 0x91:
                    self._check(stack[mark:])
                stack[mark:] = [min(1 + sum(stack[mark:]), _MOST)]
                at += 1
            elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
                stack[-1] = CALLED if pop() > 1 else _RECORD
                at += 1
            elif op == 0x73:  # SETITEM
                pop()
                weight = pop()
                if weight > 1:
                    self._check([weight])
                elif self.whole:
                    self.hashing.append(at)
                at += 1
            elif op == 0x75 or op == 0x64:  # SETITEMS, DICT
                mark = marks.pop()
                self._check(stack[mark::2])
                del stack[mark:]
                if op == 0x64:
                    push(1)
                at += 1
            elif op == 0x90:  # ADDITEMS
                mark = marks.pop()
                self._check(stack[mark:])
                del stack[mark:]
                at += 1
            elif op == 0x61 or op == 0x62:  # APPEND, BUILD
                pop()
                at += 1
                if runs and (run := take(data, at, memoised, stack)) is not None:
                    at, memoised = run.end, memoised + run.memoised
            elif op == 0x65:  # APPENDS
                del stack[marks.pop() :]
                at += 1
            elif op == 0x2E:  # STOP
                return at + 1
            else:
                at = self._rare(op, data, stack, marks)
            if at > end:
                self.at = end  # nothing follows that could be executed
                raise IndexError
            if memoised >= 0 and numbered:
                raise UnsafeError(
                    "a pickle numbers its memo in two ways, which no pickler does",
                    kind="unsafe-pickle",
                )

    def _check(self, weights: list[float]) -> None:
        """Check the keys of one opcode."""
        if self.whole:
            self.hashing.append(self.at)
        if weights and (most := max(weights)) > 1:
            if most > LIMIT:
                _refuse()
            self._suspect(weights)

    def _suspect(self, weights: list[float]) -> None:
        """Count the keys of which different ones may have one hash."""
        if weights.count(_TENSOR_WEIGHT) < len(weights):
            self.suspects += sum(
                weight > 1 and weight != _TENSOR_WEIGHT and weight is not _RECORD
                for weight in weights
            )

    def _note(self, at: int) -> None:
        """Remember an opcode that is wanted (see `key_opcodes`)."""
        if self.whole:
            self.hashing.append(at)

    def _take(self, data: bytes, at: int, memoised: int, stack: list[float]) -> PickleRun | None:
        """Pass over a run of alike records, where one begins: push what it pushes."""
        from .repeated_records import find_run

        run = find_run(data, at) if memoised >= 0 else None
        if run is None:
            return None
        first = memoised + 1
        keys = [*map(self._weigh, run.keys)]
        if (
            max(keys, default=0) > _TENSOR_WEIGHT
            or max(map(self._weigh, run.members), default=0) > CALLED
            or max(run.keys, default=0) >= first  # taken from the run itself
        ):
            _refuse()
        self._suspect(keys)
        if not self._ends or self._ends[-1] < _BLURRED:  # else nothing later is numbered exactly
            self._begins.append(first)
            self._ends.append(first + run.memoised if run.exact else _BLURRED)
            self._weights.append(_MOST if run.paths or not run.exact else _TENSOR_WEIGHT)
        stack += [_TENSOR_WEIGHT, _MOST if run.paths else CALLED] * (run.pushed // 2)
        return run

    def _weigh(self, index: int) -> float:
        """Return what a slot of the memo weighs at most."""
        known = self._memo.get(index, 1)
        place = bisect_right(self._begins, index) - 1
        if place >= 0 and index < self._ends[place]:
            return max(known, self._weights[place])
        return known

    def _line(self, data: bytes, at: int) -> int:
        """Return where the line ends that an opcode at `at` takes."""
        end = data.find(b"\n", at)
        if end < 0:
            self.at = len(data)
            raise IndexError
        return end

    def _rare(self, op: int, data: bytes, stack: list[float], marks: list[int]) -> int:
        """Follow one opcode that real pickles seldom hold; return where it ends."""
        at = self.at
        if op in _LINES:
            begin = at
            for _ in range(_LINES[op]):
                at = self._line(data, at + 1)
            stack.append(1 + (at - begin >> 4 if op in b"IL" else 0))
            return at + 1
        if op in _SKIPPED:
            if op == FRAME:
                self._note(at)
            return at + 1 + _SKIPPED[op]
        if op in (0x8A, 0x8B):  # LONG1, LONG4
            width = 1 if op == 0x8A else 4
            length = int.from_bytes(data[at + 1 : at + 1 + width], "little", signed=width == 4)
            if length < 0:
                raise ValueError
            stack.append(1 + (length >> 3))
            return at + 1 + width + length
        if op == 0x30:  # POP takes a mark where one is on top
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif op == 0x31:  # POP_MARK
            del stack[marks.pop() :]
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op == 0x6C:  # LIST
            stack[marks.pop() :] = [1]
        elif op == 0x6F:  # OBJ
            stack[marks.pop() :] = [CALLED]
        elif op == 0x69:  # INST
            stack[marks.pop() :] = [CALLED]
            return self._line(data, self._line(data, at) + 1) + 1
        elif op == 0x50:  # PERSID
            self._note(at)
            stack.append(CALLED)
            return self._line(data, at) + 1
        elif op == 0x51:  # BINPERSID
            self._note(at)
            stack[-1] = CALLED
        elif op == 0x92:  # NEWOBJ_EX
            del stack[-2:]
            stack[-1] = CALLED
        elif op == 0x93:  # STACK_GLOBAL
            stack.pop()
            stack[-1] = 1
        elif op in _EXTENSIONS:
            stack.append(CALLED)
            return at + 1 + _EXTENSIONS[op]
        else:
            raise ValueError
        return at + 1


def _nothing(data: bytes, at: int) -> None:
    """Match nothing."""


def _tensor(nbytes: int) -> re.Pattern[bytes]:
    """Return the arguments of one tensor as torch.save writes them, up to the call.

    They are most of a large pickle. They take only early memo slots, which the walk knows, and fill
    only late ones, of which the walk assumes that each holds such a tuple. A slot's number is not
    far above the length of the pickle: the unpickler makes a memo as long as the highest.
    """
    return _tensor_below(*((2, nbytes >> 16) if nbytes < 1 << 24 else (3, min(nbytes >> 24, 255))))


@lru_cache(maxsize=64)
def _tensor_below(byte: int, most: int) -> re.Pattern[bytes]:
    """See `_tensor`: of a slot's number, byte 2 or 3 is at most `most`, and those above are 0."""
    top = rb"[\x00-" + re.escape(bytes([most])) + rb"]"
    some = rb"[\x01-" + re.escape(bytes([most])) + rb"]" if most else rb"(?!)"
    if byte == 2:
        put = rb"r.(?:[^\x00]" + top + rb"|\x00" + some + rb")\x00"
    else:
        put = rb"r.(?:[^\x00]." + top + rb"|\x00[^\x00]" + top + rb"|\x00\x00" + some + rb")"
    shape = (
        rb"(?:\)|" + INT + rb"\x85" + put + rb"|" + TWO + rb"\x86" + put
        + rb"|" + THREE + rb"\x87" + put + rb"|\(" + MORE + rb"t" + put + rb")"
    )  # fmt: skip
    return re.compile(
        rb"\(\(h(.)h(.)" + _KEY + put + rb"h(.)" + INT + rb"t" + put + rb"Q" + INT + shape * 2
        + rb"[\x88\x89]h.\)R" + put + rb"t" + put + rb"R",
        re.DOTALL,
    )  # fmt: skip


def _refuse() -> None:
    raise UnsafeError(
        "a pickle uses a key of tuples nested in one another, or a very large number: comparing"
        " such keys can take for ever",
        kind="unsafe-pickle",
        hint="treat the file as hostile: find out who wrote it",
    )


def check_key(value: Any) -> None:
    """Check a value that a stand-in is about to hash.

    Raises:
        UnsafeError: hashing it would take unbounded time (`unsafe-pickle`).
    """
    if type(value) is int:
        if value.bit_length() >> 6 > LIMIT:
            _refuse()
    elif isinstance(value, (tuple, frozenset)) and _is_heavy(value, LIMIT):
        _refuse()


def limited(value: Any) -> Any:
    """Return what a stand-in made, which the walk takes for `CALLED` values.

    Raises:
        UnsafeError: it is a tuple of far more (`unsafe-pickle`).
    """
    if type(value) is tuple and _is_heavy(value, _BUILT):
        _refuse()
    return value


def _is_heavy(value: Any, most: int) -> bool:
    """Say whether a hash of `value` visits more than a number of values."""
    found = 0
    todo = [value]
    while todo:
        one = todo.pop()
        found += 1
        if isinstance(one, (tuple, frozenset)):
            found += len(one)
            if found > 2 * most:  # a member is counted twice: in its tuple, and by itself
                return True
            todo += one
    return False
