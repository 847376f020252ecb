"""What a job loads of a checkpoint: the same requests as `convert`, and its memory for a place.

`requested` is a source with a user's wishes. `LoadableState` is that under the names of torch's
state, with an optimizer's settings by parameter, and other values as bytes that torch may be
handed. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict, Unpack, cast

from ftckpt.checkpoint import Checkpoint, CommitState, Payload, Piece, StepRole
from ftckpt.checkpoint.computed import CheckpointLayer
from ftckpt.errors import (
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UsageError,
    error_of,
)
from ftckpt.extents import BLOCK
from ftckpt.storage import StoreOptions
from ftckpt.storage.computed import ComputedSource
from ftckpt.workers import ALONE, Work

from .opening import STORES, opened
from .tables import read_renames, read_rules, read_text
from .transferring import PartFlags, narrowed

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.formats.state.job_names import AskedNames as AskedNames
    from ftckpt.formats.state.job_names import SettingName
    from ftckpt.formats.state.job_settings import JobSettings
    from ftckpt.formats.state.job_settings import LoadedSettings as LoadedSettings
    from ftckpt.formats.state.objects import Leaf, StateObjects
    from ftckpt.manifest import Manifest
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.read.elements import Gatherer


# What of a source is checked: its format's rules, and the bytes that are read.
LOAD_LEVELS = ("content", "structure", "bytes", "none")


class RequestFlags(TypedDict, total=False):
    """What of a source is loaded, and as what.

    Attributes:
        names: whose names the parameters get, as `convert` takes it; "" as they are.
        only: `model`, `optimizer` or `adapter`.
        drop: state to leave out, by name or pattern.
        dtype: `bf16`, `fp16` or `fp32`, of the model's floating-point weights; quantised ones are
            computed.
        from_master: whether weights are rounded from their fp32 masters.
        also: directories with more files of the source.
        bases: where the bases of a delta lie now.
        adapter: LoRA adapters of PEFT that are merged into the weights, in order.
        family, config, rename, rules, spelling, true_vocab_size: as in `convert`.
    """

    names: str
    only: str
    drop: Sequence[str]
    dtype: str
    from_master: bool
    also: Sequence[str]
    bases: Sequence[str]
    adapter: Sequence[str]
    family: str
    config: str
    rename: str
    rules: str
    spelling: Sequence[str]
    true_vocab_size: int | None


def requested(
    source: Checkpoint | str, stores: StoreOptions = STORES, **flags: Unpack[RequestFlags]
) -> Content:
    """Return a source as a user wishes it, described and not read.

    Args:
        source: opened, or a path as `open_checkpoint` takes it.
        stores: how to reach object stores.
        flags: see `RequestFlags`.

    Raises:
        UsageError: wishes that do not go together, or that the source cannot grant.
        FtckptError: as `open_checkpoint` and `convert` do.
    """
    from ftckpt.formats.families import to_hugging_face, to_megatron, to_native
    from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
    from ftckpt.formats.huggingface.config import CONFIG, parsed_config
    from ftckpt.formats.quantised.dequantise import dequantised
    from ftckpt.transfer.request.change_dtype import from_masters, retype, target_of
    from ftckpt.transfer.request.renaming import rename as renamed

    names, dtype = flags.get("names") or "", flags.get("dtype") or ""
    adapter, masters = flags.get("adapter") or (), flags.get("from_master", False)
    known = ("hf", "megatron", "torchtitan", "meta", "packed")
    if names and names not in known:
        raise UsageError(f"names={names!r} is not known", hint=", ".join((*known, "trainer")))
    if adapter and masters:
        raise UsageError("adapter= changes the weights, and from_master= takes the masters")
    rules = read_rules(flags.get("rules", ""))
    also, bases = flags.get("also") or (), flags.get("bases") or ()
    checkpoint = opened(source, stores, rules=rules, bases=bases, also=also)
    require_whole(checkpoint)
    if dtype:
        checkpoint = dequantised(checkpoint, target_of(dtype))
    if adapter:
        from ftckpt.formats.lora.merging import merge

        others = [opened(one, stores) for one in adapter]
        checkpoint = merge(checkpoint, others, target_of(dtype) if dtype else None).checkpoint
    part: PartFlags = cast("PartFlags", {k: v for k, v in flags.items() if k in ("only", "drop")})
    content = narrowed(checkpoint, part, masters=masters)
    if masters and flags.get("only") != "adapter":
        content = from_masters(content).content
    if dtype:
        content = retype(content, dtype)
    rows, family = flags.get("true_vocab_size"), flags.get("family", "")
    config = flags.get("config", "")
    said = parsed_config(read_text(config), config) if config else None
    if names == "hf":
        content = to_hugging_face(content, family=family, true_vocab_size=rows, config=said)
    elif names == "megatron":
        spellings = (*(flags.get("spelling") or ()), *DEFAULT_SPELLINGS)
        content = to_megatron(content, family=family, true_vocab_size=rows, spellings=spellings)
    elif names:
        if said is None and CONFIG not in content.checkpoint.as_stored.source.entries:
            # Megatron's arguments say what the model is, in the words of Hugging Face.
            content = as_if_written(
                to_hugging_face(content, family=family, true_vocab_size=rows), "safetensors"
            )
            said = parsed_config(read_stored(content, CONFIG), CONFIG)
        content = to_native(content, names, family=family, true_vocab_size=rows, config=said)
    renames = read_renames(flags.get("rename", ""))
    return renamed(content, renames) if renames else content


@dataclass(kw_only=True, repr=False)
class AsIfWritten(CheckpointLayer):
    """A content as a checkpoint of some format that nobody has written.

    Attributes:
        origin: what its bytes are made of.
    """

    format: ClassVar[str] = "as if written"
    origin: Checkpoint

    @property
    def as_stored(self) -> Checkpoint:
        """The checkpoint that has files."""
        return self.origin.as_stored

    @property
    def made_from(self) -> Sequence[Checkpoint]:
        """Other checkpoints that its tensors are computed from."""
        return self.origin.made_from

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece in the files that are laid out."""
        return self.base.payload(piece)


