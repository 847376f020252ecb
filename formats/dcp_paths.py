"""The paths of keys that `planner_data` records: where each entry stood in the state_dict.

torch names an entry by its keys, joined by dots. So of most paths only the places of these dots
are kept, which many names share: half a million short texts would take longer than all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inert_tree import Path


class KeyPaths(Mapping[str, "Path"]):
    """Paths by stored name."""

    def __init__(self) -> None:
        self._whole: dict[str, Path] = {}
        self._rows: Mapping[str, int] = {}
        self._cuts: Sequence[int] = ()
        self._ends: Sequence[tuple[int, ...]] = ((),)

    def join(
        self, rows: Mapping[str, int], cuts: Sequence[int], ends: Sequence[tuple[int, ...]]
    ) -> None:
        """Take names that are their keys joined by dots, once.

        Args:
            rows: names, each with a row; not to change.
            cuts: for each row a number in `ends`.
            ends: where keys end in a name; the first is empty, of names that are no such thing.
        """
        self._rows, self._cuts, self._ends = rows, cuts, ends

    def ends(self, name: str) -> tuple[int, ...]:
        """Return where the keys end in a name that is these keys joined by dots; else nothing."""
        row = self._rows.get(name, -1)
        return () if row < 0 else self._ends[self._cuts[row]]

    def in_rows(self) -> Iterator[tuple[int, ...]]:
        """Yield the `ends` of each row."""
        return map(self._ends.__getitem__, self._cuts)

    def __getitem__(self, name: str) -> Path:
        if name in self._whole:
            return self._whole[name]
        ends = self.ends(name)
        if not ends:
            raise KeyError(name)
        begins = (0, *(end + 1 for end in ends))
        return tuple(name[begin:end] for begin, end in zip(begins, ends, strict=False))

    def __setitem__(self, name: str, path: Path) -> None:
        self._whole[name] = path

    def update(self, paths: Mapping[str, Path]) -> None:
        """Add paths, or set them anew."""
        self._whole.update(paths)

    def __contains__(self, name: object) -> bool:
        return name in self._whole or (isinstance(name, str) and bool(self.ends(name)))

    def __iter__(self) -> Iterator[str]:
        yield from self._whole
        yield from (name for name in self._rows if self.ends(name) and name not in self._whole)

    def __len__(self) -> int:
        return sum(1 for _ in self)
