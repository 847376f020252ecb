"""Inert stand-ins: records that replace the objects that a pickle names.

A stand-in remembers its use and does nothing. Its class is sealed: a pickle has opcodes that set
attributes, and a class changed by one file would act in the next.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Any, ClassVar, NoReturn, cast

from ftckpt.errors import NewerWriterError, UnsafeError

from .keys import limited

# Packages whose names may not be called: Python's own (all versions), its installers', torch's,
# numpy's.
_OURS = frozenset(sys.stdlib_module_names) | {
    "__builtin__", "__builtins__", "copy_reg", "cPickle", "cStringIO", "StringIO", "exceptions",
    "commands", "popen2", "urllib2", "httplib", "SocketServer", "_winreg", "UserDict", "UserList",
    "ConfigParser", "Tkinter", "xmlrpclib", "posix", "nt", "imp", "asynchat", "asyncore", "smtpd",
    "distutils", "binhex", "aifc", "audioop", "cgi", "cgitb", "crypt", "lib2to3", "mailcap",
    "msilib", "nntplib", "ossaudiodev", "pipes", "spwd", "sunau", "telnetlib", "uu", "xdrlib",
    "_pyrepl", "pip", "setuptools", "pkg_resources", "_distutils_hack",
    "torch", "numpy", "functorch", "torchgen",
}  # fmt: skip
# Third parties' functions that run their arguments; their other names are mere classes.
_GADGETS = frozenset((
    "pandas.eval", "pandas.core.computation.eval.eval", "pandas.read_pickle",
    "pandas.io.pickle.read_pickle", "joblib.load", "joblib.numpy_pickle.load", "dill.loads",
    "dill.load", "dill._dill.loads", "dill._dill.load", "cloudpickle.loads", "cloudpickle.load",
    "yaml.unsafe_load", "yaml.load", "fickling.load", "fsspec.open", "sympy.sympify",
    "IPython.core.interactiveshell.InteractiveShell", "IPython.utils.process.system",
    "IPython.utils._process_posix.system", "pytest.main", "_pytest.config.main", "nose.run",
    "sh.Command", "plumbum.local", "fire.Fire", "paramiko.ProxyCommand",
))  # fmt: skip


# torch's own records of tensors: it adds to them, and pickles of a later torch name the new ones.
_RECORDS = re.compile(
    r"torch\._(?:utils|tensor)\._rebuild_\w+"
    r"|torch\.distributed\.(?:checkpoint|tensor|_tensor|_shard|device_mesh|_mesh_layout)"
    r"\.(?:\w+\.)*_*[A-Z]\w*"
)


class RefusedCallError(UnsafeError):
    """A pickle calls a name that no checkpoint needs; `called` is its qualified name."""

    called = ""


class UnknownRecordError(NewerWriterError):
    """A pickle builds a record of torch that is not known; `called` is its qualified name."""

    called = ""


class Sealed(type):
    """Metaclass of every stand-in: a pickle can never change a class (BUILD does setattr)."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise UnsafeError(f"a pickle tries to set {name!r} on a class", kind="unsafe-pickle")

    @property
    def __setstate__(cls) -> Any:
        # BUILD looks this up on the top of the stack. On an instance it finds the method of
        # the class; on a class it comes here first, because a property is a data descriptor.
        raise UnsafeError("a pickle tries to change a class", kind="unsafe-pickle")


