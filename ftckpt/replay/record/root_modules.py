"""The outermost modules that a training calls, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_INSIDE = -1


class Outermost:
    """Modules in the order of their first call, without those inside another."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._roots)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._roots)

    def __getitem__(self, place: int) -> Any:
        return self._roots[place]

    def knows(self, module: Any) -> bool:
        """Whether a module was called before, or lies inside one that was."""
        return id(module) in self._places

    def add(self, module: Any) -> int:
        """Add an unknown module with all modules inside it; return its place."""
        place = len(self._roots)
        self._roots.append(module)
        self._places |= {id(inner): _INSIDE for inner in module.modules()} | {id(module): place}
        return place

    def place(self, module: Any) -> int | None:
        """Return the place of an outermost module; None for another."""
        place = self._places.get(id(module), _INSIDE)
        return None if place == _INSIDE else place

    def named(self, place: int, name: str) -> str:
        """Return a name within a module; names of the first have no prefix."""
        return name if place == 0 else f"{place}:{name}"

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter, by its `id`."""
        return {
            id(parameter): self.named(place, name)
            for place, root in enumerate(self._roots)
            for name, parameter in root.named_parameters()
        }
