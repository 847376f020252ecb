"""Put the parts of Megatron's ranks together: each part becomes boxes of the whole model's tensor.

A part is cut over tensor-parallel ranks by a rule for its name (`ftckpt.checkpoint.sharding`),
experts over the tensor ranks of their own group; a tensor that holds all experts of its rank is a
slab of one that holds all experts. What comes twice is a replica: norms on every tensor rank, dense
weights in every expert rank's directory, tied embeddings on the last stage.

Sort what the ranks of a legacy Megatron checkpoint hold into the whole model's tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Kind, ObjectInfo, Scalar, StepRole, TensorInfo
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.sharding import REPLICATED, Rules, Split, global_shape, slabs
from ftckpt.checkpoint.steps import is_counter
from ftckpt.errors import CorruptError, UnsupportedError, UsageError
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.job.optimizer_tree import MASTERS
from ftckpt.formats.megatron.job.stages import Counts, Stage, offsets, planned, settle
from ftckpt.formats.megatron.optimizer.per_rank import OptimizerTensor, Unmapped, plain_states
from ftckpt.formats.megatron.optimizer.read_distrib_optim import RankBuffers, distributed_states
from ftckpt.formats.pickles.walk import field_names, leaves
from ftckpt.formats.ranks.contents import Contents
from ftckpt.formats.ranks.names import RankFile, Role
from ftckpt.formats.ranks.tensors import (
    PieceBoxes,
    RankEntry,
    Report,
    TensorIdentity,
    agreeing,
    odd,
)
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef

from .parse import Rank, RankDirectories
from .tensor_names import (
    LocalTensor,
    chunk_keys,
    expert_count,
    global_name,
    layer_counts,
    parameters,
    tied_to,
)


class RankPart(NamedTuple):
    """What one rank holds of one tensor."""

    entry: RankEntry  # the rank, the file and the elements
    share: int  # which of the parts over tensor-parallel ranks
    experts: int | None = None  # the part's first expert, where it holds all experts of its rank


class WholeTensor(NamedTuple):
    """One tensor of the whole model, before its parts are put together."""

    identity: TensorIdentity  # what it is
    rule_name: str  # the weight's name, by which the rule is found
    parts: int  # over how many tensor-parallel ranks it is cut, if it is
    experts: int | None = None  # how many experts it holds, where it holds them all
    number: bool = False  # whether it is a single number that every rank has


def put_together(
    whole: WholeTensor, parts: Sequence[RankPart], rules: Rules, report: Report
) -> TensorInfo | None:
    """Return the logical tensor, or None where no part fits its rule.

    A part that contradicts the others is reported and left out, so that the tensor shows a hole and
    can never be read as if it were whole.

    Args:
        whole: what the tensor is.
        parts: what each rank holds of it, main copies first.
        rules: how names are cut.
        report: takes findings.

    Raises:
        UnsupportedError: it is cut over several ranks and no rule knows its name.
    """
    identity = whole.identity
    sound = {id(e) for e in agreeing(identity, [part.entry for part in parts], report)}
    parts = [part for part in parts if id(part.entry) in sound]
    head = parts[0].entry.held
    assert isinstance(head, TensorRef)
    split = REPLICATED
    if not whole.number and whole.parts > 1:
        split = rules.find(whole.rule_name).split
    boxes = PieceBoxes()
    try:
        shape = global_shape(head.shape, split, whole.parts)
        for part in parts:
            share = 0 if split.axis is None else part.share
            assert isinstance(part.entry.held, TensorRef)
            patches = _patches(shape, split, whole.parts, share, part.experts)
            boxes.add(part.entry, part.entry.held, patches)
    except UsageError as error:
        report(odd("shape-mismatch", identity, parts[0].entry, f"cannot be: {error.message}, in"))
        return None
    if whole.experts is not None:
        shape = (whole.experts, *shape[1:])
    return TensorInfo(
        identity.component,
        identity.name,
        identity.kind,
        shape,
        head.dtype,
        tuple(boxes.pieces),
        identity.stored_name,
    )


@lru_cache(maxsize=4096)  # layers repeat a few shapes
def _patches(
    shape: tuple[int, ...], split: Split, parts: int, share: int, experts: int | None
) -> tuple[Patch, ...]:
    """Return the boxes of the whole tensor that a part holds, and where they begin in it."""
    return tuple(
        Patch(_lifted(slab.box, experts), slab.local.offsets)
        for slab in slabs(shape, split, parts, share)
    )


def _lifted(box: Box, experts: int | None) -> Box:
    """Return a box of a rank's experts as a box of all experts."""
    if experts is None:
        return box
    return Box((box.offsets[0] + experts, *box.offsets[1:]), box.sizes)


