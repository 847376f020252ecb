"""The formats in the order in which they are asked: the first that recognises a place reads it.

A format's own module knows names and no more; its `open` imports what reads a checkpoint. So a
command imports the reader of the format at hand: all of them take longer than most answers.

Files of which each is a piece of one save, by names that no format joins: named and refused.

    checkpoint_2_4000-model_part-0-shard1.pt    of every model-parallel rank, and FSDP's (metaseq)
    reshard-model_part-0.pt                     the same, joined along one axis (OPT as released)
    best.th, best.th.1                          of every rank, the first without its number

Each opens by itself, and what it holds has the names of the whole model's tensors, so that nothing
but its name says that it is a part. A number that a word for pieces stands before (`shard1`) tells
pieces where the files of two such numbers lie side by side, the first of them 0; of a name with two
such numbers it is enough that they are not both 0. Two numbers of no such words tell pieces where
each of them is 0 and 1, all combined.

Sources: facebookresearch/metaseq `checkpoint_utils.py` (`get_paths_to_load`) and `trainer.py`;
facebookresearch/flashy `state.py` and audiocraft `utils/checkpoint.py` (`checkpoint_name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, overload

from ftckpt import plugins
from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.discovery.series import ROLES, roles_in
from ftckpt.errors import UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.deepspeed.universal import DeepSpeedUniversal
from ftckpt.formats.megatron.fsdp import MegatronFsdp
from ftckpt.formats.megatron.torch_dist import MegatronDist
from ftckpt.storage.source import Source
from ftckpt.storage.state_files import may_hold_tensors
from ftckpt.storage.store import EntryKind

from .dcp import Dcp
from .deepspeed import DeepSpeed
from .deepspeed.names import deepspeed_files
from .delta import Delta
from .folders import Folder
from .megatron import Megatron
from .nvrx import NvrxLocal
from .orbax import Orbax
from .ranks import Ranks
from .ranks.names import RankFile, rank_file
from .safetensors import Safetensors
from .safetensors.weight_sets import is_rank_file
from .torch_checkpointing import TorchCheckpointing
from .torchsave import TorchSave
from .trainer_dirs import Bundle
from .trainer_dirs.names import marked
from .unsupported import RECOGNISED

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.findings import Finding

    from .safetensors.reader import SafetensorsCheckpoint


# Words before the number of a piece; the others of them number other things as well: a stage of
# the training, an expert, an experiment.
_SURE = frozenset({"rank", "tp", "pp", "mp", "sdp", "shard", "part", "partition", "slice"})
_PERHAPS = _SURE | {"dp", "cp", "zero", "stage", "worker", "node", "chunk", "gpu", "device"}
# Words before numbers that count saves or name runs.
_NO_PIECE = frozenset(
    {
        "step", "steps", "epoch", "epochs", "ep", "iter", "iters", "iteration", "it", "update",
        "updates", "checkpoint", "ckpt", "ba", "batch", "batches", "e", "s", "seed", "fold", "run",
        "exp", "trial", "v", "version", "split", "best", "last", "loss", "acc",
    }
)  # fmt: skip
_NUMBER = re.compile(r"(?<![\d.])(?P<number>\d{1,6})(?![\d]|\.\d)")
_WORD_BEFORE = re.compile(r"([A-Za-z]+)[-_=.]?$")
_OF = re.compile(r"\d[-_]?of[-_]?\d", re.IGNORECASE)
_LATER_RANK = re.compile(r"(?P<first>.+\.(?:th|pt|pth|ckpt|bin))\.\d{1,5}")
_MOST_AXES = 4


class _Axis(NamedTuple):
    """A number in a name, and the word before it."""

    start: int
    end: int
    word: str


class Pieces:
    """Pieces that no format joins (fits `ftckpt.discovery.recognise.Format`)."""

    name = "pieces"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know one file by its name, and by that of another piece beside it."""
        if not listing.single:
            return None
        others = _beside(listing.single, listing.beside)
        if others is None:
            return None
        reason = _said(listing.single, others)
        return Recognition(self.name, reason, CommitState.NO_MARKER, supported=False)

    def open(self, source: Source) -> Checkpoint:
        """Refuse it by name.

        Raises:
            UnsupportedError: always.
        """
        skip = len(source.base) + 1 if source.base else 0
        names = {
            entry.path[skip:]
            for entry in source.store.children(source.base)
            if entry.kind is not EntryKind.DIRECTORY
        }
        others = _beside(source.name, names.__contains__) or ()
        raise UnsupportedError(
            f"{source.url} is {_said(source.name, others)}, and nothing here joins them",
            hint="the trainer's own tool joins them, and what it writes is read here",
            file=source.name,
        )