def as_if_written(content: Content, name: str) -> Content:
    """Return a content as its files in a format would be read: translations follow one another.

    Raises:
        UnsupportedError: the format has no place for something.
    """
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.storage.source import Source
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.prove.rehearsal import LaidOutStore
    from ftckpt.transfer.read.elements import Gatherer

    target, writer = format_and_writer(name)
    layout = writer.layout(content, LayoutRequest())
    store = LaidOutStore(layout, Gatherer(content.checkpoint))
    found = target.open(Source.directory(store))
    return Content.of(
        AsIfWritten(
            source=found.source,
            tensors=found.tensors,
            objects=found.objects,
            aliases=found.aliases,
            topology=content.topology,
            base=found,
            origin=content.checkpoint,
        )
    )


def read_stored(content: Content, file: str) -> str:
    """Return a small text file of a content's checkpoint."""
    source = content.checkpoint.source
    return source.read(file, 0, source.size(file)).decode()


def require_whole(checkpoint: Checkpoint) -> None:
    """Refuse a save that was not finished.

    Raises:
        IncompleteError: it was not.
    """
    if checkpoint.commit.state is CommitState.UNCOMMITTED:
        said = checkpoint.commit.message or "the save was not finished"
        raise IncompleteError(f"{checkpoint.source.url}: {said}")


def _raise_first(findings: Iterable[Finding]) -> None:
    for one in findings:
        if one.code is not ExitCode.OK:
            raise error_of(
                one.code, one.message, kind=one.kind, file=one.file, tensor=one.tensor,
                offset=one.offset, length=one.length,
            )  # fmt: skip


