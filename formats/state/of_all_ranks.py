"""The settings of an optimizer that every rank holds alike, for formats that keep one of them.

A file a rank holds an optimizer's groups in each of them. A format that keeps the state of the
whole job has them once, and torch looks for them there: `dcp.load` by `optimizer.param_groups`.
Groups that differ stay each rank's own, and so does all other state.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, runtime_checkable

from ftckpt.checkpoint import ObjectInfo
from ftckpt.errors import UnsupportedError
from ftckpt.formats.torch_files.write_tree import pickled
from ftckpt.transfer.content import Content

from .objects import StateObjects


@runtime_checkable
class HasGroups(Protocol):
    """A checkpoint whose ranks each hold an optimizer's groups.

    Attributes:
        groups_number_states: whether these name or number the parameters that the states are of, as
            torch's do: others say nothing to who reads the states of the whole job.
        shares_what_is_alike: whether other state that all ranks hold alike is the job's too: an
            item that a job saves under a name, and not what a rank keeps for itself.
    """

    groups_number_states: ClassVar[bool]
    shares_what_is_alike: ClassVar[bool]


_GROUPS = "param_groups"
_OWNED = re.compile(r"rank_(\d+)\.(.+)")


def of_all_ranks(content: Content) -> Content:
    """Return `content` with one object for groups that all ranks hold alike, in place of theirs.

    Tensors inside an object are not compared, and so they differ.
    """
    world = content.topology.world_size
    owned: Mapping[str, list[ObjectInfo]] = defaultdict(list)
    for name, info in content.objects.items():
        match = _OWNED.fullmatch(name) if info.field else None
        if match is not None and int(match[1]) == info.rank:
            owned[match[2]].append(info)
    checkpoint = content.checkpoint
    if not owned or not isinstance(checkpoint, HasGroups) or not checkpoint.groups_number_states:
        return content
    if not checkpoint.shares_what_is_alike:
        owned = {
            label: infos for label, infos in owned.items() if label.rpartition(".")[2] == _GROUPS
        }
    state = StateObjects(content, {})
    objects = dict(content.objects)
    for label, infos in owned.items():
        if len(infos) == world and label not in objects and _alike(state, infos):
            for info in infos:
                del objects[info.name]
            objects[label] = infos[0]._replace(name=label, rank=None)
    changed = objects.keys() != content.objects.keys()
    return replace(content, objects=objects) if changed else content


def _alike(state: StateObjects, infos: Sequence[ObjectInfo]) -> bool:
    first = None
    for info in infos:
        try:
            text, storages = pickled(list(map(list, state.nested(info.name, ("state",)))))
        except UnsupportedError:
            return False
        if storages or (first is not None and text != first):
            return False
        first = text
    return True
