"""Parse the name of a rank's file.

- verl and its relatives: `model_world_size_8_rank_3.pt`, and `optim_`, `extra_state_` likewise.
- by hand: `shard_00003.pt`, `shard_00003_of_00008.pt`, `shard_3_of_8.pt`, `rank_3.pt`,
  `model_rank_3.pt` with `optimizer_rank_3.pt`, `checkpoint_step100_stage0.pt`: a word, perhaps a
  step, then `shard`, `rank` or `stage` and its number, padded or not, counted from 0 or from 1.
  Such files may be compressed: `rank_3.pt.zst`. A dot may part the name of a whole file from the
  rank: `model_0000059.rank_0.pth`. fairseq's are `checkpoint_2_100-shard0.pt`, of epoch 2 and
  update 100.

- nanochat: `optim_000030_rank0.pt`, beside the weights of that step.
- Meta's releases: `consolidated.00.pth`, of model-parallel ranks.

Sources: verl `utils/checkpoint/fsdp_checkpoint_manager.py`; accelerate `utils/fsdp_utils.py`
(`pytorch_model_fsdp_0_rank0.bin`); the other names are a convention of many trainers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import ImpliedCount

# verl's folders inside a step; a step without that of the model is not read as one of verl's.
MAIN = "actor"
FOLDERS = (MAIN, "critic")
CONFIG = "fsdp_config.json"
METADATA = "metadata.json"


class Role(StrEnum):
    """What the file of a rank holds."""

    MODEL = "model"
    OPTIMIZER = "optim"
    EXTRA = "extra_state"
    WHOLE = "shard"


class FileSpelling(NamedTuple):
    """How the name of a file is put together around its numbers.

    Attributes:
        before: up to the rank's digits.
        width: of those digits, padded with zeros.
        between: from them to the world size's digits; "" where the name has none.
        of_width: of those.
        after: the rest.
        first: the number of the first rank, 0 or 1.
        packed: the suffix of what compressed the file; "" for nothing.
    """

    before: str
    width: int
    between: str
    of_width: int
    after: str
    first: int = 0
    packed: str = ""

    def name(self, rank: int, world: int | None) -> str:
        """Return the name for a rank of a world."""
        of = f"{self.between}{world:0{self.of_width}d}" if self.between and world else ""
        return f"{self.before}{rank + self.first:0{self.width}d}{of}{self.after}{self.packed}"


class RankFile(NamedTuple):
    """One file of one rank; `world_size` is None where the name does not say it.

    Attributes:
        path: relative to the checkpoint.
        role: what it holds.
        rank: the number of the rank, from 0; of the pipeline stage where `staged`.
        world_size: what the name says.
        spelling: how the name is spelled; None for verl's.
        staged: whether the name counts pipeline stages.
        step: the step in the name; None where there is none.
        word: what the name calls the content (`model`, `ema`); "" where it does not say.
    """

    path: str
    role: Role
    rank: int
    world_size: int | None
    spelling: FileSpelling | None = None
    staged: bool = False
    step: int | None = None
    word: str = ""

    @property
    def packed(self) -> str:
        """The suffix of what compressed the file; "" for nothing."""
        return self.spelling.packed if self.spelling is not None else ""

    @property
    def plain(self) -> str:
        """The path of what is in it."""
        return self.path.removesuffix(self.packed)

    @property
    def unit(self) -> str:
        """What the name counts, as a noun."""
        return "stage" if self.staged else "rank"

    @property
    def of_meta(self) -> bool:
        """Whether it has the name of a file that Meta releases."""
        return self.spelling is not None and self.spelling.before == "consolidated."

    @property
    def may_hold_model(self) -> bool:
        """Whether the name says a model, or does not say what is inside."""
        if self.role is Role.WHOLE:
            return re.fullmatch(_NO_MODEL, self.word) is None
        return self.role is Role.MODEL

    @property
    def series(self) -> str:
        """What the files of one series have alike: all but the numbers of the rank."""
        folder = self.path.rpartition("/")[0]
        return f"{folder}/{self.spelling.before if self.spelling else self.role}"

    @property
    def implied(self) -> ImpliedCount | None:
        """What files it is one of; None where their number stands in the name.

        A rank's own state (random numbers, counters) says nothing: other ranks have other state.
        """
        shared = self.role is Role.OPTIMIZER or self.may_hold_model
        if self.spelling is None or self.world_size is not None or not shared:
            return None
        folder, slash, _ = self.path.rpartition("/")
        after = f"{self.spelling.after}{self.spelling.packed}"
        return ImpliedCount(f"{folder}{slash}{self.spelling.before}", after)

    def of_rank(self, rank: int, world: int | None = None) -> str:
        """Return the path that the same file has for another rank, and another world."""
        folder, slash, _ = self.path.rpartition("/")
        world = self.world_size if world is None else world
        if self.spelling is None:
            return f"{folder}{slash}{self.role}_world_size_{world}_rank_{rank}.pt"
        return f"{folder}{slash}{self.spelling.name(rank, world)}"


# More digits than any cluster has ranks would only be somebody's joke on int().
_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
_BY_HAND = re.compile(
    r"(?P<before>(?:(?P<word>[A-Za-z]+(?:_[A-Za-z]+)*?)[_-])??"
    r"(?:(?:global_)?(?:step|iter)[_-]?(?P<step>\d{1,15})[_-]"
    r"|(?<=ckpt[_-])(?P<bare>\d{1,15})[_-]|(?<=checkpoint[_-])(?:\d{1,15}_)?(?P<number>\d{1,15})[_-]"
    r"|(?<=optim[_-])(?P<saved>\d{1,15})[_-]"
    r"|(?<=pytorch_model_fsdp_)\d{1,3}_|(?<=optimizer_)\d{1,3}_)?"
    r"(?:(?P<stage>(?:pp_?|pipeline_?)?stage)|shard|rank)[_-]?)"
    r"(?P<rank>\d{1,7})(?:(?P<between>[_-]of[_-]?)(?P<world>\d{1,7}))?"
    r"(?P<after>\.(?:pt|pth|bin))(?P<packed>\.(?:zst|lz4|gz))?"
)
# The number before the dot is a step's or an epoch's, as in the name of a whole file.
_DOTTED = re.compile(
    r"(?P<before>(?P<word>[A-Za-z][A-Za-z0-9_-]*?)?(?:(?:(?<![\w-])|[_-])(?P<step>\d{1,15}))?"
    r"\.(?:shard|rank)[_-]?)(?P<rank>\d{1,7})(?:(?P<between>[_-]of[_-]?)(?P<world>\d{1,7}))?"
    r"(?P<after>\.(?:pt|pth|bin|ckpt))"
)
# The component of tensors that one rank alone has.
OF_ONE_RANK = re.compile(r"extra:rank(\d+)")
_META = re.compile(r"(consolidated\.)(\d{2,3})(\.pth)")
_OPTIMIZERS = r"(?:optim|optimizer|opt)(?:_states?)?"
_EXTRAS = r"extra|(?:extra|rng|random|trainer|train|client|loader|dataloader)_states?"
# What a file of its own holds without the word "state".
_NO_MODEL = (
    r"(?:rng|random|trainer|(?:data_?)?loader|(?:data_?)?sampler"
    r"|(?:lr_?)?sched(?:uler)?|(?:(?:grad|loss)_?)?scaler)(?:_states?)?"
)


def _step_in(match: re.Match[str]) -> str | None:
    return match["step"] or match["bare"] or match["number"] or match["saved"]


def rank_file(path: str) -> RankFile | None:
    """Return what a path's last element says, or None where it is not a rank's file."""
    name = path.rpartition("/")[2]
    if match := _VERL.fullmatch(name):
        return RankFile(path, Role(match[1]), int(match[3]), int(match[2]))
    if match := _META.fullmatch(name):
        own = FileSpelling(match[1], len(match[2]), "", 0, match[3])
        return RankFile(path, Role.WHOLE, int(match[2]), None, own)
    dotted = _DOTTED.fullmatch(name)
    match = dotted or _BY_HAND.fullmatch(name)
    if match is None:
        return None
    spelling = FileSpelling(
        match["before"], len(match["rank"]), match["between"] or "",
        len(match["world"] or ""), match["after"],
        packed="" if dotted else match["packed"] or "",
    )  # fmt: skip
    word, step = match["word"] or "", dotted["step"] if dotted else _step_in(match)
    role = Role.WHOLE
    if re.fullmatch(_OPTIMIZERS, word):
        role = Role.OPTIMIZER
    elif re.fullmatch(_EXTRAS, word):
        role = Role.EXTRA
    return RankFile(
        path,
        role,
        int(match["rank"]),
        int(match["world"]) if match["world"] else None,
        spelling,
        dotted is None and match["stage"] is not None,
        int(step) if step else None,
        word,
    )


def rank_files(names: Iterable[str]) -> list[RankFile]:
    """Return the rank files among `names`, by role, world size and rank.

    One that lies there compressed and as it was is the latter.
    """
    every = [file for file in map(rank_file, names) if file is not None]
    paths = {file.path for file in every}
    found = _counted_from_one([f for f in every if not f.packed or f.plain not in paths])
    order = list(Role)
    return sorted(found, key=lambda f: (order.index(f.role), f.world_size or 0, f.rank, f.path))


def _counted_from_one(files: list[RankFile]) -> list[RankFile]:
    """Count ranks from 0 where the names do it from 1: `shard_1_of_2.pt`, `shard_2_of_2.pt`."""
    seen: dict[tuple[str, int | None], set[int]] = {}
    for file in files:
        seen.setdefault((file.series, file.world_size), set()).add(file.rank)
    shifted = []
    for file in files:
        numbers = seen[file.series, file.world_size]
        if file.world_size in numbers and 0 not in numbers and file.spelling is not None:
            own = file.spelling._replace(first=1)
            file = file._replace(rank=file.rank - 1, spelling=own)
        shifted.append(file)
    return shifted


def folder_order(folder: str) -> tuple[int, str]:
    """Return the place of a folder among others: the trained model's first."""
    return (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), folder)


def component_of(folder: str) -> str:
    """Return the component of a folder's weights; a critic is never the model."""
    return "model" if folder in ("", MAIN) else f"extra:{folder}"
