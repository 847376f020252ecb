"""The digests that ranks leave which save without collectives.

    .ftckpt/sealing/rank-3.json    in the checkpoint: what rank 3 wrote, created last

No rank knows when such a save is whole, so each record says how many ranks there were: `verify`
asks for the metadata of as many. `ftckpt.torch.seal_after` takes the digests, on one rank and after
a barrier, and removes them when the seal stands. A file that has changed since, by its size, its
time or its version, is read instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ftckpt.digests.blocks import WIDTH, block_count
from ftckpt.errors import FtckptError, IncompleteError, NotFoundError
from ftckpt.own_files import FOLDER
from ftckpt.storage.source import Source
from ftckpt.strict_json import count, decode

from . import FileDigest

_PLACE = f"{FOLDER}/sealing"
_SCHEMA = "ftckpt.sealing/1"
_MOST_BYTES = 64 << 20
_MOST_RANKS = 1 << 20


class _Written(Protocol):
    """Size and digests of one file, by the bytes that were written to it."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def blocks(self) -> bytes:
        """XXH3-128 of each of its blocks, put together (`ftckpt.digests.blocks`)."""


def name_of(rank: int) -> str:
    """Return the path of a rank's record in the checkpoint."""
    return f"{_PLACE}/rank-{rank}.json"


def remove(place: str, rank: int) -> None:
    """Remove the record of an earlier save."""
    from ftckpt.storage import open_store

    with suppress(NotFoundError):
        open_store(place).delete([name_of(rank)])


def remove_all(place: str) -> None:
    """Remove the records of all ranks: the save that begins here leaves none."""
    from ftckpt.storage import open_store

    store = open_store(place)
    with suppress(NotFoundError):
        store.delete([entry.path for entry in store.children(_PLACE)])


def leave(place: str, rank: int, written: Mapping[str, _Written], world: int) -> None:
    """Leave the digests of the files that a rank of `world` wrote, by their relative paths."""
    from ftckpt.storage import open_store

    store = open_store(place)
    files = {}
    for name, file in sorted(written.items()):
        entry = store.stat(name)
        if entry.size == file.size:
            files[name] = {
                "size": file.size,
                "blocks": file.blocks.hex(),
                "mtime": entry.mtime,
                "etag": entry.etag,
            }
    said = {"schema": _SCHEMA, "world": world, "files": files}
    store.put(name_of(rank), json.dumps(said).encode())


@dataclass(frozen=True)
class LeftDigests:
    """What ranks left in a checkpoint, of files that are still the same.

    Attributes:
        source: the checkpoint's files.
        records: paths of the records.
        files: digests, by path.
        worlds: number of ranks that saved together, by the record that says it.
        stands: paths of the records of which a file is still the same: they are of this save.
    """

    source: Source
    records: list[str] = field(default_factory=list)
    files: dict[str, FileDigest] = field(default_factory=dict)
    worlds: dict[str, int] = field(default_factory=dict)
    stands: set[str] = field(default_factory=set)

    @property
    def world(self) -> int:
        """Number of ranks that saved what is here; 0 where no record says it."""
        return max((self.worlds[name] for name in self.stands), default=0)

    def require_all(self) -> None:
        """Refuse records of several saves, and those of less than all ranks.

        Raises:
            IncompleteError: a rank left none, or none that can be read.
        """
        if not self.records:
            return
        world = max(self.worlds.values(), default=0)
        right = {name for name, said in self.worlds.items() if said == world}
        # A record may claim any number: the first name that is absent ends the search.
        wrong = next((name for name in map(name_of, range(world)) if name not in right), None)
        if wrong is None:
            wrong = min({*self.records} - {*map(name_of, range(world))}, default=None)
        if wrong is not None:
            raise IncompleteError(
                f"{wrong} is not the record of one of {world} ranks that saved together, or is"
                " absent: a rank did not finish, or another save left it",
                kind="missing-rank",
                hint="save again, into a directory of its own",
            )

    def remove(self) -> None:
        """Remove the records."""
        with suppress(FtckptError):
            if self.records:
                self.source.store.delete([self.source.path(name) for name in self.records])


def left_in(source: Source) -> LeftDigests:
    """Return what ranks left. A record that cannot be read says nothing."""
    left = LeftDigests(source)
    if source.single:
        return left
    for name in sorted(source.entries):
        if not name.startswith(f"{_PLACE}/rank-") or source.size(name) > _MOST_BYTES:
            continue
        left.records.append(name)
        with suppress(FtckptError, ValueError, KeyError, TypeError, AttributeError):
            said = decode(source.read(name))
            world = count(said["world"], "world")
            if said["schema"] == _SCHEMA and 0 < world <= _MOST_RANKS:
                same = _unchanged(source, said["files"])
                left.worlds[name] = world
                left.files.update(same)
                left.stands.update([name] if same else [])
    return left


def _unchanged(source: Source, files: Mapping[str, Mapping[str, Any]]) -> dict[str, FileDigest]:
    """Return the digests of those files that are as they were when they were written."""
    found = {}
    for name, said in files.items():
        entry = source.entries.get(name)
        if entry is None or (said["mtime"] is None and said["etag"] is None):
            continue
        same = (entry.size, entry.mtime, entry.etag) == (said["size"], said["mtime"], said["etag"])
        blocks = bytes.fromhex(said["blocks"])
        if same and len(blocks) == WIDTH * block_count(entry.size):
            found[name] = FileDigest(name, entry.size, blocks)
    return found
