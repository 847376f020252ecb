"""Opened files of torch.save, and how they are opened (see `torchsave`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from ftckpt.amounts import human_bytes
from ftckpt.checkpoint import (
    Checkpoint,
    Commit,
    CommitState,
    Extent,
    ObjectInfo,
    Record,
    Scalar,
    StepRole,
    TensorInfo,
)
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.steps import READ_FIRST, SCALARS_A_FILE, role_of, step_of_save
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    NoStateError,
    NotFoundError,
    UnsupportedError,
)
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.formats.huggingface.index import (
    ShardIndex,
    check_index,
    check_index_size,
    is_beside,
    parse_index,
    shard_name,
)
from ftckpt.formats.huggingface.weights import check_not_empty, check_pairs, zero_at_first
from ftckpt.formats.pickles.walk import at
from ftckpt.formats.ranks.lone_shards import flat_weight
from ftckpt.formats.ranks.nested_shards import ranks_inside
from ftckpt.formats.ranks.training_tree import TrainingTree, TreeTensor
from ftckpt.formats.state.stored_names import StoredName, is_of_bitsandbytes
from ftckpt.formats.torch_files.parse_files import check_streams, parse_files
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source

from .names import INDEX, SHARD, STEMS

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.checkpoint.quantised import QuantisedTensor
    from ftckpt.formats.quantised.pairing import Pairing

_LIGHTNING = ("pytorch-lightning_version", "lightning_version")


def open_torchsave(source: Source) -> Checkpoint:
    """Parse the pickles of a file or of a folder's weights (see `TorchSave.open`)."""
    if source.single:
        return _open_single(source)
    names = [n for n in source.entries if "/" not in n]
    indexes = [n for n in names if INDEX.fullmatch(n)]
    if indexes:
        main = min(indexes, key=lambda n: (not n.startswith(STEMS), len(n), n))
        check_index_size(main, source.size(main))
        index = parse_index(source.read(main), main)
        present = [n for n in (*index.files(), index.groups) if n in source.entries]
        role = "optimizer" if index.groups else "model"
        return open_files(source, present, role=role, index=index)
    whole = [f"{stem}.bin" for stem in STEMS if f"{stem}.bin" in source.entries]
    if whole:
        return open_files(source, whole[:1], role="model")
    shards = sorted(n for n in names if SHARD.fullmatch(n))
    if not shards:
        raise NotFoundError(f"{source.url} holds no pytorch_model.bin")
    first = shard_name(shards[0])
    if first is None or first.total > 1:
        missing = f"{first.stem if first else 'pytorch_model'}.bin.index.json"
        raise IncompleteError(
            f"{missing} is not there: the index is written last, so the save did not finish",
            hint="a later save may be complete",
            kind="uncommitted",
            file=missing,
        )
    return open_files(source, shards, role="model")


def _open_single(source: Source) -> Checkpoint:
    """Open one file, which may hold one state or the shards of several ranks."""
    names = list(source.entries)
    parsed = parse_files(source, names)
    for stream in parsed.values():
        if isinstance(stream, TorchStream):
            try:
                inside = ranks_inside(stream.tree)
            except FtckptError as error:
                error.file = stream.file
                raise
            if inside is not None:
                from ftckpt.formats.ranks.one_file import open_one_file

                return open_one_file(source, stream, inside)
    for stream in parsed.values():
        name = flat_weight(stream.tree) if isinstance(stream, TorchStream) else ""
        other = _rank_beside(source) if name else ""
        if other:
            raise UnsupportedError(
                f"{names[0]} holds one rank's piece of {name}: its tensors have one dimension, and"
                f" {other} is of another rank",
                hint="have its trainer gather the model: nothing in the files says the shapes",
                file=names[0],
                tensor=name,
            )
    opened = open_files(source, names, parsed=parsed)
    for stream in opened.streams.values() if not opened.tensors else ():
        if hidden := _hidden(stream, opened.trees[stream.file]):
            raise UnsupportedError(hidden, file=stream.file)
    plain = any(one.plain for one in opened.streams.values())
    if not opened.tensors:
        what = "a plain pickle (pickle.dump)" if plain else "a file of torch.save"
        said = "without a tensor: nothing says that it is a checkpoint"
        opened.no_state = f"{source.url} is {what} {said}"
        if plain:
            raise NoStateError(opened.no_state)
    if results := _results(opened):
        opened.no_state = (
            f"{source.url} holds {listed(results, 3)} and nothing of a model or an optimizer:"
            " results, and no checkpoint"
        )
    return opened


