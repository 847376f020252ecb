"""An opened safetensors checkpoint, and how one is opened (see `safetensors`).

Headers of all files are read together, in at most two rounds: a guess of 64 KiB, then the rest of
the longer ones. Damage in one of several shards does not hide the others: the tensors of the good
ones are there and `check` reports the bad one. What is hostile, or damage to a checkpoint of one
file, is raised.

Read a whole training state in one flat mapping: `model.X`, `master.X`, `exp_avg.X`.

Trainers that save by hand put it into one safetensors file. Words alone decide nothing, because a
model may have a module `model`, as Hugging Face's have: the sections count only where each first
moment has its second moment and its weight, of one shape, under names that fit throughout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ftckpt.checkpoint import Checkpoint, Commit, CommitState, Kind, Scalar, StepRole, TensorInfo
from ftckpt.checkpoint.quantised import CODED
from ftckpt.checkpoint.steps import counters_in, role_of
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.huggingface.index import check_index, shard_name
from ftckpt.formats.huggingface.weights import check_not_empty, check_pairs, zero_at_first
from ftckpt.formats.safetensors.header import HeaderTensor
from ftckpt.formats.safetensors.records import INDEX, StoredObjects, read_objects
from ftckpt.formats.state.stored_names import StoredName, weight_kind
from ftckpt.formats.torch_files.compression import UnpackedSource, inside_of, packed_by
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source, followed_links
from ftckpt.strict_json import JsonError, decode

from . import dcp_shards as dcp_hf
from .dcp_shards import NO_SHARDS, Shards, join, read_shards
from .header import Header, read_headers
from .names import COMPRESSED, SUFFIX, shard_place
from .tensor_names import Remarks, read_remarks, tensors_of
from .weight_sets import (
    Beside,
    WeightSet,
    find_beside,
    find_sets,
    has_sharded,
    is_rank_file,
    members_of,
    read_indexes,
    uncommitted,
)

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.checkpoint.quantised import QuantisedTensor

    from .quantised_weights import Recorded


_FIRST, _SECOND, _MASTER, _STEP, _MODEL = "exp_avg.", "exp_avg_sq.", "master.", "step.", "model."


def sections_of(tensors: Iterable[HeaderTensor]) -> Mapping[str, StoredName]:
    """Return what each tensor of a flat training state is, by stored name; nothing of any other.

    Args:
        tensors: all that were saved together.
    """
    held = {tensor.name: tensor for tensor in tensors}
    trained = [name.removeprefix(_FIRST) for name in held if name.startswith(_FIRST)]
    if not trained:
        return {}

    def has(prefix: str) -> bool:
        shapes = ((held.get(prefix + name), held[_FIRST + name]) for name in trained)
        return all(one is not None and one.shape == moment.shape for one, moment in shapes)

    section = _MODEL if has(_MODEL) else ""
    if not has(_SECOND) or not (has(section) or has(_MASTER)):
        return {}
    parameters = set(trained)
    found = {}
    for stored, tensor in held.items():
        word, _, name = stored.partition(".")
        prefix = f"{word}."
        if prefix in (_FIRST, _SECOND):
            kind = Kind.EXP_AVG if prefix == _FIRST else Kind.EXP_AVG_SQ
            found[stored] = StoredName("optimizer", kind, name)
        elif prefix == _MASTER and name in parameters:
            found[stored] = StoredName("optimizer", Kind.MASTER, name)
        elif prefix == _STEP and name in parameters:
            found[stored] = StoredName("optimizer", Kind.OTHER, f"{name}.step")
        elif prefix == section:
            found[stored] = StoredName("model", weight_kind(name, tensor.dtype), name)
    if len(set(found.values())) < len(found) or any(  # one name would stand for two tensors
        place.component == "model" and place.name in held and place.name not in found
        for place in found.values()
    ):
        return {}
    return found


_SAYING = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_SCALARS = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}
# Digits of a count in a header, and characters of a record there, at most.
_LONG_COUNT, _MOST_RECORDED = 16, 1 << 16


@dataclass(kw_only=True, repr=False)
class SafetensorsCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie dense in safetensors files.

    Attributes:
        sets: the weights in the folder itself, one set a stem.
        beside: the tensors in folders of their own.
        stored: the non-tensor state.
        headers: of each file that could be read.
        shards: what the ranks wrote before torch consolidated it.
        recorded: how its weights are quantised; None where nothing says that they are.
        partial: whether a conversion left out weights of the model on demand.
        copies: what torch.save's files beside them hold: the weights once more, or an adapter.
        set_aside: components whose sets hold the model once more, and whose tensors are not shown.
    """

    format: ClassVar[str] = "safetensors"

    sets: Sequence[WeightSet] = ()
    beside: Beside = field(default_factory=Beside)
    stored: StoredObjects = field(default_factory=StoredObjects)
    headers: Mapping[str, Header] = field(default_factory=dict)
    shards: Shards = NO_SHARDS
    recorded: Recorded | None = None
    partial: bool = False
    copies: Sequence[Checkpoint] = ()
    set_aside: frozenset[str] = frozenset()

    @cached_property
    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """The weights in codes and scales; bitsandbytes' states are read."""
        return {} if self.recorded is None else self.recorded.weights(self.source)

    def dequantised(self, dtype: DType) -> Checkpoint:
        """Return it with its weights in `dtype`; itself where they are not quantised."""
        if self.recorded is None:
            return self
        from .quantised_weights import dequantise

        return dequantise(self, self.recorded, dtype)

    @property
    def loads_at_any_world(self) -> bool:
        """It holds whole tensors, or shards with their places."""
        return True

    @property
    def zero_at_first(self) -> Sequence[str]:
        """The matrices of an adapter that begin as zeros."""
        return zero_at_first(self.tensors)

    def members(self) -> Iterable[str]:
        """Yield the weights, their indexes, and what belongs to a model folder."""
        beside = [*self.beside.members(), *self.stored.files, *self.shards.files]
        beside += (name for one in self.copies for name in one.members())
        return members_of(self.source, self.sets, beside)

    def load_object(self, name: str) -> Any:
        """Return a stored object: parsed where its form is known, else its bytes."""
        return self.stored.load(self.source, name)

    def known_faults(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Yield the traces of known faults of writers."""
        from ftckpt.formats.state.known_faults import explain

        yield from explain(self, findings)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield damaged headers, and where index, names and headers disagree."""
        yield from self.open_findings
        for weights in self.sets:
            yield from self._check_set(weights)
        yield from self.beside.check(self.source, self.headers)
        yield from self.stored.check(self.source)
        yield from self.shards.check()
        for one in self.copies:
            yield from one.check(counter)
        if self.recorded is not None:
            yield from self.recorded.check(lambda: self.quantised)
        places = [f for f in self.headers if shard_place(f)]
        if places and not self.source.single and not self.sets:
            every = [f for f in self.source.entries if shard_place(f)]
            yield from dcp_hf.check_grid(every, {f: self.headers[f] for f in places}, self.tensors)

    def _check_set(self, weights: WeightSet) -> Iterator[Finding]:
        held = {
            f: frozenset(t.name for t in self.headers[f].tensors)
            for f in weights.files
            if f in self.headers
        }
        if weights.index is not None:
            stored = (t for f in held for t in self.headers[f].tensors)
            nbytes = sum(t.end - t.begin for t in stored)
            yield from check_index(weights.index, held, self.source.entries, nbytes)
        whole = len(held) == len(weights.files) and weights.component not in self.set_aside
        if weights.files and whole:
            infos = [
                t
                for t in self.tensors.values()
                if t.pieces[-1].extent.file in held or t.pieces[0].extent.file in held
            ]
            yield from check_not_empty(infos, weights.files[0])
            if not self.partial:
                yield from check_pairs(infos, weights.files[0])
        for file in weights.stale:
            yield finding(
                "stale-shard",
                f"{file} is a shard that no index names, left by another save",
                file=file,
            )

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the recorded step, and the optimizer's counters from `optimizer/*.safetensors`.

        kohya's scripts and ai-toolkit record theirs in the header.
        """
        if self.stored.step is not None and limit:
            yield Scalar(INDEX, "step", self.stored.step, StepRole.ITERATION)
        for file, header in self.headers.items() if limit else ():
            for name, value in counters_in(_recorded(header.metadata)):
                yield Scalar(file, name, float(value), StepRole.ITERATION)
        taken: dict[str, int] = {}
        for info in self.tensors.values():
            code = _SCALARS.get(info.dtype.name)
            counts = info.component == "optimizer" and info.numel == 1 and code is not None
            if not counts or role_of(info.name, optimizer=True) is None:
                continue
            extent = info.pieces[0].extent
            if taken.setdefault(extent.file, 0) < limit:
                taken[extent.file] += 1
                raw = self.source.read(extent.file, extent.offset, extent.length)
                value = struct.unpack(f"<{code}", raw)[0]
                yield Scalar(extent.file, info.name, float(value), StepRole.OPTIMIZER)


def _recorded(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what a trainer wrote of the save into a header, whose values are text.

    kohya-ss/sd-scripts train_network.py (`save_model`) writes `ss_steps`; ostris/ai-toolkit
    jobs/process/BaseSDTrainProcess.py (`update_training_metadata`) JSON in `training_info`.
    """
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if value.isascii() and value.isdecimal() and len(value) < _LONG_COUNT:
            found[key.removeprefix("ss_")] = int(value)
        elif value.startswith("{") and len(value) < _MOST_RECORDED:
            with suppress(JsonError):
                found[key] = decode(value)
    return found


def open_safetensors(source: Source) -> SafetensorsCheckpoint:
    """Read the index and all headers (see `Safetensors.open`)."""
    if source.single:
        (name,) = source.entries
        codec = packed_by(source, name) if name.endswith(COMPRESSED) else None
        if codec is None:
            return _open_weights(source, [WeightSet("model", [name])])
        unpacked = UnpackedSource.over(source, {name: codec})
        opened = _open_weights(unpacked, [WeightSet("model", [inside_of(name)])])
        opened.dialect = ", ".join(filter(None, (f"compressed with {codec.name}", opened.dialect)))
        return opened
    indexes = read_indexes(source)
    sets = find_sets(source, indexes)
    beside = find_beside(source)
    if sets or beside.indexes:
        return _open_weights(source, sets, beside)
    shards = [n for n in source.entries if shard_place(n)]
    if shards:
        return _open_shards(source, shards)
    if has_sharded(source):
        raise uncommitted(source, f"model{SUFFIX}.index.json")
    raise NotFoundError(f"{source.url} holds no {SUFFIX} file")


def _split(
    read: Mapping[str, Header | CorruptError],
) -> tuple[dict[str, Header], list[Finding]]:
    """ScalePart headers from damage; damage to all that there is, is raised."""
    headers = {file: h for file, h in read.items() if isinstance(h, Header)}
    errors = [error for error in read.values() if isinstance(error, CorruptError)]
    if len(read) == 1 and errors:
        raise errors[0]
    return headers, [from_error(error) for error in errors]


def _open_weights(
    source: Source, sets: Sequence[WeightSet], beside: Beside | None = None
) -> SafetensorsCheckpoint:
    beside = beside or Beside()
    wanted = dict.fromkeys(f for s in sets for f in s.files if f in source.entries)
    present = [f for f in beside.files if f in source.entries]
    headers, damage = _split(read_headers(source, [*wanted, *present]))
    remarks = {file: read_remarks(header, file) for file, header in headers.items()}
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    for weights in sets:
        target = {} if weights.index is None else weights.index.weight_map
        sections = _sections(headers, remarks, weights)
        for file in weights.files:
            for info, owner in _tensors(headers, remarks, file, weights.component, sections):
                first = tensors.setdefault(info.key, info)
                tied = owner is not None or info.key in aliases
                if first is info and owner is not None:
                    aliases[info.key] = owner
                elif first is not info and (tied or first.component != info.component):
                    damage.append(_duplicate(first, info))
                elif target.get(info.name) == file:
                    # Where two shards hold it, the index decides; `check` reports it.
                    tensors[info.key] = info
    for file in present:
        for info, owner in _tensors(headers, remarks, file, beside.component(file), {}):
            first = tensors.setdefault(info.key, info)
            if first is not info:
                damage.append(_duplicate(first, info))
            elif owner is not None:
                aliases[info.key] = owner
    recorded = _quantisation(source, tensors)
    if recorded is not None:
        tensors |= recorded.kinds(tensors)
    shards = read_shards(source) if sets and not source.single else NO_SHARDS
    tensors, differing = join(tensors, shards)
    damage += differing
    stored = StoredObjects() if source.single else read_objects(source)
    indexes = [s.index.file for s in sets if s.index is not None]
    if not sets:
        indexes = [index.file for index in beside.indexes]
    commit = Commit(CommitState.NO_MARKER)
    if indexes:
        commit = Commit(CommitState.COMMITTED, indexes[0])
    return SafetensorsCheckpoint(
        source=source,
        tensors=tensors,
        objects=stored.infos,
        aliases=aliases,
        commit=commit,
        dialect=", ".join(filter(None, (_dialect(source, headers), recorded and recorded.said))),
        notes=followed_links(source, members_of(source, sets, [*beside.members(), *stored.files])),
        sets=sets,
        beside=beside,
        stored=stored,
        headers=headers,
        shards=shards,
        recorded=recorded,
        partial=any(one.partial for one in remarks.values()),
        second_copies=frozenset(wanted) if shards.files else frozenset(),
        open_findings=damage,
    )


def _quantisation(source: Source, tensors: Mapping[str, TensorInfo]) -> Recorded | None:
    """Return how weights are quantised, where there are any that may be."""
    if not any(info.dtype.name in CODED for info in tensors.values()):
        return None
    if source.single or not any(name in source.entries for name in _SAYING):
        from ftckpt.formats.quantised.schemes import unknown_codes

        if not unknown_codes(tensors.values()):
            return None
    from .quantised_weights import read_recorded

    return read_recorded(source, tensors)


def _duplicate(first: TensorInfo, second: TensorInfo) -> Finding:
    here, there = first.pieces[0].extent.file, second.pieces[0].extent.file
    return finding(
        "duplicate-tensor", f"{first.key} is in {here} and in {there}", file=there, tensor=first.key
    )


def _open_shards(source: Source, files: Sequence[str]) -> SafetensorsCheckpoint:
    headers, damage = _split(read_headers(source, files))
    tensors, contradictions = dcp_hf.assemble(headers)
    ranks = {place.rank for place in map(shard_place, files) if place is not None}
    return SafetensorsCheckpoint(
        source=source,
        tensors=tensors,
        objects={},
        dialect=f"written by torch DCP as one set of shards a rank, {len(ranks)} ranks seen; "
        "global shapes are derived from the parts, so the loss of the last rank may not show",
        notes=followed_links(source, members_of(source, (), ())),
        headers=headers,
        open_findings=[*damage, *contradictions],
        implied=dcp_hf.implied(files),
    )


def _sections(
    headers: Mapping[str, Header], remarks: Mapping[str, Remarks], weights: WeightSet
) -> Mapping[str, StoredName]:
    """Return what a flat training state holds; nothing where ftckpt wrote what is what."""
    if weights.component != "model" or any(remarks[f] != Remarks() for f in remarks):
        return {}
    files = [headers[file] for file in weights.files if file in headers]
    return sections_of(tensor for header in files for tensor in header.tensors)


def _tensors(
    headers: Mapping[str, Header],
    remarks: Mapping[str, Remarks],
    file: str,
    component: str,
    sections: Mapping[str, StoredName],
) -> Iterator[tuple[TensorInfo, str | None]]:
    """Yield the tensors of a file that could be read; see `safetensors_names.tensors_of`."""
    if file in headers:
        yield from tensors_of(headers[file], file, component, remarks[file], sections)


def _dialect(source: Source, headers: Mapping[str, Header]) -> str:
    place = shard_place(source.name) if source.single else None
    if place is not None:
        return f"one shard of a DCP save, of rank {place.rank - 1}: shapes are the shard's own"
    if source.single and is_rank_file(source.name):
        return "one rank's file of an inference engine: names and shapes are the engine's own"
    shard = shard_name(source.name) if source.single else None
    if shard is not None and shard.total > 1:
        return f"one shard of {shard.total}"
    if any(dcp_hf.SHARDING_INFO in h.metadata for h in headers.values()):
        return "written by torch DCP"
    said = sorted({h.metadata["format"] for h in headers.values() if "format" in h.metadata})
    return f"format {', '.join(said)}"[:80] if said else ""
