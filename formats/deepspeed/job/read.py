"""Read the description of a DeepSpeed job from a checkpoint: order, options, settings, numbers.

What a job's files store of the parameters at another stage of ZeRO.

A job that goes from stage 3 to a lower one gets weights: its masters in the compute type of the
placeholders, which is how DeepSpeed makes its weights from masters after every step. One that goes
to stage 3 has no place for them.

State of an optimizer that is not a tensor: settings of groups, plain numbers.

An example may group parameters otherwise than the source. Settings follow the parameters where the
source says whose they are. Where it says it by numbers alone, they follow what the example's groups
and the source's have in common: everything but the learning rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import STATE, DeepSpeedFile, FileRole, deepspeed_files
from ftckpt.formats.deepspeed.states import (
    BASES,
    MASTERS,
    OPTIMIZER,
    ModelState,
    group_state,
    read_model,
)
from ftckpt.formats.deepspeed.universal.reader import UniversalCheckpoint
from ftckpt.formats.deepspeed.zero.flat_buffers import SUB_GROUP_SIZE, Group, ZeroOptions
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor

from . import DeepSpeedJob


def read_job(checkpoint: DeepSpeedCheckpoint) -> DeepSpeedJob:
    """Parse the first file of each model-parallel rank.

    Raises:
        CorruptError: a rank has no file that could be read.
        UnsupportedError: ZeRO is off, or its groups cannot be told.
    """
    if not checkpoint.stage:
        raise UnsupportedError(
            "ZeRO is off in this checkpoint: it has no partitions, and DeepSpeed loads it on"
            " any number of ranks as it is, or of equally many that share experts",
            hint="ftckpt convert --to torchsave or safetensors",
        )
    whole = [DeepSpeedFile(f"zero/{STATE}", FileRole.OPTIMIZER)]
    named = [f for f in deepspeed_files(checkpoint.members()) if f.path in checkpoint.streams]
    files = {role: [f for f in named if f.role is role] for role in FileRole}
    files[FileRole.OPTIMIZER] = files[FileRole.OPTIMIZER] or [
        f for f in whole if f.path in checkpoint.streams
    ]
    states: dict[int, ModelState] = {}
    config: Any = None
    version: Any = None
    for file in files[FileRole.MODEL]:
        if file.mp not in states:
            tree = checkpoint.tree(file.path)
            states[file.mp] = read_model(file, tree, checkpoint.streams[file.path].storages)
            config = config or tree.get("ds_config")
            version = version or tree.get("ds_version")
    optimizers = files[FileRole.OPTIMIZER]
    trees = {mp: _optimizer(checkpoint, optimizers, mp) for mp in range(checkpoint.grid.mp)}
    missing = [mp for mp in trees if mp not in states]
    if missing:
        raise CorruptError(
            f"no file says which parameters model-parallel rank {missing[0]} has",
            kind="missing-rank",
            file=f"mp_rank_{missing[0]:02d}_model_states.pt",
        )
    zero = _zero_options(checkpoint, config, trees[0])
    groups: dict[int, list[Group]] = {}
    flats: dict[int, list[list[Group]]] = {}
    members = {}
    for mp, tree in trees.items():
        listed = states[mp].groups
        members[mp] = _members(checkpoint.stage, tree, len(listed))
        flats[mp] = [[listed[n] for n in part] for part in members[mp]]
        groups[mp] = [zero.parameter_group(part) for part in flats[mp]]
        masters = tree.get(MASTERS[1])
        if isinstance(masters, list) and len(masters) != len(listed):
            # Old versions list the shapes of a parameter group in one.
            flats[mp] = [zero.flat_groups(group) for group in groups[mp]]
    return DeepSpeedJob(
        checkpoint=checkpoint,
        zero=zero,
        files=files,
        states=states,
        groups=groups,
        flats=flats,
        settings={
            mp: [group for group in _param_groups(tree) if isinstance(group, dict)]
            for mp, tree in trees.items()
        },
        numbers={mp: [_numbers(tree, part) for part in members[mp]] for mp, tree in trees.items()},
        config=config,
        version=version,
    )


def _optimizer(
    checkpoint: DeepSpeedCheckpoint, files: Sequence[DeepSpeedFile], mp: int
) -> Mapping[str, Any]:
    """Return the optimizer's state in the first file of a model-parallel rank."""
    file = next((f for f in files if f.mp == mp), files[0] if files else None)
    if file is None:
        raise CorruptError(
            "no file holds the optimizer's state: learning rates and loss scale are not known",
            kind="missing-rank",
            file=f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt",
        )
    tree = checkpoint.tree(file.path)
    inner = tree.get(OPTIMIZER) if file.dp is not None else tree
    return inner if isinstance(inner, dict) else {}


