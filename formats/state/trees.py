"""One object as a tree of its own, without the tensors that the checkpoint lists.

Those are written as tensors; the object is what is left, with the storages of the tensors that
nobody lists (an RNG state inside a tuple).
"""

from __future__ import annotations

from typing import Any

from ftckpt.formats.pickles.walk import Path, at
from ftckpt.transfer.content import Content

from .nested import NestedState
from .objects import StateObjects


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