def require_structure(content: Content) -> None:
    """Hold the checkpoint to its format's rules, as far as what is loaded is concerned.

    Raises:
        FtckptError: the first defect: a lost or short file, a hole, shards of another step.
    """
    from ftckpt.progress import NULL
    from ftckpt.verification.structure import check_structure

    stored = content.checkpoint.as_stored
    known = {extent.file for extent, _, _ in stored.extents_by_owner()}
    used, names = known, stored.tensors.keys() | stored.objects.keys()
    if content.checkpoint is stored:
        copies = (copy for wanted in content.tensors.values() for copy in wanted.copies)
        names = {copy.key for copy in copies} | content.objects.keys()
        used = {e.file for e, owner, _ in stored.extents_by_owner() if owner in names}
    for found in check_structure(stored, NULL):
        other = found.file in known and found.file not in used
        if found.tensor in stored.tensors or found.tensor in stored.objects:
            other = found.tensor not in names
        if not other:
            _raise_first([found])


def with_ties(content: Content) -> Content:
    """Return content with the output layers that its model's configuration ties to the embedding.

    A folder of Hugging Face does not store them; a job's model has both names.
    """
    from ftckpt.formats.families.facts import model_of, outputs_of
    from ftckpt.formats.huggingface.config import CONFIG, read_config

    stored = content.checkpoint.as_stored
    if CONFIG not in stored.source.entries:
        return content
    try:
        config = read_config(stored)
        inner = config.get("text_config")
        model = model_of(stored)
        outputs = outputs_of(model.family)
    except FtckptError:
        return content
    tied = config.get("tie_word_embeddings")
    if tied is None and isinstance(inner, Mapping):
        tied = inner.get("tie_word_embeddings")
    if tied is None:
        tied = model.family.tied
    if tied is not True:
        return content
    names = {wanted.name for wanted in content.tensors.values() if wanted.component == "model"}
    found = {
        output: embedding
        for output, embedding in outputs.items()
        if output not in names and embedding in content.tensors
    }
    return replace(content, aliases={**content.aliases, **found}) if found else content


class StateTable(NamedTuple):
    """What a job's ranks must know of a state to ask for it; small, and sent to all of them.

    Attributes:
        rows: the tensors (see `formats.state.job_names.TensorRow`).
        objects: names of other values.
        fields: settings that the optimizer's groups have.
        step: that every parameter has, where the checkpoint keeps it once; None for none.
        url: of the checkpoint.
        files: number and bytes of its files, by which another opening is known to be of the same.
        coded: keys of tensors that are codes of quantised weights.
    """

    rows: Sequence[Any]
    objects: Sequence[str]
    fields: Sequence[str]
    step: float | None
    url: str
    files: tuple[int, int]
    coded: Sequence[str]

    def names(self) -> AskedNames:
        """Return what finds a job's names in it."""
        from ftckpt.formats.state.job_names import AskedNames

        return AskedNames(self.rows, self.objects)


class AskedName(NamedTuple):
    """What a name of the job's is: a tensor, an optimizer's setting, a value, the common step."""

    row: Any = None
    setting: Any = None
    value: str | None = None
    step: bool = False


def what_is(asked: str, table: StateTable, names: AskedNames) -> AskedName | None:
    """Return what a job's name is in a checkpoint; None where it has no such thing.

    Raises:
        UsageError: two things answer to the name.
    """
    key = names.find(asked)
    if key is not None:
        return AskedName(row=names.row(key))
    setting = setting_of(asked)
    if setting is not None:
        known = setting.field == "params" or setting.field in table.fields
        return AskedName(setting=setting) if known and table.fields else None
    value = names.find_object(asked)
    if value is not None:
        return AskedName(value=value)
    if table.step is not None and names.step_of(asked) is not None:
        return AskedName(step=True)
    return None


def setting_of(asked: str) -> SettingName | None:
    """Return what a job's name says of an optimizer's settings; None for any other."""
    from ftckpt.formats.state.job_names import setting_of as said

    return said(asked)