def _said(name: str, others: Sequence[str]) -> str:
    if not others:
        return f"a piece of a save, as {name} says by two numbers of pieces"
    shown = listed(list(others), 3)
    if rank_file(name) is not None:
        return f"a piece of a save that lacks its other ranks' files (another save has {shown})"
    return f"a piece of a save, beside {shown}"


def _beside(name: str, is_there: Callable[[str], bool]) -> Sequence[str] | None:
    """Return pieces that lie beside a file, none if its name alone tells; None if it is none."""
    if numbered := _LATER_RANK.fullmatch(name):
        return (numbered["first"],) if is_there(numbered["first"]) else None
    if name.endswith(".th"):
        return (f"{name}.1",) if is_there(f"{name}.1") else None
    if (ranks := rank_file(name)) is not None:
        return _of_another_save(ranks, is_there)
    known = bool(deepspeed_files((name,)) or is_rank_file(name) or _OF.search(name))
    if known or not may_hold_tensors(name):
        return None
    axes = list(_axes(name))
    told = [axis for axis in axes if axis.word in _PERHAPS]
    sure = [axis for axis in told if axis.word in _SURE]
    if len(told) > 1:
        near = (_with(name, {axis: n}) for axis in told for n in (0, 1))
        found = [one for one in near if one != name and is_there(one)]
        later = len(sure) > 1 and any(int(name[one.start : one.end]) for one in sure)
        return found if found or later else None
    grid = [axis for axis in axes if axis.word not in _NO_PIECE]
    for some in (sure, grid if len(grid) == 2 else []):
        every = [
            _with(name, dict(zip(some, numbers, strict=True)))
            for numbers in product((0, 1), repeat=len(some))
        ]
        if some and all(one == name or is_there(one) for one in every):
            return [one for one in every if one != name]
    return None


def _of_another_save(file: RankFile, is_there: Callable[[str], bool]) -> Sequence[str] | None:
    """Return another rank's file of another save, if that of the same save is lost: `last`, `best`.

    Files of ranks that lie side by side are joined.
    """
    mine = roles_in(file.word) if file.step is None else frozenset()
    others = [file.of_rank(rank) for rank in range(3) if mine and rank != file.rank]
    if any(map(is_there, others)):
        return None
    names = (
        other.replace(word, role) for other in others for word in mine for role in ROLES - mine
    )
    return [name for name in sorted(names) if is_there(name)] or None


def _axes(name: str) -> Iterator[_Axis]:
    """Yield the whole numbers of a name and the last word before each."""
    stem = name.rpartition(".")[0]
    found = list(_NUMBER.finditer(stem))
    for match in found if len(found) <= _MOST_AXES else ():
        before = _WORD_BEFORE.search(stem[: match.start()])
        yield _Axis(match.start(), match.end(), before[1].lower() if before else "")


def _with(name: str, numbers: dict[_Axis, int]) -> str:
    """Return a name with other numbers, each padded as it was."""
    for axis in sorted(numbers, reverse=True):
        digits = name[axis.start : axis.end]
        width = len(digits) if digits.startswith("0") else 0
        name = f"{name[: axis.start]}{numbers[axis]:0{width}d}{name[axis.end :]}"
    return name


