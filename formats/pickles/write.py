"""Write inert data back as a pickle: the inverse of `formats.unpickle`.

What is written loads in Python as what the first pickle would have made, and in our own reader as
equal data. Protocol 2, as torch.save writes it, so that torch's `weights_only` reader takes it; the
number is 4 only where a nested class is named, which protocol 2 cannot do.

The same data gives the same bytes on any machine: sets are ordered, texts and names are shared by
value. Other objects are shared where the data shares them. Nothing recurses over the data.

Source of the opcodes: `pickletools.py`; of how classes are written: `pickle.py` (`save_reduce`).

Nodes of a tree that is written as a pickle: names, calls, references.

A writer builds its trees of these; `formats.pickling` writes them.
"""

from __future__ import annotations

import pickle as op
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError

from .inert import Inert, Ordered


class Global(NamedTuple):
    """A name: `module` and the dotted name in it."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Call:
    """An object that is made by a call.

    Attributes:
        function: what is called: a `Global`, or what stands for one.
        args: its arguments.
        state: what BUILD gives the object afterwards; None gives nothing.
        new: whether only `__new__` is called, as protocol 2 does for plain classes.
        once: whether it stands in the tree only once: then nothing of it is remembered, neither
            here nor by the program that loads it.
    """

    function: Any
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False
    once: bool = False


class Persistent(NamedTuple):
    """An object that lies outside the pickle, by its id."""

    pid: Any


class Pairs(NamedTuple):
    """A dict whose members are made while it is written; it stands in the tree only once."""

    members: Iterable[tuple[Any, Any]]


class Scoped(NamedTuple):
    """A value whose own leaves are replaced by `replace` instead of the pickler's."""

    value: Any
    replace: Replace


# Returns what to write in place of a value that this module does not know: plain data, `Global`,
# `Call`, `Persistent` or `Scoped`.
Replace = Callable[[Any], Any]


__all__ = ["Call", "Global", "Pairs", "Persistent", "Replace", "Scoped", "dumps"]

_BATCH = 1000  # members between two marks, as the standard pickler has it
_MAX_SETS = 64  # sets inside sets: their order is found by pickling their members apart


def dumps(tree: Any, replace: Replace | None = None) -> bytes:
    """Return a pickle of inert data.

    Args:
        tree: plain data, `Inert` records and their classes, and what `replace` knows.
        replace: asked for every value of another type; what it returns is written instead, shared
            wherever the value is.

    Raises:
        UnsupportedError: a value that no pickle can be written of: a type that nobody knows, a
            tuple or a call that holds itself, keyword arguments.
    """
    return _Pickler(replace or _unknown, 0).dump(tree)


def _unknown(value: Any) -> Any:
    raise UnsupportedError(f"a value of type {type(value).__name__} cannot be written as a pickle")


class _Code(NamedTuple):
    """Opcodes to emit."""

    code: bytes


class _Memo(NamedTuple):
    """The value that the opcodes so far have made: it may be referred to from here on."""

    value: Any


class _Steps(NamedTuple):
    """What is to be written next, made when its turn comes."""

    rest: Iterator[Any]


class _Leave(NamedTuple):
    """The end of a scope."""

    replace: Replace


