"""Read a Megatron job's state that all ranks share from a source.

Arguments, iteration, schedule and the groups of the optimizer. torch_dist has them as its common
state; files of ranks repeat them; other formats carry one or the other along, whole or taken apart
into single values, under the names that they had:

    common_state/shard_0_1, common.pt      of torch_dist; 0.optimizer.param_groups.0.lr taken apart
    optimizer.distributed.dp_group_idx_G.… of groups of ranks (`group_records`)
    rank_R.optimizer, rank_R.args, …       of files of ranks, the same for all R
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftckpt.checkpoint import ObjectInfo
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.fsdp.reader import parameter_name
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import chunk_keys
from ftckpt.formats.megatron.torch_dist.from_store import plan_of_store, recorded
from ftckpt.formats.megatron.torch_dist.reader import MegatronDistCheckpoint
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.state.objects import StateObjects
from ftckpt.formats.state.paths import NestedState, recorded_paths
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.values import StoredStorage
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor, pickled
from ftckpt.transfer.content import Content, TargetTensor

from .groups import GroupState
from .layout import JobState

_RANK = re.compile(r"rank_(\d{1,7})\.(.+)", re.DOTALL)
# What a nested state has around an optimizer's tensors, and around those of a rank.
_HOLDERS = re.compile(r"optimizer\.param_groups|rank\d{1,7}")
_OF_RANK = re.compile(
    r"rank_?\d{1,7}\.optimizer\.(?:.*\.)?(?:state|fp32_from_fp16_params)\..*", re.DOTALL
)
# A tensor of one rank's; a universal checkpoint has all of them in the state of one rank more.
_LISTED = re.compile(r"extra:(?:rank_?\d{1,7}\.)?rank_?(\d{1,7})\.(.+)", re.DOTALL)
_RANDOM, _RERUN = "rng_state", "rerun_state_machine"
_OF_RANKS = (_RANDOM, _RERUN)
# What may stand at the top of a state that nothing else shows to be of a rank.
_KEYS = (
    "args", "iteration", "checkpoint_version", "optimizer", "opt_param_scheduler",
    "num_floating_point_operations_so_far", "content_metadata", _RERUN,
)  # fmt: skip
# Of single ranks, or of another format: Megatron begins it anew, or does not ask for it.
_NOT_SHARED = ("content_metadata", *_OF_RANKS)
_PLAIN = (int, float, str, bool, bytes, type(None))
# How Megatron-FSDP keeps the settings of groups: those of each parameter, by its name.
_BY_PARAMETER = "param_to_group_meta"
_EXPERT = "is_expert_parallel"
_STEP = "step"


def job_state(content: Content) -> JobState:
    """Return the state of the job that a content's source carries; nothing where it has none.

    Raises:
        UnsupportedError: groups of ranks recorded different optimizers.
        CorruptError, UnsafeError: an object that holds it is damaged or hostile.
    """
    if isinstance(content.checkpoint, MegatronDistCheckpoint):
        found = _of_store(content)
    else:
        found = _of_objects(content)
    by_parameter = found.root.get("optimizer")
    if isinstance(by_parameter, dict) and isinstance(by_parameter.get(_BY_PARAMETER), dict):
        found.root["optimizer"] = _grouped(_counted(by_parameter[_BY_PARAMETER], content))
    for key in _NOT_SHARED:
        if found.root.pop(key, None) is not None and key == _RERUN:
            what = "the state of reruns is of the ranks that saved it: Megatron begins it anew"
            found.notes.append(finding("note", what))
    for key in [*chunk_keys(found.root).values(), "args"]:
        found.root.pop(key, None)
    return found


def is_random(wanted: TargetTensor) -> bool:
    """Return whether a tensor is a random stream, which an object of the job holds."""
    return wanted.component.startswith("extra:") and _RANDOM in f"{wanted.component}.{wanted.name}"


def is_repeated(wanted: TargetTensor) -> bool:
    """Return whether a tensor is a rank's own state of an optimizer, left in the rank's object.

    Where the state is by parameter, this is of the last stage's copy of a tied embedding.
    """
    where = f"{wanted.component.removeprefix('extra:')}.{wanted.name}"
    return wanted.component.startswith("extra:") and _OF_RANK.fullmatch(where) is not None


def not_carried(content: Content, *, repeated: bool) -> set[str]:
    """Return keys of tensors of single ranks that need no place: random streams, copies of state.

    Args:
        content: of which.
        repeated: whether state that a rank's object repeats (`is_repeated`) is left out.
    """
    return {
        key
        for key, wanted in content.tensors.items()
        if is_random(wanted) or (repeated and is_repeated(wanted))
    }


def opened(value: Any, storages: Mapping[str, StoredStorage]) -> Any:
    """Return a part of a tree as plain containers with `CopiedTree` leaves (see `JobState`).

    Args:
        value: dicts and lists become new ones.
        storages: of the tensors in it.
    """
    if type(value) is CopiedTree:
        return opened(*value)
    if isinstance(value, dict):
        return {key: opened(member, storages) for key, member in value.items()}
    if type(value) is list:
        return [opened(member, storages) for member in value]
    plain = type(value) in _PLAIN or (
        type(value) is tuple and all(type(member) in _PLAIN for member in value)
    )
    return value if plain else CopiedTree(value, storages)


def _counted(settings: Mapping[str, Any], content: Content) -> dict[str, Any]:
    """Return settings by parameter with what torch's Adam counts beside the moments.

    The fused ones count in the group, and there Megatron-Core has torch's count too, when the
    optimizer is not Megatron-FSDP's (`DistributedOptimizer.state_dict`, core 0.16).
    """
    counters = {
        wanted.name: key
        for key, wanted in content.tensors.items()
        if wanted.component == "optimizer" and wanted.name.endswith(f".{_STEP}")
    }
    found: dict[str, Any] = {}
    for name, own in settings.items():
        key = counters.get(f"{parameter_name(name)}.{_STEP}")
        found[name] = own
        if isinstance(own, dict) and _STEP not in own and key is not None:
            count = decode_scalar(content.tensors[key].dtype, read_tensor(content.checkpoint, key))
            if count is not None and count.is_integer():
                found[name] = {**own, _STEP: int(count)}
    return found


def _grouped(settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the optimizer of groups whose settings stand by parameter.

    A group is what has equal settings: those of two groups differ by what Megatron tells them by.
    Experts that have data-parallel ranks of their own have an optimizer of their own.

    Source: `_param_groups_to_param2group_meta` in megatron/core/optimizer/distrib_optimizer.py,
    `get_megatron_optimizer` in megatron/core/optimizer/__init__.py.
    """
    groups: dict[bytes, Mapping[Any, Any]] = {}
    for one in settings.values():
        if isinstance(one, dict):
            ordered = dict(sorted(one.items(), key=lambda item: str(item[0])))
            groups.setdefault(pickled(ordered)[0], ordered)
    found: list[list[Mapping[Any, Any]]] = [
        [one for one in groups.values() if bool(one.get(_EXPERT)) is expert]
        for expert in (False, True)
    ]
    made = [{"optimizer": {"param_groups": own}} for own in found if own]
    return made[0] if len(made) == 1 else dict(enumerate(made))


