"""The layout that a legacy Megatron checkpoint is to have: sizes of groups, layers of stages.

What is not wished for stays as the source has it. Everything that must divide is checked here or
where a tensor is cut, before anything is written.

The one description of a Megatron job: a source becomes it, and each writer lays it out.

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
from math import gcd
from typing import Any, NamedTuple

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import Finding
from ftckpt.formats.megatron.rank_files.grid import Arguments, MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.megatron.reader import MegatronLayout
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .stages import Counts, Stage, planned

# How a run says that its stages do not have equal numbers of layers.
_UNEVEN = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip
# Without these nobody can tell which directory is whose, or how buffers are laid out.
_ALWAYS = frozenset((
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "data_parallel_size",
))  # fmt: skip


class TargetLayout(NamedTuple):
    """The layout that is written."""

    grid: MegatronGrid  # sizes of the groups of ranks
    chunks: int  # model chunks a stage
    layers: Counts  # of each chunk of each stage
    arguments: Mapping[str, Any]  # what the job's arguments become, by name
    same_stages: bool  # whether stages and chunks are the source's
    same_ranks: bool  # whether every directory holds what the source's of the same name holds


def target_of(source: MegatronLayout, request: LayoutRequest) -> TargetLayout:
    """Return the layout that `request` make of the source's.

    Raises:
        UsageError: sizes that do not divide.
        UnsupportedError: pipeline or expert ranks for a job whose arguments are not recorded, or
            tensor ranks of experts that this format has no directories for.
    """
    old, args = source.grid, source.args
    tp, pp, ep = request.tp or old.tp, request.pp or old.pp, request.ep or old.ep
    chunks = request.vp or (source.chunks if pp > 1 else 1)
    if chunks > 1 and pp == 1:
        raise UsageError(f"{chunks} virtual stages need several pipeline stages, not 1")
    grid = MegatronGrid(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=tp if old.etp == old.tp else old.etp,
        cp=old.cp,
        dp=request.dp or old.dp,
    )
    if args.record is None and (pp > 1 or ep > 1):
        raise UnsupportedError(
            "the source does not record its arguments, and without them nobody can tell the"
            " directories of pipeline and expert ranks apart",
            hint="--pp 1 --ep 1",
        )
    _require_heads(args, tp)
    _require_experts(source, grid)
    same_stages = (pp, chunks) == (old.pp, source.chunks)
    layers, said = (source.layers, {}) if same_stages else _stages(source, pp, chunks)
    return TargetLayout(
        grid,
        chunks,
        layers,
        said | _sizes(source, grid, chunks),
        same_stages,
        same_stages and (tp, ep, grid.etp) == (old.tp, old.ep, old.etp),
    )


def _require_heads(args: Arguments, tp: int) -> None:
    """Refuse what cuts through attention heads: rows may divide where heads do not."""
    heads = args.count("num_attention_heads")
    groups = args.count("num_query_groups") if args.flag("group_query_attention") else 0
    if heads % tp:
        raise UsageError(f"{heads} attention heads cannot be divided over {tp} tensor ranks")
    if groups and groups % tp and tp % groups:
        raise UsageError(f"{groups} query groups cannot be divided over {tp} tensor ranks")


def _require_experts(source: MegatronLayout, grid: MegatronGrid) -> None:
    experts = source.experts * source.grid.ep
    if experts % grid.ep:
        raise UsageError(f"{experts} experts cannot be divided over {grid.ep} expert ranks")
    if grid.ep > 1 and not experts:
        raise UsageError(f"a model without experts has no {grid.ep} expert ranks")
    ranks, each = grid.tp * grid.dense_ranks, grid.etp * grid.ep
    if grid.dp is not None and experts and ranks % each:
        raise UsageError(
            f"{ranks} ranks of a pipeline stage (tp {grid.tp}, cp {grid.cp}, dp {grid.dp}) cannot"
            f" be divided over {each} ranks of experts (ep {grid.ep}, tp {grid.etp})",
            hint=f"--dp {each // gcd(each, grid.tp * grid.cp)} would do",
        )


def _stages(source: MegatronLayout, pp: int, chunks: int) -> tuple[Counts, dict[str, Any]]:
    """Return the layers of other stages: as the arguments have it where that fits, else equal."""
    plan = planned(source.args, pp, chunks)
    total = sum(source.layers.values())
    if plan is not None and sum(plan.values()) == total:
        return plan, {}
    each, rest = divmod(total, pp * chunks)
    if rest:
        what = f"{pp} pipeline stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise UsageError(f"{total} layers cannot be divided over {what}")
    said: dict[str, Any] = {}
    for name in _UNEVEN:
        given = source.args.get(name)
        if given is not None:
            said[name] = False if isinstance(given, bool) else None
    return {Stage(p, v): each for v in range(chunks) for p in range(pp)}, said


def _sizes(source: MegatronLayout, grid: MegatronGrid, chunks: int) -> dict[str, Any]:
    """Return the arguments that are sizes of groups of ranks.

    What was never recorded stays so, where it says nothing new.
    """
    old, args = source.grid, source.args
    sizes = [
        ("tensor_model_parallel_size", old.tp, grid.tp),
        ("model_parallel_size", old.tp, grid.tp if args.get("model_parallel_size") else old.tp),
        ("tensor_parallel_num_weight_shards", old.tp, grid.tp),
        ("pipeline_model_parallel_size", old.pp, grid.pp),
        ("transformer_pipeline_model_parallel_size", old.pp, grid.pp),
        ("expert_model_parallel_size", old.ep, grid.ep),
        ("expert_tensor_parallel_size", old.etp, grid.etp),
        ("expert_tensor_parallel_num_weight_shards", old.etp, grid.etp),
        ("data_parallel_size", old.dp, grid.dp),
        ("world_size", None, grid.world),
    ]
    said: dict[str, Any] = {}
    for name, before, now in sizes:
        if (name in _ALWAYS and before != now) or (args.get(name) is not None and now is not None):
            said[name] = now
    if (grid.pp, chunks) != (old.pp, source.chunks):
        interleaved = chunks if chunks > 1 else None
        each = sum(source.layers.values()) // (grid.pp * chunks)
        said["virtual_pipeline_model_parallel_size"] = interleaved
        if args.get("num_layers_per_virtual_pipeline_stage") is not None:
            said["num_layers_per_virtual_pipeline_stage"] = each if interleaved else None
        if args.get("num_virtual_stages_per_pipeline_rank") is not None:
            said["num_virtual_stages_per_pipeline_rank"] = interleaved
    return said


def changed(args: Arguments, changes: Mapping[str, Any]) -> Arguments:
    """Return arguments with other values, for asking; what is written is `recorded`."""
    known = _known(args)
    return args if known is None else Arguments({**known, **changes})


def recorded(args: Arguments, changes: Mapping[str, Any]) -> Any:
    """Return the record of the arguments with other values; None where there is none.

    A namespace is changed in place: read it anew for every use.

    Raises:
        UnsupportedError: it is neither a namespace nor a dict.
    """
    known = _known(args)
    if known is None:
        return None
    if isinstance(args.record, Inert):
        args.record.state = {**known, **changes}
        return args.record
    return {**known, **changes}


def _known(args: Arguments) -> dict[str, Any] | None:
    record = args.record
    known = record.state if isinstance(record, Inert) else record
    if record is not None and not isinstance(known, dict):
        raise UnsupportedError("the job's arguments are neither a namespace nor a dict")
    return known if isinstance(known, dict) else None


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
