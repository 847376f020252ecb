"""Summarise a checkpoint from headers and metadata; reads no tensor bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter

from ftckpt.checkpoint import Checkpoint, Commit, Kind, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import named_state
from ftckpt.errors import NotFoundError
from ftckpt.findings import Finding

from .resume import ResumeItem, resume_check
from .training_state import Contents


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """Bytes of logical tensors: each element once, without replicas and aliases.

    Attributes:
        by_kind: by kind, and what has none of its own by its state (`momentum_buffer`).
        per_parameter: total divided by the number of trained elements of the model; None without.
        files: sum of the sizes of all files.
    """

    total: int
    by_kind: Mapping[str, int]
    by_dtype: Mapping[str, int]
    by_component: Mapping[str, int]
    per_parameter: float | None
    files: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint in numbers.

    Attributes:
        dialect: the writer, in words.
        step: by the trainer's record in the content.
        optimizer_count: updates that the optimizer counts for itself: no step of the save.
        commit: whether the save was finished, and the evidence.
        topology: known sizes of the job.
        files: number of files.
        tensors: number of logical tensors, without aliases.
        pieces: number of pieces.
        parameters: number of elements of the model's parameters, without aliases; those that are
            stored as masters alone count.
        objects: number of non-tensor objects.
        aliases: key -> key of the tensor that owns the same bytes.
        resume: what a restart from it has and lacks.
        notes: remarks and defects found while opening; `verify` finds all.
    """

    format: str
    dialect: str
    step: int | None
    optimizer_count: int | None
    commit: Commit
    topology: Topology
    files: int
    tensors: int
    pieces: int
    parameters: int
    objects: int
    bytes: ByteCounts
    aliases: Mapping[str, str]
    resume: tuple[ResumeItem, ...]
    notes: tuple[Finding, ...]


def inspect(checkpoint: Checkpoint, contents: Contents | None = None) -> Inspection:
    """Count the content of an opened checkpoint; `contents` is for `resume_check`.

    Raises:
        UnavailableError, DeniedError: small objects could not be read.
        CorruptError, UnsafeError: a small object that the resume check reads is damaged or hostile.
    """
    # Counted by class and shape first: there may be a million tensors, but few of these.
    alike: dict[tuple[str, str, str, tuple[int, ...]], int] = defaultdict(int)
    dtypes: dict[str, DType] = {}
    tensors = pieces = 0
    tied = checkpoint.aliases
    counted = (t for key, t in checkpoint.tensors.items() if not (tied and key in tied))
    same = attrgetter("component", "kind", "dtype", "shape")
    for (component, kind, dtype, shape), same_form in groupby(counted, key=same):
        run = list(same_form)
        parts = [len(tensor.pieces) for tensor in run]
        tensors += len(parts)
        pieces += sum(parts)
        if kind is Kind.OTHER and component == "optimizer":
            for tensor in run:
                alike[component, _state_of(tensor), dtype.name, shape] += 1
        else:
            alike[component, kind, dtype.name, shape] += len(parts)
        dtypes[dtype.name] = dtype
    by_kind: dict[str, int] = defaultdict(int)
    by_dtype: dict[str, int] = defaultdict(int)
    by_component: dict[str, int] = defaultdict(int)
    parameters = trained = 0
    for (component, part, name, shape), count in alike.items():
        elements = count * prod(shape)
        nbytes = count * dtypes[name].nbytes(prod(shape))
        by_kind[part] += nbytes
        by_dtype[name] += nbytes
        by_component[component] += nbytes
        if component == "model" and part == Kind.PARAM:
            parameters += elements
        if part == Kind.MASTER:
            trained += elements
    for key, weight in checkpoint.quantised.items():  # an element can hold several values
        parameters += prod(weight.shape) - checkpoint.tensors[key].numel
    total = sum(by_kind.values())
    if trained and parameters:
        from ftckpt.checkpoint.optimizer_states import masters_alone  # few formats have any

        alone = masters_alone(checkpoint.tensors, tied)
        parameters += sum(checkpoint.tensors[key].numel for key in alone if key not in tied)
    known = parameters or trained
    counts = ByteCounts(
        total=total,
        by_kind=_largest_first(by_kind),
        by_dtype=_largest_first(by_dtype),
        by_component=_largest_first(by_component),
        per_parameter=total / known if known else None,
        files=checkpoint.source.nbytes,
    )
    return Inspection(
        format=checkpoint.format,
        dialect=checkpoint.dialect,
        step=checkpoint.step,
        optimizer_count=checkpoint.optimizer_count,
        commit=checkpoint.commit,
        topology=checkpoint.topology,
        files=len(checkpoint.source.entries),
        tensors=tensors,
        pieces=pieces,
        parameters=known,
        objects=len(checkpoint.objects),
        bytes=counts,
        aliases=checkpoint.aliases,
        resume=resume_check(checkpoint, contents),
        notes=(
            *checkpoint.notes,
            *checkpoint.suppositions,
            *checkpoint.open_findings,
            *checkpoint.unread_parts(),
        ),
    )


def matching(checkpoint: Checkpoint, pattern: str = "") -> list[TensorInfo]:
    """Return the tensors, aliases included, whose key or name a pattern matches; all for "".

    Raises:
        NotFoundError: nothing matches.
    """
    if not pattern:
        return list(checkpoint.tensors.values())
    from ftckpt.storage.suggestions import hint_for_name

    found = find_tensors(checkpoint, pattern)
    if not found:
        near = hint_for_name(pattern, checkpoint.tensors)
        raise NotFoundError(
            f"no tensor of {checkpoint.source.url} matches {pattern}",
            hint=near or "`*` stands for any text",
            tensor=pattern,
        )
    return found


def find_tensors(checkpoint: Checkpoint, pattern: str) -> list[TensorInfo]:
    """Return the tensors that a name means (see `find_tensor`), or a pattern with `*`."""
    found = find_tensor(checkpoint, pattern)
    if found or "*" not in pattern:
        return found
    from ftckpt.checkpoint.sharding import name_pattern

    whole = name_pattern(pattern)
    return [
        info
        for key, info in checkpoint.tensors.items()
        if whole.fullmatch(key) or whole.fullmatch(info.name)
    ]


def find_tensor(checkpoint: Checkpoint, name: str) -> list[TensorInfo]:
    """Return the tensors that `name` means: one key, else all of one parameter name.

    `layers.0.weight` also finds its moments; `exp_avg:layers.0.weight` is one key.
    """
    exact = checkpoint.tensors.get(name)
    same = [i for i in checkpoint.tensors.values() if name in (i.name, i.stored_name)]
    if exact is not None and exact not in same:
        return [exact]
    return same


def _state_of(info: TensorInfo) -> str:
    """Return what an optimizer's tensor counts as: the state that it is, or is a part of."""
    named = named_state(info.name)
    return named.slot if named.state is not None and named.state.moment else str(Kind.OTHER)


def _largest_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