def _zero_options(
    checkpoint: DeepSpeedCheckpoint, config: Any, optimizer: Mapping[str, Any]
) -> ZeroOptions:
    """Return how the job partitioned, by its `ds_config` and the state of its optimizer."""
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    size = zero.get("sub_group_size")
    bf16_optimizer = MASTERS[0] in optimizer and "zero_stage" not in optimizer
    names = [name for name in checkpoint.members() if name.endswith("optim_states.pt")]
    bf16 = config.get("bf16")
    prefix = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""
    has_gaps = any(any(group) for rank in checkpoint.gaps.values() for group in rank)
    return ZeroOptions(
        grid=checkpoint.grid,
        experts=checkpoint.experts,
        stage=checkpoint.stage,
        prefix=names[0].partition("zero_pp_rank")[0] if names else prefix,
        bf16_optimizer=bf16_optimizer,
        elastic=isinstance(optimizer.get(BASES[0]), list),
        round_robin=zero.get("round_robin_gradients") is True and not bf16_optimizer,
        aligned=has_gaps or (zero.get("parameter_alignment") is True and not bf16_optimizer),
        sub_group_size=int(size) if isinstance(size, (int, float)) else SUB_GROUP_SIZE,
    )


def _members(stage: int, optimizer: Mapping[str, Any], count: int) -> list[list[int]]:
    """Return the flat groups of each parameter group, by number.

    Raises:
        UnsupportedError: nothing says which sub-groups make up a parameter group.
    """
    one_each = [[number] for number in range(count)]
    if stage < 3:
        return one_each
    groups = _param_groups(optimizer)
    members = [group.get("params") for group in groups if isinstance(group, dict)]
    lists = [m for m in members if isinstance(m, list) and all(type(n) is int for n in m)]
    if len(lists) == len(groups) and sorted(n for m in lists for n in m) == [*range(count)]:
        return lists
    if len(groups) == count:  # old versions list the shapes of a parameter group in one
        return one_each
    raise UnsupportedError(
        f"nothing says which of {count} sub-groups belong to which of {len(groups)} parameter"
        " groups of the optimizer"
    )


def _param_groups(optimizer: Mapping[str, Any]) -> list[Any]:
    for holder in (*(optimizer.get(key) for key in BASES), optimizer):
        found = holder.get("param_groups") if isinstance(holder, dict) else None
        if isinstance(found, list):
            return found
    return []


def _numbers(optimizer: Mapping[str, Any], flats: Sequence[int]) -> dict[str, Any]:
    """Return the states of a parameter group that are not tensors."""
    base = next((optimizer[key] for key in BASES if key in optimizer), None)
    state = group_state(base, flats[0]) if flats else {}
    return {key: v for key, v in state.items() if not isinstance(v, TensorRef)}


# What DeepSpeed's converter makes of buffers, of frozen and of shared parameters.
COPIES = "extra:universal"


def stored_content(job: DeepSpeedJob, content: Content) -> Content:
    """Return the content that a repartitioned job stores."""
    content = content.with_tensors(_padded(job, content))
    if job.stage == 3:
        return without_weights(content, job.trained)
    made = {wanted.key: wanted for wanted in _cast_masters(job, content)}
    if not made:
        return content
    tied = {n: owner for n, owner in job.shared.items() if {n, owner} <= made.keys()}
    return replace(
        content, tensors={**made, **content.tensors}, aliases={**content.aliases, **tied}
    )


def _padded(job: DeepSpeedJob, content: Content) -> Iterator[TargetTensor]:
    """Yield the tensors of a job's own files, which a universal checkpoint has otherwise.

    There a vocabulary has lost its padding, which is zeros, and there are copies of weights.
    """
    for wanted in content.tensors.values():
        placed = job.placed.get(wanted.name)
        short = placed is not None and wanted.shape[1:] == placed.shape[1:] != ()
        if placed is not None and short and wanted.component == "optimizer":
            yield wanted._replace(shape=placed.shape)
        elif wanted.component != COPIES:
            yield wanted


def without_weights(content: Content, names: Collection[str]) -> Content:
    """Return content without the weights of parameters that are their masters, cast."""
    tensors = content.tensors
    return content.with_tensors(
        wanted
        for wanted in tensors.values()
        if (wanted.component, wanted.kind) != ("model", Kind.PARAM) or wanted.name not in names
    )


def _cast_masters(job: DeepSpeedJob, content: Content) -> Iterator[TargetTensor]:
    """Yield the weights that the source does not store.

    Stage 3 stores none, a universal checkpoint those alone that AutoEP does not stack. Where any
    other source lacks one, it is lost.

    Raises:
        UnsupportedError: the type of a stacked weight is not known.
    """
    partitioned = job.checkpoint.stage == 3
    if not partitioned and not isinstance(job.checkpoint, UniversalCheckpoint):
        return
    for state in job.states.values():
        dtypes = {name: ref.dtype for name, ref in state.weights.items() if name in job.trained}
        stacked = job.zero.experts.stacked if dtypes else ()
        for name in (*(dtypes if partitioned else ()), *stacked):
            key = tensor_key("optimizer", Kind.MASTER, job.shared.get(name, name))
            master = content.tensors.get(key)
            if name in job.trained and name not in content.tensors and master is not None:
                dtype = dtypes.get(name) or _only_one(dtypes, name)
                yield master._replace(component="model", kind=Kind.PARAM, name=name, dtype=dtype)


