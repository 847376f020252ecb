"""Open the parts of a folder, and put them together as one checkpoint (see `folders`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest

from ftckpt.checkpoint import (
    Checkpoint,
    Commit,
    CommitState,
    Kind,
    ObjectInfo,
    Scalar,
    StepRole,
    TensorInfo,
    Topology,
)
from ftckpt.checkpoint.steps import counters_in
from ftckpt.discovery.listing import listing_of_source
from ftckpt.discovery.recognise import Format
from ftckpt.errors import CorruptError, FtckptError, NewerWriterError, UnsupportedError
from ftckpt.findings import Finding, finding, from_error, listed
from ftckpt.formats.huggingface.config import parsed_json
from ftckpt.formats.state.side_by_side import OPTIMIZERS as OF_OPTIMIZER
from ftckpt.formats.state.stored_names import KNOWN, place
from ftckpt.formats.torch_files.parse_files import parse_files
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torchsave import LEGACY_MAGIC
from ftckpt.formats.torchsave.reader import open_files
from ftckpt.formats.trainer_dirs.checkpoint import BundleCheckpoint, OpenedPart, in_part
from ftckpt.formats.trainer_dirs.names import TRAINED
from ftckpt.own_files import is_leftover, is_own
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source
from ftckpt.storage.state_files import (
    is_exported,
    is_harmless,
    is_text,
    may_hold_tensors,
    without_numbers,
)
from ftckpt.storage.store import EntryKind
from ftckpt.strict_json import is_cut

from .parts import AVERAGES, COMPANIONS, FolderPart, find_parts, implied_by, owner, role, words

# A trainer's small file of counters, whose fields say the step (`counters_in`).
_COUNTERS = frozenset({"train", "training", "trainer", "state", "info", "progress", "meta", "step"})
_MOST_COUNTERS = 1 << 16  # bytes
_HEAD = 4096
# Files without a suffix that are looked into; more of them are those of a store.
_SNIFFED = 1000


@dataclass(kw_only=True, repr=False)
class FolderCheckpoint(BundleCheckpoint):
    """The parts of a folder as one checkpoint."""

    def members(self) -> Iterable[str]:
        """Yield all files below the folder: none of them is anybody else's."""
        return sorted(n for n in self.source.entries if not (is_own(n) or is_leftover(n)))

    @property
    def resharded_part(self) -> str:
        """No trainer is known, so none of the parts can be written again alone."""
        return ""

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield what the parts find, what no part reads, and that nothing holds a tensor."""
        yield from super().check(counter)
        for part in self.parts:
            if part.checkpoint.described is not None:
                yield from (part.moved(one) for one in part.checkpoint.described(part.checkpoint))
        yield from self.unread_parts()
        known = any(note.kind == "missing-part" for note in self.notes)  # which says why
        if not known and not any(_is_weight(info) for info in self.tensors.values()):
            read = listed([_path(part) for part in self.parts], 3) or "nothing"
            what = (
                f"{self.source.url} holds no weights that are understood: what could be read is"
                f" {read}"
            )
            yield finding("unsupported", what)
        holding = [p for p in self.parts if any(map(_is_weight, p.checkpoint.tensors.values()))]
        models = {_owner(part) for part in holding}
        trained = [file for file in self.unread if _may_be_trained(file, holding)]
        if not known and holding and trained:
            what = (
                f"{listed(trained, 3)} may hold the model, and no format that is read here knows"
                f" it: what was read is {listed([_path(part) for part in holding], 3)}"
            )
            yield finding("unsupported", what, file=trained[0])
        if not known and models and models <= {*COMPANIONS, *AVERAGES}:
            what = (
                f"{self.source.url} holds {listed(sorted(models))}, and no model that is trained"
                " with it"
            )
            yield finding("no-weights", what)


def _is_weight(info: TensorInfo) -> bool:
    return info.kind in (Kind.PARAM, Kind.MASTER)


def _may_be_trained(unread: str, holding: Sequence[OpenedPart]) -> bool:
    """Whether a file that was not read may be the model, although other parts hold weights.

    So its name may say; and beside an export for other programs alone it may be any file but those
    of state.
    """
    said = _role_in(unread)
    return said == "model" or (not said and all(is_exported(_path(p) + "/") for p in holding))


def open_folder(source: Source, formats: Sequence[Format]) -> FolderCheckpoint:
    """Open every part (see `Folder.open`)."""
    opening = _Opening(source, formats)
    for part in find_parts(listing_of_source(source), formats):
        opening.part(part)
    for name in opening.others():
        opening.file(name)
    return opening.together()


class _Opening:
    """The parts of one folder while they are opened."""

    def __init__(self, source: Source, formats: Sequence[Format]) -> None:
        self.source, self.formats = source, formats
        self.parts: list[OpenedPart] = []
        self.unread: dict[str, str] = {}
        self.damage: list[Finding] = []
        self.seen: set[str] = set()
        self.sniffed = 0

    def part(self, part: FolderPart) -> None:
        """Open a part; of one that is damaged or not read here, keep why."""
        if part.format is None:
            self.file(part.place)
            return
        prefix = part.place + "/"
        inside = self.source.part(part.place)
        try:
            with in_part(prefix):
                opened = OpenedPart(prefix, part.format.open(inside))
        except (UnsupportedError, CorruptError) as error:
            self._fails(part.place, error)
            self.seen.update(prefix + name for name in inside.entries)
            return
        self.parts.append(opened)
        self.seen.update(prefix + name for name in opened.checkpoint.members())

    def file(self, place: str) -> None:
        """Open one file; text under a checkpoint's suffix holds no tensor."""
        self.seen.add(place)
        entry = self.source.entries[place]
        if entry.kind is not EntryKind.FILE or self._is_text(place):
            return
        folder, slash, name = place.rpartition("/")
        base = self.source.path(folder) if folder else self.source.base
        inside = replace(self.source, base=base, entries={name: entry}, single=True)
        listing = replace(listing_of_source(inside), single=name)
        try:
            with in_part(folder + slash):
                for form in self.formats:
                    found = form.recognise(listing)
                    if found is not None and not found.shares:
                        opened = _loose(inside, name, form)
                        self.parts.append(OpenedPart(folder + slash, opened))
                        return
            self.unread[place] = ""
        except (UnsupportedError, CorruptError) as error:
            self._fails(place, error)

    def _fails(self, place: str, error: FtckptError) -> None:
        if isinstance(error, UnsupportedError) and not isinstance(error, NewerWriterError):
            self.unread[place] = error.message
        else:
            self.damage.append(from_error(error))

    def _is_text(self, name: str) -> bool:
        """Whether a file is a text that a program saved as its state, by its first bytes."""
        if name.endswith((".safetensors", ".distcp")):
            return False
        return is_text(self.source.read(name, 0, min(_HEAD, self.source.size(name))))

    def others(self) -> list[str]:
        """Return further files that may hold tensors: by their names, or by their first bytes."""
        found = []
        for name, entry in sorted(self.source.entries.items()):
            last = name.rpartition("/")[2]
            if name in self.seen or is_own(name) or is_leftover(name) or is_harmless(last):
                continue
            if entry.kind is EntryKind.FILE and (
                may_hold_tensors(name) or ("." not in last and self._begins_as_saved(name))
            ):
                found.append(name)
        return found

    def _begins_as_saved(self, name: str) -> bool:
        self.sniffed += 1
        if self.sniffed > _SNIFFED:
            self.unread[name] = ""
            return False
        head = self.source.read(name, 0, min(16, self.source.size(name)))
        return head.startswith((b"PK\3\4", LEGACY_MAGIC))

    def together(self) -> FolderCheckpoint:
        """Return the parts as one checkpoint."""
        self.parts = _by_model(self.parts)
        tensors: dict[str, TensorInfo] = {}
        held_by: dict[str, OpenedPart] = {}
        objects: dict[str, ObjectInfo] = {}
        owners: dict[str, tuple[OpenedPart, str]] = {}
        aliases: dict[str, str] = {}
        for number, part in enumerate(self.parts):
            part = self.parts[number] = _apart(part, held_by)
            is_state = _is_plain_state(part)
            for info in part.checkpoint.tensors.values():
                moved = part.named(info)
                moved = _as_state(moved) if is_state else moved
                tensors[moved.key] = moved
                held_by[moved.key] = part
            if not part.model:
                aliases.update(part.checkpoint.aliases)
            for name, item in part.checkpoint.objects.items():
                shown = f"{part.model}.{name}" if part.model else name
                shown = shown if shown not in objects else f"{_path(part)}:{shown}"
                extent = item.extent._replace(file=part.prefix + item.extent.file)
                objects[shown] = item._replace(name=shown, extent=extent, field=())
                owners[shown] = (part, name)
            self.damage += [part.moved(one) for one in part.checkpoint.open_findings]
        numbers, cut = _numbers(self.source)
        self.parts = _counted(self.parts, _recorded_world(self.source))
        checkpoint = FolderCheckpoint(
            source=self.source,
            tensors=tensors,
            objects=objects,
            aliases=aliases,
            topology=_topology(self.parts),
            commit=_commit(self.parts),
            notes=[part.moved(one) for part in self.parts for one in part.checkpoint.notes],
            parts=self.parts,
            owners=owners,
            open_findings=[*self.damage, *cut],
            numbers=numbers,
            implied=[
                one
                for part in self.parts
                # A part that knows of several ranks tells itself what it does not know.
                if part.checkpoint.topology.world_size is None
                and (one := implied_by(_first_file(part)))
            ],
            unread=self.unread,
        )
        checkpoint.second_copies = frozenset(
            part.prefix + name for part in self.parts for name in part.checkpoint.second_copies
        )
        return checkpoint