class Inert(metaclass=Sealed):
    """An object of a class that is not imported: its name, and its data in the pickle.

    Attributes:
        qualname: `module.name` as the pickle spells it.
        module: the first half of `qualname`; a nested class has dots in the second.
        args: positional arguments of its construction.
        keywords: keyword arguments; also in `state`, until BUILD gives another.
        called: whether the name was called (REDUCE), or its `__new__` alone (NEWOBJ).
        state: from BUILD; None without one.
        items: appended, added or set items, in order (pairs for mappings).
        filled: how `items` came: `append`, `add`, `set`; "" if there are none.
    """

    __slots__ = ("args", "called", "filled", "items", "keywords", "state")
    qualname: ClassVar[str] = ""
    module: ClassVar[str] = ""
    refused: ClassVar[bool] = False

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    called: bool
    state: Any
    items: list[Any]
    filled: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Record a call or an instantiation; refuse it if the name must not be called.

        Raises:
            RefusedCallError: it is Python's, torch's or numpy's, and no checkpoint needs it.
            UnknownRecordError: it is one of torch's records of tensors, of a later torch.
        """
        if cls.refused:
            if _RECORDS.fullmatch(cls.qualname):
                newer = UnknownRecordError.of(
                    "a pickle builds a record of torch",
                    expected="one of torch 1.0 to 2.15",
                    found=cls.qualname,
                )
                newer.called = cls.qualname
                raise newer
            error = RefusedCallError(
                f"a pickle calls {cls.qualname}, which no checkpoint needs; nothing was executed",
                kind="unsafe-pickle",
                hint="treat the file as hostile: find out who wrote it",
            )
            error.called = cls.qualname
            raise error
        self = object.__new__(cls)
        self.args = args
        self.keywords = kwargs
        self.called = False
        self.state = kwargs or None
        self.items = []
        self.filled = ""
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.called = True  # a call comes here after `__new__`, an instantiation does not

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Record a list item."""
        self.items.append(item)
        self.filled = "append"

    def extend(self, items: Any) -> None:
        """Record list items."""
        self.items.extend(items)
        self.filled = "append"

    def add(self, item: Any) -> None:
        """Record a set item."""
        self.items.append(item)
        self.filled = "add"

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))
        self.filled = "set"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the state, whether it was a dict or a slots pair."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
        return state.get(name, default) if isinstance(state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.qualname}>"


def inert(qualname: str, *, module: str = "", refused: bool = False) -> type[Inert]:
    """Return a fresh inert class for `module.name`; a nested class needs `module`."""
    members = {
        "__slots__": (),
        "qualname": qualname,
        "module": module or qualname.rpartition(".")[0],
        "refused": refused,
    }
    return cast("type[Inert]", Sealed("Inert", (Inert,), members))


def refuse(what: str) -> NoReturn:
    """Raise UnsafeError: a pickle does `what`."""
    raise UnsafeError(f"a pickle {what}", kind="unsafe-pickle")


@lru_cache(maxsize=4096)
def unknown(module: str, name: str) -> type[Inert]:
    """Return the record class of a name outside the table; classes are sealed, so shared."""
    # A dotted name walks attributes (`os` + `path.join`): judged by its module alone.
    qualname = f"{module}.{name}"
    ours = module.partition(".")[0] in _OURS
    return inert(qualname, module=module, refused=ours or qualname in _GADGETS)


def one_bit_from(name: str, known: Container[str]) -> str:
    """Return the known name that becomes `name` when one bit of it flips, or ''."""
    raw = bytearray(name.encode("utf-8", "surrogatepass"))
    if len(raw) <= _LONG_NAME:
        for at in range(len(raw)):
            for bit in range(7):
                raw[at] ^= 1 << bit
                found = raw.decode("utf-8", "replace")
                raw[at] ^= 1 << bit
                if found in known:
                    return found
    return ""


_LONG_NAME = 200


@lru_cache(maxsize=1024)
def sealed(build: Callable[..., Any]) -> type:
    """Return a class that can be called as `build`, and that a pickle cannot change.

    BUILD on a function writes into its `__dict__`, or sets `__defaults__` and `__code__`, for every
    load that follows. A sealed class has nothing to write to.
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return limited(build(*args, **kwargs))
        except TypeError:
            _require_arguments(build, args, kwargs)
            raise

    return Sealed(build.__name__, (), {"__slots__": (), "__new__": new})


def _require_arguments(build: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise NewerWriterError for a call with more or fewer arguments than `build` has."""
    from inspect import signature  # only after a failure

    known = signature(build)
    try:
        known.bind(*args, **kwargs)
    except TypeError:
        given = len(args) + len(kwargs)
        raise NewerWriterError.of(
            f"the arguments of {build.__name__} in a pickle",
            expected=", ".join(known.parameters) or "none", found=f"{given} values",
        ) from None  # fmt: skip


class Ordered(dict[Any, Any], metaclass=Sealed):
    """An OrderedDict: a plain dict, whose methods a pickle cannot shadow by attributes.

    torch keeps `_metadata` (module versions) as an attribute of a state_dict; it is dropped here.
    """

    __slots__ = ()

    def __setstate__(self, state: Any) -> None: ...