class _Pickler:
    def __init__(self, replace: Replace, depth: int) -> None:
        self._replace = replace
        self._depth = depth
        self._out = bytearray()
        # Values are kept with their numbers: an address may be given again after a value is gone.
        self._memo: dict[int, tuple[int, Any]] = {}
        self._texts: dict[str | Global, int] = {}
        self._numbers = 0
        self._open: set[int] = set()
        self._todo: list[Any] = []
        self._protocol = 2

    def dump(self, tree: Any) -> bytes:
        todo, writers = self._todo, _WRITERS
        todo.append(tree)
        while todo:
            value = todo.pop()
            write = writers.get(type(value))
            if write is not None:
                write(self, value)
            elif not self._known(value):
                self._other(value)
        return op.PROTO + bytes([self._protocol]) + bytes(self._out) + op.STOP

    # --- what is shared -------------------------------------------------------------------------

    def _known(self, value: Any) -> bool:
        """Refer to a value that was written before; False where it was not."""
        known = self._memo.get(id(value))
        if known is None:
            return False
        self._get(known[0])
        return True

    def _get(self, number: int) -> None:
        short = number < 256
        self._out += op.BINGET + bytes([number]) if short else op.LONG_BINGET + _U32(number)

    def _put(self) -> int:
        number = self._numbers
        self._numbers += 1
        self._out += op.BINPUT + bytes([number]) if number < 256 else op.LONG_BINPUT + _U32(number)
        return number

    def memo(self, mark: _Memo) -> None:
        """Number the value on the stack."""
        self._open.discard(id(mark.value))
        self._memo[id(mark.value)] = (self._put(), mark.value)

    def _enter(self, value: Any) -> None:
        if id(value) in self._open:
            raise UnsupportedError("a tuple or a call that holds itself cannot be written")
        self._open.add(id(value))

    # --- leaves ---------------------------------------------------------------------------------

    def code(self, item: _Code) -> None:
        """Emit opcodes."""
        self._out += item.code

    def of_none(self, value: None) -> None:
        """Write None."""
        self._out += op.NONE

    def of_bool(self, value: bool) -> None:
        """Write a bool."""
        self._out += op.NEWTRUE if value else op.NEWFALSE

    def of_int(self, value: int) -> None:
        """Write an int."""
        if 0 <= value < 1 << 8:
            self._out += op.BININT1 + bytes([value])
        elif 0 <= value < 1 << 16:
            self._out += op.BININT2 + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self._out += op.BININT + value.to_bytes(4, "little", signed=True)
        else:
            data = op.encode_long(value)
            short = len(data) < 256
            self._out += op.LONG1 + bytes([len(data)]) if short else op.LONG4 + _U32(len(data))
            self._out += data

    def of_float(self, value: float) -> None:
        """Write a float."""
        self._out += op.BINFLOAT + struct.pack(">d", value)

    def of_str(self, value: str) -> None:
        """Write a text; equal texts once."""
        known = self._texts.get(value)
        if known is not None:
            self._get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        self._out += op.BINUNICODE + _U32(len(data)) + data
        self._texts[value] = self._put()

    def of_global(self, value: Global) -> None:
        """Write a global name; equal names once."""
        known = self._texts.get(value)
        if known is not None:
            self._get(known)
            return
        if "\n" in value.module + value.name:
            raise UnsupportedError(f"the name {value.name!r} cannot be written in a pickle")
        if "." in value.name:
            self._protocol = 4  # from here on names with dots are attributes of attributes
        self._out += op.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        self._texts[value] = self._put()

    def of_bytes(self, value: bytes) -> None:
        """Write bytes, for which protocol 2 has no opcode."""
        self._call(value, Call(_ENCODE, (value.decode("latin1"), "latin1")))

    def of_bytearray(self, value: bytearray) -> None:
        """Write a bytearray."""
        self._call(value, Call(_builtin("bytearray"), (value.decode("latin1"), "latin1")))

    def of_complex(self, value: complex) -> None:
        """Write a complex number."""
        self._call(value, Call(_builtin("complex"), (value.real, value.imag)))

    # --- containers -----------------------------------------------------------------------------

    def of_tuple(self, value: tuple[Any, ...]) -> None:
        """Write a tuple."""
        if not value:
            self._out += op.EMPTY_TUPLE
            return
        if self._known(value):
            return
        code = _SHORT[len(value) - 1] if len(value) <= 3 else _TUPLE
        writers = [_AT_ONCE.get(type(member)) for member in value]
        if len(value) > 3:
            self._out += op.MARK
        if None not in writers:  # sizes, strides, the ids of storages: most of a pickle of tensors
            for write, member in zip(writers, value, strict=True):
                write(self, member)  # type: ignore[misc]
            self._out += code.code
            self._memo[id(value)] = (self._put(), value)
            return
        self._enter(value)
        self._push(*value, code, _Memo(value))

    def of_list(self, value: list[Any]) -> None:
        """Write a list."""
        if self._known(value):
            return
        self._out += op.EMPTY_LIST
        self.memo(_Memo(value))
        self._push(_members(value, op.APPEND, op.APPENDS))

    def of_dict(self, value: Mapping[Any, Any]) -> None:
        """Write a dict."""
        if self._known(value):
            return
        self._out += op.EMPTY_DICT
        self.memo(_Memo(value))
        self._push(_pairs(value.items()))

    def of_pairs(self, value: Pairs) -> None:
        """Write a dict that nothing refers to."""
        self._out += op.EMPTY_DICT
        self._push(_pairs(value.members))

    def of_ordered(self, value: Ordered) -> None:
        """Write an OrderedDict."""
        if self._known(value):
            return
        self._push(_ORDERED, (), _REDUCE, _Memo(value), _pairs(value.items()))

    def of_set(self, value: Any) -> None:
        """Write a set or frozenset, in an order that its members alone decide."""
        self._call(value, Call(_builtin(type(value).__name__), (self._sorted(value),)))

    def _sorted(self, members: Any) -> list[Any]:
        kinds = set(map(type, members))
        if kinds <= {str} or kinds <= {int, bool}:
            return sorted(members)
        if self._depth == _MAX_SETS:
            raise UnsupportedError(f"sets inside sets, more than {_MAX_SETS} deep")
        return sorted(members, key=lambda m: _Pickler(self._replace, self._depth + 1).dump(m))

    # --- objects --------------------------------------------------------------------------------

    def of_call(self, value: Call) -> None:
        """Write an object that is made by a call."""
        self._call(value, value)

    def _call(self, value: Any, made: Call) -> None:
        """Write `made`; `value` is what it stands for."""
        code = _NEWOBJ if made.new else _REDUCE
        state = () if made.state is None else (made.state, _BUILD)
        if made.once:
            if type(made.state) is dict:
                state = (Pairs(made.state.items()), _BUILD)
            self._push(made.function, made.args, code, *state)
            return
        if self._known(value):
            return
        self._enter(value)
        self._push(made.function, made.args, code, _Memo(value), *state)

    def of_persistent(self, value: Persistent) -> None:
        """Write a reference to what lies outside."""
        self._push(value.pid, _BINPERSID)

    def of_scoped(self, value: Scoped) -> None:
        """Write a value with another way to replace its leaves."""
        self._push(value.value, _Leave(self._replace))
        self._replace = value.replace

    def leave(self, mark: _Leave) -> None:
        """Go on as before the scope."""
        self._replace = mark.replace

    def steps(self, value: _Steps) -> None:
        """Write steps up to one that takes others, and come back for the rest."""
        at_once = _AT_ONCE.get
        for step in value.rest:
            write = at_once(type(step))
            if write is None:
                self._todo += (value, step)
                return
            write(self, step)

    def _other(self, value: Any) -> None:
        if isinstance(value, Inert):
            self._inert(value)
        elif isinstance(value, type) and issubclass(value, Inert):
            self.of_global(Global(value.module, value.qualname[len(value.module) + 1 :]))
        else:
            made = self._replace(value)
            if type(made) is Call:
                self._call(value, made)
            else:
                self._push(made)

    def _inert(self, value: Inert) -> None:
        if value.keywords:
            raise UnsupportedError(f"{value.qualname} was made with keywords: it cannot be written")
        self._enter(value)
        pairs = all(type(item) is tuple and len(item) == 2 for item in value.items)
        if value.filled == "set" and pairs:
            items = _pairs(value.items)
        elif value.filled == "add":
            items = _members(self._sorted(value.items), op.ADDITEMS, op.ADDITEMS)
        else:
            items = _members(value.items, op.APPEND, op.APPENDS)
        state = [] if value.state is None else [value.state, _BUILD]
        code = _REDUCE if value.called else _NEWOBJ
        self._push(type(value), value.args, code, _Memo(value), items, *state)

    def _push(self, *steps: Any) -> None:
        """Let `steps` be written next, the first of them first."""
        self._todo.extend(reversed(steps))


