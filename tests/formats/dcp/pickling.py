"""Metadata pickles made by hand: objects of classes that this torch does not have any more."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple


class Thing(NamedTuple):
    """An object of any class, pickled as torch pickles its dataclasses: NEWOBJ and BUILD."""

    module: str
    name: str
    state: Any


class Called(NamedTuple):
    """The result of a call, pickled as REDUCE."""

    module: str
    name: str
    arguments: tuple[Any, ...]


class Global(NamedTuple):
    """A name: a class, a function, a dtype."""

    module: str
    name: str


class Pairs(list[tuple[Any, Any]]):
    """A dict as a list of pairs: its keys need not be hashable, and may stand twice."""


class Writer:
    """Writes plain data and the above, with opcodes that every protocol since 2 knows."""

    def __init__(self, protocol: int = 4) -> None:
        self._out = bytearray(b"\x80" + bytes([protocol]))

    def write(self, value: Any) -> None:
        out = self._out
        if isinstance(value, Thing):
            self.write(Global(value.module, value.name))
            out.extend(b")\x81")
            if value.state is not None:
                self.write(value.state)
                out.extend(b"b")
        elif isinstance(value, Called):
            self.write(Global(value.module, value.name))
            self.write(value.arguments)
            out.extend(b"R")
        elif isinstance(value, Global):
            out.extend(b"c" + f"{value.module}\n{value.name}\n".encode())
        elif type(value) in (dict, Pairs):
            out.extend(b"}(")
            for key, member in value.items() if type(value) is dict else value:
                self.write(key)
                self.write(member)
            out.extend(b"u")
        elif type(value) is list:
            out.extend(b"](")
            for member in value:
                self.write(member)
            out.extend(b"e")
        elif type(value) is tuple:
            out.extend(b"(")
            for member in value:
                self.write(member)
            out.extend(b"t")
        else:
            # A plain value: its opcodes without the protocol, frame and STOP.
            plain = pickle.dumps(value, protocol=3)
            out.extend(plain[2:-1])

    def done(self) -> bytes:
        return bytes(self._out) + b"."


def pickled(value: Any, protocol: int = 4) -> bytes:
    writer = Writer(protocol)
    writer.write(value)
    return writer.done()


META = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def size(*numbers: int) -> Called:
    return Called("torch", "Size", (numbers,))


def chunk(offsets: Any, sizes: Any, module: str = META) -> Thing:
    return Thing(module, "ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})


def tensor(
    shape: Any,
    chunks: Any,
    dtype: Any = None,
    *,
    module: str = META,
    properties: str = META,
) -> Thing:
    encoding = "_MEM_FORMAT_ENCODING" if properties == META else "MEM_FORMAT_ENCODING"
    kept = (
        dtype or Global("torch", "float32"),
        Called("torch.serialization", "_get_layout", ("torch.strided",)),
        False,
        Called(properties, encoding, (0,)),
        False,
    )  # fmt: skip
    state = {"properties": Thing(properties, "TensorProperties", kept), "size": shape}
    return Thing(module, "TensorStorageMetadata", {**state, "chunks": chunks})


def index(name: Any, offset: Any = None, hint: Any = None, module: str = META) -> Thing:
    state = {"fqn": name, "index": hint}
    return Thing(module, "MetadataIndex", state if offset is None else {**state, "offset": offset})


def stored(path: Any, offset: Any, length: Any, module: str = FILES, **more: Any) -> Thing:
    state = {"relative_path": path, "offset": offset, "length": length, **more}
    return Thing(module, "_StorageInfo", state)


def metadata(entries: Any, storage: Any, *, module: str = META, name: str = "Metadata",
             planner: Any = None, **more: Any) -> Thing:  # fmt: skip
    """Return the top object."""
    state = {"state_dict_metadata": entries, "planner_data": planner, "storage_data": storage}
    return Thing(module, name, {**state, **more})
