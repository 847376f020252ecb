"""The parts of a bundle, and the checkpoint that they make together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ftckpt.checkpoint import (
    Box,
    Checkpoint,
    Kind,
    Payload,
    Piece,
    Record,
    Scalar,
    StepRole,
    TensorInfo,
)
from ftckpt.checkpoint.steps import SCALARS_A_FILE, is_counter
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.formats.huggingface.index import is_beside, shard_name
from ftckpt.formats.pickles.walk import field_names
from ftckpt.formats.ranks.training_tree import MAX_NAMES
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.formats.torch_files.parse_files import check_saved_names
from ftckpt.formats.torchsave.reader import TorchSaveCheckpoint
from ftckpt.progress import NULL, Counter

from .names import (
    CONTEXT,
    HUGGING_FACE,
    POINTER,
    SCRIPT,
    STATE,
    STORE,
    TAG,
    WEIGHTS,
    is_beside_store,
)  # fmt: skip

if TYPE_CHECKING:
    from ftckpt.formats.huggingface.declared_folders import DeclaredFolder
    from ftckpt.formats.state.coded_shards import CodedParts
    from ftckpt.formats.state.paths import RecordedPaths


class OpenedPart(NamedTuple):
    """One part, opened by its own format.

    Attributes:
        prefix: what its file names lack: `optimizer_0/`, or "" for files in the directory itself.
        checkpoint: the opened part.
        rank: whose state it is, where it is kept by rank.
        model: the component of a further model of the job (`model_1`); "" for the first one's.
        copy: the number of a copy of a further model, which every rank saves; 0 for the first.
        again: whether it holds a further model's weights a second time.
    """

    prefix: str
    checkpoint: Checkpoint
    rank: int | None = None
    model: str = ""
    copy: int = 0
    again: bool = False

    def named(self, info: TensorInfo) -> TensorInfo:
        """Return a tensor's record under the names of the whole checkpoint."""
        if self.prefix:
            info = info._replace(pieces=Prefixed(info.pieces, self.prefix))
        if self.model == "ema" and info.component == "model":
            info = info._replace(component="ema")
        elif self.model and info.component in ("model", "optimizer"):
            info = info._replace(component=f"extra:{self.model}")
        elif self.model and info.component.startswith("extra:"):
            own = info.component.removeprefix("extra:")
            info = info._replace(component=f"extra:{self.model}.{own}")
        return info

    def moved(self, found: Finding) -> Finding:
        """Return a finding with the file's name as the whole checkpoint has it."""
        if not self.prefix or found.file is None:
            return found
        message = _named(found.message, found.file, self.prefix)
        return replace(found, file=self.prefix + found.file, message=message)


@contextmanager
def in_part(prefix: str) -> Iterator[None]:
    """Complete the file's name in errors that a part raises."""
    try:
        yield
    except FtckptError as error:
        if error.file is not None and prefix:
            error.message = _named(error.message, error.file, prefix)
            error.args = (error.message,)
            error.hint = _named(error.hint, error.file, prefix)
            error.file = prefix + error.file
        raise


def _named(message: str, file: str, prefix: str) -> str:
    """Return a sentence with a file's name completed: several parts have a file of that name."""
    whole = rf"(?<![\w./-]){re.escape(file)}(?![\w/-])"
    return re.sub(whole, lambda _: prefix + file, message)


class Prefixed(LazyPieces):
    """Pieces of a part whose files lie below a folder; made when they are asked for."""

    __slots__ = ("_pieces", "_prefix")

    def __init__(self, pieces: Sequence[Piece], prefix: str) -> None:
        self._pieces, self._prefix = pieces, prefix

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            yield _prefixed(piece, self._prefix)

    def piece(self, index: int) -> Piece:
        """Return one piece; `index` is in range."""
        return _prefixed(self._pieces[index], self._prefix)

    def box(self, index: int) -> Box:
        """Return the box of one piece."""
        return self._pieces[index].box


