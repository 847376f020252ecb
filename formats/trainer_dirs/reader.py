"""Open a directory of several parts, each by its own format (see `bundle`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ftckpt.checkpoint import (
    Checkpoint,
    Commit,
    CommitState,
    Extent,
    Kind,
    ObjectInfo,
    TensorInfo,
    Topology,
)
from ftckpt.checkpoint.steps import SCALARS_A_FILE, step_of
from ftckpt.discovery.recognise import Format, Listing
from ftckpt.errors import CorruptError, FtckptError, IncompleteError, UnsupportedError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.torchsave.reader import TorchSaveCheckpoint, open_files
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse

from .checkpoint import BundleCheckpoint, OpenedPart, Prefixed, in_part
from .names import (
    ARGUMENTS,
    CONTEXT,
    DEEPSPEED,
    FOLDER,
    OF_TRAINER,
    OPTIMIZER,
    OTHER,
    RNG,
    STATE,
    WEIGHTS,
    fits_here,
    gaps,
    is_state,
    not_there,
)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_STATE = 256 << 20
_ALONE = "rng_state.pth"
# More ranks than this are not named one by one.
_MOST = 10_000
_JSON = JsonLimits(depth=32, objects=2_000_000, keys=20_000_000, items=20_000_000, naturals=False)


def open_bundle(source: Source, formats: Sequence[Format]) -> BundleCheckpoint:
    """Open every part (see `Bundle.open`).

    Args:
        source: the directory.
        formats: what reads the parts.
    """
    names = [n for n in source.entries if "/" not in n]
    top = {n.partition("/")[0] for n in source.entries if "/" in n}
    if {WEIGHTS, CONTEXT} <= top:
        return _merged(source, [_folder(source, WEIGHTS, formats)], "")
    tags = sorted(t for t in top if DEEPSPEED.fullmatch(t))
    if tags:
        raise UnsupportedError(
            f"{source.url} keeps model and optimizer in {tags[0]}/, in DeepSpeed's layout",
            hint="that folder is a checkpoint of its own: name it",
            file=tags[0],
        )
    if STATE not in names and any(OF_TRAINER.fullmatch(n) for n in names):
        raise IncompleteError(
            f"{STATE} is not there: the Trainer writes it last, so the save did not finish",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=STATE,
        )
    parts = [_folder(source, d, formats) for d in sorted(top) if FOLDER.fullmatch(d)]
    weights = _weights(source, names, formats)
    if weights is not None:
        parts.insert(0, weights)
    elif not parts:
        raise _no_weights(source, names)
    known = _parameters(parts)
    for name in sorted(names):
        if is_state(name) and name != STATE:
            parts.append(_state_part(source, name, known))
    return _merged(source, parts, STATE if STATE in names else "")


def _folder(source: Source, folder: str, formats: Sequence[Format]) -> OpenedPart:
    inside = source.part(folder)
    with in_part(folder + "/"):
        listing = Listing(
            {n: e for n, e in inside.entries.items() if "/" not in n},
            frozenset(n.partition("/")[0] for n in inside.entries if "/" in n),
            lambda name, length: inside.read(name, 0, min(length, inside.size(name))),
            _nowhere,
        )
        for form in formats:
            if form.recognise(listing) is not None:
                return OpenedPart(folder + "/", form.open(inside))
    raise UnsupportedError(f"{folder} is of no format that is read there", file=folder)


def _weights(source: Source, names: Sequence[str], formats: Sequence[Format]) -> OpenedPart | None:
    entries = {n: source.entries[n] for n in names if not is_state(n)}
    inside = replace(source, entries=entries, single=False)
    listing = Listing(entries, frozenset(), lambda *_: b"", _nowhere)
    for form in formats:
        if (
            form.name != "dcp"
            and fits_here(form.name, entries)
            and form.recognise(listing) is not None
        ):
            return OpenedPart("", form.open(inside))
    return None


def _no_weights(source: Source, names: Sequence[str]) -> FtckptError:
    """Return why there is nothing to train on: the weights are lost, or under a name not known."""
    others = sorted(n for n in names if not is_state(n) and n.endswith(_WEIGHTS))
    if others:
        return UnsupportedError(
            f"{source.url} has a trainer's state, and {listed(others)} in place of weights under a"
            " name that is known",
            file=others[0],
        )
    what = f"{source.url} has a trainer's state and no weights: they are lost"
    if STATE in names:
        return CorruptError(what, kind="missing-file")
    return IncompleteError(what, kind="missing-file")


def _nowhere(_: str) -> Listing:
    return Listing({}, frozenset(), lambda *_: b"", _nowhere)


def _parameters(parts: Sequence[OpenedPart]) -> list[tuple[str, TensorInfo]]:
    """Return the model's parameters in the order of its state_dict, tied ones once.

    An optimizer numbers parameters in that order. Only torch.save keeps it: safetensors sorts by
    name and DCP by rank, so there no number has a provable name.
    """
    return [
        (info.name, info)
        for part in parts
        if part.checkpoint.format == "torchsave"
        for key, info in part.checkpoint.tensors.items()
        if info.component == "model" and info.kind is Kind.PARAM
        if info.dtype.family in ("float", "complex") and key not in part.checkpoint.aliases
    ]


def _state_part(source: Source, name: str, known: Sequence[tuple[str, TensorInfo]]) -> OpenedPart:
    inside = replace(source, entries={name: source.entries[name]}, single=False)
    if OPTIMIZER.fullmatch(name):
        return OpenedPart("", open_files(inside, [name], role="optimizer", weights=known))
    rng = RNG.fullmatch(name)
    if rng is not None:
        rank = int(rng["trainer"] or rng["rank"] or 0)
        label = name.partition(".")[0]
        opened = open_files(inside, [name], role="state", label=label)
        opened.objects = {k: o._replace(rank=rank) for k, o in opened.objects.items()}
        return OpenedPart("", opened, rank)
    other = OTHER.fullmatch(name)
    assert other is not None
    return OpenedPart("", open_files(inside, [name], role="state", label=other["label"]))


@dataclass(frozen=True)
class _State:
    """What trainer_state.json says."""

    value: object
    step: int | None


def _read_state(source: Source) -> _State:
    size = source.size(STATE)
    if size > _MAX_STATE:
        raise UnsupportedError(f"{STATE} has {size} bytes", file=STATE)
    raw = source.read(STATE)
    value = parse(raw, _JSON, file=STATE, what="state", bad="bad-index", unsafe="unsafe-index")
    step = value.get("global_step") if isinstance(value, dict) else None
    return _State(value, step if type(step) is int and 0 <= step < 1 << 63 else None)


def _merged(source: Source, parts: Sequence[OpenedPart], marker: str) -> BundleCheckpoint:
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, ObjectInfo] = {}
    owners: dict[str, tuple[OpenedPart, str]] = {}
    aliases: dict[str, str] = {}
    notes: list[Finding] = []
    damage: list[Finding] = []
    names = [n.partition("/")[0] for n in source.entries]
    for part in parts:
        found: Checkpoint = part.checkpoint
        for key, info in found.tensors.items():
            moved = info if not part.prefix else _moved(info, part.prefix)
            if tensors.setdefault(key, moved) is not moved:
                file = part.prefix or next(iter(found.source.entries))
                what = f"{key} is in {file} and in another part of the checkpoint"
                damage.append(finding("duplicate-tensor", what, file=file, tensor=key))
        aliases.update(found.aliases)
        for name, info_ in found.objects.items():
            shown = name if name not in objects else f"{part.prefix or 'part:'}{name}"
            extent = info_.extent._replace(file=part.prefix + info_.extent.file)
            objects[shown] = info_._replace(name=shown, extent=extent)
            owners[shown] = (part, name)
        notes += [part.moved(note) for note in found.notes]
        damage += [part.moved(wrong) for wrong in found.open_findings]
    damage += _lost_ranks(parts)
    damage += gaps(names)
    held = any(info.component == "model" for info in tensors.values())
    notes += not_there(names, trainer=bool(marker), weights=held)
    state = _read_state(source) if marker else None
    if state is not None:
        extent = Extent(STATE, 0, source.size(STATE))
        objects["trainer_state"] = ObjectInfo("trainer_state", extent)
    checkpoint = BundleCheckpoint(
        source=source,
        tensors=tensors,
        objects=objects,
        aliases=aliases,
        topology=_topology(parts),
        commit=_commit(parts, marker),
        dialect=f"written by {_writer(parts, marker)}",
        notes=notes,
        parts=parts,
        owners=owners,
        state=None if state is None else state.value,
        open_findings=damage,
    )
    if state is not None and state.step is not None:
        checkpoint.step = state.step
    else:
        checkpoint.step = step_of(checkpoint.scalars(SCALARS_A_FILE))
    return checkpoint


def _writer(parts: Sequence[OpenedPart], marker: str) -> str:
    if marker:
        return "the Hugging Face Trainer"
    return "NeMo 2" if parts[0].prefix == f"{WEIGHTS}/" else "accelerate"


def _lost_ranks(parts: Sequence[OpenedPart]) -> Iterator[Finding]:
    """Yield the ranks whose random state is not there: every process of the job saves its own.

    How many there were is what the weights' files or the Trainer's arguments say, and at least the
    highest number.
    """
    held = {
        part.rank: name
        for part in parts
        for name in part.checkpoint.members()
        if (match := RNG.fullmatch(name)) and part.rank is not None and match["label"] != _ALONE
    }
    if not held:
        return
    worlds = (part.checkpoint.topology.world_size for part in parts if part.rank is None)
    world = max(1 + max(held), *(world or 0 for world in worlds), _processes(parts))
    example = next(iter(held.values()))
    for rank in range(min(world, _MOST)):
        if rank not in held:
            name = re.sub(r"\d+(?=\.\w+$)", str(rank), example)
            what = f"{name} is missing: the random state of rank {rank} of {world}"
            yield finding("missing-rank", what, file=name, rank=rank)


def _processes(parts: Sequence[OpenedPart]) -> int:
    """Return the number of processes that the Trainer's pickled arguments record; 0 where none."""
    for part in parts:
        found = part.checkpoint
        if not isinstance(found, TorchSaveCheckpoint):
            continue
        stream = found.streams.get(ARGUMENTS)
        args = None if stream is None else stream.tree
        state = args.get("distributed_state") if isinstance(args, Inert) else None
        count = state.get("num_processes") if isinstance(state, Inert) else None
        if type(count) is int and 0 < count <= _MOST:
            return count
    return 0


def _commit(parts: Sequence[OpenedPart], marker: str) -> Commit:
    """Return the Trainer's own marker, else that of the folders where every one has it."""
    if marker:
        return Commit(CommitState.COMMITTED, marker)
    folders = [part for part in parts if part.prefix]
    markers = [part.prefix + part.checkpoint.commit.marker for part in folders]
    if folders and all(p.checkpoint.commit.state is CommitState.COMMITTED for p in folders):
        return Commit(CommitState.COMMITTED, markers[0])
    return Commit(CommitState.NO_MARKER)


def _moved(info: TensorInfo, prefix: str) -> TensorInfo:
    return TensorInfo(
        info.component, info.name, info.kind, info.shape, info.dtype,
        Prefixed(info.pieces, prefix), info.stored_name,
    )  # fmt: skip


def _topology(parts: Sequence[OpenedPart]) -> Topology:
    ranks = {part.rank for part in parts if part.rank is not None}
    known = next((t for p in parts if (t := p.checkpoint.topology).world_size), None)
    if len(ranks) > 1 and (known is None or (known.world_size or 0) < len(ranks)):
        return Topology(world_size=len(ranks))
    return known or Topology()
