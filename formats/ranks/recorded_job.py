"""Read what a rank's file records of its job: world size, groups, rank, step.

Trainers that save by hand write such numbers beside the tensors, at the top of the file or in a
plain dict of settings, under many spellings. They are evidence: a set of files that holds fewer
than its files record is not whole, whatever the highest number in a name implies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import Path, step_of
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed

# More ranks than any cluster has; a larger number is not a count.
MOST = 10_000_000
_DEPTH = 3
_ITEMS = 4096


def _spelled(words: str) -> frozenset[str]:
    return frozenset(words.split())


# The number of files, of ranks in all, and of ranks along one axis of the grid.
SHARDS = _spelled("num_shards n_shards nshards shard_count total_shards num_files total_files")
WORLDS = _spelled(
    "world_size world worldsize global_world_size num_ranks n_ranks nranks total_ranks"
    " num_processes n_processes nprocs num_procs"
)
GROUPS: Mapping[str, frozenset[str]] = {
    "tp": _spelled(
        "tp tp_size tp_degree tp_world_size tensor_parallel tensor_parallel_size"
        " tensor_parallel_degree tensor_parallel_world_size tensor_model_parallel_size"
        " tensor_model_parallel_world_size"
        " mp mp_size mp_degree mp_world_size model_parallel_size model_parallel_degree"
        " model_parallel_world_size"
    ),
    "pp": _spelled(
        "pp pp_size pp_degree pp_world_size pipeline_parallel pipeline_parallel_size"
        " pipeline_parallel_degree pipeline_parallel_world_size pipeline_model_parallel_size"
        " pipeline_model_parallel_world_size pipeline_size num_stages n_stages pipeline_stages"
        " num_pipeline_stages total_stages stages"
    ),
    "cp": _spelled("cp cp_size cp_degree cp_world_size context_parallel_size"),
    "dp": _spelled(
        "dp dp_size dp_degree dp_world_size data_parallel data_parallel_size data_parallel_degree"
        " data_parallel_world_size fsdp_size fsdp_world_size"
    ),
}
RANKS = _spelled(
    "rank global_rank world_rank rank_id process_index process_rank shard_id shard_index shard_idx"
    " shard_rank shard_num shard_number"
)
COORDINATES: Mapping[str, frozenset[str]] = {
    "tp": _spelled(
        "tp_rank tensor_parallel_rank tensor_model_parallel_rank mp_rank model_parallel_rank"
    ),
    "pp": _spelled(
        "pp_rank pipeline_rank pipeline_parallel_rank pipeline_model_parallel_rank stage stage_id"
        " stage_index stage_idx stage_rank pipeline_stage"
    ),
    "cp": _spelled("cp_rank context_parallel_rank"),
    "dp": _spelled("dp_rank data_parallel_rank fsdp_rank"),
}
STEPS = _spelled("step global_step global_steps iteration iter train_step training_step")
_KEYS = {
    **dict.fromkeys(SHARDS, "shards"),
    **dict.fromkeys(WORLDS, "world"),
    **{word: axis for axis, words in GROUPS.items() for word in words},
}
_PLACES = {
    **dict.fromkeys(RANKS, "rank"),
    **{word: axis for axis, words in COORDINATES.items() for word in words},
}
# Dicts beside the tensors that speak of the job. Others may count something else: the shards of a
# dataset, the workers of a loader.
_ABOUT_THE_JOB = re.compile(
    r"_*(?:config|cfg|conf|configuration|args|arguments|hparams|hyper_?parameters|opts?|options"
    r"|settings|metadata|meta|info|header|manifest|topology|grid|mesh|world|job|run|env"
    r"|environment|context|state|train|training|trainer|extra|user"
    r"|.*(?:parallel|distributed|dist|shard|sharding|rank|checkpoint|ckpt).*"
    r"|.*_(?:config|cfg|args|metadata|meta|info|state|topology))",
    re.IGNORECASE,
)
# `rank` in a configuration is most often LoRA's.
_PLAIN_RANK = re.compile(
    r"_*(?:metadata|meta|info|header|manifest|topology|grid|mesh|world|job|context|state"
    r"|.*(?:parallel|dist|shard|rank).*)",
    re.IGNORECASE,
)
_OF_DATA = re.compile(r".*(?:data|loader|sampler|optim|model|weights|tokenizer).*", re.IGNORECASE)


class Contradiction(NamedTuple):
    """Two numbers of one file that say the same thing and differ.

    Attributes:
        what: which number, as in `Evidence.spelled`.
        first: how the file spells the one that counts.
        known: its value.
        second: how it spells the other.
        value: its value.
    """

    what: str
    first: str
    known: int
    second: str
    value: int

    def __str__(self) -> str:
        """Return what the file does, without its name."""
        return f"records {self.first} = {self.known} and {self.second} = {self.value}"


@dataclass
class Evidence:
    """What one file records.

    Attributes:
        file: which file.
        number: the rank, or stage, that its name says.
        shards: number of files; None where not recorded.
        world: number of ranks.
        groups: `tp`, `pp`, `cp`, `dp` -> ranks along that axis.
        rank: the rank that wrote it.
        coordinates: its place along each axis.
        step: the trainer's step.
        least: ranks that the meshes of its tensors have, at least.
        spelled: what was found -> how the file spells it (`config.world_size`).
        torn: numbers of this one file that contradict each other.
    """

    file: str
    number: int
    shards: int | None = None
    world: int | None = None
    groups: dict[str, int] = field(default_factory=dict)
    rank: int | None = None
    coordinates: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    least: int = 0
    spelled: dict[str, str] = field(default_factory=dict)
    torn: list[Contradiction] = field(default_factory=list)

    def read(self, tree: Any) -> None:
        """Take what a file's tree records."""
        for path, value in _numbers(tree):
            key = str(path[-1]).lower()
            shown = ".".join(map(str, path))
            if key in STEPS and len(path) <= 2:
                self._once("step", shown, value)
            if (what := _KEYS.get(key)) is not None and 1 <= value <= MOST:
                self._once(what, shown, value)
            elif len(path) > 1 and not is_number_in(key, str(path[-2])):
                continue
            elif (what := _PLACES.get(key)) is not None and 0 <= value <= MOST:
                self._once("rank" if what == "rank" else f"{what}_rank", shown, value)

    def take_counts(self, of: Evidence) -> None:
        """Take the numbers of ranks and files that a record of the whole job says."""
        for what in ("shards", "world", *GROUPS):
            value = of.get(what)
            if value is not None:
                self._once(what, of.spelled[what], value)

    def _once(self, what: str, shown: str, value: int) -> None:
        known = self.get(what)
        if known is None:
            self.spelled[what] = shown
            if what.endswith("_rank"):
                self.coordinates[what.removesuffix("_rank")] = value
            elif what in GROUPS:
                self.groups[what] = value
            else:
                setattr(self, what, value)
        elif known != value and what not in ("step", "rank"):
            # A step and a rank are many things at a depth; the first, the outermost, is meant.
            self.torn.append(Contradiction(what, self.spelled[what], known, shown, value))

    def get(self, what: str) -> int | None:
        """Return a number by its name in `spelled`."""
        if what.endswith("_rank"):
            return self.coordinates.get(what.removesuffix("_rank"))
        if what in GROUPS:
            return self.groups.get(what)
        found: int | None = getattr(self, what)
        return found

    def see(self, held: Held) -> None:
        """Take what a tensor's own record says of the number of ranks."""
        if isinstance(held, Distributed):
            size = 1
            for along in held.mesh.sizes:
                size *= along
            self.least = max(self.least, min(size, MOST))
        elif isinstance(held, Listed) and held.world_size is not None:
            self.least = max(self.least, min(held.world_size, MOST))


