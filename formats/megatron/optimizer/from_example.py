"""The optimizer of a job that an example shows, with the state and the settings of a source.

The example says which optimizers there are, their groups, what they keep of a parameter and where
that lies. The settings of a group (learning rate, decay, its count of steps) are those of the
source's group of the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from struct import pack
from typing import Any

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.job.common_state import opened
from ftckpt.formats.megatron.job.groups import (
    BufferForm,
    JobOptimizer,
    Optimizers,
    form_of,
    optimizers_of,
)
from ftckpt.formats.megatron.job.kept_state import (
    ADAMS,
    LATER,
    MUONS,
    TENSORS,
    KeptState,
    lacking,
    require_leaves,
    require_plain,
    require_same_types,
    require_schedule,
    require_steps,
)
from ftckpt.formats.megatron.job.optimizer_tree import MASTERS, groups_in, is_muon, numbered, torchs
from ftckpt.formats.megatron.rank_files.parts import state_key
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import Storage, Tensor
from ftckpt.transfer.content import Known
from ftckpt.transfer.layout import Literal

from .per_rank import HALF, Unmapped, class_of_group
from .read_distrib_optim import RankBuffers, bucket_starts

_OWN = ("params", "is_expert_parallel", "wd_mult")  # what says which parameters a group holds
_MOMENTS = ("param", "exp_avg", "exp_avg_sq")
_STEPS = {"float32": "<f", "float64": "<d", "int64": "<q"}


def example_optimizer(
    ranks: FirstRanks, kept: KeptState, root: Mapping[Any, Any], parameters: Iterable[LocalTensor]
) -> tuple[JobOptimizer, list[Finding]] | None:
    """Return the optimizer of an example and what of it is the example's; None without one.

    Args:
        ranks: of the example.
        kept: the source's state of parameters.
        root: the other state that the source carries (`JobState.root`).
        parameters: of the whole model.

    Raises:
        UnsupportedError: the example's state could not be given to parameters, or the source lacks
            a part of what the example keeps.
    """
    found = optimizers_of(ranks)
    if found is None:
        return None
    form = None if found.plain else form_of(ranks)
    if not found.plain and form is None:
        raise UnsupportedError(
            "the example has no state of its distributed optimizer, which shows where buckets lie",
            hint=LATER,
        )
    starts = _starts(ranks)
    if form is not None:
        require_leaves(form)
    sources = list(numbered(root.get("optimizer")).values())
    count = _Count(sources, kept)
    require_steps(found)
    require_schedule(ranks.stream(ranks.coordinates()[0]).tree, root)
    found = replace(found, states=_states(found, form, kept, parameters, count))
    groups, notes = _settings(found, ranks, sources, count)
    trees = [_tree(one, sources, n, found) for n, one in enumerate(found.trees)]
    found = replace(found, trees=trees, groups=groups, storages={})
    return JobOptimizer(found, form, starts=starts), notes


class _Count:
    """How many steps the source's optimizer has made, wherever it counts them; read when asked."""

    def __init__(self, sources: Sequence[Mapping[Any, Any]], kept: KeptState) -> None:
        self._groups = [group for one in sources for group in groups_in(one)]
        self._kept = kept

    @cached_property
    def value(self) -> float | None:
        """The number; None where there is not one."""
        found = {group["step"] for group in self._groups if type(group.get("step")) in (int, float)}
        if found:
            return float(found.pop()) if len(found) == 1 else None
        return self._kept.count()


def _states(
    found: Optimizers,
    form: BufferForm | None,
    kept: KeptState,
    parameters: Iterable[LocalTensor],
    count: _Count,
) -> dict[str, Mapping[Any, Any]]:
    """Take the state of every parameter; return it by leaf, in the example's order."""
    fresh = found.plain and not any(found.states.values())  # saved before its first step
    counts = fresh or any("step" in one for one in found.states.values())
    made: dict[str, Mapping[Any, Any]] = {}
    more = [] if form is None else [k for k, v in form.leaves.items() if isinstance(v, TENSORS)]
    # Those of several optimizers count one training: where they differ, a parameter's is not known.
    shared = [one for one in kept.steps if one is not None]
    step = shared[0] if len(shared) == 1 or (shared and count.value is not None) else None
    for local in parameters:
        shown = found.states.get(local.name, {})
        masters = form is not None or local.ref.dtype.name in HALF
        own = kept.of_parameter(
            local,
            step,
            masters=masters,
            counts=form is None and counts and "momentum_buffer" not in shown,
            moments=MUONS if "momentum_buffer" in shown else ADAMS,
        )
        if form is None and counts and not ("step" in own or "momentum_buffer" in shown):
            own["step"] = _step_like(shown.get("step"), local, kept, count)
        for leaf in (*(k for k, v in shown.items() if isinstance(v, TENSORS)), *more):
            if leaf not in own and leaf not in _MOMENTS:
                own[leaf] = kept.take(state_key(local.name, str(leaf)))
        require_same_types(local, shown if form is None else form.leaves, kept)
        made[local.name] = {leaf: own[leaf] for leaf in (*shown, *own) if leaf in own}
    return made