# --- of files of ranks ----------------------------------------------------------------------------


def state_of_ranks(content: Content, ranks: FirstRanks, needed: Sequence[str]) -> JobState:
    """Return the state of a job whose source has files of ranks: what the first one says.

    Args:
        content: what is written.
        ranks: its files.
        needed: keys that are kept whatever part of the state is wanted.
    """
    first = ranks.stream(ranks.coordinates()[0])
    chunks = set(chunk_keys(first.tree).values())
    if any(wanted.component == "optimizer" for wanted in content.tensors.values()):
        needed = (*needed, "optimizer")
    root = {
        key: value
        for key, value in first.tree.items()
        if key not in chunks
        and (key in needed or (f"rank_0.{key}" in content.objects and key not in _OF_RANKS))
    }
    found = JobState(root, first.storages)
    if f"rank_0.{_RERUN}" in content.objects:
        what = "the state of reruns is of one rank each and is dropped: Megatron begins it anew"
        found.notes.append(finding("note", what, tensor=f"rank_0.{_RERUN}"))
    for number, at in enumerate(ranks.layout.grid.directories()):
        # Those of further expert ranks Megatron does not keep either.
        if f"rank_{number}.{_RANDOM}" in content.objects and (at.pp, at.tp) not in found.random:
            stream = ranks.checkpoint.stream(at)
            found.random[at.pp, at.tp] = CopiedTree(stream.tree[_RANDOM], stream.storages)
    inside = set(map(str, first.tree))  # names whose objects and tensors all this holds
    for name in content.objects:
        if (match := _RANK.fullmatch(name)) is not None and match[2] in inside:
            found.placed.add(name)
    for key, wanted in content.tensors.items():
        if (
            wanted.component not in ("model", "optimizer")
            and wanted.name.partition(".")[0] in inside
        ):
            found.placed.add(key)
    return found


# --- of torch_dist --------------------------------------------------------------------------------


