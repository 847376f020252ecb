"""A job as the files of its ranks are written: what each kind of source gives to the writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ftckpt.checkpoint.rules import Rules
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.checkpoint import MegatronLayout
from ftckpt.formats.megatron.job.groups import JobOptimizer
from ftckpt.formats.megatron.job.layout import TargetLayout
from ftckpt.formats.megatron.job.module_order import Order, RankFileItem
from ftckpt.formats.megatron.job.whole_model import namespace
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content

from .grid import Arguments, Coordinate, MegatronGrid

# What stands in a frame for the model's chunks and for the optimizer.
WRITTEN = object()


class RankFrame(NamedTuple):
    """What a rank's `model_optim_rng.pt` holds beside tensors that are laid out."""

    # by key, in the file's order; `WRITTEN` for `model` (all chunks) and `optimizer`
    root: Mapping[Any, Any]
    # returns what a module keeps beside its weights (`_extra_state`), by chunk and place
    extra: Callable[[int, RankFileItem], Any] = lambda chunk, item: None
    ordered: bool = True  # whether a chunk is an ordered dict, as torch's `state_dict` is


class RankStates(Protocol):
    """The state of every rank that is not the model's or the optimizer's."""

    placed: set[str]  # keys of tensors and names of objects of the source that it holds

    def frame(self, at: Coordinate, *, trained: bool) -> RankFrame:
        """Return what a rank's file holds; `trained` says whether its optimizer is laid out."""
        ...

    def of_others(self, at: Coordinate, known: Sequence[str]) -> list[str]:
        """Return the source's further files of a rank, but for `known`, which are copied."""
        ...

    def held(self, content: Content) -> Content:
        """Return what the result holds, given the tensors that were laid out."""
        ...


@dataclass(kw_only=True)
class RankFilesJob:
    """A job whose files are to be written."""

    given: Content  # what is converted, as the source has it
    # tensors of the model and its optimizer under the names of the job's own modules, with the
    # padding of the target
    content: Content
    layout: MegatronLayout  # of the job that `order` is of
    target: TargetLayout  # the layout that is written
    order: Order  # of the modules on every stage of `layout`
    rules: Rules  # how tensors are cut
    args: Arguments  # of the job that is to load the files
    # whether a last stage without an output layer of its own has a copy of the embedding
    tied: bool
    optimizer: JobOptimizer | None  # None where none is laid out
    states: RankStates  # of the ranks
    names: Sequence[str]  # of the source's tensors and objects that must have a place
    notes: Sequence[Finding]  # what is worth knowing


@dataclass(kw_only=True)
class SharedState:
    """The state of all ranks of a job whose source has it once (fits `RankStates`)."""

    keys: Sequence[str]  # of a rank's file, in its order; what `root` holds beyond them follows
    root: Mapping[Any, Any]  # what all ranks share
    arguments: Mapping[str, Any]  # of the job
    grid: MegatronGrid  # its ranks
    # random streams of each rank, where there are any to go on with
    random: Mapping[Coordinate, CopiedTree] = field(default_factory=dict)
    ordered: bool = True  # see `RankFrame`
    placed: set[str]  # see `RankStates`

    def frame(self, at: Coordinate, *, trained: bool) -> RankFrame:
        """Return what a rank's file holds; its arguments say which rank it is, where known."""
        rank = self.grid.rank(at)
        known = "rank" in self.arguments and rank is not None
        args = namespace({**self.arguments, "rank": rank} if known else self.arguments)
        root = {k: v for k, v in self.root.items() if k != "optimizer"}
        own = root | {"args": args, "model": WRITTEN}
        if trained:
            own["optimizer"] = WRITTEN
        if at in self.random:
            own["rng_state"] = self.random[at]
        made = {key: own[key] for key in self.keys if key in own}
        made |= {key: value for key, value in root.items() if key not in made}
        return RankFrame(made, ordered=self.ordered)

    def of_others(self, at: Coordinate, known: Sequence[str]) -> list[str]:
        """Return nothing: such a source has no files of ranks."""
        return []

    def held(self, content: Content) -> Content:
        """Return the content: the result lists no object of what all ranks share."""
        return content


def weights_alone() -> Finding:
    """Return the note of files without an optimizer's state."""
    what = (
        "these are the weights alone: start Megatron with --finetune, or with --no-load-optim and"
        " --no-load-rng"
    )
    return finding("note", what)


def seeded_anew() -> Finding:
    """Return the note of files without random streams."""
    what = (
        "random streams were not written, as no rank can go on with them: start Megatron with"
        " --no-load-rng, and each is seeded anew"
    )
    return finding("note", what)
