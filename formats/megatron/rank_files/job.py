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
    """What a rank's `model_optim_rng.pt` holds beside tensors that are laid out.

    Attributes:
        root: by key, in the file's order; `WRITTEN` for `model` (all chunks) and `optimizer`.
        extra: returns what a module keeps beside its weights (`_extra_state`), by chunk and place.
        ordered: whether a chunk is an ordered dict, as torch's `state_dict` is.
    """

    root: Mapping[Any, Any]
    extra: Callable[[int, RankFileItem], Any] = lambda chunk, item: None
    ordered: bool = True


class RankStates(Protocol):
    """The state of every rank that is not the model's or the optimizer's.

    Attributes:
        placed: keys of tensors and names of objects of the source that it holds.
    """

    placed: set[str]

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
    """A job whose files are to be written.

    Attributes:
        given: what is converted, as the source has it.
        content: tensors of the model and its optimizer under the names of the job's own modules,
            with the padding of the target.
        layout: of the job that `order` is of.
        target: the layout that is written.
        order: of the modules on every stage of `layout`.
        rules: how tensors are cut.
        args: of the job that is to load the files.
        tied: whether a last stage without an output layer of its own has a copy of the embedding.
        optimizer: None where none is laid out.
        states: of the ranks.
        names: of the source's tensors and objects that must have a place.
        notes: what is worth knowing.
    """

    given: Content
    content: Content
    layout: MegatronLayout
    target: TargetLayout
    order: Order
    rules: Rules
    args: Arguments
    tied: bool
    optimizer: JobOptimizer | None
    states: RankStates
    names: Sequence[str]
    notes: Sequence[Finding]


@dataclass(kw_only=True)
class SharedState:
    """The state of all ranks of a job whose source has it once (fits `RankStates`).

    Attributes:
        keys: of a rank's file, in its order; what `root` holds beyond them follows.
        root: what all ranks share.
        arguments: of the job.
        grid: its ranks.
        random: random streams of each rank, where there are any to go on with.
        ordered: see `RankFrame`.
        placed: see `RankStates`.
    """

    keys: Sequence[str]
    root: Mapping[Any, Any]
    arguments: Mapping[str, Any]
    grid: MegatronGrid
    random: Mapping[Coordinate, CopiedTree] = field(default_factory=dict)
    ordered: bool = True
    placed: set[str]

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
