"""Fewer things: one part of a checkpoint, or all but what is named; what is left out is said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from ftckpt.amounts import human_bytes
from ftckpt.checkpoint import Kind, ObjectInfo
from ftckpt.checkpoint.optimizer_states import masters_alone
from ftckpt.checkpoint.sharding import name_pattern
from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.storage.suggestions import hint_for_name
from ftckpt.transfer.content import Content, TargetTensor


class Only(StrEnum):
    """The part that is kept."""

    MODEL = "model"
    OPTIMIZER = "optimizer"


# How trainers and frameworks call the optimizer's entry in their state, as a whole key in a path.
_OPTIMIZER_OBJECT = r"(?:.*\.)?optim(?:izer)?(?:s|_states?|_state_dict|_\d+)?(?:\..*)?"


def only(content: Content, part: Only, *, masters: bool = False) -> Content:
    """Keep the model's weights and buffers, or the optimizer's tensors and its own objects.

    Args:
        content: from which.
        part: what is kept.
        masters: whether a weight that is stored as its master alone is made from that.

    Raises:
        NotFoundError: the content has nothing of that part, or a weight as its master alone.
        UnsupportedError: it has weights, and nothing tells which of them are the model's.
    """
    kept = [wanted for wanted in content.tensors.values() if wanted.component == part.value]
    alone = masters_alone(content.tensors, content.aliases) if part is Only.MODEL else []
    if alone and not masters:
        names = listed([content.tensors[key].name for key in alone], 3)
        raise NotFoundError(
            f"{content.checkpoint.source.url} holds {counted(len(alone), 'weight')} as masters"
            f" alone: {names}",
            hint="--from-master makes weights of them",
        )
    made = {key: content.tensors[key]._replace(component="model", kind=Kind.PARAM) for key in alone}
    kept += made.values()
    tied = {made[k].key: made[o].key for k, o in content.aliases.items() if k in made and o in made}
    content = replace(content, aliases={**content.aliases, **tied})
    objects = {
        name: info
        for name, info in content.objects.items()
        if part is Only.OPTIMIZER and re.fullmatch(_OPTIMIZER_OBJECT, name)
    }
    if not kept:
        held = sorted({wanted.component for wanted in content.tensors.values()})
        other = sorted({w.component for w in content.tensors.values() if w.kind is Kind.PARAM})
        if part is Only.MODEL and any(one.startswith("extra:") for one in other):
            raise UnsupportedError(
                f"nothing tells which weights of {content.checkpoint.source.url} are the model's:"
                f" it holds {listed(other, 3)}",
                hint="`ftckpt inspect` says why; without --only model all of it is carried",
            )
        hint = f"it holds {', '.join(held)}" if held else ""
        if part is Only.MODEL and other == ["ema"]:
            hint += ": its weights are an average; --drop 'optimizer:*' in place of --only keeps it"
        raise NotFoundError(
            f"{content.checkpoint.source.url} holds no tensors of the {part}", hint=hint
        )
    return _narrowed(content, kept, objects)


def drop(content: Content, patterns: Sequence[str]) -> Content:
    """Leave out tensors and objects by name.

    Args:
        content: from which.
        patterns: keys of tensors and names of objects; `*` stands for any text, dots included.

    Raises:
        UsageError: a pattern matches nothing.
    """
    names = (*content.tensors, *content.objects)
    gone: set[str] = set()
    for text in patterns:
        pattern = name_pattern(text)
        matched = {name for name in names if pattern.fullmatch(name)}
        if not matched:
            near = hint_for_name(text, names)
            raise UsageError(
                f"--drop {text} matches no tensor and no object of {content.checkpoint.source.url}",
                hint=near or "`ftckpt inspect --tensors` lists the names",
            )
        gone |= matched
    kept = [wanted for key, wanted in content.tensors.items() if key not in gone]
    objects = {name: info for name, info in content.objects.items() if name not in gone}
    return _narrowed(content, kept, objects)


def _narrowed(
    content: Content, kept: Sequence[TargetTensor], objects: Mapping[str, ObjectInfo]
) -> Content:
    """Return the content with just these, and say in words what is gone."""
    keys = {wanted.key for wanted in kept}
    gone = [wanted for key, wanted in content.tensors.items() if key not in keys]
    said = list(_tensors_in_words(gone))
    names = [name for name in content.objects if name not in objects]
    if names:
        said.append(f"non-tensor state: {listed(names, 3)}")
    weights = any(w.component == "model" and w.kind in (Kind.PARAM, Kind.BUFFER) for w in gone)
    return replace(
        content.with_tensors(kept),
        objects=dict(objects),
        dropped=(*content.dropped, *said),
        partial=content.partial or weights,
    )


def _tensors_in_words(gone: Iterable[TargetTensor]) -> Iterable[str]:
    held: dict[str, list[TargetTensor]] = {}
    for wanted in gone:
        held.setdefault(wanted.component, []).append(wanted)
    for component, tensors in held.items():
        nbytes = sum(wanted.nbytes for wanted in tensors)
        yield f"{counted(len(tensors), 'tensor')} of {component}, {human_bytes(nbytes)}"
