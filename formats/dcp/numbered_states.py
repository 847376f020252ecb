"""Name the states of an optimizer that numbers its parameters, where the file says the names.

`optimizer.state_dict()` saved as it is has states under numbers. torch 2.6 and newer record the
names beside the numbers (`param_names` of each group) if the optimizer was made of
`model.named_parameters()`. DCP does not keep the model's order, so without that record no order
proves which parameter a number is, and the states stay numbered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ftckpt.errors import FtckptError
from ftckpt.storage.source import Source

from .items import ItemWindow, as_item, open_item
from .metadata import DcpMetadata, Path

_GROUPS, _STATE = "param_groups", "state"


def named_paths(meta: DcpMetadata, source: Source) -> dict[str, Path]:
    """Return the paths of numbered states with their parameters' names, by stored name.

    Nothing for an optimizer whose record is incomplete, ambiguous or damaged.
    """
    groups: dict[Path, dict[tuple[int | str, str], str]] = defaultdict(dict)
    for name in meta.objects:
        path = meta.paths.get(name, ())
        if path[-3:-2] == (_GROUPS,) and path[-1] in ("params", "param_names"):
            groups[path[:-3]][path[-2], str(path[-1])] = name
    recorded = {
        at: names for at, names in groups.items() if any(k == "param_names" for _, k in names)
    }
    if not recorded:
        return {}
    known = {at: _names(meta, source, names) for at, names in recorded.items()}
    found: dict[str, Path] = {}
    for name in (*meta.tensors, *meta.objects):
        path = meta.paths.get(name, ())
        for at, names in known.items():
            size = len(at)
            if path[:size] == at and path[size : size + 1] == (_STATE,) and len(path) > size + 2:
                said = names.get(str(path[size + 1]))
                if said is not None:
                    found[name] = (*path[: size + 1], said, *path[size + 2 :])
    return found


def _names(
    meta: DcpMetadata, source: Source, objects: Mapping[tuple[int | str, str], str]
) -> dict[str, str]:
    """Return number -> name of one optimizer; nothing unless every group says both, once each."""
    found: dict[str, str] = {}
    total = 0
    try:
        for number in dict.fromkeys(group for group, _ in objects):
            numbers, names = (
                _loaded(meta, source, objects.get((number, key), ""))
                for key in ("params", "param_names")
            )
            if not _fit(numbers, names):
                return {}
            total += len(numbers)
            found |= {str(i): name for i, name in zip(numbers, names, strict=True)}
    except FtckptError:  # the checks report it
        return {}
    return found if len(found) == total == len(set(found.values())) else {}


def _loaded(meta: DcpMetadata, source: Source, name: str) -> Any:
    item = meta.objects.get(name)
    if item is None:
        return None
    window = open_item(source, as_item(name, item))
    return window.parse().tree if isinstance(window, ItemWindow) else None


def _fit(numbers: Any, names: Any) -> bool:
    return (
        isinstance(numbers, list)
        and isinstance(names, list)
        and len(numbers) == len(names)
        and all(type(number) is int for number in numbers)
        and all(isinstance(name, str) and name for name in names)
    )