def _described(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = {name.rpartition("/")[2] for name in checkpoint.source.entries}
    if not names.isdisjoint(("config.json", "adapter_config.json")):
        from .huggingface.config import check_wrapped

        yield from check_wrapped(checkpoint)
    if "config.json" in names:
        from .against_config import check_described

        yield from check_described(checkpoint)
    if "adapter_config.json" in names:
        from .lora.recorded_ranks import check_recorded

        yield from check_recorded(checkpoint)


def _twice(checkpoint: SafetensorsCheckpoint) -> None:
    """Join second copies where names show that there may be one."""
    top = (name for name in checkpoint.source.entries if "/" not in name)
    if any(name.endswith(".bin") or name.startswith("consolidated") for name in top):
        from .second_copies import join_second_copies

        join_second_copies(checkpoint)


# What is known by name and refused comes last, so that it never hides what can be read; before it
# those of other packages, which change nothing that ours know.
# A directory of several parts comes before the formats that would read one part of it, and what a
# job saved to go on before weights alone, which people export into the same directory.
_PARTS: tuple[Format, ...] = (
    MegatronDist(),
    MegatronFsdp(),
    Dcp(),
    Safetensors(),
    TorchSave(),
    Ranks(),
)
_FIRST: tuple[Format, ...] = (
    Delta(lambda rules, bases: formats(rules, bases)),
    MegatronDist(),  # a DCP store too
    MegatronFsdp(),  # and so is this
    Dcp(),
    TorchCheckpointing(),
    Bundle(_PARTS, described=_described),
    Megatron(),
    DeepSpeedUniversal(),
    DeepSpeed(),
    NvrxLocal(),
    Orbax(),
    Ranks(marked=marked),
    Pieces(),
    Safetensors(_described, _twice),
    TorchSave(_described),
)


@cache
def _added() -> tuple[Format, ...]:
    """Return the formats of other packages; one that does not work is noted and left out."""
    found = []
    own = {one.name for one in (*_FIRST, *RECOGNISED)}
    for name in plugins.plugins(plugins.FORMATS):
        try:
            made = plugins.load(plugins.FORMATS, name)
            one = made() if callable(made) else made
            if one.name != name or one.name in own:
                raise ValueError(f"a format called {one.name!r} cannot be added under this name")
            if not (callable(one.recognise) and callable(one.open)):
                raise TypeError("recognise and open are methods of a format")
        except UnsupportedError:  # noted where it was found
            continue
        except plugins.MISTAKES as error:
            plugins.failed(plugins.FORMATS, name, error)
            continue
        found.append(one)
    return tuple(found)


class Formats(Sequence[Format]):
    """Formats in their order; those of other packages are looked for where no earlier one knows.

    Args:
        first: ours that are asked before them.
        last: ours that are asked after them.
    """

    def __init__(self, first: Sequence[Format], last: Sequence[Format] = ()) -> None:
        self._first, self._last = first, last

    def __iter__(self) -> Iterator[Format]:
        yield from self._first
        yield from _added()
        yield from self._last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, place: int) -> Format: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Format]: ...

    def __getitem__(self, place: int | slice) -> Format | Sequence[Format]:
        return tuple(self)[place]


FORMATS: Sequence[Format] = Formats(_FIRST, (*RECOGNISED, Folder(lambda: _IN_FOLDERS)))
# What a folder of parts may be made of; a delta has bases elsewhere, and names of refused formats
# say nothing of what lies beside.
_IN_FOLDERS: Sequence[Format] = Formats([one for one in _FIRST if not isinstance(one, Delta)])

_BY_RULES = (Megatron, DeepSpeed, DeepSpeedUniversal, Ranks)


def formats(rules: Rules | None, bases: Sequence[str] = ()) -> Sequence[Format]:
    """Return the formats in their order, with what the user says about reading.

    Args:
        rules: a table of how tensors are cut, asked before what a format knows itself; or None.
        bases: places where the bases of deltas may lie, asked before those that are recorded.
    """
    if rules is None and not bases:
        return FORMATS
    return tuple(_told(one, rules, bases) for one in FORMATS)


def reads_by_rules(name: str) -> bool:
    """Say whether checkpoints of a format are read by the user's table of rules."""
    return any(isinstance(one, (*_BY_RULES, Bundle, Folder)) for one in FORMATS if one.name == name)


def _told(one: Format, rules: Rules | None, bases: Sequence[str]) -> Format:
    if isinstance(one, Delta):
        return Delta(one.formats, rules, bases, one.stores)
    if rules is not None and isinstance(one, Bundle):
        return Bundle(_PARTS, DeepSpeed(rules), described=_described)
    if rules is not None and isinstance(one, Ranks):
        return Ranks(rules, one.marked)
    if rules is not None and isinstance(one, Folder):
        parts = tuple(_told(inner, rules, ()) for inner in _IN_FOLDERS)
        return Folder(lambda: parts)
    if rules is not None and isinstance(one, _BY_RULES):
        return type(one)(rules)
    return one