def _loose(source: Source, name: str, form: Format) -> Checkpoint:
    """Open one file; what it is called says what it holds where its content does not."""
    what = role(name)
    if form.name != "torchsave" or what not in ("optimizer", "state"):
        return form.open(source)
    parsed = parse_files(source, [name])
    tree = next((s.tree for s in parsed.values() if isinstance(s, TorchStream)), None)
    if isinstance(tree, dict) and not KNOWN.isdisjoint(key for key in tree if type(key) is str):
        what = ""  # a whole training state
    label = name.partition(".")[0]
    return open_files(source, [name], role=what, label=label, parsed=parsed)


def _path(part: OpenedPart) -> str:
    """Return the place of a part below the checkpoint: its folder, or its file."""
    source = part.checkpoint.source
    return part.prefix + next(iter(source.entries)) if source.single else part.prefix.rstrip("/")


def _first_file(part: OpenedPart) -> str:
    """Return the path of a part's first file."""
    return part.prefix + min(part.checkpoint.source.entries, default="")


def _by_model(parts: Sequence[OpenedPart]) -> list[OpenedPart]:
    """Name the model of each part where a job trains several, and put the trained one first."""
    found = {id(part): _owner(part) for part in parts}
    held = {
        found[id(part)]
        for part in parts
        if any(_is_weight(info) for info in part.checkpoint.tensors.values())
    }
    first = "" if "" in held else next((one for one in TRAINED if one in held), "")
    if not first and len(held) == 1 and held.isdisjoint({*COMPANIONS, *AVERAGES}):
        (first,) = held
    if "" in held:
        found |= _nobody_tells([part for part in parts if not found[id(part)]])
    named = [
        part._replace(model="" if found[id(part)] in ("", first) else found[id(part)])
        for part in parts
    ]
    order = {"model": 0, "optimizer": 2, "state": 3}
    return sorted(named, key=lambda p: (bool(p.model), order.get(_role(p), 1), _path(p)))


