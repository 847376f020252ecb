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
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

from ftckpt.errors import CorruptError, FtckptError, NoResourceError, UnsafeError
from ftckpt.memory import MARGIN, bounded

# What parsing may cost beyond the input itself. Real metadata needs about six times its size.
GROWTH = 64 << 20
GROWTH_PER_BYTE = 16

# Memo slots beyond one a byte: the unpickler starts with a few and doubles.
_MEMO_SLACK = 64 << 10
# Hashing a tuple recurses on the C stack without a limit, 67 bytes a level measured: a tuple nested
# a million deep as a dict key kills the process. A pickle too short for that needs no own stack.
_SHALLOW = 16 << 10
_STACK_PER_LEVEL = 128
_MAX_STACK = 2 << 30
_TUPLE_BYTES = 48

# Whose names may not be called: Python's own (all versions), its installers', torch's, numpy's.
_OURS = frozenset(sys.stdlib_module_names) | {
    "__builtin__", "__builtins__", "copy_reg", "cPickle", "cStringIO", "StringIO", "exceptions",
    "commands", "popen2", "urllib2", "httplib", "SocketServer", "_winreg", "UserDict", "UserList",
    "ConfigParser", "Tkinter", "xmlrpclib", "posix", "nt", "imp", "asynchat", "asyncore", "smtpd",
    "distutils", "binhex", "aifc", "audioop", "cgi", "cgitb", "crypt", "lib2to3", "mailcap",
    "msilib", "nntplib", "ossaudiodev", "pipes", "spwd", "sunau", "telnetlib", "uu", "xdrlib",
    "_pyrepl", "pip", "setuptools", "pkg_resources", "_distutils_hack",
    "torch", "numpy", "functorch", "torchgen",
}  # fmt: skip
# Third parties' functions that run what they are given; their other names are mere classes.
_GADGETS = frozenset((
    "pandas.eval", "pandas.core.computation.eval.eval", "pandas.read_pickle",
    "pandas.io.pickle.read_pickle", "joblib.load", "joblib.numpy_pickle.load", "dill.loads",
    "dill.load", "dill._dill.loads", "dill._dill.load", "cloudpickle.loads", "cloudpickle.load",
    "yaml.unsafe_load", "yaml.load", "fickling.load", "fsspec.open", "sympy.sympify",
    "IPython.core.interactiveshell.InteractiveShell", "IPython.utils.process.system",
    "IPython.utils._process_posix.system", "pytest.main", "_pytest.config.main", "nose.run",
    "sh.Command", "plumbum.local", "fire.Fire", "paramiko.ProxyCommand",
))  # fmt: skip


class Sealed(type):
    """Metaclass of every stand-in: a pickle can never change a class (BUILD does setattr)."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise UnsafeError(f"a pickle tries to set {name!r} on a class", kind="unsafe-pickle")

    @property
    def __setstate__(cls) -> Any:
        # BUILD looks this up on whatever is on the stack. On an instance it finds the method of
        # the class; on a class it comes here first, because a property is a data descriptor.
        raise UnsafeError("a pickle tries to change a class", kind="unsafe-pickle")


class Inert(metaclass=Sealed):
    """An object of a class that is not imported: its name, and what the pickle gave it.

    Attributes:
        qualname: `module.name` as the pickle spells it.
        args: positional arguments it was built with.
        state: what BUILD gave it; None where it gave nothing.
        items: what was appended, added or set on it, in order (pairs for mappings).
    """

    __slots__ = ("args", "items", "state")
    qualname: ClassVar[str] = ""
    refused: ClassVar[bool] = False

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Record a call or an instantiation; refuse it where the name must not be called."""
        if cls.refused:
            raise UnsafeError(
                f"a pickle calls {cls.qualname}, which no checkpoint needs; nothing was executed",
                kind="unsafe-pickle",
                hint="treat the file as hostile: find out who wrote it",
            )
        self = object.__new__(cls)
        self.args = args
        self.state = kwargs or None
        self.items = []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Record a list item."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Record list items."""
        self.items.extend(items)

    def add(self, item: Any) -> None:
        """Record a set item."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the state, whether it was a dict or a slots pair."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
        return state.get(name, default) if isinstance(state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.qualname}>"


def inert(qualname: str, *, refused: bool = False) -> type[Inert]:
    """Return a fresh inert class for `module.name`."""
    return cast(
        "type[Inert]",
        Sealed("Inert", (Inert,), {"__slots__": (), "qualname": qualname, "refused": refused}),
    )


def refuse(what: str) -> NoReturn:
    """Raise UnsafeError: a pickle does `what`."""
    raise UnsafeError(f"a pickle {what}", kind="unsafe-pickle")


@lru_cache(maxsize=4096)
def _unknown(module: str, name: str) -> type[Inert]:
    """Return the record class of a name outside the table; classes are sealed, so shared."""
    # A dotted name walks attributes (`os` + `path.join`): judged by its module alone.
    qualname = f"{module}.{name}"
    return inert(qualname, refused=module.partition(".")[0] in _OURS or qualname in _GADGETS)


@lru_cache(maxsize=1024)
def sealed(build: Callable[..., Any]) -> type:
    """Return a class that can be called as `build`, and that a pickle cannot change.

    BUILD on a function writes into its `__dict__`, or sets `__defaults__` and `__code__`, for every
    load that follows. A sealed class has nothing to write to.
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return build(*args, **kwargs)

    return Sealed(build.__name__, (), {"__slots__": (), "__new__": new})