def _step_like(shown: Any, local: LocalTensor, kept: KeptState, count: _Count) -> Any:
    """Return the step of a parameter in the example's form, where the source counts elsewhere."""
    if count.value is None:
        raise lacking(f"step of {local.name}", local.name)
    if shown is None or type(shown) in (int, float):
        return type(shown or 0.0)(count.value)
    if not isinstance(shown, TensorRef):
        raise lacking(f"step of {local.name}", local.name)
    form = _STEPS.get(shown.dtype.name)
    if form is None or shown.numel != 1:
        raise lacking(f"step of {local.name}", local.name)
    data = pack(form, count.value if form != "<q" else int(count.value))
    kept.known[state_key(local.name, "step")] = Known(shown.shape, shown.dtype, data)
    strides = dense_strides(shown.shape)
    return Tensor(Storage((Literal(data),)), shown.dtype, shown.shape, strides)


def _settings(
    found: Optimizers, ranks: FirstRanks, sources: Sequence[Mapping[Any, Any]], count: _Count
) -> tuple[list[list[Mapping[Any, Any]]], list[Finding]]:
    """Return the groups with the source's settings, and what is the example's."""
    args = ranks.layout.args
    notes: list[Finding] = []
    made: list[list[Mapping[Any, Any]]] = []
    for number, groups in enumerate(found.groups):
        made.append([])
        muon = is_muon(found.trees[number])
        known = [group for one in sources if is_muon(one) == muon for group in groups_in(one)]
        for place, group in enumerate(groups):
            shown = opened(dict(group), found.storages)
            where = f"group {place} of optimizer {number}"
            require_plain(shown, where)
            wanted = class_of_group(group, args, apart=False)
            same = [g for g in known if class_of_group(g, args, apart=False) == wanted]
            alike = [_less(g) for g in same]
            if same and all(one == alike[0] for one in alike):
                shown |= {k: v for k, v in alike[0].items() if k in shown and k not in _OWN}
            else:
                what = f"the settings of {where} are the example's: the source has no one like it"
                notes.append(finding("note", what))
            if "step" in shown:
                if count.value is None or type(shown["step"]) not in (int, float):
                    raise lacking(f"count of steps for {where}")
                shown["step"] = type(shown["step"] or 0.0)(count.value)
            made[-1].append(shown)
    return made, notes


def _less(group: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: value for key, value in group.items() if key not in ("params", "is_expert_parallel")
    }


def _tree(
    one: Mapping[Any, Any], sources: Sequence[Mapping[Any, Any]], number: int, found: Optimizers
) -> Mapping[Any, Any]:
    """Return what a file holds of an optimizer, as the source has it where it does."""
    source = sources[min(number, len(sources) - 1)] if sources else {}
    inner = torchs(one)
    made: dict[Any, Any] = {}
    for key, value in one.items():
        if key in ("state", "param_groups", MASTERS):
            made[key] = {}
        elif value is inner:
            made[key] = {name: {} for name in inner}
            rest = {k: v for k, v in inner.items() if k not in ("state", "param_groups")}
            made[key] |= _settled(rest, torchs(source), found)
        else:
            made |= _settled({key: value}, source, found)
    return made


def _settled(
    shown: Mapping[Any, Any], source: Mapping[Any, Any], found: Optimizers
) -> dict[Any, Any]:
    """Return the source's values for the example's keys; its own where the source has none."""
    made = {}
    for key, value in shown.items():
        made[key] = source.get(key, opened(value, found.storages))
        if key not in source:
            require_plain(made[key], f"optimizer.{key}")
    return made


def _starts(ranks: FirstRanks) -> dict[tuple[int, int, str], int]:
    """Return where the example's parameters begin in their buffers."""
    grid, args = ranks.layout.grid, ranks.layout.args
    found: dict[tuple[int, int, str], int] = {}
    for at in ranks.coordinates():
        stream = ranks.distributed(at)
        if stream is None:
            continue
        storages = ranks.stream(at).storages
        numels = {key: stored.numel for key, stored in storages.items()}
        locals_ = [named.local for named in ranks.parameters(at)]
        try:
            starts = bucket_starts(stream.tree, RankBuffers(locals_, numels, at.pp, grid, args))
        except Unmapped as reason:
            what = f"{stream.file} of the example does not show where buckets lie: {reason}"
            raise UnsupportedError(what, file=stream.file) from reason
        found |= {(at.pp, chunk, name): start for (chunk, name), start in starts.items()}
    return found
