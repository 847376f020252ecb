"""Resolve a pointer to its checkpoint, and to no other."""

from __future__ import annotations

from dataclasses import replace

from ftckpt.errors import CorruptError, MissingError, UnsupportedError, UsageError
from ftckpt.storage.suggestions import hint_for_name

from .pointers import Pointer
from .roots import Candidate, Root
from .select import SelectionRules


def follow(root: Root, name: str, rules: SelectionRules) -> Root:
    """Return a root with only a pointer's target, and allowed fallbacks.

    With a `max_fallback` in `rules`, checkpoints older than the pointer's remain.

    Raises:
        MissingError: the root has no such pointer; that is not a first start.
        CorruptError: its target does not exist (`pointer-dangling`).
        UnsupportedError: its target is there, under a name that no checkpoint has.
        UsageError: older ones are allowed, and nothing shows which are.
    """
    pointer = next((one for one in root.pointers if one.name == name), None)
    if pointer is None:
        names = [one.name for one in root.pointers]
        hint = hint_for_name(name, names) or "ftckpt promote CHECKPOINT --pointer NAME makes one"
        raise MissingError(f"{root.url} has no pointer {name}", hint=hint)
    meant = tuple(c for c in root.candidates if _means(pointer, c))
    if not meant and pointer.no_candidate:
        raise UnsupportedError(
            f"{name} of {root.url} says {pointer.says!r}, which is there, and whose name is not a "
            "checkpoint's",
            hint="name it itself",
        )
    if not meant:
        raise CorruptError(
            f"{name} of {root.url} says {pointer.says!r}, which is not there",
            kind="pointer-dangling",
            file=name,
            hint="ftckpt promote points it at a checkpoint that passes",
        )
    if rules.max_fallback is None:
        return replace(root, candidates=meant)
    step = pointer.step
    if step is None:
        raise UsageError(
            f"{name} of {root.url} shows no step, so nothing says what is older than it",
            hint="leave --max-fallback out",
        )
    older = tuple(
        c for c in root.candidates if c not in meant and c.step is not None and c.step < step
    )
    return replace(root, candidates=meant + older)


def _means(pointer: Pointer, candidate: Candidate) -> bool:
    if candidate.path == pointer.target:
        return True
    same = candidate.step is not None and candidate.step == pointer.step
    return pointer.means_step and same and not candidate.staging
