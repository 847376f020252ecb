"""The tree of an optimizer's file, in the three forms that DeepSpeed's optimizers write.

Stages 1 and 2 keep the masters without their padding and the states with it, or in the elastic form
both without; BF16_Optimizer keeps all of it, and books it on the last rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.job.plan import JobPlan
from ftckpt.formats.deepspeed.job.shares import GROUPS, FileShare
from ftckpt.formats.deepspeed.states import BASES, MASTERS, OPTIMIZER
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.write import Call, Global

from .flats import Partition, RankFlatGroup

_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


class OptimizerTree:
    """Builds the trees of a job's optimizer files.

    Attributes:
        renumbered: whether parameter groups have other numbers than in the source.
    """

    def __init__(self, plan: JobPlan) -> None:
        self._source, self._job, self._called = plan.source, plan.job, plan.models.called
        self.renumbered = False

    def build(
        self, share: FileShare, groups: Sequence[Sequence[RankFlatGroup]], dp: int
    ) -> dict[str, Any]:
        """Return the tree of one partition's file.

        Args:
            share: the other state.
            groups: flat groups of each parameter group.
            dp: which partition.

        Raises:
            UnsupportedError: the source has no parameter groups, and this form needs them.
        """
        flats = [flat for group in groups for flat in group]
        parts = [Partition(flat, self._job, dp) for flat in flats]
        inner = dict(share.inner)
        if self._job.stage == 3:
            inner = self._stage3(inner, parts)
            inner[OPTIMIZER] = self._base(share, groups, [part.state(part.size) for part in parts])
        else:
            inner = self._stages12(inner, flats, parts, dp)
            if self._job.elastic:
                inner[BASES[0]] = [part.state(part.held) for part in parts]
            else:
                states = [part.state(part.size) for part in parts]
                inner[BASES[0]] = self._base(share, groups, states)
        around = {"ds_config": self._source.config, "ds_version": self._source.version}
        return {OPTIMIZER: inner, **(share.outer if share.at else around)}

    def _stage3(self, inner: dict[str, Any], parts: Sequence[Partition]) -> dict[str, Any]:
        scaler = Call(_SCALER, state={"cur_scale": 1.0, "dynamic": False}, new=True)
        # What the loader asks for and BF16_Optimizer does not keep: it never scales.
        found = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, **inner}
        found.pop("ds_version", None)  # it stands around this state, where stage 3 has it alone
        return found | {
            "zero_stage": Call(_STAGE, (3,)),
            "partition_count": self._job.grid.dp,
            MASTERS[1]: [part.masters(part.size) for part in parts],
        }

    def _stages12(
        self,
        inner: dict[str, Any],
        flats: Sequence[RankFlatGroup],
        parts: Sequence[Partition],
        dp: int,
    ) -> dict[str, Any]:
        ranks, plain = self._job.grid.dp, self._job.plain
        last = dp == ranks - 1
        found = {
            "ds_version": self._source.version,
            **inner,
            "group_paddings": [
                (part.size * ranks - part.total if last else 0) if plain else part.size - part.held
                for part in parts
            ],
            "partition_count": [ranks] * len(parts),
            "param_slice_mappings": [self._addresses(part) for part in parts],
            MASTERS[0]: [part.masters(part.size if plain else part.held) for part in parts],
        }
        if not plain:
            found["zero_stage"] = Call(_STAGE, (self._job.stage,))
            found["param_alignment_paddings"] = [
                list(flat.gaps) or [0] * len(flat.group) for flat in flats
            ]
        return found

    def _addresses(self, part: Partition) -> Ordered:
        """Return where in the partition what is held of which parameter."""
        found = Ordered()
        for run in part.runs:
            place = {"numel": run.stop - run.start, "start": run.at}
            found[self._called.get(run.name, run.name)] = Call(_ADDRESS, state=place, new=True)
        return found

    def _base(
        self,
        share: FileShare,
        groups: Sequence[Sequence[RankFlatGroup]],
        states: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the base optimizer's state_dict, whose parameters are the flat groups."""
        base = share.base
        hyper = base.get(GROUPS)
        if not isinstance(hyper, list) or len(hyper) != len(groups):
            raise UnsupportedError(
                f"the optimizer's param_groups are not those of its {len(groups)} parameter groups:"
                " without learning rates this form of a checkpoint cannot be loaded",
            )
        numbers = iter(range(len(states)))
        members = [[next(numbers) for _ in group] for group in groups]
        self.renumbered |= any(
            group.get("params") != mine for group, mine in zip(hyper, members, strict=True)
        )
        base[GROUPS] = [
            {**group, "params": mine} for group, mine in zip(hyper, members, strict=True)
        ]
        held = {number: state for number, state in enumerate(states) if state}
        return {"state": held, **base}
