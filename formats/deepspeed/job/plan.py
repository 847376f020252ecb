"""Plan a DeepSpeed job's files: which rank has which parameter groups, in which order.

Taken from the job that wrote the source, for other partitions or another stage of it; or from an
example, as it stands: a checkpoint that the target job saved itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.geometry import PlacedParameter
from ftckpt.formats.deepspeed.job import DeepSpeedJob, Group
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole

from .models import Models
from .source import DeepSpeedSource

STEP = "step"


class JobPlan:
    """A job's layout.

    Attributes:
        checkpoint: that says it.
        source: the same, read again.
        job: whose files are laid out.
        exact: whether it is the job that wrote `checkpoint`: an example.
        models: the parameters of its model.
        placed: where they lie on the model-parallel ranks.
        flats: by model-parallel rank, the flat groups of each parameter group.
        layers: the files of a pipeline's layers.
    """

    def __init__(
        self,
        checkpoint: DeepSpeedCheckpoint,
        source: DeepSpeedSource,
        job: DeepSpeedJob,
        *,
        exact: bool = False,
    ) -> None:
        """Take the layout; the arguments are the attributes."""
        self.checkpoint, self.source, self.job, self.exact = checkpoint, source, job, exact
        self.models: Models = source.models
        self.placed: Mapping[str, PlacedParameter] = checkpoint.placed
        self.layers: Sequence[DeepSpeedFile] = source.files[FileRole.LAYER]
        self.flats: Mapping[int, Sequence[Sequence[Group]]] = source.flats
        if not exact:
            groups = source.groups.items()
            self.flats = {mp: [job.partitioned(group) for group in own] for mp, own in groups}

    @property
    def pipeline(self) -> bool:
        """Whether the weights are in files of layers."""
        return not any(state.weights for state in self.models.states.values())

    def groups(self) -> Iterator[tuple[int, int]]:
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
        if not self.exact:
            return self.job.gaps(self.flats[mp][number][0], itemsize)
        recorded = self.checkpoint.gaps.get(mp, ())
        return recorded[number] if number < len(recorded) else ()

    def counts_in_settings(self, mp: int, number: int) -> bool:
        """Say whether a parameter group's steps are counted in its settings alone.

        So do apex' fused Adam and DeepSpeed's of old versions; newer ones have a zero there.
        """
        settings, groups = self.source.settings[mp], self.flats[mp]
        if len(settings) != len(groups) or STEP in self.source.numbers[mp][number]:
            return False
        name = next(iter(self.members(mp, number)), "")
        tensors = self.checkpoint.tensors
        stepped = tensor_key("optimizer", Kind.EXP_AVG, name) in tensors
        apart = tensor_key("optimizer", Kind.OTHER, f"{name}.{STEP}") in tensors
        return stepped and not apart and type(settings[number].get(STEP)) in (int, float)
