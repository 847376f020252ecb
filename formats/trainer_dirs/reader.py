"""Open a directory of several parts, each by its own format (see `bundle`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from ftckpt.checkpoint.steps import SCALARS_A_FILE, step_of_save
from ftckpt.discovery.recognise import Format, Listing
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import Finding, Severity, as_error, finding, from_error, listed
from ftckpt.formats.huggingface.declared_folders import DeclaredFolder, declared_folders
from ftckpt.formats.huggingface.index import is_beside
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.ranks.names import OF_ONE_RANK
from ftckpt.formats.ranks.reader import open_ranks
from ftckpt.formats.torchsave.names import STEMS
from ftckpt.formats.torchsave.reader import TorchSaveCheckpoint, open_files
from ftckpt.own_files import is_own
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse

from .checkpoint import BundleCheckpoint, OpenedPart, in_part, parameters
from .names import (
    ARGUMENTS,
    CONTENTS,
    FOLDER,
    FULL,
    HUGGING_FACE,
    OPTIMIZER,
    OTHER,
    RNG,
    STATE,
    STORE,
    TAG,
    TRAINER,
    WEIGHTS,
    by_accelerate,
    fits_here,
    folder_of_store,
    further_models,
    gaps,
    is_state,
    lists_stores,
    lost_models,
    marked,
    model_of,
    not_there,
    states_of_ranks,
)
from .nested import Nest, choose_tag, nest_among, step_of_tag, tags_in
from .verl import parts_of, read_contents
from .weight_folders import copy_of_model, lost_model, models_of, second_copy, weight_folders

if TYPE_CHECKING:
    from .open_nest import OpenedNest

_TORCH = (".pt", ".pth", ".ckpt", ".bin")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_STATE = 256 << 20
_ALONE = "rng_state.pth"
# More ranks than this are not named one by one.
_MOST = 10_000
_JSON = JsonLimits(depth=32, objects=2_000_000, keys=20_000_000, items=20_000_000, naturals=False)


def open_bundle(source: Source, formats: Sequence[Format], reads_tag: Format) -> BundleCheckpoint:
    """Open every part (see `Bundle.open`).

    Args:
        source: the directory.
        formats: what reads the parts.
        reads_tag: what reads DeepSpeed's tag.
    """
    if source.single:
        return _of_step(source)
    names = [n for n in source.entries if "/" not in n]
    top = {n.partition("/")[0] for n in source.entries if "/" in n}
    if lists_stores(names, top):
        return _by_contents(source, formats)
    nest = nest_among(source.entries)
    if nest is not None:
        from .open_nest import open_nest

        return _nested(
            source, nest, open_nest(source, nest, lambda at: _folder(source, at, formats))
        )
    store = folder_of_store(names, top)
    if store:
        return _merged(source, [_folder(source, store, formats)], "")
    tags = tags_in(source)
    by = marked(names, top, source.head)
    if by is not None and by.lacks:
        raise by.error()
    models = further_models([*names, *top])
    folders = (d for d in sorted(top) if FOLDER.fullmatch(d))
    parts = [_folder(source, d, formats)._replace(model=model_of(d, models)) for d in folders]
    parts = [*_weights(source, names, formats, models), *parts]
    declared = declared_folders(names, source.head)
    inside = _in_folders(source, declared, formats, top=bool(parts))
    below = [part.prefix.rstrip("/") for part in inside]
    wrong = [*lost_model(below, top=bool(parts) or bool(tags))]
    parts += inside
    wrong += _lost_folders(source, declared, parts)
    if tags:
        tag, said = choose_tag(source, tags, trainer=STATE in names)
        wrong += said
        parts.insert(0, _folder(source, tag, (reads_tag,)))
        wrong += step_of_tag(tag, parts[0].checkpoint)
    if not parts and wrong:
        raise as_error(wrong[0])
    if not parts:
        raise _no_weights(source, names)
    known = parameters(parts)
    for name in sorted(names):
        if is_state(name) and name != STATE:
            part = _state_part(source, name, known if not model_of(name, models) else ())
            further = model_of(name, models) if OPTIMIZER.fullmatch(name) else ""
            parts.append(part._replace(model=further))
    if ranked := states_of_ranks(names):
        of_ranks = replace(source, entries={n: source.entries[n] for n in ranked})
        parts.append(OpenedPart("", open_ranks(of_ranks, None)))
    further_parts, torn = _further(source, names, parts, formats)
    parts += further_parts
    wrong += torn
    checkpoint = _merged(source, parts, STATE if STATE in names else "", wrong)
    if any(one.path for one in declared):
        checkpoint.declared = declared
        places = tuple(f"{one.path}/" for one in declared if one.path)
        own = (n for n in source.entries if is_beside(n) or n.startswith(places))
        checkpoint.beside = frozenset(n for n in own if not is_own(n))
    return checkpoint


def _further(
    source: Source,
    names: Sequence[str],
    parts: Sequence[OpenedPart],
    formats: Sequence[Format],
) -> tuple[list[OpenedPart], list[Finding]]:
    """Open the torch.save files of names that no trainer here gives: a program's own state.

    What is hostile, or not read, is left a stray file; the weights' second copy is none of these.
    """
    reads = next((form for form in formats if form.name == "torchsave"), None)
    held = {name for part in parts if not part.prefix for name in part.checkpoint.members()}
    found: list[OpenedPart] = []
    damage: list[Finding] = []
    for name in sorted(set(names) - held) if reads is not None else ():
        if not name.endswith(_TORCH) or is_state(name) or name.startswith(STEMS):
            continue
        entries = {name: source.entries[name]}
        listing = Listing(entries, frozenset(), source.head, _nowhere, single=name)
        if reads is None or reads.recognise(listing) is None:
            continue
        inside = replace(source, entries=entries, single=False)
        label = name.rpartition(".")[0]
        try:
            opened = open_files(inside, [name], role="state", label=label)
        except CorruptError as error:
            damage.append(from_error(error))
        except (UnsafeError, UnsupportedError):
            continue
        else:
            found.append(OpenedPart("", opened))
    return found, damage


def _in_folders(
    source: Source, declared: Sequence[DeclaredFolder], formats: Sequence[Format], *, top: bool
) -> list[OpenedPart]:
    """Open the weights in folders: those that a file names, or all beside a trainer's state."""
    inside = {n.partition("/")[0] for n in source.entries if "/" in n}
    named = {one.path.partition("/")[0] for one in declared} & inside
    if named:  # a module may have modules of its own below it
        above = (name.rpartition("/")[0] for name in source.entries)
        inside = {place for place in above if place.partition("/")[0] in named}
    elif not any(is_state(name) for name in source.entries):
        return []
    found = weight_folders(inside, lambda place: _listed(source.part(place)), formats)
    models = models_of(found, declared, top=top)
    order = sorted(found, key=lambda place: (models[place] != "", place))
    return [_folder(source, place, formats)._replace(model=models[place]) for place in order]