def _rank_beside(source: Source) -> str:
    """Return the file of another rank, as the names say; the file itself if its name has a rank.

    audiocraft's `checkpoint_name` gives rank 0 no number: `checkpoint.th`, `checkpoint.th.1`.
    """
    (name,) = source.entries
    if re.search(r"(?:^|[-_.])rank[-_]?\d{1,7}(?!\d)", name, re.IGNORECASE):
        return name
    numbered = re.fullmatch(r"(.+\.[A-Za-z]\w*)\.(\d{1,7})", name)
    other = numbered[1] if numbered else f"{name}.1"
    try:
        source.store.stat(source.path(other))
    except (NotFoundError, NotADirectoryError):
        return name if numbered else ""
    return other


# What an evaluation gives; a parameter has no such name (pycocotools' `COCOeval.accumulate`).
_RESULTS = re.compile(
    r"(?:\w+_)?(?:precisions?|recalls?|scores?|counts|accuracy|acc|ious?|aps?|mAP|losses|loss|errors?"
    r"|metrics?|results?|preds?|predictions?|predicted|logits|probs?|probabilities|labels?|targets?"
    r"|ground_truths?|gts?|boxes|bboxes|masks|keypoints|detections|confusion(?:_matrix)?|image_ids?"
    r"|img_ids?|evals?|evalImgs|outputs?|samples?|generations?)(?:_per_\w+|_\d+)?",
    re.IGNORECASE,
)


def _results(opened: TorchSaveCheckpoint) -> list[str]:
    """Return the tensors of a file if each is an evaluation's by its name; [] if one is not."""
    names = []
    for tree in opened.trees.values():
        for one in tree.tensors:
            if one.ref.parameter or one.where.component != "model":
                return []
            names.append(one.where.name)
    last = [re.sub(r"(?:\.\d+)+$", "", name).rpartition(".")[2] for name in names]
    return names if all(map(_RESULTS.fullmatch, last)) else []


