"""Tensors that lie in folders beside the weights, so that a loader of weights passes them by.

`optimizer/` holds the optimizer's, `ftckpt.components/` those of every other component (averages,
RNG states), each in the layout of the weights: one file or shards of a stem. ftckpt writes an
index also for one file, because a lost file would otherwise not be missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.findings import Finding
from ftckpt.formats.huggingface.index import (
    ShardIndex,
    check_index,
    check_shard_count,
)
from ftckpt.formats.huggingface.names import shard_name
from ftckpt.storage.source import Source

from .header import Header
from .names import COMPONENTS, OPTIMIZER, SUFFIX
from .weight_sets import read_indexes

FOLDERS = (OPTIMIZER, COMPONENTS)


@dataclass(frozen=True)
class Beside:
    """The files of these folders.

    Attributes:
        files: with tensors, those included that an index only names.
        indexes: with the folder in every name.
    """

    files: Sequence[str] = ()
    indexes: Sequence[ShardIndex] = ()

    def members(self) -> list[str]:
        """Return all files, indexes included."""
        return [*self.files, *(index.file for index in self.indexes)]

    def component(self, file: str) -> str:
        """Return the component of a file's tensors, where its header does not say it."""
        if file.startswith(OPTIMIZER):
            return "optimizer"
        shard = shard_name(file)
        stem = file.removesuffix(SUFFIX) if shard is None else shard.stem
        return f"extra:{stem.removeprefix(COMPONENTS)}"

    def check(self, source: Source, headers: Mapping[str, Header]) -> Iterator[Finding]:
        """Yield where indexes, names and headers disagree.

        Args:
            source: the whole checkpoint.
            headers: of the files that could be read.
        """
        indexed: set[str] = set()
        for index in self.indexes:
            files = index.files()
            indexed.update(files)
            held = {f: [t.name for t in headers[f].tensors] for f in files if f in headers}
            stored = (t for f in held for t in headers[f].tensors)
            nbytes = sum(t.end - t.begin for t in stored)
            yield from check_index(index, held, source.entries, nbytes)
        groups: dict[tuple[str, int], list[str]] = {}
        for file in self.files:
            shard = shard_name(file)
            if shard is not None and file not in indexed:
                groups.setdefault((shard.stem, shard.total), []).append(file)
        for group in groups.values():
            yield from check_shard_count(group, group[0])


def find_beside(source: Source) -> Beside:
    """Find the files of the folders, and read their indexes.

    Raises:
        CorruptError: an index is damaged.
        UnsafeError: an index is hostile.
    """
    files: dict[str, None] = {}
    indexes: list[ShardIndex] = []
    for folder in FOLDERS:
        part = source.part(folder[:-1])
        if not part.entries:
            continue
        names = [n for n in part.entries if "/" not in n and n.endswith(SUFFIX)]
        files.update(dict.fromkeys(folder + n for n in names))
        for index in read_indexes(part).values():
            shards = {name: folder + file for name, file in index.weight_map.items()}
            whole = index._replace(file=folder + index.file, weight_map=shards)
            files.update(dict.fromkeys(whole.files()))
            indexes.append(whole)
    return Beside(list(files), indexes)