def _nobody_tells(parts: Sequence[OpenedPart]) -> dict[int, str]:
    """Return what parts with weights of the same names are called, if none is told to be the model.

    Args:
        parts: whose names say no owner.
    """
    weights = [
        (part, {info.key for info in part.checkpoint.tensors.values() if _is_weight(info)})
        for part in parts
        if _role(part) not in ("optimizer", "state")
    ]
    found: dict[int, str] = {}
    for (one, mine), (other, theirs) in combinations(weights, 2):
        if mine.isdisjoint(theirs) or "model" in (_role(one), _role(other)):
            continue
        names = _own_name(_path(one), _path(other)), _own_name(_path(other), _path(one))
        if all(names):
            found |= {id(one): names[0], id(other): names[1]}
    return found


def _owner(part: OpenedPart) -> str:
    return next((one for name in _path(part).split("/") if (one := owner(name))), "")


def _role(part: OpenedPart) -> str:
    return _role_in(_path(part))


def _role_in(path: str) -> str:
    """Return what a part holds, by the name in its path that says it first."""
    told = [one for name in path.split("/") if (one := role(name))]
    return next((one for one in told if one in ("optimizer", "state")), told[0] if told else "")


def _apart(part: OpenedPart, held: Mapping[str, OpenedPart]) -> OpenedPart:
    """Return a part under a name of its own if it has tensors of names that another part has.

    State that is saved under a model's names (`training_state/optimizer_state.safetensors`) has
    its folder's name always, so that it is never taken for weights.

    Raises:
        UnsupportedError: no name tells the two apart: pieces of one model perhaps.
    """
    mine = _path(part)
    if not part.model and _is_plain_state(part):
        part = part._replace(model=mine.rpartition("/")[2].partition(".")[0])
    for _ in range(3):
        keys = (part.named(info).key for info in part.checkpoint.tensors.values()) if held else ()
        twice = next((key for key in keys if key in held), None)
        if twice is None:
            return part
        theirs = _path(held[twice])
        name = _own_name(mine, theirs)
        if not name or part.model == name:
            break
        part = part._replace(model=name)
    raise UnsupportedError(
        f"{mine} and {theirs} hold tensors of the same names, as {twice}, and nothing says whether"
        " they are pieces of one model or two models",
        hint="one of them can be read alone, by its own path",
        file=mine,
        tensor=twice,
    )


