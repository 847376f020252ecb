"""The one description of a Megatron job: a source becomes it, and each writer lays it out.

    files of ranks, such files as an example      ┐               ┌ rank_files   files of ranks
    a torch_dist store                            ├  MegatronJob  ┼ torch_dist   a store
    a model in any format (`whole_model`)         ┘               └ fsdp         a plain store

A reader says what the source shows: tensors, the layout with its arguments, and the state beside
the model. What depends on the layout that is written (which rank has what, how a tensor is stored)
is a writer's plan, made of the job and the request. State of single ranks that others cannot have
goes from files of ranks to such files alone (`rank_files.states.OwnState`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.findings import Finding
from ftckpt.formats.megatron.checkpoint import MegatronLayout
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor


@dataclass
class JobState:
    """The state of a job beside its model."""

    # what all ranks share, by key: arguments, iteration, schedule, groups of the optimizer; a part
    # of it may be `CopiedTree`, or a `Tensor` where the source lists it
    root: dict[Any, Any] = field(default_factory=dict)
    # of the tensors in parts of `root` that are neither
    storages: Mapping[str, StoredStorage] = field(default_factory=dict)
    # random streams by pipeline stage and tensor rank, where the source shows whose they are
    random: dict[tuple[int, int], CopiedTree] = field(default_factory=dict)
    # keys of tensors and names of objects of the source that have their place by all this
    placed: set[str] = field(default_factory=set)
    notes: list[Finding] = field(default_factory=list)  # what is worth knowing


@dataclass(kw_only=True)
class MegatronJob:
    """A job."""

    given: Content  # what is converted, as the source has it
    content: Content  # the tensors that are written, tied ones once
    # of the job that the arguments are of; a model that no job has had has one rank
    layout: MegatronLayout
    state: JobState = field(default_factory=JobState)
    # by the source's keys: what an optimizer keeps of a model that `content` has without it
    trained: Mapping[str, TargetTensor] = field(default_factory=dict)
    names: Sequence[str] = ()  # of the source's tensors and objects that need a place of their own
    notes: Sequence[Finding] = ()  # what is worth knowing
    rows: int | None = None  # of the vocabulary that are no padding, where the source shows it

    @property
    def args(self) -> Arguments:
        """The job's arguments."""
        return self.layout.args

    @property
    def iteration(self) -> int:
        """Of the save; 0 for weights that nobody says the step of."""
        return self.given.checkpoint.step or 0

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name, of a job that has them so."""
        assert isinstance(self.args.record, dict)
        return self.args.record

    def locals(self) -> list[LocalTensor]:
        """Return the model's tensors as a job of one rank would hold them; where is not said."""
        return [
            LocalTensor(
                0, w.name, TensorRef("", 0, w.shape, dense_strides(w.shape), w.dtype), w.kind
            )
            for w in self.content.tensors.values()
            if w.component == "model"
        ]
