"""The tree of an optimizer's file, in the three forms that DeepSpeed's optimizers write.

Stages 1 and 2 keep the masters without their padding and the states with it, or in the elastic form
both without; BF16_Optimizer keeps all of it, and books it on the last rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.autoep import group_ep
from ftckpt.formats.deepspeed.job import DeepSpeedJob
from ftckpt.formats.deepspeed.job.rank_states import GROUPS, FileState
from ftckpt.formats.deepspeed.states import BASES, GROUPS_OF_RANKS, MASTERS, OPTIMIZER
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.write import Call, Global

from .flat_buffers import Group, Partition, RankFlatGroup

_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


# A flat group, and which of its partitions a file has.
PartitionedGroup = tuple[RankFlatGroup, int]


class OptimizerTree:
    """Builds the trees of a job's optimizer files.

    Attributes:
        renumbered: whether parameter groups have other numbers than in the source.
    """

    def __init__(self, job: DeepSpeedJob) -> None:
        self._job, self._zero = job, job.zero
        self.renumbered = False

    def build(
        self, state: FileState, groups: Sequence[Sequence[PartitionedGroup]], dp: int
    ) -> dict[str, Any]:
        """Return the tree of one partition's file.

        Args:
            state: the other state.
            groups: flat groups of each parameter group, each with the number of its partition.
            dp: which partition of the job.

        Raises:
            UnsupportedError: the source has no parameter groups, and this form needs them.
        """
        flats = [flat for group in groups for flat, _ in group]
        parts = [Partition(flat, self._zero, rank) for group in groups for flat, rank in group]
        inner = dict(state.inner)
        if self._zero.stage == 3:
            inner = self._stage3(inner, parts)
            inner[OPTIMIZER] = self._base(state, groups, [part.state(part.size) for part in parts])
            if self._zero.experts.stacked:
                inner[GROUPS_OF_RANKS] = [
                    self._ranks(number, flat.group, dp) for number, flat in enumerate(flats)
                ]
        else:
            inner = self._stages12(inner, flats, parts)
            if self._zero.elastic:
                inner[BASES[0]] = [part.state(part.held) for part in parts]
            else:
                states = [part.state(part.size) for part in parts]
                inner[BASES[0]] = self._base(state, groups, states)
        around = {"ds_config": self._job.config, "ds_version": self._job.version}
        return {OPTIMIZER: inner, **(state.outer if state.at else around)}

    def _ranks(self, number: int, group: Group, dp: int) -> dict[str, Any]:
        """Return which ranks partition a sub-group; AutoEP loads on the same ones alone."""
        experts, ep = self._zero.experts, self._zero.experts.ep or 1
        stacked = experts.on_its_rank(next(iter(group))) in experts.stacked
        every = [*range(self._zero.grid.dp)]
        if stacked:
            mine = experts.place(dp, ep)[0]
            every = [rank for rank in every if experts.place(rank, ep)[0] == mine]
        return {
            "sub_group": number,
            "partition_count": len(every),
            "partition_rank": every.index(dp),
            "partition_ranks": every,
            "families": ["autoep_expert" if stacked else "replicated"],
            "group_names": [f"ep_size_{ep}" if stacked else "replicated"],
        }

    def _stage3(self, inner: dict[str, Any], parts: Sequence[Partition]) -> dict[str, Any]:
        scaler = Call(_SCALER, state={"cur_scale": 1.0, "dynamic": False}, new=True)
        # What the loader asks for and BF16_Optimizer does not keep: it never scales.
        found = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, **inner}
        found.pop("ds_version", None)  # it stands around this state, where stage 3 has it alone
        return found | {
            "zero_stage": Call(_STAGE, (3,)),
            "partition_count": self._zero.grid.dp,
            MASTERS[1]: [part.masters(part.size) for part in parts],
        }

    def _stages12(
        self,
        inner: dict[str, Any],
        flats: Sequence[RankFlatGroup],
        parts: Sequence[Partition],
    ) -> dict[str, Any]:
        keeps_padding = self._zero.bf16_optimizer
        found = {
            "ds_version": self._job.version,
            **inner,
            "group_paddings": [
                (part.size * part.ranks - part.total if part.is_last else 0)
                if keeps_padding
                else part.size - part.held
                for part in parts
            ],
            "partition_count": [part.ranks for part in parts],
            "param_slice_mappings": [self._addresses(part) for part in parts],
            MASTERS[0]: [part.masters(part.size if keeps_padding else part.held) for part in parts],
        }
        if not keeps_padding:
            found["zero_stage"] = Call(_STAGE, (self._zero.stage,))
            found["param_alignment_paddings"] = [
                list(flat.gaps) or [0] * len(flat.group) for flat in flats
            ]
        return found

    def _addresses(self, part: Partition) -> Ordered:
        """Return where in the partition what is held of which parameter."""
        found = Ordered()
        for run in part.runs:
            place = {"numel": run.stop - run.start, "start": run.at}
            name = self._zero.experts.on_its_rank(run.name)
            found[self._job.called.get(name, name)] = Call(_ADDRESS, state=place, new=True)
        return found

    def _base(
        self,
        state: FileState,
        groups: Sequence[Sequence[PartitionedGroup]],
        states: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the base optimizer's state_dict, whose parameters are the flat groups."""
        base = state.base
        hyper = base.get(GROUPS)
        if not isinstance(hyper, list) or len(hyper) != len(groups):
            raise UnsupportedError(
                f"the optimizer's param_groups are not those of its {len(groups)} parameter groups:"
                " without learning rates this form of a checkpoint cannot be loaded",
            )
        numbers = iter(range(len(states)))
        members = [[next(numbers) for _ in group] for group in groups]
        self.renumbered |= any(
            group.get("params") != mine or self._shared(group)
            for group, mine in zip(hyper, members, strict=True)
        )
        base[GROUPS] = [
            {**group, **self._shared(group), "params": mine}
            for group, mine in zip(hyper, members, strict=True)
        ]
        held = {number: state for number, state in enumerate(states) if state}
        return {"state": held, **base}

    def _shared(self, group: Mapping[str, Any]) -> dict[str, str]:
        """Return the name of a parameter group of experts, where other ranks share them now."""
        ep, now = group_ep(group), self._zero.experts.ep
        return {"name": f"ep_size_{now}"} if ep is not None and ep != now else {}