def _is_plain_state(part: OpenedPart) -> bool:
    """Whether a format took state for weights, for want of anything that says what it is."""
    return part.checkpoint.format == "safetensors" and _role(part) in ("optimizer", "state")


def _as_state(info: TensorInfo) -> TensorInfo:
    """Return a tensor that a format took for a weight as what its names say.

    LeRobot's `state/0/exp_avg` in `optimizer_state.safetensors` is the first parameter's moment.
    """
    if not words(info.component.replace(".", "_")) & OF_OPTIMIZER:
        return info._replace(kind=Kind.OTHER)
    said = info.name.split("/")
    if len(said) < 3 or said[0] != "state":
        return info._replace(component="optimizer", kind=Kind.OTHER)
    where = place("", ["optimizer", "state", "/".join(said[1:-1]), said[-1]], info.dtype)
    return info._replace(component=where.component, kind=where.kind, name=where.name)


def _own_name(mine: str, theirs: str) -> str:
    """Return what a part is called beside another with tensors of the same names; "" for nothing.

    Two folders of a step are two models, as are two files side by side and a folder inside the
    other's; the modules of one model lie in folders below one (`model/embed`, `model/head`).
    """
    pairs = list(zip_longest(mine.split("/"), theirs.split("/"), fillvalue=""))
    depth = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), 0)
    name, other = (one.rpartition(".")[0] or one for one in pairs[depth])
    files = depth == len(pairs) - 1 and "." in pairs[depth][0] and "." in pairs[depth][1]
    told = depth == 0 or files or not (name and other) or owner(name) != owner(other)
    return name if told and without_numbers(name) != without_numbers(other) else ""


def _topology(parts: Sequence[OpenedPart]) -> Topology:
    every = [part.checkpoint.topology for part in parts]
    return max(every, key=lambda one: one.world_size or 0, default=Topology())


def _commit(parts: Sequence[OpenedPart]) -> Commit:
    commits = [part.checkpoint.commit for part in parts]
    if parts and all(one.state is CommitState.COMMITTED for one in commits):
        return Commit(CommitState.COMMITTED, parts[0].prefix + commits[0].marker)
    return Commit(CommitState.NO_MARKER)


def _numbers(source: Source) -> tuple[list[Scalar], list[Finding]]:
    """Return the step that a trainer's small files of counters say, if they agree, and damage.

    OneTrainer writes `train_progress.global_step` into `meta.json`
    (modules/trainer/GenericTrainer.py, `__backup_internal`).
    """
    found: list[Scalar] = []
    cut: list[Finding] = []
    for name in _small_json(source):
        stem = name.rpartition("/")[2].removesuffix(".json")
        if words(stem).isdisjoint(_COUNTERS):
            continue
        try:
            said = next(counters_in(parsed_json(source, name)), None)
        except CorruptError as error:
            cut += [from_error(error)] if is_cut(source.read(name)) else []
            continue
        except FtckptError:
            continue
        if said is not None:
            found.append(Scalar(name, said[0], float(said[1]), StepRole.ITERATION))
    return found if len({one.value for one in found}) == 1 else [], cut


def _small_json(source: Source) -> Iterator[str]:
    """Yield the JSON files of a folder and of those in it that are small enough for counters."""
    for name, entry in sorted(source.entries.items()):
        small = 0 < entry.size <= _MOST_COUNTERS and entry.kind is EntryKind.FILE
        if small and name.endswith(".json") and name.count("/") <= 1:
            yield name


def _recorded_world(source: Source) -> int | None:
    """Return the number of ranks that a small file at the top records, if they agree."""
    found = set()
    for name in _small_json(source):
        with suppress(FtckptError):
            world = parsed_json(source, name).get("world_size") if "/" not in name else None
            found |= {world} if type(world) is int else set()
    return found.pop() if len(found) == 1 else None


def _counted(parts: Sequence[OpenedPart], world: int | None) -> list[OpenedPart]:
    """Take back that nothing records the number of ranks' files where a file beside them does."""
    for part in parts:
        one = part.checkpoint
        if one.implied and one.topology.world_size == world is not None:
            one.notes = [note for note in one.notes if note.kind != "count-unknown"]
            one.implied = ()
    return list(parts)