def _lost_folders(
    source: Source, declared: Sequence[DeclaredFolder], parts: Sequence[OpenedPart]
) -> Iterator[Finding]:
    """Yield the folders that a file names and that are not there, and those without weights."""
    if not any(one.path for one in declared):
        return
    held = [part.prefix for part in parts]
    for one in declared:
        place = f"{one.path}/" if one.path else ""
        shown = one.path or "the directory itself"
        if place and not any(name.startswith(place) for name in source.entries):
            what = f"{one.path} is not there: {one.by} names it as a part of the model"
            yield finding("missing-file", what, file=one.path)
        elif one.needs_weights(source.entries) and not any(
            prefix.startswith(place) if place else not prefix for prefix in held
        ):
            what = f"{shown} holds no weights: {one.by} names it as a part that has some"
            yield finding("missing-file", what, file=one.path or one.by)
        elif one.needs_config and f"{place}config.json" not in source.entries:
            what = f"{place}config.json is not there: {one.by} names {one.path} as a model"
            yield finding("missing-file", what, file=f"{place}config.json")


def _of_step(single: Source) -> BundleCheckpoint:
    """Open one step of a directory that several share."""
    from .step_files import open_step_files

    made = open_step_files(single)
    checkpoint = _merged(made.source, made.parts, made.document, made.wrong)
    checkpoint.commit, checkpoint.dialect = Commit(CommitState.NO_MARKER), ""
    return checkpoint


def _nested(source: Source, nest: Nest, opened: OpenedNest) -> BundleCheckpoint:
    """Put the stores of a step together, and what the trainer saved beside them."""
    checkpoint = _merged(source, opened.parts, "", opened.wrong)
    checkpoint.notes = [*checkpoint.notes, *opened.notes]
    checkpoint.dialect = f"written by {nest.trainer}"
    checkpoint.beside = frozenset(name for name in source.entries if nest.owns(name))
    checkpoint.numbers = opened.numbers
    if opened.numbers:
        checkpoint.step = step_of_save(tuple(checkpoint.scalars(SCALARS_A_FILE)), source.name)
    if nest.last:
        checkpoint.commit = Commit(CommitState.COMMITTED, nest.last)
    return checkpoint


