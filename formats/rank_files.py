"""The names of one-file-a-rank checkpoints, and what a set of such names must be.

- verl and its relatives: `model_world_size_8_rank_3.pt`, and `optim_`, `extra_state_` likewise,
  with `fsdp_config.json` beside them, in a directory of their own (`global_step_12/actor`).
- plain: `shard_00003.pt` or `shard_00003_of_00008.pt`, perhaps with a `metadata.json`.

Sources: verl `utils/checkpoint/fsdp_checkpoint_manager.py`; the plain names are a convention.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from ftckpt.findings import Finding, finding


class Role(StrEnum):
    """What the file of a rank holds."""

    MODEL = "model"
    OPTIMIZER = "optim"
    EXTRA = "extra_state"
    WHOLE = "shard"


class RankFile(NamedTuple):
    """One file of one rank; `world_size` is None where the name does not say it."""

    path: str
    role: Role
    rank: int
    world_size: int | None

    def of_rank(self, rank: int) -> str:
        """Return the path that the same file has for another rank."""
        folder, slash, name = self.path.rpartition("/")
        if self.role is Role.WHOLE:
            of = "" if self.world_size is None else f"_of_{self.world_size:05d}"
            width = len(name.removeprefix("shard_").partition(".")[0].partition("_")[0])
            return f"{folder}{slash}shard_{rank:0{width}d}{of}.pt"
        return f"{folder}{slash}{self.role}_world_size_{self.world_size}_rank_{rank}.pt"


# More digits than any cluster has ranks would only be somebody's joke on int().
_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
_PLAIN = re.compile(r"shard_(\d{5,7})(?:_of_(\d{5,7}))?\.pt")
# A set that lacks more ranks than this is told in one sentence.
SHOWN = 64
# verl's folders inside a step, the trained one first.
FOLDERS = ("actor", "critic")
CONFIG = "fsdp_config.json"
METADATA = "metadata.json"


def rank_file(path: str) -> RankFile | None:
    """Return what a path's last element says, or None where it is no rank's file."""
    name = path.rpartition("/")[2]
    if match := _VERL.fullmatch(name):
        return RankFile(path, Role(match[1]), int(match[3]), int(match[2]))
    if match := _PLAIN.fullmatch(name):
        return RankFile(path, Role.WHOLE, int(match[1]), int(match[2]) if match[2] else None)
    return None


def rank_files(names: Iterable[str]) -> list[RankFile]:
    """Return the rank files among `names`, by role, world size and rank."""
    found = [file for file in map(rank_file, names) if file is not None]
    order = list(Role)
    return sorted(found, key=lambda f: (order.index(f.role), f.world_size or 0, f.rank, f.path))


def folder_order(folder: str) -> tuple[int, str]:
    """Return the place of a folder among others: the trained model's first."""
    return (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), folder)


def world_size_of(files: Iterable[RankFile], recorded: int | None) -> int:
    """Return the world size that most of the files are of.

    Where names say none, the recorded one, else what the highest rank implies.
    """
    files = list(files)
    sizes = Counter(f.world_size for f in files if f.world_size is not None)
    if recorded is not None and (recorded in sizes or not sizes):
        return recorded
    if sizes:
        return max(sizes.items(), key=lambda item: (item[1], item[0]))[0]
    return 1 + max((f.rank for f in files), default=-1)


def check_set(
    files: Iterable[RankFile], world_size: int, recorded: int | None, recorded_by: str
) -> Iterator[Finding]:
    """Yield what is wrong with a set of names: ranks missing, several worlds, a wrong record.

    Args:
        files: all rank files.
        world_size: the world that is read.
        recorded: the world size in a configuration file; None where there is none.
        recorded_by: that file.
    """
    files = list(files)
    for file in files:
        if file.world_size not in (None, world_size):
            yield finding(
                "world-size",
                f"{file.path} is of {file.world_size} ranks, the others of {world_size}",
                file=file.path,
                rank=file.rank,
            )
        elif file.rank >= world_size:
            yield finding(
                "world-size",
                f"{file.path} is of rank {file.rank} in a world of {world_size}",
                file=file.path,
                rank=file.rank,
            )
    if recorded is not None and recorded != world_size:
        yield finding(
            "world-size",
            f"{recorded_by} says {recorded} ranks, the files are of {world_size}",
            file=recorded_by,
        )
    mine = [f for f in files if f.world_size in (None, world_size)]
    for role in Role:
        held = {f.rank: f for f in mine if f.role is role and f.rank < world_size}
        if not held:
            continue
        example = next(iter(held.values()))
        absent = (rank for rank in range(world_size) if rank not in held)
        for rank in islice(absent, SHOWN):
            name = example.of_rank(rank)
            yield finding(
                "missing-rank",
                f"{name} is missing: rank {rank} of {world_size} has no {role} file",
                file=name,
                rank=rank,
            )
        more = world_size - len(held) - SHOWN
        if more > 0:
            yield finding("missing-rank", f"{more} more ranks have no {role} file")
