"""Read the pickled trees of DeepSpeed's files into records, as far as they say how tensors lie.

Everything in a tree is the file's word, so every type is checked. What says nothing of the layout
(a scheduler, a random state, the client's own keys) is left to `deepspeed_contents`.

Sources: `deepspeed/runtime/engine.py` (`_common_checkpoint_state`), `runtime/zero/` and
`runtime/bf16_optimizer.py` (`state_dict`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.values import Composite, StoredStorage, SubclassRef, TensorRef

from .autoep import AUTOEP_KEYS, StackedLayer, read_layers
from .names import DeepSpeedFile

MODULE = "module"
OPTIMIZER = "optimizer_state_dict"
INFO = "universal_checkpoint_info"
GROUPS_OF_RANKS = "ds_zero_partition_groups"
# Keys that say how the files cut the state; they mean nothing beside another cut.
LAYOUT_OF_MODEL = frozenset({
    "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
    "sparse_tensor_module_names", *AUTOEP_KEYS,
})  # fmt: skip
LAYOUT_OF_OPTIMIZER = frozenset({
    "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count",
    "param_slice_mappings", GROUPS_OF_RANKS,
})  # fmt: skip
MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
BASES = ("base_optimizer_state", OPTIMIZER)
_NEEDED = ("zero_stage", "partition_count", *MASTERS, *BASES)

# What torch's activation checkpointing adds to names of parameters, and keeps out of state_dicts.
_WRAPPER = "_checkpoint_wrapped_module."

Storages = Mapping[str, StoredStorage]


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """What a `*_model_states.pt` says of tensors.

    Attributes:
        file: where it stands.
        storages: of the file.
        weights: the module's state_dict; stage 3 has placeholders of no elements in it.
        groups: name -> shape of one parameter group, or sub-group of stage 3, in flat order.
        frozen: name -> shape of parameters that are not trained.
        fragments: what the file holds of those.
        keeps_frozen: whether the file lists them: stage 1 does not, nor a job that leaves them out.
        shared: name that is not stored -> name of the same parameter that is.
        buffers: names of buffers among `weights`.
        called: name -> what the optimizer calls the parameter, where a wrapper adds to it.
        parallel: (pp, tp) as recorded.
        dp: number of data-parallel ranks, as recorded.
        mp: number of model-parallel ranks, as recorded.
        info: `universal_checkpoint_info`: how tensor-parallel parameters are cut.
        experts: number of experts of each layer of experts.
        stacked: the layers of experts that AutoEP stacks.
        data_first: whether ranks are grouped for data parallelism before expert parallelism.
        optimizer: the optimizer's state where ZeRO is off.
        args: the arguments of Megatron-DeepSpeed, a record, where that wrote it.
    """

    file: DeepSpeedFile
    storages: Storages
    weights: Mapping[str, TensorRef]
    groups: tuple[Mapping[str, Shape], ...]
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, TensorRef]
    keeps_frozen: bool
    shared: Mapping[str, str]
    buffers: frozenset[str]
    called: Mapping[str, str]
    parallel: tuple[int, int] | None
    dp: int | None
    mp: int | None
    info: Mapping[str, Any] | None
    experts: tuple[int, ...]
    stacked: tuple[StackedLayer, ...]
    data_first: bool
    optimizer: Any
    args: Any

    def lists_as(self, other: ModelState) -> bool:
        """Say whether two files list the same parameters, in the same order and shapes."""
        return len(self.groups) == len(other.groups) and all(
            list(mine.items()) == list(theirs.items())
            for mine, theirs in zip(
                (*self.groups, self.frozen), (*other.groups, other.frozen), strict=True
            )
        )

    def other_sizes(self, other: ModelState) -> str:
        """Return in words which sizes of the job two files record differently; "" for none."""
        sizes = (
            ("data-parallel ranks", self.dp, other.dp),
            ("model-parallel ranks", self.mp, other.mp),
            ("pipeline stages and tensor slices", self.parallel, other.parallel),
        )
        told = [f"{a} {of}, not {b}" for of, a, b in sizes if None not in (a, b) and a != b]
        return ", ".join(told)


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What a `*_optim_states.pt` holds: one partition of every group.

    Attributes:
        file: where it stands.
        storages: of the file.
        stage: of ZeRO.
        partitions: number of partitions of each group; one number for all in stage 3.
        groups: the base optimizer's parameter groups, as far as they are recorded.
        slices: name of each parameter of which it holds elements -> how many, and where the first
            lies in its flat tensor, of each group; None where that is not told.
        recorded: which of the keys are there that a load needs; all ranks have the same.
        masters: flat fp32 weights of each group, or sub-group of stage 3.
        states: state name -> value of each group: flat tensors, counters.
        gaps: elements after each parameter of each group, where they were recorded.
        ranks: of each sub-group of stage 3, which partition this is and the global ranks of all,
            where they were recorded.
    """

    file: DeepSpeedFile
    storages: Storages
    stage: int
    partitions: tuple[int, ...]
    groups: tuple[Any, ...]
    slices: tuple[Mapping[str, tuple[int, int] | None], ...]
    recorded: frozenset[str]
    masters: tuple[TensorRef, ...]
    states: tuple[Mapping[str, Any], ...]
    gaps: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[object, tuple[object, ...]], ...]

    def other_optimizer(self, other: OptimizerState) -> str:
        """Return in words what another rank's file cannot have of one optimizer; "" for nothing."""
        if self.stage != other.stage:
            return f"it records ZeRO stage {other.stage}, not {self.stage}"
        odd = sorted(self.recorded ^ other.recorded)
        return f"one of them has no {odd[0]}" if odd else ""