def similar(asked: str, names: AskedNames) -> list[str]:
    """Return listed names that are like one that was not found."""
    from ftckpt.formats.state.job_names import similar as like

    return like(asked, names)


@dataclass
class LoadableState:
    """A checkpoint as a job asks for it; on the rank that has opened it.

    Attributes:
        content: what may be loaded.
        table: the names.
        manifest: of the source; None without one.
    """

    content: Content
    table: StateTable
    manifest: Manifest | None
    _settings: JobSettings
    _leaves: Mapping[str, _Value]
    _trees: StateObjects

    @classmethod
    def of(cls, content: Content) -> LoadableState:
        """Return the state that some content is.

        Raises:
            FtckptError: its objects cannot be read.
        """
        from ftckpt.formats.pickles.walk import dotted
        from ftckpt.formats.state.job_names import TensorRow
        from ftckpt.formats.state.job_settings import JobSettings
        from ftckpt.formats.state.objects import StateObjects, of_all_ranks
        from ftckpt.formats.state.paths import recorded_paths, torch_paths, with_aliases
        from ftckpt.manifest.locate import find

        content = with_aliases(with_ties(content))
        shared = of_all_ranks(content)
        recorded = recorded_paths(content.checkpoint)
        paths = torch_paths(content)
        rows = []
        for key, wanted in content.tensors.items():
            own = recorded.tensors.get(key)
            info = content.checkpoint.tensors.get(key)
            kept = own is not None and (info is None or wanted.name == info.name)
            listed = dotted(own) if own is not None and kept else dotted(paths[key])
            rows.append(TensorRow(key, listed, paths[key], wanted.shape, wanted.dtype.name))
        trees = StateObjects(shared, recorded.objects)
        settings = JobSettings(shared, trees)
        leaves = dict(_values(shared, trees, recorded.objects))
        for row in rows:
            leaves.pop(row.listed, None)
        source = content.checkpoint.as_stored.source
        table = StateTable(
            rows=rows,
            objects=list(leaves),
            fields=sorted(settings.fields),
            step=_step_of(content, settings),
            url=source.url,
            files=(len(source.entries), source.nbytes),
            coded=_coded(content),
        )
        return cls(content, table, find(source), settings, leaves, trees)

    @property
    def pieces(self) -> int:
        """How many pieces the checkpoint's tensors have."""
        return sum(len(info.pieces) for info in self.content.checkpoint.as_stored.tensors.values())

    def settings(
        self, fields: Iterable[str], gatherer: Gatherer, allow: Collection[str]
    ) -> LoadedSettings:
        """Return some settings of the optimizer, by parameter.

        Raises:
            UnsafeError: one holds a class that is not allowed.
            FtckptError: one cannot be read.
        """
        from ftckpt.formats.state.job_settings import saved

        return self._settings.load(
            fields, lambda value, name: saved(value, gatherer, name=name, allow=allow)
        )

    def value(self, name: str, gatherer: Gatherer, allow: Collection[str]) -> bytes:
        """Return a value other than a tensor, as bytes for `torch.load`.

        Raises:
            UnsafeError: it holds a class that is not allowed.
            FtckptError: it cannot be read.
        """
        from ftckpt.formats.state.job_settings import saved

        found = self._leaves[name]
        leaf = found.leaf
        if leaf is None:
            leaves = list(self._trees.nested(found.name))
            if len(leaves) != 1:
                raise NotFoundError(f"{name} is not one value", tensor=name)
            leaf = leaves[0]
        return saved(leaf.value, gatherer, name=name, allow=allow)

    def check_objects(self, names: Iterable[str], work: Work = ALONE) -> None:
        """Hold the records of some values, or their blocks, to what is recorded of them.

        Raises:
            CorruptError: one is damaged.
        """
        from ftckpt.verification.blocks import check_blocks
        from ftckpt.verification.records import check_these

        checkpoint = self.content.checkpoint.as_stored
        extents = {self.content.objects[self._leaves[name].name].extent for name in names
                   if self._leaves[name].name in self.content.objects}  # fmt: skip
        extents = {one for one in extents if one.file in checkpoint.source.entries}
        found: list[Finding] = []
        records = checkpoint.records_in(extents)
        if records:
            check_these(checkpoint, records, emit=found.append, work=work)
        elif self.manifest is not None:
            blocks = {
                one.file: range(one.offset // BLOCK, (one.end - 1) // BLOCK + 1)
                for one in extents
                if one.file in self.manifest.by_path and one.length
            }
            if blocks:
                source = checkpoint.source
                check_blocks(source, self.manifest, blocks, emit=found.append, work=work)
        _raise_first(found)


class _Value(NamedTuple):
    """Where a value is: the object, and the part of it; None for all of it."""

    name: str
    leaf: Leaf | None


def _values(
    content: Content, trees: StateObjects, recorded: Mapping[str, Any]
) -> Iterator[tuple[str, _Value]]:
    """Yield the values that are no tensors and no settings of an optimizer, by dotted path."""
    from ftckpt.formats.pickles.walk import dotted
    from ftckpt.formats.state.job_names import setting_of
    from ftckpt.formats.state.paths import recorded_items

    checkpoint = content.checkpoint
    items = recorded_items(checkpoint)
    hidden = {*getattr(checkpoint, "subclasses", ()), *getattr(checkpoint, "coded", ())}
    for name in content.objects:
        if setting_of(name) is not None or name.rpartition(".")[2] == "param_groups":
            continue
        if name in hidden:
            continue
        if name in items:
            yield dotted(recorded.get(name, (name,))), _Value(name, None)
            continue
        try:
            for leaf in trees.flattened(name):
                if "param_groups" not in leaf.path:
                    yield dotted(leaf.path), _Value(name, leaf)
        except FtckptError:  # what cannot be read is missed by the job that asks for it
            continue


def _step_of(content: Content, settings: JobSettings) -> float | None:
    """Return the step of every parameter, where it is kept once for all."""
    said = settings.step()
    if said is not None:
        return said
    try:
        scalars = content.checkpoint.as_stored.step_scalars
    except FtckptError:
        return None
    found = {one.value for one in scalars if one.role is StepRole.OPTIMIZER}
    return found.pop() if len(found) == 1 else None


def _coded(content: Content) -> list[str]:
    """Return the keys of what is stored in codes, and would be loaded as numbers."""
    held = content.checkpoint.quantised
    return [
        key
        for key, wanted in content.tensors.items()
        if any(copy.key in held for copy in wanted.copies)
    ]


def is_computed(checkpoint: Checkpoint) -> bool:
    """Return whether tensors are made of others when they are read."""
    if isinstance(checkpoint.source, ComputedSource):
        return True
    apart = checkpoint.source.store is not checkpoint.as_stored.source.store
    return apart or bool(checkpoint.decoding)


def threads_alone(work: Work, checkpoint: Checkpoint | None = None) -> Work:
    """Return work that makes no copies of this process, which may hold a device or a job's threads.

    Args:
        work: as it was asked for.
        checkpoint: what is read: no more of its tensors are decoded at a time than memory allows.
    """
    slots = checkpoint.decoding.slots() if checkpoint is not None and checkpoint.decoding else 0
    threads = min(work.threads, slots) if slots else work.threads
    return replace(work, threads=threads, processes=0)


def verify_used(content: Content, keys: Iterable[str], work: Work) -> None:
    """Verify what some tensors are computed from, where that is not read as it lies there.

    Raises:
        FtckptError: it does not pass.
    """
    from ftckpt.operations.writing import verified

    chosen = replace(content, tensors={k: content.tensors[k] for k in keys}, objects={})
    report = verified(content.checkpoint, chosen, work)
    # Without evidence there is nothing to hold it to, and the job is told so.
    if report.code not in (ExitCode.OK, ExitCode.UNVERIFIED):
        raise error_of(report.code, report.message, hint=report.hint)
