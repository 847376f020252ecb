"""Compare the files of two legacy Megatron checkpoints, tree for tree, as torch loads them."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Foreign:
    """An object of a class that is not installed here."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ImportError:
            return type(name, (Foreign,), {})


def _load(file: Path) -> Any:
    import torch

    reading = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    return torch.load(file, weights_only=False, pickle_module=reading)


def assert_same_files(
    found: Path,
    expected: Path,
    *,
    without: Collection[str] = (),
    places: bool = False,
    extra_states: bool = True,
) -> None:
    """Require the same files with the same trees: keys in their order, types, every bit.

    Args:
        found, expected: two checkpoints.
        without: keys that are not compared, at the top or in a namespace there.
        places: whether tensors must lie at the same places of storages of the same size.
        extra_states: whether both must say where quantised arithmetic has no state.
    """
    names = [sorted(p.relative_to(root).as_posix() for p in root.rglob("*.pt"))
             for root in (found, expected)]  # fmt: skip
    assert names[0] == names[1]
    for name in names[0]:
        one, two = (_load(root / name) for root in (found, expected))
        if not extra_states:
            one, two = (_without_extra_states(tree) for tree in (one, two))
        has, wants = (dict(_leaves(_less(t, without), (name,), places)) for t in (one, two))
        assert list(has) == list(wants)
        for path, value in wants.items():
            assert has[path] == value, path


def _without_extra_states(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {
        key: dict(_bare(value)) if str(key).startswith("model") else value
        for key, value in tree.items()
    }


def _bare(model: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in model.items():
        assert not name.endswith("_extra_state") or value is None
        if not name.endswith("_extra_state"):
            yield name, value


def _less(tree: Any, without: Collection[str]) -> Any:
    if not isinstance(tree, dict):
        return tree
    for value in tree.values():
        if isinstance(value, Namespace):
            for name in without:
                value.__dict__.pop(name, None)
    return {key: value for key, value in tree.items() if key not in without}


def _leaves(tree: Any, path: tuple[Any, ...], places: bool) -> Iterator[tuple[Any, Any]]:
    import numpy as np
    import torch

    inside: dict[Any, Any] | None = None
    if isinstance(tree, torch.Tensor):
        data = tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        at = (tree.storage_offset(), tree.untyped_storage().nbytes()) if places else ()
        yield path, (tree.dtype, tuple(tree.shape), data, at)
    elif isinstance(tree, np.ndarray):
        yield path, (tree.dtype, tree.shape, tree.tobytes())
    elif isinstance(tree, dict):
        inside = tree
    elif isinstance(tree, (list, tuple)):
        inside = dict(enumerate(tree))
    elif isinstance(tree, (Namespace, Foreign)):
        inside = vars(tree)
    else:
        yield path, tree
    if inside is not None:
        yield path, (type(tree).__name__, len(inside))
        for key, value in inside.items():
            yield from _leaves(value, (*path, key), places)