def _members(values: Iterable[Any], one: bytes, many: bytes) -> _Steps:
    return _Steps(_batches(((value,) for value in values), one, many))


def _pairs(pairs: Iterable[tuple[Any, Any]]) -> _Steps:
    return _Steps(_batches(pairs, op.SETITEM, op.SETITEMS))


def _batches(items: Iterable[tuple[Any, ...]], one: bytes, many: bytes) -> Iterator[Any]:
    """Yield the steps that fill a container, marked as the standard pickler marks them."""
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        single = len(batch) == 1 and one != op.ADDITEMS
        if not single:
            yield _Code(op.MARK)
        for item in batch:
            yield from item
        yield _Code(one if single else many)


def _builtin(name: str) -> Global:
    return Global("__builtin__", name)  # protocol 2 spells it as Python 2 did


_ENCODE = Global("_codecs", "encode")
_ORDERED = Global("collections", "OrderedDict")
_SHORT, _TUPLE = (_Code(op.TUPLE1), _Code(op.TUPLE2), _Code(op.TUPLE3)), _Code(op.TUPLE)
_REDUCE, _NEWOBJ, _BUILD = _Code(op.REDUCE), _Code(op.NEWOBJ), _Code(op.BUILD)
_BINPERSID = _Code(op.BINPERSID)
_U32 = struct.Struct("<I").pack

_Write = Callable[[_Pickler, Any], None]
# What is written without writing anything else first.
_AT_ONCE: Mapping[type, _Write] = {
    _Code: _Pickler.code,
    _Memo: _Pickler.memo,
    type(None): _Pickler.of_none,
    bool: _Pickler.of_bool,
    int: _Pickler.of_int,
    float: _Pickler.of_float,
    str: _Pickler.of_str,
    Global: _Pickler.of_global,
}
_WRITERS: Mapping[type, _Write] = {
    **_AT_ONCE,
    _Leave: _Pickler.leave,
    _Steps: _Pickler.steps,
    bytes: _Pickler.of_bytes,
    bytearray: _Pickler.of_bytearray,
    complex: _Pickler.of_complex,
    tuple: _Pickler.of_tuple,
    list: _Pickler.of_list,
    dict: _Pickler.of_dict,
    Pairs: _Pickler.of_pairs,
    Ordered: _Pickler.of_ordered,
    set: _Pickler.of_set,
    frozenset: _Pickler.of_set,
    Call: _Pickler.of_call,
    Persistent: _Pickler.of_persistent,
    Scoped: _Pickler.of_scoped,
}
