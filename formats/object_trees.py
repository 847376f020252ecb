"""One object as a tree of its own, without the tensors that the checkpoint lists.

Those are written as tensors; the object is what is left, with the storages of the tensors that
nobody lists (an RNG state inside a tuple).
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, Stored

from .inert_tree import Path, at
from .nested_state import NestedState
from .state_objects import StateObjects
from .torch_tree import save

_BLOCK = 4 << 20


def objects_of(content: Content) -> StateObjects:
    """Return the objects of a content, each under its own name."""
    return StateObjects(content, {})


def object_tree(content: Content, objects: StateObjects, name: str) -> Any:
    """Return what `torch_tree.save` writes of one object.

    Args:
        content: of which it is.
        objects: `objects_of(content)`.
        name: of the object.
    """
    top = "object"
    state = NestedState()
    for leaf in objects.nested(name, (top,)):
        if leaf.path == (top,):
            return leaf.value
        state.put(leaf.path, leaf.value)
    whole = content.checkpoint.load_object(name)

    def is_list(path: Path) -> bool:
        return type(at(whole, path[1:])) is list

    return state.settled(is_list).get(top, {})


def object_digest(checkpoint: Checkpoint, name: str) -> bytes:
    """Return a digest that is equal where two checkpoints hold the same object under one name.

    It is of what `torch.save` would write, the bytes of tensors that nobody lists included: it does
    not depend on the format, on where a record lies, or on how storages are numbered.

    Raises:
        UnsupportedError: the object holds what no pickle can be written of.
    """
    content = Content.of(checkpoint)
    digest = sha256()
    for segment in save(object_tree(content, objects_of(content), name)):
        if isinstance(segment, Literal):
            digest.update(segment.data)
        elif isinstance(segment, Stored):
            file, offset, length = segment.extent
            with checkpoint.source.open(file) as reader:
                for start in range(0, length, _BLOCK):
                    digest.update(reader.read(offset + start, min(_BLOCK, length - start)))
    return digest.digest()
