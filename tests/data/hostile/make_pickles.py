"""Write the hostile pickles that lie beside this script, and their table.

    python tests/data/hostile/make_pickles.py

Each case is one way to run code, to hide it, or to exhaust the reader. Those marked `live` create
a file `ftckpt-canary` in the working directory when Python's own unpickler reads them: a test
proves that they do, and that nothing does through ftckpt. The table in pickle/README.md comes from
here too, and a test holds files, table and this script together.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CANARY = "ftckpt-canary"
SHELL = f"touch {CANARY}"
CODE = f"open('{CANARY}','w').close()"


class Case(NamedTuple):
    """One hostile pickle.

    Attributes:
        content: its bytes.
        kind: finding kind that it must lead to.
        code: exit code that it must lead to.
        tries: what it tries.
        live: whether Python's unpickler would create the canary.
    """

    content: bytes
    tries: str
    kind: str = "unsafe-pickle"
    code: int = 7
    live: bool = False


# --- an assembler -------------------------------------------------------------------------------


def named(module: str, name: str) -> bytes:
    """Return opcodes that push a global."""
    return f"c{module}\n{name}\n".encode()


def stacked(module: str, name: str) -> bytes:
    """Return opcodes that push a global, dotted names allowed (STACK_GLOBAL)."""
    return text(module) + text(name) + b"\x93"


def text(string: str) -> bytes:
    """Return opcodes that push a string."""
    raw = string.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def arguments(*args: object) -> bytes:
    """Return opcodes that push a tuple."""
    return b"(" + b"".join(plain(a) for a in args) + b"t"


def plain(obj: object) -> bytes:
    """Return opcodes for one value; strings and bytes are opcodes only where they are bytes."""
    if isinstance(obj, bytes):
        return obj
    if isinstance(obj, str):
        return text(obj)
    if isinstance(obj, list):
        return b"(" + b"".join(plain(a) for a in obj) + b"l"
    return pickle.dumps(obj, 2)[2:-1]


def call(what: bytes, *args: object) -> bytes:
    """Return opcodes that call what `what` pushes (REDUCE)."""
    return what + arguments(*args) + b"R"


def whole(body: bytes, protocol: int = 2) -> bytes:
    """Return a complete pickle."""
    return b"\x80" + bytes([protocol]) + body + b"."


SYSTEM = named("os", "system")
RUN = call(SYSTEM, SHELL)
EVIL = whole(RUN)


def _import(module: str) -> bytes:
    return call(named("importlib", "import_module"), module)


# --- names that run something -------------------------------------------------------------------

# name -> (module, attribute, arguments, whether Python creates the canary by it)
_GADGETS: dict[str, tuple[str, str, tuple[object, ...], bool]] = {
    "os-system": ("os", "system", (SHELL,), True),
    "posix-system": ("posix", "system", (SHELL,), True),
    "nt-system": ("nt", "system", (SHELL,), False),
    "os-popen": ("os", "popen", (SHELL,), True),
    "os-spawn": ("os", "spawnlp", (0, "touch", "touch", CANARY), True),
    "os-exec": ("os", "execvp", ("touch", ["touch", CANARY]), False),
    "os-exit": ("os", "_exit", (0,), False),
    "os-remove": ("os", "remove", ("model.pt",), False),
    "os-kill": ("os", "kill", (0, 9), False),
    "subprocess-popen": ("subprocess", "Popen", (["touch", CANARY],), False),
    "subprocess-call": ("subprocess", "call", (["touch", CANARY],), True),
    "subprocess-run": ("subprocess", "run", (["touch", CANARY],), True),
    "subprocess-check-output": ("subprocess", "check_output", (["touch", CANARY],), True),
    "subprocess-getoutput": ("subprocess", "getoutput", (SHELL,), True),
    "commands-getoutput": ("commands", "getoutput", (SHELL,), False),
    "eval": ("builtins", "eval", (CODE,), True),
    "exec": ("builtins", "exec", (CODE,), True),
    "eval-python2": ("__builtin__", "eval", (CODE,), True),
    "open": ("builtins", "open", (CANARY, "w"), True),
    "io-open": ("io", "open", (CANARY, "w"), True),
    "io-fileio": ("_io", "FileIO", (CANARY, "w"), True),
    "import": ("builtins", "__import__", ("antigravity",), False),
    "compile": ("builtins", "compile", (CODE, "x", "exec"), False),
    "getattr": ("builtins", "getattr", (named("os", "path"), "join"), False),
    "setattr": ("builtins", "setattr", (named("collections", "OrderedDict"), "x", 1), False),
    "map": ("builtins", "map", (SYSTEM, [SHELL]), False),
    "type": ("builtins", "type", ("X", b")", b"}"), False),
    "breakpoint": ("builtins", "breakpoint", (), False),
    "input": ("builtins", "input", (), False),
    "importlib": ("importlib", "import_module", ("antigravity",), False),
    "runpy": ("runpy", "run_module", ("antigravity",), False),
    "pty-spawn": ("pty", "spawn", ("touch",), False),
    "pkgutil-resolve": ("pkgutil", "resolve_name", ("os:system",), False),
    "attrgetter": ("operator", "attrgetter", ("system",), False),
    "methodcaller": ("operator", "methodcaller", ("system", SHELL), False),
    "partial": ("functools", "partial", (SYSTEM, SHELL), False),
    "reduce": ("functools", "reduce", (named("builtins", "eval"), [b"}", CODE]), False),
    "function-type": ("types", "FunctionType", (1, b"}"), False),
    "code-type": ("types", "CodeType", (0,), False),
    "ctypes": ("ctypes", "CDLL", ("libc.so.6",), False),
    "webbrowser": ("webbrowser", "open", ("http://localhost:9",), False),
    "codecs-decode": ("codecs", "decode", ("6162", "hex"), False),
    "codecs-other": ("_codecs", "encode", ("uryyb", "rot13"), False),
    "copyreg": ("copyreg", "add_extension", ("os", "system", 1), False),
    "weakref": ("weakref", "finalize", (named("os", "path"), SYSTEM, SHELL), False),
    "atexit": ("atexit", "register", (SYSTEM, SHELL), False),
    "thread": ("_thread", "start_new_thread", (SYSTEM, arguments(SHELL)), False),
    "timeit": ("timeit", "timeit", (CODE, "pass", named("time", "perf_counter"), 1), True),
    "cprofile": ("cProfile", "run", (CODE,), True),
    "pdb": ("pdb", "run", (CODE,), False),
    "code-interact": ("code", "interact", (), False),
    "sqlite": ("sqlite3", "connect", (CANARY,), True),
    "logging-file": ("logging", "FileHandler", (CANARY,), True),
    "zipfile-write": ("zipfile", "ZipFile", (CANARY, "w"), True),
    "gzip-open": ("gzip", "open", (CANARY, "w"), True),
    "shelve": ("shelve", "open", (CANARY,), False),
    "shutil-rmtree": ("shutil", "rmtree", ("checkpoint",), False),
    "socket": ("socket", "create_connection", (("localhost", 9),), False),
    "urlretrieve": ("urllib.request", "urlretrieve", ("http://localhost:9", CANARY), False),
    "smtplib": ("smtplib", "SMTP", ("localhost", 9), False),
    "marshal": ("marshal", "loads", (plain(b"N"),), False),
    "pickle-loads": ("pickle", "loads", (b"B" + struct.pack("<I", len(EVIL)) + EVIL,), True),
    "c-pickle-loads": ("_pickle", "loads", (b"B" + struct.pack("<I", len(EVIL)) + EVIL,), True),
    "multiprocessing": ("multiprocessing.util", "spawnv_passfds", (plain(b"N"),), False),
    "asyncio": ("asyncio.unix_events", "_UnixSubprocessTransport", (), False),
    "distutils": ("distutils.spawn", "spawn", (["touch", CANARY],), False),
    "faulthandler": ("faulthandler", "_sigsegv", (), False),
    "sys-exit": ("sys", "exit", (0,), False),
    "pip-main": ("pip", "main", (["download", "x"],), False),
    "pip-internal": ("pip._internal", "main", (["download", "x"],), False),
    "ensurepip": ("ensurepip", "_run_pip", (["x"],), False),
    "venv": ("venv", "create", (CANARY,), False),
    "numpy-runstring": ("numpy.testing._private.utils", "runstring", (CODE, b"}"), True),
    "numpy-load": ("numpy", "load", ("x.npy",), False),
    "torch-load": ("torch", "load", ("x.pt",), False),
    "torch-serialization-load": ("torch.serialization", "load", ("x.pt",), False),
    "torch-hub": ("torch.hub", "load", ("a/b", "c"), False),
    "torch-jit": ("torch.jit", "load", ("x.pt",), False),
    "torch-package": ("torch.package", "PackageImporter", ("x.pt",), False),
    "torch-cpp-extension": ("torch.utils.cpp_extension", "load_inline", ("x", "y"), False),
    "torch-config": ("torch.utils._config_module", "load_config", (b"N",), False),
    "torch-bottleneck": ("torch.utils.bottleneck.__main__", "run_cprofile", (CODE, b"}"), False),
    "torch-shape-env": (
        "torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression",
        (b"N", CODE, b")"), False,
    ),
    "torch-ops": ("torch.ops", "load_library", ("x.so",), False),
    "torch-distributed": ("torch.distributed.rpc", "init_rpc", ("x",), False),
    "joblib": ("joblib", "load", ("x",), False),
    "dill": ("dill", "loads", (b"N",), False),
    "pandas-eval": ("pandas", "eval", (CODE,), False),
    "ipython": ("IPython.utils.process", "system", (SHELL,), False),
}  # fmt: skip


def _shapes() -> dict[str, Case]:
    """Return every opcode that can call, with one name each."""
    set_state = b"(N}" + text("__setstate__") + SYSTEM + b"stb"
    inst = b"(" + text(SHELL) + b"ios\nsystem\n"
    obj = b"(" + SYSTEM + text(SHELL) + b"o"
    return {
        "call-stack-global": Case(
            whole(stacked("os", "system") + arguments(SHELL) + b"R", 4),
            "a global from the stack",
            live=True,
        ),
        "call-dotted": Case(
            whole(
                stacked("pathlib", "Path.touch")
                + arguments(call(named("pathlib", "PosixPath"), CANARY))
                + b"R",
                4,
            ),
            "an attribute chain in a global's name",
            live=True,
        ),
        "call-dotted-module": Case(
            whole(stacked("collections", "namedtuple.__globals__") + b")R", 4),
            "a dotted name that leaves an allowed module",
        ),
        "call-inst": Case(inst + b".", "INST, protocol 0", live=True),
        "call-obj": Case(whole(obj), "OBJ", live=True),
        "call-newobj": Case(
            whole(named("subprocess", "Popen") + arguments(SHELL) + b"\x81"), "NEWOBJ"
        ),
        "call-newobj-ex": Case(
            whole(named("subprocess", "Popen") + arguments(SHELL) + b"}" + b"\x92", 4), "NEWOBJ_EX"
        ),
        "call-protocol-0": Case(f"cos\nsystem\n(V{SHELL}\ntR.".encode(), "text opcodes", live=True),
        "call-unicode-module": Case(
            whole(stacked("builtins", "eval") + arguments(CODE) + b"R", 4),
            "a module's name as a string",
            live=True,
        ),
        "obj-pop": Case(whole(obj + b"0N"), "a call whose result is dropped", live=True),
        "inst-pop": Case(inst + b"0N.", "a call whose result is dropped", live=True),
        "reduce-pop": Case(whole(RUN + b"0}"), "a call whose result is dropped", live=True),
        "pop-mark": Case(whole(b"(" + RUN + b"1N"), "a call dropped with a mark", live=True),
        "memo-swap": Case(
            whole(SYSTEM + b"q\x050h\x05" + arguments(SHELL) + b"R"),
            "a function fetched from the memo",
            live=True,
        ),
        "dup-call": Case(
            whole(SYSTEM + b"2" + arguments(SHELL) + b"R0" + arguments(SHELL) + b"R"),
            "a function called twice",
            live=True,
        ),
        "in-a-key": Case(whole(b"}" + RUN + b"Ns"), "a call as a dict key", live=True),
        "among-good-data": Case(
            whole(b"}" + text("step") + b"K\x01s" + text("w") + RUN + b"s"),
            "a call among a training state",
            live=True,
        ),
        "import-chain": Case(
            whole(
                call(
                    call(named("operator", "attrgetter"), "system")
                    + arguments(_import("os"))
                    + b"R",
                    SHELL,
                )
            ),
            "operator.attrgetter on an imported module",
            live=True,
        ),
        "method-chain": Case(
            whole(
                call(named("operator", "methodcaller"), "system", SHELL)
                + arguments(_import("os"))
                + b"R"
            ),
            "operator.methodcaller on an imported module",
            live=True,
        ),
        "getattr-chain": Case(
            whole(call(call(named("builtins", "getattr"), _import("os"), "system"), SHELL)),
            "builtins.getattr on an imported module",
            live=True,
        ),
        "resolve-chain": Case(
            whole(call(call(named("pkgutil", "resolve_name"), "os:system"), SHELL)),
            "pkgutil.resolve_name",
            live=True,
        ),
        "partial-chain": Case(
            whole(call(named("functools", "partial"), SYSTEM, SHELL) + b")R"),
            "functools.partial",
            live=True,
        ),
        "map-list": Case(
            whole(call(named("builtins", "list"), call(named("builtins", "map"), SYSTEM, [SHELL]))),
            "map, run by a list",
            live=True,
        ),
        "build-class-slots": Case(
            whole(named("argparse", "Namespace") + set_state), "BUILD sets an attribute of a class"
        ),
        "build-class-dict": Case(
            whole(named("argparse", "Namespace") + b"}" + text("x") + b"K\x01sb"),
            "BUILD updates a class",
        ),
        "build-setstate": Case(
            whole(
                named("collections", "OrderedDict")
                + set_state
                + b"0"
                + named("collections", "OrderedDict")
                + b")R"
                + text(SHELL)
                + b"b"
            ),
            "BUILD plants __setstate__, the next BUILD calls it",
        ),
        "build-function": Case(
            whole(
                named("_codecs", "encode")
                + b"(N}"
                + text("__defaults__")
                + arguments("rot13")
                + b"stb"
            ),
            "BUILD changes a function that later loads share",
        ),
        "build-rebuild": Case(
            whole(named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("x") + b"K\x01sb"),
            "BUILD changes a rebuild function",
        ),
        "build-named-class": Case(
            whole(SYSTEM + b"}" + text("x") + b"K\x01sb"), "BUILD changes an unknown class"
        ),
        "ext-1": Case(whole(b"\x82\x01"), "the extension registry, one byte"),
        "ext-2": Case(whole(b"\x83\x01\x01"), "the extension registry, two bytes"),
        "ext-4": Case(whole(b"\x84\x01\x01\x01\x01"), "the extension registry, four bytes"),
        "register-extension": Case(
            whole(
                call(named("copyreg", "add_extension"), "os", "system", 5)
                + b"0\x82\x05"
                + arguments(SHELL)
                + b"R"
            ),
            "registers an extension, then calls it",
            live=True,
        ),
        "next-buffer": Case(whole(b"\x97", 5), "a buffer from outside"),
        "readonly-buffer": Case(whole(b"\x97\x98", 5), "a read-only buffer from outside"),
        "text-persistent-id": Case(b"Pos.system\n.", "a persistent id in text"),
        "persistent-id": Case(
            whole(arguments("storage", SYSTEM, "0", "cpu", 1) + b"Q"),
            "a persistent id whose class is a function",
        ),
    }


def _hiding() -> dict[str, Case]:
    frame = b"\x95" + struct.pack("<Q", 4) + b"}." + b"N."
    return {
        "trailing-pickle": Case(whole(b"}") + EVIL, "a second pickle after the first"),
        "trailing-byte": Case(whole(b"}") + b"\0", "one byte after the end"),
        "trailing-newline": Case(whole(b"}") + b"\n", "a newline after the end"),
        "trailing-in-frame": Case(b"\x80\x04" + frame, "bytes after the end, in the same frame"),
        "cut-after-call": Case(EVIL[:-1], "no STOP after the call", live=True),
        "broken-after-call": Case(
            whole(RUN)[:-1] + b"\xff", "an invalid opcode after the call", live=True
        ),
        "noise-after-call": Case(
            whole(RUN + b"0" + b"\x8c\xffshort")[:-1], "a cut string after the call", live=True
        ),
        "frame-too-short": Case(
            b"\x80\x04\x95" + struct.pack("<Q", 8) + SYSTEM + arguments(SHELL) + b"R.",
            "an opcode across a frame's end",
            live=True,
        ),
        "many-protocols": Case(
            b"\x80\x02\x80\x03\x80\x04" + RUN + b".", "several PROTO opcodes", live=True
        ),
        "nested-legacy": Case(
            whole(
                call(
                    named("torch.storage", "_load_from_bytes"),
                    b"B" + struct.pack("<I", len(_LEGACY)) + _LEGACY,
                ),
                3,
            ),
            "a call in a stream inside the pickle",
        ),
        "nested-deep": Case(_nested(6), "streams in streams"),
        "nested-text": Case(
            whole(call(named("torch.storage", "_load_from_bytes"), "text")), "a stream that is text"
        ),
    }


_LEGACY = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    + whole(b"}" + text("little_endian") + b"\x88s")
    + EVIL
    + whole(b"]")
)


def _nested(depth: int) -> bytes:
    body = b"N"
    for _ in range(depth):
        stream = _LEGACY.replace(EVIL, whole(body, 3))
        name = named("torch.storage", "_load_from_bytes")
        body = call(name, b"B" + struct.pack("<I", len(stream)) + stream)
    return whole(body, 3)


def _torch() -> dict[str, Case]:
    rebuild = named("torch._tensor", "_rebuild_from_type_v2")
    sharded = named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    return {
        "type-v2-calls": Case(
            whole(call(rebuild, SYSTEM, named("torch", "Tensor"), arguments(SHELL), b"}")),
            "torch's rebuild of subclasses calls any function",
        ),
        "type-v2-itself": Case(
            whole(call(rebuild, rebuild, named("torch", "Tensor"), b")", b"}")),
            "the rebuild of subclasses calls itself",
        ),
        "parameter-of-anything": Case(
            whole(call(named("torch._utils", "_rebuild_parameter"), text("x"), b"\x88", b"}")),
            "a parameter made of a string",
        ),
        "parameter-with-state-of-anything": Case(
            whole(
                call(
                    named("torch._utils", "_rebuild_parameter_with_state"),
                    text("x"),
                    b"\x88",
                    b"}",
                    b"}",
                )
            ),
            "a parameter made of a string, with attributes",
        ),
        "wrapper-of-no-sizes": Case(
            whole(
                call(
                    named("torch._utils", "_rebuild_wrapper_subclass"),
                    named("torchao.optim.subclass_8bit", "OptimState8bit"),
                    named("torch", "float32"),
                    text("x"),
                    (1,),
                )
            ),
            "a wrapper subclass whose sizes are a string",
        ),
        "rebuild-without-storage": Case(
            whole(
                call(named("torch._utils", "_rebuild_tensor_v2"), 1, 0, (1,), (1,), b"\x89", b"}")
            ),
            "a tensor on a number",
        ),
        "rebuild-v3-without-storage": Case(
            whole(
                call(
                    named("torch._utils", "_rebuild_tensor_v3"),
                    1,
                    0,
                    (1,),
                    (1,),
                    b"\x89",
                    b"}",
                    named("torch", "float32"),
                )
            ),
            "a tensor on a number, with a type",
        ),
        "wrapper-of-a-function": Case(
            whole(call(named("torch._utils", "_rebuild_wrapper_subclass"), 1, 2, 3, 4)),
            "a wrapper subclass of a number",
        ),
        "sparse-of-text": Case(
            whole(call(named("torch._utils", "_rebuild_sparse_tensor"), "torch.sparse_coo", "x")),
            "a sparse tensor of a string",
        ),
        "getattr-of-sharded": Case(
            whole(call(named("__builtin__", "getattr"), sharded, "__init__")),
            "the allowed getattr, with another name",
        ),
        "getattr-of-other": Case(
            whole(call(named("__builtin__", "getattr"), SYSTEM, "ProcessGroupState")),
            "the allowed getattr, on another object",
        ),
        "size-of-text": Case(whole(call(named("torch", "Size"), "123")), "a size made of a string"),
        "layout-of-function": Case(
            whole(call(named("torch.serialization", "_get_layout"), SYSTEM)),
            "a layout of a function",
        ),
    }


def _exhaustion() -> dict[str, Case]:
    huge, bad = struct.pack("<Q", 1 << 62), ("bad-pickle", 4)
    deep = b"]" * 70 + b"a" * 69
    return {
        "memo-bomb": Case(whole(b"Nr" + struct.pack("<I", 50_000_000)), "800 MB of memo, 9 bytes"),
        "memo-bomb-small": Case(whole(b"Nr" + struct.pack("<I", 2_000_000)), "32 MB of memo"),
        "memo-bomb-text": Case(b"Np99999999\n.", "a memo index in text"),
        "bytearray-of-int": Case(
            whole(call(named("builtins", "bytearray"), 1 << 40)), "a bytearray of a terabyte"
        ),
        "bytes-of-int": Case(
            whole(call(named("builtins", "bytes"), 1 << 40)), "a terabyte of bytes"
        ),
        "set-of-range": Case(
            whole(call(named("builtins", "set"), call(named("builtins", "range"), 1 << 40))),
            "a set of a trillion numbers",
        ),
        "list-of-text": Case(
            whole(call(named("builtins", "list"), "x" * 50)), "a list of a string"
        ),
        "complex-of-text": Case(
            whole(call(named("builtins", "complex"), "1j")), "complex from text"
        ),
        "bytearray-length": Case(whole(b"\x96" + huge, 5), "BYTEARRAY8 of 4 EB"),
        "bytes-length": Case(
            whole(b"\x8e" + struct.pack("<Q", 1 << 24), 4), "BINBYTES8 of 16 MB", *bad
        ),
        "text-length": Case(whole(b"\x8d" + huge, 4), "BINUNICODE8 of 4 EB", *bad),
        "frame-length": Case(whole(b"\x95" + huge, 4), "a frame of 4 EB", *bad),
        "digits": Case(b"I" + b"9" * 6000 + b"\n.", "an integer of 6,000 digits", *bad),
        "negative-length": Case(whole(b"\x8b\xff\xff\xff\xff"), "LONG4 of -1 bytes", *bad),
        "no-mark": Case(whole(b"t"), "a tuple without a mark", *bad),
        "empty-stack": Case(whole(b""), "STOP on an empty stack", *bad),
        "unknown-memo": Case(whole(b"h\x09"), "a memo entry that is not there", *bad),
        "unhashable-key": Case(whole(b"}]Ns"), "a list as a dict key", *bad),
        "protocol-9": Case(b"\x80\x09}.", "a protocol of the future", *bad),
        "cut": Case(whole(b"}" + text("step"))[:-3], "ends inside a string", *bad),
        "empty": Case(b"", "no bytes", *bad),
        "zeros": Case(bytes(64), "zeros, as a lost block leaves them", *bad),
        "not-latin": Case(
            whole(call(named("_codecs", "encode"), "\u20ac", "latin1")),
            "text that latin-1 cannot write",
            *bad,
        ),
        "deep-lists": Case(whole(b"}" + text("x") + deep + b"s"), "lists 70 deep", live=False),
    }


# What only a reader of whole checkpoints refuses: as pickles they are plain data.
DATA_ONLY = frozenset({"deep-lists"})


def _keys() -> dict[str, Case]:
    """Return pickles of a few hundred bytes whose keys Python would hash or compare for ever."""
    doubled = b")" + b"2\x86" * 60  # each level holds the one below twice
    ordered = named("collections", "OrderedDict")
    by_memo = b")q\0" + b"".join(b"0h" + bytes([n, 104, n, 0x86, 113, n + 1]) for n in range(60))
    # tuple() of a list, which alone costs nothing, in place of each tuple opcode
    called = b")q\0" + b"".join(
        b"0" + named("builtins", "tuple") + b"](h" + bytes([n])
        + b"h" + bytes([n]) + b"e\x85Rq" + bytes([n + 1])
        for n in range(60)
    )  # fmt: skip
    late = b"r\0\1\0\0"
    return {
        "key-doubled": Case(whole(b"}" + doubled + b"Ns"), "a dict key of 2**60 empty tuples"),
        "key-doubled-items": Case(whole(b"}(" + doubled + b"Nu"), "the same in SETITEMS"),
        "key-doubled-dict": Case(whole(b"(" + doubled + b"Nd"), "the same in DICT"),
        "key-doubled-set": Case(whole(b"\x8f(" + doubled + b"\x90", 4), "the same in a set"),
        "key-doubled-frozenset": Case(whole(b"(" + doubled + b"\x91", 4), "in a frozenset"),
        "key-doubled-memo": Case(whole(b"}" + by_memo + b"Ns"), "doubled by the memo"),
        "key-doubled-late": Case(
            whole(b"})" + (late + b"j\0\1\0\0\x86") * 60 + b"Ns"), "doubled by a late memo slot"
        ),
        "key-doubled-memoize": Case(
            whole(b"}N0)\x94" + b"".join(b"h%c\x86\x94" % n for n in range(60)) + b"Ns", 4),
            "doubled by MEMOIZE",
        ),
        "key-tripled": Case(whole(b"})" + b"22\x87" * 40 + b"Ns"), "3**40 empty tuples"),
        "key-wide": Case(
            whole(b"})" + b"".join(b"q" + bytes([n]) + b"0(" + (b"h" + bytes([n])) * 100 + b"t"
                                   for n in range(8)) + b"Ns"),
            "100**8 empty tuples, eight levels deep",
        ),
        "key-called": Case(whole(b"}" + called + b"Ns"), "doubled by calls of tuple()"),
        "key-in-set-call": Case(
            whole(named("builtins", "set") + b"](" + doubled + b"e\x85R"), "set() of such a list"
        ),
        "key-in-dict-call": Case(
            whole(ordered + b"](" + b"(" + doubled + b"Nte\x85R"), "OrderedDict() of such pairs"
        ),
        "key-behind-a-list": Case(
            whole(b"}" + doubled + b"]\x86Ns"), "such a tuple before what has no hash"
        ),
        "key-after-stop": Case(
            whole(b"}") + b"}" + doubled + b"Ns.", "such a key in a second pickle after the first"
        ),
        "key-deep": Case(whole(b"})" + b"\x85" * 5000 + b"Ns"), "a key 5,000 tuples deep"),
        "key-number": Case(
            whole(b"}\x8b" + struct.pack("<i", 1 << 16) + b"\1" * (1 << 16) + b"Ns"),
            "a key that is a number of 64 KiB",
        ),
        "value-doubled-list": Case(
            whole(b"]" + b"".join(b"q%c0](h%ch%ce" % (n, n, n) for n in range(60))),
            "a list that holds another one twice, sixty levels deep",
        ),
        "value-doubled-dict": Case(
            whole(b"}" + b"".join(b"q%c0}(K\0h%cK\1h%cu" % (n, n, n) for n in range(60))),
            "the same of dicts",
        ),
        "value-doubled-tuple": Case(whole(doubled), "the same of tuples, as a value"),
        "key-two-memos": Case(
            whole(b"})q\0\x94h\0\x86Ns", 4), "PUT and MEMOIZE mixed, so that a walk miscounts"
        ),
    }  # fmt: skip


PICKLES: dict[str, Case] = {
    **{
        name: Case(
            whole(call(stacked(m, a) if "." in a else named(m, a), *args), 4 if "." in a else 2),
            f"calls {m}.{a}",
            live=live,
        )
        for name, (m, a, args, live) in _GADGETS.items()
    },
    **_shapes(),
    **_hiding(),
    **_torch(),
    **_exhaustion(),
    **_keys(),
}

README = """# Hostile pickles

Each is read alone, and as `data.pkl` of a torch.save archive, and must lead to the finding and the
exit code in its row; nothing is executed. Those marked live create `ftckpt-canary` when Python's
own unpickler reads them. Written by `../make_pickles.py`.

| file | tries | live | finding | exit code |
|---|---|---|---|---|
"""


def files() -> dict[str, bytes]:
    """Return path -> content of all that this script writes."""
    rows = "".join(
        f"| {name}.pkl | {c.tries} | {'yes' if c.live else ''} | `{c.kind}` | {c.code} |\n"
        for name, c in PICKLES.items()
    )
    made = {f"pickle/{name}.pkl": case.content for name, case in PICKLES.items()}
    return {**made, "pickle/README.md": (README + rows).encode()}


if __name__ == "__main__":
    for path, content in files().items():
        (HERE / path).parent.mkdir(exist_ok=True)
        (HERE / path).write_bytes(content)