@dataclass(kw_only=True, repr=False)
class TorchSaveCheckpoint(Checkpoint):
    """One or more opened files.

    Attributes:
        streams: of each file that could be parsed.
        trees: what those hold.
        index: the index of a sharded folder.
        pairing: bitsandbytes' weights in codes and scales; None where there are none.
    """

    format: ClassVar[str] = "torchsave"

    streams: Mapping[str, TorchStream] = field(default_factory=dict)
    trees: Mapping[str, TrainingTree] = field(default_factory=dict)
    index: ShardIndex | None = None
    pairing: Pairing | None = None

    @property
    def loads_at_any_world(self) -> bool:
        """One file holds the whole state."""
        return True

    def members(self) -> Iterable[str]:
        """Yield the files, their index, and what belongs to a model folder."""
        files = set(self.streams) | {f.file for f in self.open_findings if f.file}
        if self.index is not None:
            files |= {self.index.file, *self.index.files(), self.index.groups} - {""}
        if not self.source.single:
            files |= {n for n in self.source.entries if is_beside(n)}
        yield from sorted(n for n in files if not n.startswith("ftckpt.manifest"))

    def load_object(self, name: str) -> Any:
        """Return one object as inert data."""
        info = self.objects[name]
        return at(self.streams[info.extent.file].tree, info.field)

    @cached_property
    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """The weights of bitsandbytes in codes and scales; their states are read."""
        if self.pairing is None:
            return {}
        from ftckpt.formats.quantised.pairing import weights_of

        return weights_of(self, self.pairing)

    def dequantised(self, dtype: DType) -> Checkpoint:
        """Return itself; weights in codes are refused.

        Raises:
            UnsupportedError: it has some.
        """
        if self.pairing is not None and self.pairing.pairs:
            from ftckpt.formats.quantised.pairing import not_computed

            raise not_computed(self, self.pairing)
        return self

    def known_faults(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Yield the traces of known faults of writers."""
        from ftckpt.formats.state.known_faults import explain

        yield from explain(self, findings)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield damaged files, zips that contradict themselves, and what the index gets wrong."""
        yield from self.open_findings
        if self.pairing is not None:
            from ftckpt.formats.quantised.pairing import check

            yield from check(self.pairing, lambda: self.quantised)
        yield from check_streams(self.source, self.streams)
        weights = [file for file in self.trees if file.startswith(STEMS)]
        if weights and not self.source.single and len(self.trees) == len(self.streams):
            yield from check_not_empty(self.tensors.values(), weights[0])
            yield from check_pairs(self.tensors.values(), weights[0])
        if self.index is None:
            return
        held = {
            file: self.index.names_in(
                (found.stored_name for found in tree.tensors), _top(self.streams[file])
            )
            for file, tree in self.trees.items()
            if file != self.index.groups
        }
        once = sum(i.nbytes for k, i in self.tensors.items() if k not in self.aliases)
        yield from check_index(self.index, held, self.source.entries, once)
        named = set(self.index.files())
        for name in self.source.entries:
            if SHARD.fullmatch(name) and name not in named:
                what = f"{name} is a shard that no index names, left by another save"
                yield finding("stale-shard", what, file=name)

    @property
    def zero_at_first(self) -> Sequence[str]:
        """The matrices of an adapter that begin as zeros."""
        return zero_at_first(self.tensors)

    def records(self) -> Iterator[Record]:
        """Yield every record of every zip; a storage belongs to the first tensor that uses it."""
        owners = {
            (info.pieces[0].extent.file, key): name
            for name, (info, key) in reversed(self._storages().items())
        }
        for file, stream in self.streams.items():
            for name, extent, crc in stream.records:
                owner = owners.get((file, name.removeprefix("data/")), f"{file}:{name}")
                yield Record(extent, crc, owner)

    def _storages(self) -> dict[str, tuple[TensorInfo, str]]:
        """Return tensor key -> the tensor and its storage's key, in the file's order."""
        keys = {
            found.where: found.ref.key for tree in self.trees.values() for found in tree.tensors
        }
        return {
            key: (info, keys[place])
            for key, info in self.tensors.items()
            if (place := StoredName(info.component, info.kind, info.name)) in keys
        }

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield step counters: those in the pickle, then the optimizer's tensors."""
        for file, tree in self.trees.items():
            found = self._in_pickle(file, tree)
            yield from found[:limit]
            if len(found) < limit:
                yield from self._step_tensors(file, tree, limit - len(found))

    def counters(self) -> Iterator[Scalar]:
        """Yield the first counter of the trainer's in each pickle, else those that may be one."""
        for file, tree in self.trees.items():
            found = self._in_pickle(file, tree)
            sure = bool(found) and found[0].role is StepRole.ITERATION
            yield from found[: 1 if sure else SCALARS_A_FILE]

    @staticmethod
    def _in_pickle(file: str, tree: TrainingTree) -> list[Scalar]:
        found = [
            Scalar(file, n.name, n.value, role)
            for n in tree.numbers
            if (role := n.role or role_of(n.name, optimizer=n.optimizer)) is not None
        ]
        return sorted(found, key=lambda scalar: READ_FIRST[scalar.role])

    def _step_tensors(self, file: str, tree: TrainingTree, limit: int) -> Iterator[Scalar]:
        steps = [f for f in tree.tensors if _is_step(f)][:limit]
        spans = [f.ref.span(self.streams[file].storages) for f in steps]
        for found, data in zip(steps, self.source.read_many(spans), strict=True):
            value = decode_scalar(found.ref.dtype, data)
            if value is not None and isfinite(value):
                yield Scalar(file, found.where.name, value, StepRole.OPTIMIZER)

    def fields(self) -> Iterable[str]:
        """Names of the non-tensor state of all files."""
        yield from dict.fromkeys(name for tree in self.trees.values() for name in tree.names)


def _top(stream: TorchStream) -> Mapping[Any, Any]:
    return stream.tree if isinstance(stream.tree, dict) else {}


def _is_step(found: TreeTensor) -> bool:
    optimizer = found.where.component == "optimizer"
    return (
        optimizer
        and found.ref.numel == 1
        and found.ref.dtype.itemsize > 0
        and role_of(found.where.name, optimizer=True) is not None
    )


def open_files(
    source: Source,
    names: Sequence[str],
    *,
    role: str = "",
    label: str = "",
    index: ShardIndex | None = None,
    weights: Sequence[tuple[str, Any]] = (),
    parsed: Mapping[str, TorchStream | CorruptError] | None = None,
) -> TorchSaveCheckpoint:
    """Open some files of a place as one checkpoint.

    Args:
        source: the place.
        names: the files.
        role: `model`, `optimizer` or `state` where names decide what they are (`TrainingTree`).
        label: what the state in them is called.
        index: the index that names them.
        weights: (name, what has its shape) of the model's parameters, where the model lies in
            other files and the optimizer in these.
        parsed: the files, where they are parsed already.

    Raises:
        CorruptError: the only file is damaged.
        UnsafeError, UnsupportedError: see `TorchSave.open`.
    """
    parsed = parse_files(source, names) if parsed is None else parsed
    streams = {file: s for file, s in parsed.items() if isinstance(s, TorchStream)}
    errors = [error for error in parsed.values() if isinstance(error, CorruptError)]
    if errors and index is None:
        raise errors[0]
    trees = {
        f: TrainingTree(s, role=role, label=label, weights=weights) for f, s in streams.items()
    }
    damage = [from_error(error) for error in errors]
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    objects: dict[str, ObjectInfo] = {}
    for file, tree in trees.items():
        damage += (
            finding("bad-metadata", f"{file}: {said}", file=file) for said in tree.contradictions
        )
        owners: dict[tuple[Any, ...], str] = {}
        for found in tree.tensors:
            info = found.info(streams[file])
            key = info.key
            if tensors.setdefault(key, info) is not info:
                damage.append(_twice(tensors[key], info))
                continue
            ref = found.ref
            view = (ref.key, ref.storage_offset, ref.shape, ref.strides, ref.dtype.name)
            owner = owners.setdefault(view, key)
            if owner is not key and ref.numel:
                aliases[key] = owner
        for name, path in tree.objects.items():
            objects.setdefault(
                name, ObjectInfo(name, _pickle_of(source, streams[file]), None, path)
            )
    marker = "" if index is None else index.file
    checkpoint = TorchSaveCheckpoint(
        source=source,
        tensors=tensors,
        objects=objects,
        aliases=aliases,
        commit=Commit(CommitState.COMMITTED if marker else CommitState.NO_MARKER, marker),
        dialect=_dialect(streams),
        notes=[*_notes(streams, trees), *_links(source, streams)],
        streams=streams,
        trees=trees,
        index=index,
        open_findings=damage,
    )
    checkpoint.step = step_of_save(tuple(checkpoint.counters()), source.name)
    if any(map(is_of_bitsandbytes, tensors)):
        from ftckpt.formats.quantised.pairing import paired

        checkpoint.pairing, checkpoint.tensors = paired(tensors)
    return checkpoint


def _twice(first: TensorInfo, second: TensorInfo) -> Finding:
    here, there = first.pieces[0].extent.file, second.pieces[0].extent.file
    return finding(
        "duplicate-tensor", f"{first.key} is in {here} and in {there}", file=there, tensor=first.key
    )


def _pickle_of(source: Source, stream: TorchStream) -> Extent:
    if stream.archive is None:
        return Extent(stream.file, 0, source.size(stream.file))
    member = stream.archive.members["data.pkl"]
    return Extent(stream.file, member.offset, member.size)


def _hidden(stream: TorchStream, tree: TrainingTree) -> str:
    """Say which storages lie where no name leads: in sets, and in objects of unknown classes."""
    used = {found.ref.key for found in tree.tensors}
    left = [
        one.numel * one.dtype.itemsize
        for key, one in stream.storages.items()
        if key not in used and one.numel and one.inline is None
    ]
    if not left:
        return ""
    where = f"objects of {listed(stream.opaque, 3)}" if stream.opaque else "a set"
    return (
        f"{stream.file} keeps {counted(len(left), 'storage')} of tensors, {human_bytes(sum(left))},"
        f" where no name leads to them, perhaps in {where}: they are not read as tensors"
    )


def _notes(
    streams: Mapping[str, TorchStream], trees: Mapping[str, TrainingTree]
) -> Iterator[Finding]:
    for file, stream in streams.items():
        if stream.opaque:
            yield finding(
                "opaque-object",
                f"{file} names classes that are kept inert: {listed(stream.opaque)}",
                file=file,
            )
        for remark in trees[file].remarks:
            yield finding("note", f"{file}: {remark}", file=file)
        if hidden := _hidden(stream, trees[file]):
            yield finding("note", hidden, file=file)


def _links(source: Source, files: Iterable[str]) -> Iterator[Finding]:
    for name in files:
        link = source.entries[name].link
        if link is not None:
            yield finding("link-followed", f"{name} is a link to {link}", file=name)


def _dialect(streams: Mapping[str, TorchStream]) -> str:
    said = []
    for stream in streams.values():
        if isinstance(stream.tree, dict):
            version = next((stream.tree[k] for k in _LIGHTNING if k in stream.tree), None)
            if isinstance(version, str) and len(version) < 40:
                said.append(f"written by Lightning {version}")
        if stream.legacy:
            said.append("legacy stream, before torch 1.6")
        if stream.plain:
            said.append("a plain pickle (pickle.dump)")
    return ", ".join(dict.fromkeys(said))
