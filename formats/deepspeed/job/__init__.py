"""One description of a DeepSpeed job, which readers make and writers lay files out by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid, PlacedParameter
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import ModelState
from ftckpt.formats.deepspeed.zero.flat_buffers import Group, ZeroOptions
from ftckpt.transfer.layout import LayoutRequest

STEP = "step"
# What helps where only the target job knows how it lays its parameters out.
LIKE = "--like EXAMPLE takes the layout from a checkpoint that the target job saved"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedJob:
    """A job: its parameters, groups and optimizer, and how its files are laid out.

    Attributes:
        checkpoint: what describes it.
        zero: how it partitions; `repartitioned` changes it.
        files: of the checkpoint, by role; of a universal one the file of the optimizer's state.
        states: what the first model file of each model-parallel rank says.
        groups: by model-parallel rank, the parameter groups in the order of the optimizer.
        flats: by model-parallel rank and parameter group, the flat groups that are partitioned.
        settings: by model-parallel rank and parameter group, the base optimizer's settings;
            empty where the optimizer's form has none.
        numbers: by model-parallel rank and parameter group, states that are not tensors.
        config, version: of DeepSpeed, as a model's file records them.
        is_example: whether the result is laid out exactly as the checkpoint is (`--like`).
    """

    checkpoint: DeepSpeedCheckpoint
    zero: ZeroOptions
    files: Mapping[FileRole, Sequence[DeepSpeedFile]]
    states: Mapping[int, ModelState]
    groups: Mapping[int, Sequence[Group]]
    flats: Mapping[int, Sequence[Sequence[Group]]]
    settings: Mapping[int, Sequence[dict[str, Any]]]
    numbers: Mapping[int, Sequence[dict[str, Any]]]
    config: Any
    version: Any
    is_example: bool = False

    @property
    def grid(self) -> DeepSpeedGrid:
        """The sizes of its parallel groups."""
        return self.zero.grid

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return self.zero.stage

    @cached_property
    def placed(self) -> Mapping[str, PlacedParameter]:
        """Where parameters, and rows of stacked ones, lie on the model-parallel ranks."""
        placed = self.checkpoint.placed
        return {**placed, **self.zero.experts.parts(placed)}

    @property
    def moves_experts(self) -> bool:
        """Whether a rank of AutoEP's has other experts, or keeps them otherwise, than it did."""
        now, before = self.zero, self.checkpoint
        same = now.grid.dp == before.grid.dp and now.experts.layers == before.experts.layers
        return bool(now.experts.stacked) and not (same and now.stage == before.stage)

    @property
    def layers(self) -> Sequence[DeepSpeedFile]:
        """The files of a pipeline's layers."""
        return self.files[FileRole.LAYER]

    @property
    def pipeline(self) -> bool:
        """Whether the weights are in files of layers."""
        return not any(state.weights for state in self.states.values())

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Name that is not stored -> name of the same parameter that is."""
        return {a: b for state in self.states.values() for a, b in state.shared.items()}

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Name -> what the optimizer calls the parameter, where a wrapper adds to it."""
        return {a: b for state in self.states.values() for a, b in state.called.items()}

    @cached_property
    def trained(self) -> set[str]:
        """Names that the optimizer knows, and those that are shared with one of them."""
        known = {n for rank in self.checkpoint.groups.values() for group in rank for n in group}
        return known | {name for name, owner in self.shared.items() if owner in known}

    def param_groups(self) -> Iterator[tuple[int, int]]:
        """Yield the parameter groups: a model-parallel rank and a number each."""
        for mp, groups in self.flats.items():
            yield from ((mp, number) for number in range(len(groups)))

    def members(self, mp: int, number: int) -> list[str]:
        """Return the parameters of a group, in the order in which they are partitioned."""
        return [name for flat in self.flats[mp][number] for name in flat]

    def gaps(self, mp: int, number: int, itemsize: int) -> tuple[int, ...]:
        """Return the elements after each parameter of a flat group of stages 1 and 2.

        Args:
            mp: the model-parallel rank.
            number: of the parameter group.
            itemsize: bytes of an element in the compute type.
        """
        if not self.is_example:
            return self.zero.gaps(self.flats[mp][number][0], itemsize)
        recorded = self.checkpoint.gaps.get(mp, ())
        return recorded[number] if number < len(recorded) else ()

    def counts_in_settings(self, mp: int, number: int) -> bool:
        """Say whether a parameter group's steps are counted in its settings alone.

        So do apex' fused Adam and DeepSpeed's of old versions; newer ones have a zero there.
        """
        settings, groups = self.settings[mp], self.flats[mp]
        if len(settings) != len(groups) or STEP in self.numbers[mp][number]:
            return False
        name = next(iter(self.members(mp, number)), "")
        tensors = self.checkpoint.tensors
        stepped = tensor_key("optimizer", Kind.EXP_AVG, name) in tensors
        apart = tensor_key("optimizer", Kind.OTHER, f"{name}.{STEP}") in tensors
        return stepped and not apart and type(settings[number].get(STEP)) in (int, float)

    def repartitioned(self, request: LayoutRequest) -> DeepSpeedJob:
        """Return the job with the partitions and the stage of ZeRO that the user wants.

        Raises:
            UsageError: the vocabulary's size, which stays what it is.
            UnsupportedError: other tensor slices or pipeline stages, or experts that the ranks
                cannot share.
        """
        if request.true_vocab_size is not None:
            raise UsageError(
                "--true-vocab-size has no meaning for DeepSpeed's own partitions: their vocabulary"
                " keeps its padding",
                hint="leave it out; with --like the result has the padding of the example",
            )
        for name, has in (("tp", self.grid.tp), ("pp", self.grid.pp)):
            wanted = getattr(request, name)
            if wanted not in (None, has):
                raise UnsupportedError(
                    f"--{name} {wanted} of a job of {has}: which parameter then belongs to which"
                    " group and rank is decided by the trainer's model and recorded nowhere",
                    hint=f"{LIKE}; or convert --to deepspeed-universal, which loads at any tp and"
                    " pp",
                )
        stage = request.zero_stage or self.stage
        grid = self.grid._replace(dp=request.dp or self.grid.dp, evidence="")
        before = self.zero.experts
        if request.ep is not None and not before.layers:
            raise UsageError("--ep has no meaning here: the job has no layers of experts")
        if before.layers.keys() - before.stacked.keys() and stage == 3:
            raise UnsupportedError("DeepSpeed has no experts with stage 3 of ZeRO")
        frozen = sorted(before.stacked.keys() - self.trained)
        if frozen and stage == 3:
            raise UnsupportedError(
                f"{frozen[0]} is not trained: stage 3 has no frozen experts of AutoEP",
                tensor=frozen[0],
            )
        experts = before.resharded(grid, request.ep)
        zero = replace(
            self.zero,
            grid=grid,
            experts=experts,
            stage=stage,
            # BF16_Optimizer is an optimizer of stage 1; the elastic form one of stages 1 and 2.
            bf16_optimizer=self.zero.bf16_optimizer and stage == 1,
            elastic=self.zero.elastic and stage < 3,
        )
        flats = {}
        for mp, own in self.groups.items():
            relisted = [experts.relisted(one, before) for one in own]
            experts.require_the_same_groups(own, relisted)
            flats[mp] = [zero.flat_groups(one) for one in relisted]
        return replace(self, zero=zero, flats=flats)