def read_model(file: DeepSpeedFile, tree: Any, storages: Storages) -> ModelState:
    """Read the tree of a `*_model_states.pt`.

    Raises:
        NewerWriterError: it has another form than is known.
        UnsupportedError: a weight is of a tensor subclass, or see `read_layers`.
    """
    path = file.path
    if not isinstance(tree, dict) or MODULE not in tree:
        _unknown(path, "", f"a dict with {MODULE}", tree)
    shapes = tree.get("param_shapes") or ()
    if isinstance(shapes, dict):  # one group, as versions before 0.4 wrote
        shapes = [shapes]
    shared = tree.get("shared_params") or {}
    if isinstance(shared, list):
        pairs = [p for p in shared if isinstance(p, (list, tuple)) and len(p) == 2]
        shared = {p[0]: p[1] for p in pairs if isinstance(p[0], str)}
    if not isinstance(shapes, (list, tuple)) or not _texts(shared):
        _unknown(path, "param_shapes and shared_params", "lists of shapes, and names", shapes)
    dims = tree.get("checkpoint_parallel_dimensions")
    parallel = None
    if isinstance(dims, dict):
        pp, tp = _natural(dims.get("pp_degree")), _natural(dims.get("tp_degree"))
        parallel = (pp, tp) if pp and tp else None
    info, config = tree.get(INFO), tree.get("ds_config")
    config = config if isinstance(config, dict) else {}
    experts = listed(tree.get("num_experts") or ())
    if not _naturals(experts) and all(type(n) is int for n in experts):
        raise _impossible(path, "numbers of experts that none can have")
    if not _naturals(experts):
        _unknown(path, "num_experts", "numbers", "other values")
    weights = read_weights(path, tree[MODULE])
    groups = [_shapes(path, group) for group in shapes]
    told = tree.get("frozen_param_shapes")
    frozen = _shapes(path, {} if told is None else told)
    told = tree.get("buffer_names") or ()
    buffers = [name for name in listed(told) if isinstance(name, str)]
    if not isinstance(told, (list, tuple)) or len(buffers) < len(told):
        _unknown(path, "buffer_names", "names", told)
    bare = _bare((*chain(*groups), *frozen, *chain(*shared.items()), *buffers), weights)
    fragments = read_weights(path, tree.get("frozen_param_fragments"))
    return ModelState(
        file=file,
        storages=storages,
        weights=weights,
        groups=tuple({bare.get(n, n): shape for n, shape in group.items()} for group in groups),
        frozen={bare.get(n, n): shape for n, shape in frozen.items()},
        fragments={bare.get(n, n): ref for n, ref in fragments.items()},
        keeps_frozen=tree.get("frozen_param_fragments") is not None,
        shared={bare.get(a, a): bare.get(b, b) for a, b in shared.items()},
        buffers=frozenset(bare.get(n, n) for n in buffers),
        called={name: called for called, name in bare.items()},
        parallel=parallel,
        dp=_natural(tree.get("dp_world_size")) or None,
        mp=_natural(tree.get("mp_world_size")) or None,
        info=info if isinstance(info, dict) else None,
        experts=tuple(experts),
        stacked=read_layers(path, tree),
        data_first=config.get("use_data_before_expert_parallelism") is True,
        optimizer=tree.get("optimizer"),
        args=tree.get("args"),
    )


def _bare(names: Iterable[str], weights: Mapping[str, TensorRef]) -> dict[str, str]:
    """Return name with a wrapper -> name in the module's state_dict, for those that have one.

    Optimizers go by `named_parameters`, which a parent answers with the wrapper's own name in it.
    """
    known = {*names, *weights}
    bare = {name: name.replace(_WRAPPER, "") for name in known if _WRAPPER in name}
    return {name: own for name, own in bare.items() if own in weights and name not in weights}


def read_weights(path: str, tree: Any) -> Mapping[str, TensorRef]:
    """Return the tensors of a flat state_dict; None, as pipelines have it, holds none.

    Raises:
        NewerWriterError: it is not a state_dict.
        UnsupportedError: a tensor is not a strided view of a storage.
    """
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        _unknown(path, "a state_dict", "a dict", tree)
    found = {}
    for name, value in tree.items():
        if isinstance(value, (SubclassRef, Composite)):
            raise UnsupportedError(
                f"{str(name)[:200]} in {path} is a tensor subclass, which hides its bytes",
                file=path,
                tensor=str(name)[:200],
            )
        if isinstance(name, str) and isinstance(value, TensorRef):
            found[name] = value
    return found


