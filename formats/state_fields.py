"""The non-tensor state of a checkpoint as named fields that can be compared with another's.

Every object is taken apart into its leaves. So are the namespaces that trainers pickle for their
arguments, and pickles kept as bytes inside the state (a stateful dataloader's position); what
cannot be taken apart is compared whole.
"""

from __future__ import annotations

import re
import reprlib
import struct
from collections.abc import Iterator
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.comparison import Field
from ftckpt.errors import FtckptError
from ftckpt.transfer.content import Content

from .inert import Inert
from .inert_tree import Path, dotted, leaves
from .same_object import state_digest
from .state_objects import StateObjects
from .state_paths import recorded_paths
from .torch_table import TABLE
from .torch_tree import Carried
from .torch_values import TensorRef
from .unpickle import load

_RANK = re.compile(r"rank_(\d+)\.(?=.)")
_LONG = 48  # characters of a value that are shown
_INSIDE = 4  # how many pickles and namespaces inside one another are taken apart


def state_fields(checkpoint: Checkpoint) -> Iterator[Field | FtckptError]:
    """Yield every field of the non-tensor state; an object that cannot be read gives its error.

    Tensors that the checkpoint lists are left out. A field's name is the path to it in the
    trainer's state, however the format cuts that state into objects.
    """
    objects = StateObjects(Content.of(checkpoint), recorded_paths(checkpoint).nested_objects())
    for name in checkpoint.objects:
        try:
            for leaf in objects.fields(name):
                for path, value in _apart(leaf.path, leaf.value.value, _INSIDE):
                    yield _field(checkpoint, dotted(path), leaf.value._replace(value=value))
        except FtckptError as error:
            error.tensor = error.tensor or name
            yield error


def _apart(path: Path, value: Any, left: int) -> Iterator[tuple[Path, Any]]:
    """Yield what a leaf is made of where it is a namespace or a pickle; else the leaf."""
    tree = _inside(value) if left else None
    if tree is None:
        yield path, value
        return
    for inner, member in leaves(tree, path):
        yield from _apart(inner, member, left - 1)


def _inside(value: Any) -> Any:
    """Return what a namespace or a pickle holds; None for any other value, and for nothing."""
    if isinstance(value, Inert):
        namespace = not value.args and not value.items and isinstance(value.state, dict)
        return (value.state or None) if namespace else None
    if type(value) is bytes and value[:1] == b"\x80" and value[-1:] == b".":
        try:
            tree = load(value, file="", table=TABLE).value
        except FtckptError:
            return None  # bytes that only look like a pickle, or one that we do not take apart
        return tree if isinstance(tree, (dict, list, Inert)) and tree else None
    return None


def _field(checkpoint: Checkpoint, name: str, part: Carried) -> Field:
    name = name.removeprefix("0.")  # Megatron keeps its common state in a list of one
    match = _RANK.match(name)
    digest = _digest(checkpoint, part)
    shown = _shown(part.value, digest)
    return Field(name[match.end() :] if match else name, int(match[1]) if match else None,
                 shown, digest)  # fmt: skip


def _digest(checkpoint: Checkpoint, part: Carried) -> bytes:
    value = part.value
    if type(value) is float:  # by its bits: NaN, -0.0
        return b"float" + struct.pack("<d", value)
    if value is None or type(value) in (bool, int, str):
        plain = f"{type(value).__name__} {value if type(value) is not int else hex(value)}"
        return plain.encode("utf-8", "surrogatepass")
    return state_digest(checkpoint, [part])


class _Brief(reprlib.Repr):
    """Values in a few words, whatever a file says that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4
        self.maxstring = self.maxother = self.maxlong = _LONG

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 1 << 128 else f"an integer of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"{len(x)} bytes"


_BRIEF = _Brief()


def _shown(value: Any, digest: bytes) -> str:
    if type(value) is TensorRef:
        return f"{value.dtype.name}{list(value.shape)} #{digest.hex()[:8]}"
    text = _BRIEF.repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