def _by_contents(source: Source, formats: Sequence[Format]) -> BundleCheckpoint:
    """Open the stores that verl's list names."""
    contents = read_contents(source)
    parts, wrong = parts_of(source, contents, lambda place: _folder(source, place, formats))
    if not parts:
        raise CorruptError(f"none of the places that {CONTENTS} names is there",
                           kind="missing-file", file=CONTENTS)  # fmt: skip
    checkpoint = _merged(source, parts, "", wrong)
    checkpoint.commit = Commit(CommitState.COMMITTED, CONTENTS)
    if contents.step is not None:
        checkpoint.step = contents.step
    if contents.world:  # files show only the ranks that wrote one
        known = checkpoint.topology
        checkpoint.topology = replace(known, world_size=contents.world, evidence=CONTENTS)
    return checkpoint


def _listed(inside: Source) -> Listing:
    return Listing(
        {n: e for n, e in inside.entries.items() if "/" not in n},
        frozenset(n.partition("/")[0] for n in inside.entries if "/" in n),
        inside.head,
        _nowhere,
    )


def _folder(source: Source, folder: str, formats: Sequence[Format]) -> OpenedPart:
    inside = source.part(folder)
    with in_part(folder + "/"):
        listing = _listed(inside)
        for form in formats:
            if form.recognise(listing) is not None:
                return OpenedPart(folder + "/", form.open(inside))
    raise UnsupportedError(f"{folder} is of no format that is read there", file=folder)


def _weights(
    source: Source, names: Sequence[str], formats: Sequence[Format], models: Collection[int]
) -> list[OpenedPart]:
    """Open the weights in the directory itself: what a trainer resumes from first, then the rest.

    The files of ranks are read a model at a time; so are torch.save files of further models, which
    have no name that is known by itself. safetensors' reader names its components.
    """
    own: dict[str, list[str]] = {}
    for name in names:
        if not is_state(name):
            further = "" if name.endswith(".safetensors") else model_of(name, models)
            own.setdefault(further, []).append(name)
    parts = []
    whole = [n for n in own.get("", ()) if n == FULL]
    rest = [n for n in own.get("", ()) if n != FULL]
    for group in (whole, rest):
        part = _read_by(source, group, formats)
        if part is not None:
            parts.append(part)
    for further in sorted(own.keys() - {""}):
        part = _read_by(source, own[further], formats)
        if part is None:
            entries = {n: source.entries[n] for n in own[further]}
            inside = replace(source, entries=entries, single=False)
            part = OpenedPart("", open_files(inside, own[further], role="model"))
        parts.append(part._replace(model=further))
    return parts


def _read_by(source: Source, names: Sequence[str], formats: Sequence[Format]) -> OpenedPart | None:
    entries = {n: source.entries[n] for n in names}
    inside = replace(source, entries=entries, single=False)
    listing = Listing(entries, frozenset(), lambda *_: b"", _nowhere)
    for form in formats:
        fits = form.name != "dcp" and fits_here(form.name, entries)
        if fits and form.recognise(listing) is not None:
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


def _read_state(source: Source, file: str) -> _State:
    size = source.size(file)
    if size > _MAX_STATE:
        raise UnsupportedError(f"{file} has {size} bytes", file=file)
    raw = source.read(file)
    value = parse(raw, _JSON, file=file, what="state", bad="bad-index", unsafe="unsafe-index")
    field = "global_step" if file == STATE else "step"
    step = value.get(field) if isinstance(value, dict) else None
    return _State(value, step if type(step) is int and 0 <= step < 1 << 63 else None)