def parameters(parts: Sequence[OpenedPart]) -> list[tuple[str, TensorInfo]]:
    """Return the model's parameters in the order of its state_dict, tied ones once.

    An optimizer numbers parameters in that order. Only torch.save keeps it: safetensors sorts by
    name and DCP by rank, so there no number has a provable name.
    """
    return [
        (info.name, info)
        for part in parts
        if part.checkpoint.format == "torchsave" and not part.model
        for key, info in part.checkpoint.tensors.items()
        if info.component == "model" and info.kind is Kind.PARAM
        if info.dtype.family in ("float", "complex") and key not in part.checkpoint.aliases
    ]


def _prefixed(piece: Piece, prefix: str) -> Piece:
    return piece._replace(extent=piece.extent._replace(file=prefix + piece.extent.file))


@dataclass(kw_only=True, repr=False)
class BundleCheckpoint(Checkpoint):
    """Several parts as one checkpoint.

    Attributes:
        parts: in the order weights, optimizer, other state.
        owners: name of an object -> its part and its name there.
        state: what trainer_state.json holds, or another file of its kind; None where there is none.
        state_file: its name.
        beside: further files that belong to it.
        numbers: steps that such files say.
        declared: the folders that a file at the top names as parts of one model.
    """

    format: ClassVar[str] = "bundle"

    parts: Sequence[OpenedPart]
    owners: Mapping[str, tuple[OpenedPart, str]]
    state: Any = None
    state_file: str = STATE
    beside: frozenset[str] = frozenset()
    numbers: Sequence[Scalar] = ()
    declared: Sequence[DeclaredFolder] = ()

    def __post_init__(self) -> None:
        """Take over which files of its parts are not counted."""
        self.implied = [
            *self.implied,
            *(
                one._replace(before=part.prefix + one.before)
                for part in self.parts
                for one in part.checkpoint.implied
            ),
        ]

    @property
    def stems(self) -> Mapping[str, str]:
        """The component of the tensors in a folder that `declared` names -> folder and stem."""
        found = {}
        for part in self.parts if self.declared else ():
            file = next((i.pieces[0].extent.file for i in part.checkpoint.tensors.values()), "")
            shard = shard_name(file)
            stem = file.partition(".")[0] if shard is None else shard.stem
            component = f"extra:{part.model}" if part.model else "model"
            if part.prefix and file:
                stem = "model" if stem == "pytorch_model" else stem
                found[component] = part.prefix + stem
        return found

    @property
    def state_name(self) -> str:
        """What the object is called that `state` holds: `trainer_state`, `meta`."""
        return re.sub(r"_?\d*\.json$", "", self.state_file)

    @property
    def loads_at_any_world(self) -> bool:
        """Each part must."""
        return all(part.checkpoint.loads_at_any_world for part in self.parts)

    @property
    def resharded_part(self) -> str:
        """The tag of DeepSpeed, NeMo's `weights`, or verl's `dist_ckpt`."""
        folders = (part.prefix.rstrip("/") for part in self.parts)
        return next((f for f in folders if f in (WEIGHTS, STORE) or re.fullmatch(TAG, f)), "")

    @property
    def config_file(self) -> str:
        """The configuration that verl saves in a folder; that of others lies at the top."""
        places = (f"{HUGGING_FACE}/{CONFIG}", f"model/{HUGGING_FACE}/{CONFIG}")
        found = (place for place in places if place in self.source.entries)
        return next(found, CONFIG) if self._of_verl() else CONFIG

    def _of_verl(self) -> bool:
        """Say whether verl's stores are among the parts."""
        ends = ([STORE], [HUGGING_FACE])
        return any(part.prefix.split("/")[-2:-1] in ends for part in self.parts)

    def recorded_paths(self) -> RecordedPaths:
        """Return what the parts recorded (see `RecordsPaths`)."""
        from ftckpt.formats.state.paths import RecordedPaths, recorded_paths

        parts = {id(part): recorded_paths(part.checkpoint) for part in self.parts}
        return RecordedPaths(
            {
                key: path
                for part in self.parts
                if not part.model  # one tree has one place for a model
                for key, path in parts[id(part)].tensors.items()
            },
            {
                shown: parts[id(part)].objects[name]
                for shown, (part, name) in self.owners.items()
                if name in parts[id(part)].objects and not part.model
            },
        )

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return the byte items of the parts (see `RecordsPaths`)."""
        from ftckpt.formats.state.paths import recorded_items

        parts = {id(part): recorded_items(part.checkpoint) for part in self.parts}
        return {
            shown: parts[id(part)][name]
            for shown, (part, name) in self.owners.items()
            if name in parts[id(part)] and not part.model
        }

    @property
    def coded(self) -> Mapping[str, CodedParts]:
        """The tensor subclasses that the parts have cut over ranks (see `HoldsCoded`)."""
        from ftckpt.formats.state.coded_shards import HoldsCoded

        return {
            shown: part.checkpoint.coded[name]
            for shown, (part, name) in self.owners.items()
            if isinstance(part.checkpoint, HoldsCoded)
            and name in part.checkpoint.coded
            and not part.model
        }

    @property
    def suppositions(self) -> Sequence[Finding]:
        """What the parts took for granted."""
        return [note for part in self.parts for note in part.checkpoint.suppositions]

    def part_of(self, file: str) -> OpenedPart:
        """Return the part that holds a file."""
        for part in self.parts:
            if part.prefix and file.startswith(part.prefix):
                return part
        for part in self.parts:
            if not part.prefix and file in part.checkpoint.source.entries:
                return part
        raise KeyError(file)

    def members(self) -> Iterable[str]:
        """Yield the members of all parts, and the state file beside them."""
        seen = {part.prefix + n for part in self.parts for n in part.checkpoint.members()}
        if self.state is not None:
            seen.add(self.state_file)
        if self.state is not None and self.state_file == STATE:
            seen.update(n for n in self.source.entries if is_beside(n))
        if any(re.fullmatch(TAG, part.prefix.rstrip("/")) for part in self.parts):
            seen.update(n for n in self.source.entries if n == POINTER or re.fullmatch(SCRIPT, n))
        if self._of_verl():
            seen.update(n for n in self.source.entries if is_beside_store(n))
        if f"{WEIGHTS}/" in {part.prefix for part in self.parts}:
            seen.update(n for n in self.source.entries if n.startswith(f"{CONTEXT}/"))
        yield from sorted(seen | self.beside)

    def load_object(self, name: str) -> Any:
        """Return one object of one part."""
        if name not in self.owners and name == self.state_name:
            return self.state
        part, inner = self.owners[name]
        with in_part(part.prefix):
            return part.checkpoint.load_object(inner)

    def payload(self, piece: Piece) -> Payload:
        """Let the part find the elements."""
        part = self.part_of(piece.extent.file)
        file = piece.extent.file.removeprefix(part.prefix)
        with in_part(part.prefix):
            found = part.checkpoint.payload(piece._replace(extent=piece.extent._replace(file=file)))
        record = found.record
        if record is not None:
            place, crc = record
            record = (place._replace(file=part.prefix + place.file), crc)
        extent = found.extent._replace(file=part.prefix + found.extent.file)
        return found._replace(extent=extent, record=record)

    def for_rank(self, tensors: Mapping[str, TensorInfo]) -> Checkpoint | None:
        """Return what reads some tensors in another process; see `Checkpoint.for_rank`."""
        from .alone import parts_alone

        return parts_alone(self.source, self.parts, self.part_of, tensors)

    @property
    def records_by_piece(self) -> bool:
        """Whether all parts with tensors tell records so."""
        return all(one.checkpoint.records_by_piece for one in self.parts if one.checkpoint.tensors)

    def known_faults(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Yield the traces of known faults of writers."""
        from ftckpt.formats.state.known_faults import explain

        yield from explain(self, findings)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield what each part finds, and where the parts do not fit together."""
        yield from self.open_findings
        known = frozenset(self.open_findings)  # a part says again what was wrong as it was opened
        for part in self.parts:
            with in_part(part.prefix):
                for found in part.checkpoint.check(counter):
                    moved = part.moved(found)
                    if moved not in known:
                        yield moved
        # Each state file is a part by itself: only here are they seen beside one another. A random
        # state may have been copied for further processes, so that none is one rank's alone.
        streams = {
            part.prefix + file: stream
            for part in self.parts
            if isinstance(part.checkpoint, TorchSaveCheckpoint)
            for file, stream in part.checkpoint.streams.items()
        }
        yield from check_saved_names(streams, {})
        if self.state is not None and self.state_file == STATE:
            yield from self._check_clocks()

    def _check_clocks(self) -> Iterator[Finding]:
        """Yield where files of the Trainer count other steps than it does.

        It steps its scheduler with the optimizer and leaves both out where a loss scale skips, so
        that they are equal, and never ahead. One of the user's own may count otherwise. In real
        jobs DeepSpeed's engine fell behind the Trainer (issue 7405 of DeepSpeed:
        `checkpoint-800/global_step799`). So none of this proves anything.
        """
        counted: dict[StepRole, dict[float, str]] = defaultdict(dict)
        engine: Scalar | None = None
        for scalar in self.scalars(SCALARS_A_FILE):
            counted[scalar.role].setdefault(scalar.value, scalar.file)
            tag, inside, _ = scalar.file.partition("/")
            if inside and scalar.name == "global_steps" and re.fullmatch(TAG, tag):
                engine = engine or scalar
        step = self.state.get("global_step") if isinstance(self.state, dict) else None
        if engine is not None and is_counter(step) and step != engine.value:
            what = (
                f"{engine.file} holds global_steps = {engine.value:g}, trainer_state.json says"
                f" {step}: files of two saves, or the two count differently"
            )
            yield finding("clocks-differ", what, file=engine.file, tensor=engine.name)
            return
        iteration, optimizer = counted[StepRole.ITERATION], counted[StepRole.OPTIMIZER]
        scheduler = counted[StepRole.SCHEDULER]
        if not any(name.endswith("._step_count") for name in self.fields()):
            scheduler = {}  # `ReduceLROnPlateau` counts evaluations
        most = [max(clock.items()) for clock in (optimizer, scheduler) if clock]
        if len(iteration) != 1 or not most:
            return
        ((step, file),) = iteration.items()
        ahead = [one for one in most if one[0] > step]
        if ahead or len({value for value, _ in most}) > 1:
            said = ", ".join(f"{where} {value:g}" for value, where in [*most, (step, file)])
            what = (
                f"steps are counted differently ({said}): files of two saves, or an optimizer or a"
                " schedule that counts otherwise"
            )
            yield finding("clocks-differ", what, file=(ahead or most)[0][1])

    def records(self) -> Iterator[Record]:
        """Yield the records of all parts."""
        for part in self.parts:
            for record in part.checkpoint.records():
                if part.prefix:
                    extent = record.extent._replace(file=part.prefix + record.extent.file)
                    record = record._replace(extent=extent)
                yield record

    def file_digests(self) -> Mapping[str, str]:
        """Return what the parts record."""
        return {
            part.prefix + name: digest
            for part in self.parts
            for name, digest in part.checkpoint.file_digests().items()
        }

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the Trainer's own step and the counters of all parts."""
        field = "global_step" if self.state_file == STATE else "step"
        step = self.state.get(field) if isinstance(self.state, dict) else None
        if type(step) is int:
            yield Scalar(self.state_file, field, float(step), StepRole.ITERATION)
        yield from self.numbers
        for part in self.parts:
            for scalar in part.checkpoint.scalars(limit):
                yield scalar._replace(file=part.prefix + scalar.file)

    def fields(self) -> Iterable[str]:
        """Names of the non-tensor state of all parts."""
        for part in self.parts:
            yield from part.checkpoint.fields()
        if self.state is not None:
            yield self.state_name
            for number, name in enumerate(field_names(self.state)):
                if number == MAX_NAMES:
                    break
                yield f"{self.state_name}.{name}"