def read_optimizer(file: DeepSpeedFile, tree: Any, storages: Storages) -> OptimizerState:
    """Read the tree of a `*_optim_states.pt`.

    Raises:
        NewerWriterError: it has another form than is known.
    """
    path = file.path
    inner = tree.get(OPTIMIZER) if isinstance(tree, dict) else None
    if not isinstance(inner, dict):
        _unknown(path, f"{OPTIMIZER}", "a dict", inner)
    masters = next((inner[key] for key in MASTERS if key in inner), None)
    base = next((inner[key] for key in BASES if key in inner), None)
    if not isinstance(masters, (list, tuple)) or not all(type(m) is TensorRef for m in masters):
        _unknown(path, f"{' or '.join(MASTERS)}", "a list of flat tensors", masters)
    groups = base.get("param_groups") if isinstance(base, dict) else None
    if groups is not None and not (listed(groups) and all(isinstance(g, dict) for g in groups)):
        _unknown(path, "param_groups", "a list of dicts", groups)
    counts = inner.get("partition_count")
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    gaps = listed(inner.get("param_alignment_paddings"))
    if not all(_naturals(g) for g in gaps):
        _unknown(path, "param_alignment_paddings", "lists of lengths", "other values")
    return OptimizerState(
        file=file,
        storages=storages,
        stage=_stage(path, inner),
        partitions=tuple(c for c in map(_natural, counts) if c),
        groups=tuple(listed(groups)),
        slices=tuple(
            {name: _address(told) for name, told in group.items() if isinstance(name, str)}
            for group in listed(inner.get("param_slice_mappings"))
            if isinstance(group, dict)
        ),
        recorded=frozenset(key for key in _NEEDED if key in inner),
        masters=tuple(masters),
        states=tuple(
            {k: v for k, v in group_state(base, number).items() if isinstance(k, str)}
            for number in range(len(masters))
        ),
        gaps=tuple(tuple(g) for g in gaps),
        ranks=tuple(
            (one.get("partition_rank"), tuple(listed(one.get("partition_ranks"))))
            for one in listed(inner.get(GROUPS_OF_RANKS))
            if isinstance(one, dict)
        ),
    )


def _address(value: Any) -> tuple[int, int] | None:
    """Return (elements, first) of a `fragment_address`."""
    told = value.state if isinstance(value, Inert) else None
    found = tuple(told.get(key) for key in ("numel", "start")) if isinstance(told, dict) else ()
    numel, start = map(_natural, found) if found else (None, None)
    return None if numel is None or start is None else (numel, start)


def read_expert_optimizer(file: DeepSpeedFile, tree: Any) -> Any:
    """Read the tree of an `expp_rank_*_optim_states.pt`: an optimizer's whole state.

    Raises:
        NewerWriterError: it has another form than is known.
    """
    state = tree.get("optimizer") if isinstance(tree, dict) else None
    if not isinstance(state, dict):
        _unknown(file.path, "optimizer", "a dict", state)
    return state


def _stage(path: str, inner: Mapping[str, Any]) -> int:
    """Return the stage; BF16_Optimizer records none and partitions as stage 1 does."""
    value = inner.get("zero_stage", 1 if MASTERS[0] in inner else 3)
    if isinstance(value, Inert):  # an enumeration, pickled as its class and its value
        value = value.args[0] if len(value.args) == 1 else None
    if value not in (1, 2, 3):
        _unknown(path, "zero_stage", "1, 2 or 3", f"{value!r}"[:40])
    if (value == 3) is not (MASTERS[1] in inner):
        raise _impossible(path, "a ZeRO stage that its own keys contradict")
    return int(value)


def group_state(base: Any, number: int) -> Mapping[Any, Any]:
    """Return a group's state in a base optimizer's; {} where the group was never stepped.

    The base optimizer sees one flat parameter a group, so its parameter ids are group numbers.
    """
    states = base.get("state") if isinstance(base, dict) else base
    if isinstance(states, list):
        state = states[number] if number < len(states) else None
    else:
        state = states.get(number) if isinstance(states, dict) else None
    return state if isinstance(state, dict) else {}


def _shapes(path: str, group: Any) -> Mapping[str, Shape]:
    if not isinstance(group, dict) or not all(
        isinstance(name, str) and type(shape) is tuple and all(type(n) is int for n in shape)
        for name, shape in group.items()
    ):
        _unknown(path, "a group of param_shapes", "names and shapes", group)
    if not all(map(_naturals, group.values())):
        raise _impossible(path, "shapes that no parameter can have")
    return group


def listed(value: Any) -> Sequence[Any]:
    """Return a list or tuple; () for anything else."""
    return value if isinstance(value, (list, tuple)) else ()


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    )


def _naturals(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_natural(n) is not None for n in value)


def _natural(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 48 else None


def _impossible(path: str, what: str) -> CorruptError:
    return CorruptError(f"{path} holds {what}", kind="bad-metadata", file=path)


def _unknown(path: str, what: str, expected: str, found: object) -> NoReturn:
    raise NewerWriterError.of(
        f"{what} of {path}" if what else path, expected=expected, found=found, file=path
    )