def _merged(
    source: Source, parts: Sequence[OpenedPart], marker: str, wrong: Sequence[Finding] = ()
) -> BundleCheckpoint:
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, ObjectInfo] = {}
    owners: dict[str, tuple[OpenedPart, str]] = {}
    aliases: dict[str, str] = {}
    notes: list[Finding] = []
    damage: list[Finding] = list(wrong)
    names = [n.partition("/")[0] for n in source.entries]
    copies: set[str] = set()
    tag = next((part for part in parts if re.fullmatch(TAG, part.prefix.rstrip("/"))), None)
    full = (part for part in parts if FULL in part.checkpoint.source.entries and not part.prefix)
    resumed = tag or next(full, None) or _first_store(parts)
    for part in parts:
        found: Checkpoint = part.checkpoint
        if resumed not in (None, part) and not part.model and _has_model(found):
            second = second_copy(found, tensors, aliases)
        elif part.again:
            second = copy_of_model(found, part.model, tensors)
        else:
            second = None
        if second is not None:
            tensors.update(second.tensors)
            copies |= second.files
            damage += second.findings
            notes += second.notes
        else:
            _take(part, tensors, damage, copies)
            if not part.model:
                aliases.update(found.aliases)
        for name, info_ in found.objects.items():
            shown = f"{part.model}.{name}" if part.model else name
            shown = shown if shown not in objects else f"{part.prefix or 'part:'}{shown}"
            extent = info_.extent._replace(file=part.prefix + info_.extent.file)
            # Optimizers have their groups at one place in each file; names tell them apart.
            field = () if part.model else info_.field
            objects[shown] = info_._replace(name=shown, extent=extent, field=field)
            owners[shown] = (part, name)
        notes += [part.moved(note) for note in found.notes]
        damage += [part.moved(wrong) for wrong in found.open_findings]
    damage += _lost_ranks(parts)
    if by_accelerate(names):
        damage += gaps(names)
        for found_ in lost_models(set(names)):
            (damage if found_.severity is Severity.ERROR else notes).append(found_)
    held = any(_is_weight(info) for info in tensors.values())
    notes += not_there(names, trainer=marker == STATE, weights=held, tag=tag is not None)
    state = _read_state(source, marker) if marker else None
    checkpoint = BundleCheckpoint(
        source=source,
        tensors=tensors,
        objects=objects,
        aliases=aliases,
        topology=_topology(parts),
        commit=_commit(parts, marker),
        dialect=_dialect(parts, marker, names),
        notes=notes,
        parts=parts,
        owners=owners,
        state=None if state is None else state.value,
        state_file=marker or STATE,
        open_findings=damage,
        second_copies=frozenset(copies),
    )
    if state is not None:
        name = checkpoint.state_name
        checkpoint.objects = {
            **objects,
            name: ObjectInfo(name, Extent(marker, 0, source.size(marker))),
        }
    if state is not None and state.step is not None:
        checkpoint.step = state.step
    else:
        checkpoint.step = step_of_save(tuple(checkpoint.scalars(SCALARS_A_FILE)), source.name)
    return checkpoint


def _is_weight(info: TensorInfo) -> bool:
    """Whether a tensor is of the model, perhaps as one rank's part that nothing joins."""
    if info.kind is Kind.PARAM and OF_ONE_RANK.fullmatch(info.component):
        return True
    return info.component == "model" or info.kind is Kind.MASTER


def _first_store(parts: Sequence[OpenedPart]) -> OpenedPart | None:
    """Return the store of the trained model, if a file beside it has the weights again."""
    return parts[0] if parts[0].prefix and any(_is_copy(part) for part in parts) else None


def _is_copy(part: OpenedPart) -> bool:
    return any(name.endswith("full_weights.pt") for name in part.checkpoint.members())


def _has_model(found: Checkpoint) -> bool:
    return any(info.component == "model" for info in found.tensors.values())


def _take(
    part: OpenedPart, tensors: dict[str, TensorInfo], damage: list[Finding], copies: set[str]
) -> None:
    """Add the tensors of a part; what another part holds too is damage, or a rank's copy."""
    for info in part.checkpoint.tensors.values():
        moved = part.named(info)
        held = tensors.setdefault(moved.key, moved)
        if held is moved:
            continue
        file = part.prefix or next(iter(part.checkpoint.source.entries))
        if part.copy and (held.shape, held.dtype) == (moved.shape, moved.dtype):
            more = [p._replace(replica=part.copy + p.replica, rank=part.copy) for p in moved.pieces]
            tensors[held.key] = held._replace(pieces=[*held.pieces, *more])
            copies.update(piece.extent.file for piece in more)
            continue
        what = f"{moved.key} is in {file} and in another part of the checkpoint"
        damage.append(finding("duplicate-tensor", what, file=file, tensor=moved.key))


def _dialect(parts: Sequence[OpenedPart], marker: str, names: Sequence[str]) -> str:
    """Return who wrote the files, in words; "" if nothing shows it."""
    first = parts[0].prefix
    if marker:
        who = TRAINER
    elif first == f"{WEIGHTS}/":
        who = "NeMo 2"
    elif first.split("/")[-2:-1] in ([STORE], [HUGGING_FACE]):
        who = "verl"
    else:
        who = "accelerate" if by_accelerate(names) else ""
    return f"written by {who}" if who else ""


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


def _topology(parts: Sequence[OpenedPart]) -> Topology:
    ranks = {part.rank for part in parts if part.rank is not None}
    known = next((t for p in parts if (t := p.checkpoint.topology).world_size), None)
    if len(ranks) > 1 and (known is None or (known.world_size or 0) < len(ranks)):
        return Topology(world_size=len(ranks))
    return known or Topology()