def _numbers(tree: Any) -> Iterator[tuple[Path, int]]:
    """Yield (path, number) of what speaks of the job, the outermost first."""
    todo: list[tuple[Path, Any]] = [((), tree)]
    for path, value in todo:  # grows as it is gone through
        members = _members(value)
        if path and len(members) > _ITEMS:
            continue
        for key, member in members.items():
            if type(key) is not str or len(key) > 80:
                continue
            if type(member) is int:
                yield (*path, key), member
            elif len(path) < _DEPTH and len(todo) < _ITEMS and _leads_on(key, member):
                todo.append(((*path, str(step_of(key))), member))


def _members(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Inert):
        value = value.state
    return value if isinstance(value, dict) else {}


def _leads_on(key: str, member: Any) -> bool:
    if not isinstance(member, (dict, Inert)):
        return False
    return speaks_of_job(key)


def number_of(key: str) -> str:
    """Return what a number under a key is: "count" (of ranks), "place" (of one), or ""."""
    key = key.lower()
    if key in _KEYS:
        return "count"
    return "place" if key in _PLACES else ""


def speaks_of_job(key: str) -> bool:
    """Say whether a dict under a key speaks of the job, and not of data, model or optimizer."""
    return _ABOUT_THE_JOB.fullmatch(key) is not None and not (
        _OF_DATA.fullmatch(key) and "parallel" not in key.lower()
    )


def is_number_in(key: str, parent: str) -> bool:
    """Say whether a key in a dict speaks of the job: `rank` in a configuration is LoRA's."""
    return key.lower() != "rank" or _PLAIN_RANK.fullmatch(parent) is not None
