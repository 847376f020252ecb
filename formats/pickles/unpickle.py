"""The one unpickler: it builds inert records and runs nothing.

A pickle is a program. This reader gives that program no functions: every global is looked up by
its exact name in a table and becomes a stand-in; no module is imported and no attribute of a real
object is read. What the table does not name becomes an opaque record class that remembers how it
was used.

The verdict on such a name depends on what the pickle does with it:
- *named*, or a third party's class that is *built*: an opaque object, worth a note, because
  trainers do pickle their own configurations;
- *called*, and it belongs to Python, its standard library, torch or numpy: UnsafeError, because no
  checkpoint needs it and every known attack does just this.

Rules that hold for every load: STOP is the last byte; memory is bounded whatever lengths and memo
indices say; results are never walked recursively (a list can be a million deep).
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from ftckpt.errors import CorruptError, FtckptError, NoResourceError, UnsafeError
from ftckpt.workers.budget import budget, held
from ftckpt.workers.memory import MARGIN, bounded, no_gc

from .inert import Inert, Ordered, Sealed, inert, refuse, sealed, unknown
from .keys import FEW, check_keys
from .names import BUILTINS
from .walk import refuse_unfolding

__all__ = [
    "BUILTINS",
    "Inert",
    "Loaded",
    "Ordered",
    "Sealed",
    "inert",
    "load",
    "refuse",
    "sealed",
]

# What parsing may cost beyond the input itself. Real metadata needs about six times its size.
GROWTH = 64 << 20
GROWTH_PER_BYTE = 16

# Memo slots beyond one a byte: the unpickler starts with a few and doubles.
_MEMO_SLACK = 64 << 10


class _NoBuffers:
    """Out-of-band buffers of protocol 5: a file has none."""

    def __iter__(self) -> _NoBuffers:
        return self

    def __next__(self) -> NoReturn:
        refuse("refers to buffers outside its file")


class Loaded(NamedTuple):
    """What one pickle held.

    Attributes:
        value: the object, made of plain data, stand-ins and `Inert` records.
        opaque: names outside the table, in order of appearance.
        consumed: bytes of the input up to and including STOP.
    """

    value: Any
    opaque: tuple[str, ...]
    consumed: int


Persistent = Callable[[Any], Any]


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BufferedIOBase, table: Mapping[str, Any], persistent: Persistent | None
    ) -> None:
        super().__init__(stream, encoding="latin1", buffers=_NoBuffers())
        self._table = table
        self._persistent = _resolver(persistent)
        self.opaque: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        qualname = f"{module}.{name}"
        found = self._table.get(qualname)
        if found is not None:
            return sealed(found) if type(found) is FunctionType else found
        cls = self.opaque.get(qualname)
        if cls is None:
            cls = self.opaque[qualname] = unknown(module, name)
        return cls

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)


def _resolver(persistent: Persistent | None) -> Persistent:
    return _refuse_storage if persistent is None else persistent


def _refuse_storage(_: Any) -> NoReturn:
    raise UnsafeError(
        "a pickle refers to outside storage where there is none", kind="unsafe-pickle"
    )


def load(
    data: bytes,
    *,
    file: str,
    table: Mapping[str, Any],
    persistent: Persistent | None = None,
    exact: bool = True,
    offset: int = 0,
) -> Loaded:
    """Parse one pickle into inert data.

    Args:
        data: the pickle; where not `exact`, more may follow it.
        file: the file that it is from, for messages.
        table: qualified global name -> stand-in (class, function or value).
        persistent: resolves persistent ids; None refuses them.
        exact: whether STOP must be the last byte.
        offset: where `data` starts in `file`, for messages.

    Raises:
        UnsafeError: it calls what is not allowed, changes a class, hides bytes after STOP, or asks
            for more memory than its size can need (kind `unsafe-pickle`).
        NoResourceError: it needs more than the budget has.
        CorruptError: it ends early or is not a pickle (kind `bad-pickle`).
    """
    from .sniff import refuse_inside

    size = len(data)
    most = GROWTH + GROWTH_PER_BYTE * size
    # What is held is asked for a large pickle alone: a store has one for each tensor.
    left = most if most <= budget() // 2 else max(GROWTH, budget() - held() - MARGIN)

    def parse() -> tuple[Any, int, _Unpickler]:
        with bounded(min(most, left)), no_gc(), _no_extensions():
            end, stopped, nested, suspects = check_keys(data)
            # Nothing runs that was not checked: the rest is made opcodes that do not exist.
            rest = b"" if stopped else b"\xff" * (size - end)
            if suspects > FEW:
                from .key_collisions import guarded

                known, resolve = guarded(data, end, _resolver(persistent))
                unpickler = _Unpickler(io.BytesIO(known + rest), table, resolve)
            else:
                stream = io.BytesIO(data[:end] + rest if rest else data)
                unpickler = _Unpickler(stream, table, persistent)
            value = unpickler.load()
            refuse_unfolding(value)
            for start, behind in nested:
                refuse_inside(data[start:behind])
        if exact and end != size:
            raise UnsafeError(
                f"the pickle in {file} hides bytes after its end",
                kind="unsafe-pickle",
                file=file,
                offset=offset + end,
                length=size - end,
            )
        if unpickler.__sizeof__() > _MEMO_SLACK + 16 * size:
            refuse("reserves memo slots that its size can never fill")
        return value, end, unpickler

    try:
        value, consumed, unpickler = parse()
    except FtckptError as error:
        error.file = error.file or file
        raise
    except MemoryError:
        if left < most:
            needed = -(-2 * most >> 20)  # from there on the size alone bounds it
            raise NoResourceError(
                f"the pickle in {file} of {size >> 20} MiB needs more memory than the"
                f" {left >> 20} MiB that are left of what is allowed",
                hint=f"--max-memory {needed}MiB",
            ) from None
        raise UnsafeError(
            f"the pickle in {file} asks for far more memory than its {size} bytes can need",
            kind="unsafe-pickle",
            file=file,
            offset=offset,
            length=size,
        ) from None
    except Exception as error:  # the C unpickler raises almost anything on damaged input
        reason = " ".join(str(error).split())[:120]
        raise CorruptError(
            f"the pickle in {file} is damaged ({type(error).__name__}: {reason})",
            kind="bad-pickle",
            file=file,
            offset=offset,
            length=size,
        ) from None
    return Loaded(value, tuple(unpickler.opaque), consumed)


@contextmanager
def _no_extensions() -> Iterator[None]:
    """Refuse the EXT opcodes: they look names up in a registry of this process.

    The unpickler asks the registry's cache before `find_class`, and fills it with stand-ins.
    """
    cache: dict[int, Any] = copyreg._extension_cache  # type: ignore[attr-defined]
    cache.clear()
    try:
        yield
    except ValueError as error:
        if str(error).startswith("unregistered extension code"):
            refuse("uses the extension registry")
        raise
    if cache:
        cache.clear()
        refuse("uses the extension registry")
