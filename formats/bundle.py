"""A directory that a trainer fills with several files: weights, optimizer, scheduler, RNG.

- Hugging Face Trainer, `checkpoint-N/`: the weights in any Hugging Face layout, `optimizer.pt`,
  `scheduler.pt`, `rng_state[_R].pth`, `scaler.pt`, `training_args.bin`, and `trainer_state.json`,
  which is written last.
- accelerate, any directory: weights, `optimizer.bin`, `scheduler.bin`, `sampler.bin`,
  `dl_state_dict.bin`, `scaler.pt`, `random_states_R.pkl`; under FSDP the weights and the optimizer
  are DCP folders `pytorch_model_fsdp_0/` and `optimizer_0/`.

Each part is opened by its own format and the whole reads as one checkpoint.
Sources: `transformers/trainer.py` (`_save_checkpoint`), `accelerate/checkpointing.py`,
`accelerate/utils/fsdp_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
from ftckpt.errors import IncompleteError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.registry import Format, Listing, Recognition
from ftckpt.source import Source
from ftckpt.steps import SCALARS_A_FILE, step_of

from .bundle_parts import BundleCheckpoint, Part, Prefixed, in_part
from .strict_json import Limits, parse
from .torchsave import open_files

STATE = "trainer_state.json"
_MAX_STATE = 256 << 20
_JSON = Limits(depth=32, objects=2_000_000, keys=20_000_000, items=20_000_000, naturals=False)
_OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.(?:pt|bin)")
_OTHER = re.compile(
    r"(?P<label>scheduler(?:_\d+)?|sampler(?:_\d+)?|dl_state_dict(?:_\d+)?|scaler|training_args"
    r"|custom_checkpoint_\d+)\.(?:pt|bin|pkl)"
)
_RNG = re.compile(
    r"(?P<label>rng_state(?:_(?P<trainer>\d+))?\.pth|random_states_(?P<rank>\d+)\.pkl)"
)
_FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
_DEEPSPEED = re.compile(r"global_step(\d+)")
# What only the Trainer writes, and before trainer_state.json.
_OF_TRAINER = re.compile(r"optimizer\.pt|scheduler\.pt|rng_state(?:_\d+)?\.pth")


class Bundle:
    """The format `bundle` (see the module's docstring)."""

    name = "bundle"

    def __init__(self, formats: Sequence[Format]) -> None:
        """Keep the formats that read the parts, in the order in which they are asked.

        Args:
            formats: `dcp` for folders; what reads weights lying in the directory itself.
        """
        self._formats = tuple(formats)

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by state files beside weights, or by accelerate's FSDP folders."""
        if listing.single:
            return None
        folders = sorted(d for d in listing.directories if _FOLDER.fullmatch(d))
        folders = [d for d in folders if self._of(listing.inside(d)) is not None]
        state = sorted(n for n in listing.files if _is_state(n) and not n.startswith("training"))
        tags = sorted(d for d in listing.directories if _DEEPSPEED.fullmatch(d))
        weights = self._of(listing)
        if not (folders or (state and (weights is not None or (tags and STATE in state)))):
            return None
        commit = CommitState.NO_MARKER
        if STATE in listing.files:
            commit = CommitState.COMMITTED
        elif any(_OF_TRAINER.fullmatch(n) for n in listing.files):
            commit = CommitState.UNCOMMITTED
        parts = [r for d in folders if (r := self._of(listing.inside(d))) is not None]
        if commit is CommitState.NO_MARKER and parts:
            commit = parts[0].commit
        if weights is not None:
            parts.append(weights)
        if any(part.commit is CommitState.UNCOMMITTED for part in parts):
            commit = CommitState.UNCOMMITTED
        seen = [*folders, *state] if weights is None else [weights.reason[4:], *folders, *state]
        return Recognition(self.name, f"has {' and '.join(seen[:3])}", commit)

    def _of(self, listing: Listing) -> Recognition | None:
        return next((r for f in self._formats if (r := f.recognise(listing)) is not None), None)

    def open(self, source: Source) -> BundleCheckpoint:
        """Open every part.

        Raises:
            IncompleteError: a part is not committed, or the Trainer's last file is not there.
            UnsupportedError: a part is of a layout that is not read.
            CorruptError, UnsafeError: see the parts' formats.
        """
        names = [n for n in source.entries if "/" not in n]
        top = {n.partition("/")[0] for n in source.entries if "/" in n}
        tags = sorted(t for t in top if _DEEPSPEED.fullmatch(t))
        if tags:
            raise UnsupportedError(
                f"{source.url} keeps model and optimizer in {tags[0]}/, in DeepSpeed's layout",
                hint="that folder is a checkpoint of its own: name it",
                file=tags[0],
            )
        if STATE not in names and any(_OF_TRAINER.fullmatch(n) for n in names):
            raise IncompleteError(
                f"{STATE} is not there: the Trainer writes it last, so the save did not finish",
                hint="an earlier checkpoint is complete",
                kind="uncommitted",
                file=STATE,
            )
        parts = [self._folder(source, d) for d in sorted(top) if _FOLDER.fullmatch(d)]
        weights = self._weights(source, names)
        if weights is not None:
            parts.insert(0, weights)
        known = _parameters(parts)
        for name in sorted(names):
            if _is_state(name) and name != STATE:
                parts.append(_state_part(source, name, known))
        return _merged(source, parts, STATE if STATE in names else "")

    def _folder(self, source: Source, folder: str) -> Part:
        inside = source.part(folder)
        for form in self._formats:
            if form.name == "dcp":
                with in_part(folder + "/"):
                    return Part(folder + "/", form.open(inside))
        raise UnsupportedError(f"{folder} is a DCP folder", file=folder)

    def _weights(self, source: Source, names: Sequence[str]) -> Part | None:
        entries = {n: source.entries[n] for n in names if not _is_state(n)}
        inside = Source(source.store, source.base, entries)
        listing = Listing(entries, frozenset(), lambda *_: b"", _nowhere)
        for form in self._formats:
            if form.name != "dcp" and form.recognise(listing) is not None:
                return Part("", form.open(inside))
        return None


def _nowhere(_: str) -> Listing:
    return Listing({}, frozenset(), lambda *_: b"", _nowhere)


def _is_state(name: str) -> bool:
    return name == STATE or any(p.fullmatch(name) for p in (_OPTIMIZER, _OTHER, _RNG))


def _parameters(parts: Sequence[Part]) -> list[tuple[str, TensorInfo]]:
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


def _state_part(source: Source, name: str, known: Sequence[tuple[str, TensorInfo]]) -> Part:
    inside = Source(source.store, source.base, {name: source.entries[name]})
    if _OPTIMIZER.fullmatch(name):
        return Part("", open_files(inside, [name], role="optimizer", weights=known))
    rng = _RNG.fullmatch(name)
    if rng is not None:
        rank = int(rng["trainer"] or rng["rank"] or 0)
        label = name.partition(".")[0]
        opened = open_files(inside, [name], role="state", label=label)
        opened.objects = {k: o._replace(rank=rank) for k, o in opened.objects.items()}
        return Part("", opened, rank)
    other = _OTHER.fullmatch(name)
    assert other is not None
    return Part("", open_files(inside, [name], role="state", label=other["label"]))


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


def _merged(source: Source, parts: Sequence[Part], marker: str) -> BundleCheckpoint:
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, ObjectInfo] = {}
    owners: dict[str, tuple[Part, str]] = {}
    aliases: dict[str, str] = {}
    notes: list[Finding] = []
    damage: list[Finding] = []
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
        dialect="written by the Hugging Face Trainer" if marker else "written by accelerate",
        notes=notes,
        parts=parts,
        owners=owners,
        state=None if state is None else state.value,
        found=damage,
    )
    if state is not None and state.step is not None:
        checkpoint.step = state.step
    else:
        checkpoint.step = step_of(checkpoint.scalars(SCALARS_A_FILE))
    return checkpoint


def _commit(parts: Sequence[Part], marker: str) -> Commit:
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


def _topology(parts: Sequence[Part]) -> Topology:
    ranks = {part.rank for part in parts if part.rank is not None}
    known = next((t for p in parts if (t := p.checkpoint.topology).world_size), None)
    if len(ranks) > 1 and (known is None or (known.world_size or 0) < len(ranks)):
        return Topology(world_size=len(ranks))
    return known or Topology()