def by_expert(ref: TensorRef, experts: int, name: str) -> TensorRef:
    """Return a tensor of all experts of a rank with its experts as the first axis.

    `weight1` [in, experts · out] and `weight2` [experts · in, out] are 2-D in name only: the layer
    that uses them views their memory as [experts, in, out] (`GroupedMLP` in
    megatron/core/transformer/moe/experts.py, core 0.5 to 0.12).

    Raises:
        UnsupportedError: it cannot be viewed so.
    """
    sound = len(ref.shape) == 2 and ref.dense and experts > 0
    axis = 1 if name.endswith("1") else 0
    if not sound or ref.shape[axis] % experts:
        raise UnsupportedError(
            f"{name} of shape {list(ref.shape)} does not hold {experts} experts", tensor=name
        )
    each = [n // experts if d == axis else n for d, n in enumerate(ref.shape)]
    shape = (experts, *each)
    return ref._replace(shape=shape, strides=dense_strides(shape))


# More chunks of stages than any model has layers.
_STAGES = 1 << 20


class Merging:
    """What all ranks hold, merged."""

    def __init__(self, read: RankDirectories, rules: Rules) -> None:
        self.grid, self.args = read.grid, read.args
        self.tensors: dict[str, TensorInfo] = {}  # by key
        # (file, stored name) of what is stored under another name than the first part
        self.elsewhere: set[tuple[str, str]] = set()
        # key of a copy of the embedding -> key of the embedding, where weights are tied
        self.aliases: dict[str, str] = {}
        self.objects: dict[str, ObjectInfo] = {}  # non-tensor state of every rank
        self.names: list[str] = []  # dotted names of that state
        self.counters: list[Scalar] = []  # steps that it shows
        self.found: list[Finding] = []  # what is wrong
        self.notes: list[Finding] = []  # what is worth knowing
        held = [local for rank in read.ranks for local in rank.held]
        # model chunks a pipeline stage
        self.chunks = max((local.chunk for local in held), default=0) + 1
        if self.chunks * self.grid.pp > _STAGES:
            what = f"{self.grid.pp} pipeline stages of {self.chunks} chunks cannot be"
            raise CorruptError(what, kind="bad-metadata")
        self.counts: Counts = {}  # layers on each chunk of each stage
        # number in the model of the first layer of each stack on each stage
        self.firsts = self._number_layers(read.ranks)
        # how many experts each expert-parallel rank holds; 0 without experts
        self.experts = self._count_experts(held)
        self._expert_shares = self.grid.expert_parts()
        self._known: dict[tuple[Stage, int, str], str] = {}
        self._tied = not self.args.flag("untie_embeddings_and_output_weights")
        self._wholes: dict[str, WholeTensor] = {}
        self._parts: dict[str, list[RankPart]] = defaultdict(list)
        own: list[TensorInfo] = []
        for rank in read.ranks:
            own += self._rank(rank)
        for key, whole in self._wholes.items():
            tensor = put_together(whole, self._parts[key], rules, self.found.append)
            if tensor is not None:
                self.tensors[key] = tensor
        self.tensors |= {tensor.key: tensor for tensor in own}
        if read.ranks:
            self.names += [f"rank_0.args.{name}" for name in field_names(self.args.record)]

    # --- names ----------------------------------------------------------------------------------

    def _number_layers(self, ranks: Iterable[Rank]) -> dict[Stage, dict[str, int]]:
        """Return the number in the model of the first layer of each stack on each stage."""
        stacks: dict[str, dict[Stage, int]] = defaultdict(dict)
        seen: set[Stage] = set()
        for rank in ranks:
            seen |= {Stage(rank.at.pp, chunk) for chunk in range(self.chunks)}
            for (stack, chunk), count in layer_counts(rank.held).items():
                stage = Stage(rank.at.pp, chunk)
                stacks[stack][stage] = max(count, stacks[stack].get(stage, 0))
        stages = [Stage(p, v) for v in range(self.chunks) for p in range(self.grid.pp)]
        # What the arguments say of stages is said of the stack with the most layers.
        main = max(stacks, key=lambda s: sum(stacks[s].values()), default="")
        layers = self.args.count("num_layers")
        first: dict[Stage, dict[str, int]] = {stage: {} for stage in stages}
        for stack, counts in stacks.items():
            held: Counts = {stage: counts.get(stage, 0) for stage in stages if stage in seen}
            if stack == main:
                plan = planned(self.args, self.grid.pp, self.chunks)
                held = self.counts = settle(held, plan, stages, layers)
                total = sum(held.values())
                if layers and total != layers:
                    what = f"the files hold {total} layers, their arguments record {layers}"
                    self.found.append(finding("bad-metadata", what))
            for stage, number in offsets(held).items():
                first[stage][stack] = number
        return first

    def _count_experts(self, held: Iterable[LocalTensor]) -> int:
        """Return how many experts each expert-parallel rank holds; 0 without experts."""
        experts = self.args.count("num_experts")
        if experts % self.grid.ep:
            what = f"{experts} experts over {self.grid.ep} ranks"
            self.found.append(finding("bad-metadata", f"the arguments record {what}"))
        return experts // self.grid.ep or expert_count(held)

    def _weight(self, rank: Rank, local: LocalTensor) -> str:
        """Return the name in the whole model of a parameter, or of the one that it is a copy of."""
        stage = Stage(rank.at.pp, local.chunk)
        place = stage, rank.at.ep, local.name
        found = self._known.get(place)
        if found is None:
            found = global_name(local.name, self.firsts[stage], rank.at.ep * self.experts)
            head = tied_to(found) if self._tied and rank.at.pp > 0 else None
            if head is not None:
                self.aliases[found] = head
                found = head
            self._known[place] = found
        return found

    # --- one rank -------------------------------------------------------------------------------

    def _rank(self, rank: Rank) -> list[TensorInfo]:
        """Sort all that a rank holds; return the tensors that are its own."""
        stream, tree = rank.stream, rank.stream.tree
        for local in rank.held:
            state = OptimizerTensor(local, "", local.ref, local.name)
            self._add(rank, "model", local.kind, state, stream)
        chunks = set(chunk_keys(tree).values())
        rest = {key: value for key, value in tree.items() if key not in chunks} | rank.rest
        trained = parameters(rank.held)
        if "optimizer" in tree and self._plain(rank, trained):
            rest["optimizer"] = _without_state(tree["optimizer"])
        own = self._own(rank, stream, rest)
        self._count_steps(stream.file, tree)
        if rank.distributed is not None and not self._distributed(rank, rank.distributed, trained):
            own += self._own(rank, rank.distributed, rank.distributed.tree)
        for other in rank.others:
            own += self._own(rank, other, other.tree)
        return own

    def _plain(self, rank: Rank, trained: list[LocalTensor]) -> bool:
        """Give the optimizer's state beside the weights to parameters; say whether that went."""
        tree, apart = rank.stream.tree["optimizer"], self.grid.experts_apart
        try:
            found = list(plain_states(tree, trained, experts_apart=apart, args=self.args))
        except Unmapped as reason:
            return self._refuse(rank, rank.stream.file, reason)
        return self._states(rank, found, rank.stream)

    def _distributed(self, rank: Rank, stream: TorchStream, trained: list[LocalTensor]) -> bool:
        """Give the distributed optimizer's buffers to parameters; say whether that went."""
        numels = {key: stored.numel for key, stored in rank.stream.storages.items()}
        held = RankBuffers(trained, numels, rank.at.pp, self.grid, self.args)
        try:
            found = list(distributed_states(stream.tree, held))
        except Unmapped as reason:
            return self._refuse(rank, stream.file, reason)
        return self._states(rank, found, stream)

    def _refuse(self, rank: Rank, file: str, reason: Unmapped) -> bool:
        what = f"the optimizer state in {file} is kept by rank, not by parameter: {reason}"
        self.notes.append(finding("note", what, file=file, rank=rank.number))
        return False

    def _states(self, rank: Rank, states: Iterable[OptimizerTensor], stream: TorchStream) -> bool:
        for state in states:
            self._add(rank, "optimizer", KINDS.get(state.leaf, Kind.OTHER), state, stream)
        return True

    def _add(
        self, rank: Rank, component: str, kind: Kind, state: OptimizerTensor, stream: TorchStream
    ) -> None:
        """Add what a rank holds of one tensor to that tensor."""
        local, ref = state.of, state.held
        weight = self._weight(rank, local)
        name = f"{weight}.{state.leaf}" if component != "model" and kind is Kind.OTHER else weight
        stored = "" if state.stored == name else state.stored
        identity = TensorIdentity(component, kind, name, stored)
        experts = begin = None
        if local.stacked and not state.number:
            ref = by_expert(ref, self.experts, local.name)
            experts, begin = self.experts * self.grid.ep, rank.at.ep * self.experts
        parts, share = self.grid.tp, rank.at.tp
        if local.expert:
            parts, share = self.grid.etp, self._expert_shares[rank.at.tp, rank.at.ep]
        whole = WholeTensor(identity, weight, parts, experts, state.number)
        first = self._wholes.setdefault(identity.key, whole)
        if first.identity.stored_name != stored:
            self.elsewhere.add((stream.file, state.stored))
        entry = RankEntry(rank.number, stream.file, ref, stream.storages)
        self._parts[identity.key].append(RankPart(entry, share, begin))

    # --- what is not the model's ----------------------------------------------------------------

    def _own(self, rank: Rank, stream: TorchStream, tree: Any) -> list[TensorInfo]:
        """Name the state in a file that belongs to its rank alone; return the tensors in it."""
        base = stream.file.rpartition("/")[2].removesuffix(".pt")
        owner = "" if stream is rank.stream else f"{base}."
        file = RankFile(stream.file, Role.EXTRA, rank.number, None)
        contents = Contents(file, stream._replace(tree=tree), [], owner)
        self.objects |= contents.objects
        self.names += contents.names
        self.counters += (Scalar(file.path, n.name, n.value, n.role) for n in contents.numbers)
        tensors = []
        for where, stored, held, _ in contents.tensors:
            if not isinstance(held, TensorRef):
                what = f"{stream.file} holds {stored} sharded, in a rank's own state"
                raise UnsupportedError(what, file=stream.file, tensor=stored)
            boxes = PieceBoxes()
            patch = Patch(Box.whole(held.shape), (0,) * len(held.shape))
            boxes.add(RankEntry(rank.number, stream.file, held, stream.storages), held, [patch])
            tensors.append(
                TensorInfo(
                    where.component,
                    where.name,
                    where.kind,
                    held.shape,
                    held.dtype,
                    tuple(boxes.pieces),
                    "" if stored == where.name else stored,
                )
            )
        return tensors

    def _count_steps(self, file: str, tree: Mapping[Any, Any]) -> None:
        """Note the counters that stand under names of Megatron's own."""
        for path, value in leaves(tree.get("optimizer")):
            if path[-1:] == ("step",) and "param_groups" in path and is_counter(value):
                name = ".".join(["optimizer", *map(str, path)])
                self.counters.append(Scalar(file, name, float(value), StepRole.OPTIMIZER))
        scheduler = tree.get("opt_param_scheduler")
        samples = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
        if isinstance(samples, (int, float)) and is_counter(samples):
            name = "opt_param_scheduler.num_steps"
            self.counters.append(Scalar(file, name, float(samples), StepRole.SCHEDULER))


def _without_state(tree: Any) -> Any:
    """Return an optimizer's tree without the tensors that were given to parameters."""
    if isinstance(tree, list):
        return [_without_state(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {k: v for k, v in tree.items() if k not in ("state", MASTERS)}
    return {k: _without_state(v) if k == "optimizer" or type(k) is int else v
            for k, v in kept.items()}  # fmt: skip
