"""The job that a DeepSpeed checkpoint is laid out for: its grid, its stage, the order of groups.

Two options change the order or the place of parameters in a flat partition, and both depend on the
number of partitions, so they are applied anew:

- `round_robin_gradients` deals a group's parameters out over the partitions: 0, n, 2n, …, 1, n+1, …
- `parameter_alignment` begins every parameter at a multiple of 16 bytes of its compute type.

Sources: `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`, the loop over groups),
`runtime/zero/stage3.py` (`_create_fp16_sub_groups`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid
from ftckpt.formats.deepspeed.states import BASES, MASTERS
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.transfer.layout import LayoutRequest

Group = Mapping[str, Shape]

# What helps where nothing but the target job knows how it lays its parameters out.
LIKE = "--like EXAMPLE takes the layout from a checkpoint that the target job saved"
_SUB_GROUP = 1_000_000_000  # DeepSpeed's default
_ALIGNED_TO = 16


@dataclass(frozen=True, kw_only=True)
class DeepSpeedJob:
    """How a job partitions.

    Attributes:
        grid: sizes of its parallel groups.
        stage: of ZeRO, 1 to 3.
        prefix: of its optimizer's files.
        plain: whether BF16_Optimizer writes, which keeps all padding and records no stage.
        elastic: whether the states of stages 1 and 2 are a list and without padding.
        round_robin: see the module's docstring.
        aligned: see the module's docstring.
        sub_group: elements of a rank at which a sub-group of stage 3 ends.
    """

    grid: DeepSpeedGrid
    stage: int
    prefix: str = ""
    plain: bool = False
    elastic: bool = False
    round_robin: bool = False
    aligned: bool = False
    sub_group: int = _SUB_GROUP

    def partitioned(self, group: Group) -> list[Group]:
        """Return the flat groups of one parameter group: more than one in stage 3 alone."""
        if self.stage == 3:
            return list(self._sub_groups(group))
        names = list(group)
        if self.round_robin:
            names = [names[n] for n in _dealt(len(names), self.grid.dp)]
        return [{name: group[name] for name in names}]

    def joined(self, groups: Sequence[Group]) -> Group:
        """Return the parameter group that was partitioned: the inverse of `partitioned`."""
        flat = {name: shape for group in groups for name, shape in group.items()}
        if self.stage == 3 or not self.round_robin:
            return flat
        names = list(flat)
        back = sorted(zip(_dealt(len(names), self.grid.dp), names, strict=True))
        return {name: flat[name] for _, name in back}

    def gaps(self, group: Group, itemsize: int) -> tuple[int, ...]:
        """Return the elements after each parameter of a flat group of stages 1 and 2.

        Args:
            group: laid out.
            itemsize: bytes of an element in the compute type.
        """
        unit = _ALIGNED_TO // gcd(_ALIGNED_TO, itemsize) if self.aligned else 1
        gaps, end = [], 0
        for shape in group.values():
            end += prod(shape)
            gaps.append(-end % unit)
            end += gaps[-1]
        return (*gaps[:-1], 0) if gaps else ()

    def _sub_groups(self, group: Group) -> Iterator[Group]:
        held = {name: -(-prod(shape) // self.grid.dp) for name, shape in group.items()}
        if self.sub_group >= sum(held.values()):
            yield group
            return
        part: dict[str, Shape] = {}
        size = 0
        for name, shape in group.items():
            part[name] = shape
            size += held[name]
            if size >= self.sub_group:
                yield part
                part, size = {}, 0
        if part:
            yield part


def _dealt(count: int, ranks: int) -> list[int]:
    return [n for rank in range(ranks) for n in range(rank, count, ranks)]


def job_of(
    checkpoint: DeepSpeedCheckpoint, config: Any, optimizer: Mapping[str, Any]
) -> DeepSpeedJob:
    """Return the job that wrote a checkpoint.

    Args:
        checkpoint: opened.
        config: its `ds_config`.
        optimizer: the optimizer's state in one of its files.
    """
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    size = zero.get("sub_group_size")
    plain = MASTERS[0] in optimizer and "zero_stage" not in optimizer
    names = [name for name in checkpoint.members() if name.endswith("optim_states.pt")]
    return DeepSpeedJob(
        grid=checkpoint.grid,
        stage=checkpoint.stage,
        prefix=names[0].partition("zero_pp_rank")[0] if names else _prefix(config),
        plain=plain,
        elastic=isinstance(optimizer.get(BASES[0]), list),
        round_robin=zero.get("round_robin_gradients") is True and not plain,
        aligned=_any(checkpoint.gaps) or (zero.get("parameter_alignment") is True and not plain),
        sub_group=int(size) if isinstance(size, (int, float)) else _SUB_GROUP,
    )


def _prefix(config: Mapping[str, Any]) -> str:
    bf16 = config.get("bf16")
    return "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""


def _any(gaps: Mapping[int, tuple[tuple[int, ...], ...]]) -> bool:
    return any(any(group) for rank in gaps.values() for group in rank)


def wished(job: DeepSpeedJob, request: LayoutRequest) -> DeepSpeedJob:
    """Return the job that the user wants.

    Raises:
        UsageError: the vocabulary's size, which stays what it is.
        UnsupportedError: other tensor slices or pipeline stages.
    """
    if request.true_vocab_size is not None:
        raise UsageError(
            "--true-vocab-size has no meaning for DeepSpeed's own partitions: their vocabulary"
            " keeps its padding",
            hint="leave it out; with --like the result has the padding of the example",
        )
    for name, has in (("tp", job.grid.tp), ("pp", job.grid.pp)):
        wish = getattr(request, name)
        if wish not in (None, has):
            raise UnsupportedError(
                f"--{name} {wish} of a job of {has}: which parameter then belongs to which group"
                " and rank is decided by the trainer's model and recorded nowhere",
                hint=f"{LIKE}; or convert --to deepspeed-universal, which loads at any tp and pp",
            )
    grid = job.grid._replace(dp=request.dp or job.grid.dp, evidence="")
    stage = request.zero_stage or job.stage
    # BF16_Optimizer is an optimizer of stage 1; the elastic form one of stages 1 and 2.
    return DeepSpeedJob(
        grid=grid,
        stage=stage,
        prefix=job.prefix,
        plain=job.plain and stage == 1,
        elastic=job.elastic and stage < 3,
        round_robin=job.round_robin,
        aligned=job.aligned,
        sub_group=job.sub_group,
    )