def _of_store(content: Content) -> JobState:
    plan = plan_of_store(content)
    found = JobState()
    if plan.common is not None:
        found.root = opened(plan.common.root, plan.common.storages)
    found.random = {plan.random[name]: tree for name, tree in recorded(content, plan.random)}
    taken = content.objects.keys() - plan.objects.keys()
    reruns = {name for name in content.objects if name.startswith("rerun_state_machine_state/")}
    found.placed = {*taken, *plan.random, *reruns}
    return found


# --- of what other formats carry ------------------------------------------------------------------


def _of_objects(content: Content) -> JobState:
    recorded = recorded_paths(content.checkpoint).objects
    objects = StateObjects(content, recorded)
    trees: dict[int, NestedState] = {}
    found, groups = JobState(), GroupState()
    for name, info in content.objects.items():
        path = recorded.get(name, (name,))
        if str(path[0]).partition("/")[0] == _RANDOM or _is_nothing(content, name):
            found.placed.add(name)
        if groups.takes(path):
            found.placed.add(name)
            for leaf in objects.nested(name, path):
                for inner, value in leaves(leaf.value.value, leaf.path):
                    groups.put(inner, opened(value, leaf.value.storages))
            continue
        if _place(path) is None:
            continue
        for place, value in _parts(objects, info, path):
            found.placed.add(name)
            if place[1]:
                trees.setdefault(place[0], NestedState()).put(place[1], value)
    for key, wanted in content.tensors.items():
        where = _listed_place(wanted)
        if where is not None:
            found.placed.add(key)
            value = Tensor.of(content.whole(key))
            trees.setdefault(where[0], NestedState()).put(where[1], value)
    roots = {n: tree.settled(lambda path: True) for n, tree in sorted(trees.items())}
    if roots:
        first = min(roots)
        found.root = dict(roots[first])
        found.notes = list(_differences(roots, first))
        shared = groups.shared(found.root.get("optimizer"))
        if shared is not None:
            found.root["optimizer"] = shared
    return found


def _is_nothing(content: Content, name: str) -> bool:
    """Return whether an object holds nothing but what the checkpoint lists as tensors."""
    if _HOLDERS.fullmatch(name) is None:
        return False
    found = StateObjects(content, {}).nested(name, (name,))
    return all(leaf.value.value in ({}, []) for leaf in found)


def _parts(
    objects: StateObjects, info: ObjectInfo, path: Path
) -> Iterator[tuple[tuple[int, Path], Any]]:
    """Yield the rank, the path in its state and the value of every part of an object."""
    for leaf in objects.nested(info.name, path):
        for inner, value in leaves(leaf.value.value, leaf.path):
            place = _place(inner)
            if place is not None:
                yield place, opened(value, leaf.value.storages)


def _listed_place(wanted: TargetTensor) -> tuple[int, Path] | None:
    """Return where a tensor stood that a reader lists by rank: in a loss scale, say."""
    match = _LISTED.fullmatch(f"{wanted.component}.{wanted.name}")
    if match is None or is_random(wanted) or is_repeated(wanted):
        return None
    path = tuple(int(step) if step.isdigit() else step for step in match[2].split("."))
    return (int(match[1]), path) if path[0] in _KEYS else None


def _place(path: Path) -> tuple[int, Path] | None:
    """Return whose state stands at a path, and where in it; None where that is not a job's.

    An empty path inside is that of the whole state, where it is empty.
    """
    number, first, rest = 0, path[0], path[1:]
    match = _RANK.fullmatch(first) if isinstance(first, str) else None
    if match is not None:
        number, first = int(match[1]), match[2]
    shown = match is not None
    if isinstance(first, str) and is_common(first):
        shown = True
    else:
        rest = (first, *rest)
    if rest[:1] == (0,):  # torch_dist keeps an object in a list of one
        shown, rest = True, rest[1:]
    key = rest[0] if rest else None
    if key is None:
        return (number, ()) if shown else None
    if not isinstance(key, str) or not (key in _KEYS or (shown and key.isidentifier())):
        return None
    return number, rest


def _differences(roots: Mapping[int, Mapping[Any, Any]], first: int) -> Iterator[Finding]:
    """Yield what was not the same on all ranks."""
    for key, value in roots[first].items():
        if key in ("args", "optimizer", *_NOT_SHARED):
            continue
        want = pickled(value)[0]
        if any(pickled(root.get(key))[0] != want for root in roots.values()):
            what = f"{key} differs between ranks; all have it now as rank {first} had it"
            yield finding("note", what, tensor=f"rank_{first}.{key}")