class Ordered(dict[Any, Any], metaclass=Sealed):
    """An OrderedDict: a plain dict, whose methods a pickle cannot shadow by attributes.

    torch keeps `_metadata` (module versions) as an attribute of a state_dict; it is dropped here.
    """

    __slots__ = ()

    def __setstate__(self, state: Any) -> None: ...


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
        self._persistent = persistent
        self.opaque: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        qualname = f"{module}.{name}"
        found = self._table.get(qualname)
        if found is not None:
            return sealed(found) if type(found) is FunctionType else found
        cls = self.opaque.get(qualname)
        if cls is None:
            cls = self.opaque[qualname] = _unknown(module, name)
        return cls

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnsafeError(
                "a pickle refers to outside storage where there is none", kind="unsafe-pickle"
            )
        return self._persistent(pid)


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
        CorruptError: it ends early or is no pickle (kind `bad-pickle`).
    """
    return load_stream(
        io.BytesIO(data),
        len(data),
        file=file,
        table=table,
        persistent=persistent,
        exact=exact,
        offset=offset,
    )


def load_stream(
    stream: io.BufferedIOBase,
    size: int,
    *,
    file: str,
    table: Mapping[str, Any],
    persistent: Persistent | None = None,
    exact: bool = True,
    offset: int = 0,
) -> Loaded:
    """Parse one pickle of `size` bytes from a stream; see `load`.

    A large pickle is not held in memory: the unpickler asks for a frame (64 KiB) at a time.
    """
    unpickler = _Unpickler(stream, table, persistent)

    def parse() -> tuple[Any, int]:
        with bounded(GROWTH + GROWTH_PER_BYTE * size), no_gc(), _no_extensions():
            value = unpickler.load()
            consumed = stream.tell()
            if exact:
                _refuse_trailing(unpickler, consumed, size, file, offset)
        if unpickler.__sizeof__() > _MEMO_SLACK + 16 * size:
            refuse("reserves memo slots that its size can never fill")
        return value, consumed

    try:
        value, consumed = parse() if size <= _SHALLOW else _deep(parse, size)
    except FtckptError as error:
        error.file = error.file or file
        raise
    except MemoryError:
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


_stack_lock = threading.Lock()


def _deep(parse: Callable[[], tuple[Any, int]], size: int) -> tuple[Any, int]:
    """Run `parse` on a stack that holds the deepest tuple which `size` bytes can nest.

    The stack is address space: pages that are not reached cost nothing.
    """
    done: list[tuple[Any, int]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(parse())
        except BaseException as error:  # carried to the caller's thread
            failed.append(error)

    depth = min(size, (GROWTH + MARGIN + GROWTH_PER_BYTE * size) // _TUPLE_BYTES)
    stack = min(_MAX_STACK, (8 << 20) + depth * _STACK_PER_LEVEL) & ~0xFFFF
    thread = threading.Thread(target=work, name="unpickle", daemon=True)
    with _stack_lock:
        before = threading.stack_size(stack)
        try:
            thread.start()
        except RuntimeError:
            raise NoResourceError(
                f"no {stack >> 20} MiB of address space for the stack that a pickle of {size} bytes"
                " can need",
                hint="raise the address space limit (ulimit -v)",
            ) from None
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


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


def _refuse_trailing(
    unpickler: _Unpickler, consumed: int, size: int, file: str, offset: int
) -> None:
    # Bytes after STOP but inside the last frame are already in the unpickler's buffer: only a
    # second load shows them. It ends at once when there are none.
    hidden = consumed == size
    if hidden:
        try:
            unpickler.load()
        except EOFError:
            return
        except Exception:  # anything else means that there was something to read
            pass
    raise UnsafeError(
        f"the pickle in {file} hides bytes after its end",
        kind="unsafe-pickle",
        file=file,
        offset=offset + (0 if hidden else consumed),
        length=size if hidden else size - consumed,
    )


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the cycle collector out of a large allocation: 3-5 times faster."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --- what every torch pickle may call -----------------------------------------------------------


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        refuse("calls codecs.encode for another codec than latin1")
    return text.encode("latin1")


def _bytearray(*args: Any) -> bytearray:
    # An int argument would allocate that many bytes.
    if args and isinstance(args[0], str):
        return bytearray(_encode(*args))
    if not args or (len(args) == 1 and isinstance(args[0], (bytes, bytearray))):
        return bytearray(*args)
    refuse("builds a bytearray from what is not bytes")


def _bytes(*args: Any) -> bytes:
    return bytes(_bytearray(*args))


def _container(kind: type) -> Callable[..., Any]:
    def build(*args: Any) -> Any:
        if len(args) > 1 or (args and not isinstance(args[0], (list, tuple, dict, set, frozenset))):
            refuse(f"builds a {kind.__name__} from what holds no items")
        return kind(*args)

    return build


def _complex(real: Any = 0.0, imag: Any = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imag, (int, float)):
        refuse("builds a complex number from what is no number")
    return complex(real, imag)


# Classes that real checkpoints hold and that say nothing worth a note. Exact names only.
_QUIET = (
    "argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "_io.BytesIO", "io.BytesIO",
    "uuid.UUID", "datetime.timedelta", "datetime.datetime", "datetime.date", "datetime.timezone",
    "decimal.Decimal", "fractions.Fraction", "collections.defaultdict", "collections.deque",
    "collections.Counter", "copyreg._reconstructor", "copy_reg._reconstructor",
    "builtins.object", "__builtin__.object", "builtins.slice", "__builtin__.slice",
    "builtins.range", "__builtin__.xrange", "builtins.int", "__builtin__.int", "__builtin__.long",
    "builtins.float", "__builtin__.float", "builtins.bool", "__builtin__.bool", "builtins.str",
    "__builtin__.str", "__builtin__.unicode",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.WindowsPath",
    "pathlib.PureWindowsPath", "pathlib._local.Path", "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath", "pathlib._local.WindowsPath", "pathlib._local.PureWindowsPath",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer",
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType", "numpy.dtypes.Int64DType", "numpy.dtypes.BoolDType",
    "torch.device", "torch.Tensor", "torch._C.Generator", "torch.torch_version.TorchVersion",
    "torch.nn.parameter.Parameter", "torch.nn.Parameter",
)  # fmt: skip

BUILTINS: Mapping[str, Any] = {
    "collections.OrderedDict": _container(Ordered),
    "_codecs.encode": _encode,
    "codecs.encode": _encode,
    **{
        f"{module}.{name}": build
        for module in ("builtins", "__builtin__")
        for name, build in (
            ("set", _container(set)),
            ("frozenset", _container(frozenset)),
            ("dict", _container(dict)),
            ("list", _container(list)),
            ("tuple", _container(tuple)),
            ("complex", _complex),
            ("bytearray", _bytearray),
            ("bytes", _bytes),
        )
    },
    **{name: inert(name) for name in _QUIET},
}