def _only_one(dtypes: Mapping[str, DType], name: str) -> DType:
    """Return the type of all weights, which is that of a stacked one, of which none is recorded."""
    found = sorted({dtype.name for dtype in dtypes.values()})
    if len(found) > 1:
        raise UnsupportedError(
            f"{name} is to be made of its master, and other weights are {' and '.join(found)}:"
            " which of these types the experts have is not recorded",
            hint="--zero-stage 3 stores no weights",
            tensor=name,
        )
    return next(iter(dtypes.values()))


Settings = Mapping[str, Any]

_PARAMS = "params"
# What schedules change; the rest tells one group from another.
_SCHEDULED = frozenset({_PARAMS, "lr", "initial_lr", "max_lr", "min_lr"})


class GroupSettings(NamedTuple):
    """The settings of one parameter group, and its number."""

    number: int
    settings: Settings


@dataclass
class ParameterSettings:
    """The settings and numbers of a source.

    Attributes:
        settings: parameter -> settings of its group.
        groups: settings of groups of which nothing says whose they are.
        places: parameter -> number of its group; None where ranks number it otherwise.
        numbers: parameter -> leaf -> value.
        alike: leaf -> value that all parameters have.
    """

    settings: dict[str, Settings] = field(default_factory=dict)
    groups: list[GroupSettings] = field(default_factory=list)
    places: dict[str, int | None] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    alike: dict[str, Any] = field(default_factory=dict)
    _found: list[Settings] = field(default_factory=list)

    @classmethod
    def of(cls, source: DeepSpeedJob) -> ParameterSettings:
        """Return those of a DeepSpeed source, which lists the parameters of each group."""
        made = cls()
        for mp, groups in source.groups.items():
            settings = source.settings[mp]
            for number, group in enumerate(groups):
                for name in group:
                    known = made.places.setdefault(name, number)
                    made.places[name] = number if known == number else None
                    made.numbers[name] = source.numbers[mp][number]
                    if len(settings) == len(groups):
                        made.settings[name] = without_params(settings[number])
        return made

    def of_group(self, names: Iterable[str], example: Settings) -> Settings | None:
        """Return the settings of a group of the example; None where nothing says which they are.

        Args:
            names: of the group's parameters in the source.
            example: the settings that the example has.

        Raises:
            UnsupportedError: the parameters have different ones.
        """
        known = {name: self.settings[name] for name in names if name in self.settings}
        if known:
            first, found = next(iter(known.items()))
            for name, other in known.items():
                if other != found:
                    raise UnsupportedError(
                        f"{first} and {name} have other settings in the source, and the example"
                        " has them in one group",
                        hint="--drop optimizer.param_groups: the example's settings are kept",
                        tensor=name,
                    )
            return found
        candidates = [one.settings for one in self._candidates(example)]
        if not candidates or not all_equal(candidates):
            return None
        self._found.append(candidates[0])
        return candidates[0]

    @property
    def unused(self) -> bool:
        """Whether no group of the example got the settings of some group; known at the end."""
        return any(one.settings not in self._found for one in self.groups)

    def place_of_group(self, names: Iterable[str], example: Settings) -> int | None:
        """Return the number that a group of the example had in the source, where that is known.

        Args:
            names: of the group's parameters in the source.
            example: the settings that the example has.
        """
        known = {self.places[name] for name in names if name in self.places}
        if not known:
            known = {one.number for one in self._candidates(example)}
        return known.pop() if len(known) == 1 else None

    def _candidates(self, example: Settings) -> Sequence[GroupSettings]:
        """Return the groups that may be the example's."""
        if all_equal([one.settings for one in self.groups]):
            return self.groups
        return [one for one in self.groups if _fits(one.settings, example)]

    def numbers_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the numbers that the parameters of a group have.

        Raises:
            UnsupportedError: they differ.
        """
        found: dict[str, Any] | None = None
        for name in names:
            own = self.alike | self.numbers.get(name, {})
            if found is not None and own != found:
                raise UnsupportedError(
                    f"{name} and others of its group differ in {_differing(own, found)}: ZeRO has"
                    " one number a group",
                    tensor=name,
                )
            found = own
        return found or {}


def without_params(group: Settings) -> dict[str, Any]:
    """Return the settings of a group without its members."""
    return {key: value for key, value in group.items() if key != _PARAMS}


def _fits(one: Settings, example: Settings) -> bool:
    one, example = _values(one), _values(example)
    shared = one.keys() & example.keys() - _SCHEDULED
    return bool(shared) and all(one[key] == example[key] for key in shared)


def all_equal(groups: Sequence[Settings]) -> bool:
    """Say whether groups have the same settings."""
    values = [_values(one) for one in groups]
    return all(one == values[0] for one in values)


def _values(group: Settings) -> dict[str, Any]:
    """Return settings without where they were read: that is another place for each group."""
    return {k: v.value if type(v) is CopiedTree else v for k, v in group.items()}


def _differing(one: Settings, other: Settings) -> str:
    return ", ".join(sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k)))
