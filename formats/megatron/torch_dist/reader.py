"""An opened `torch_dist` checkpoint, and how one is opened (see `torch_dist`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ftckpt.checkpoint import Commit, CommitState, Extent, Payload, Piece, TensorInfo, Topology
from ftckpt.errors import CorruptError, FtckptError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.dcp.items import misshapen
from ftckpt.formats.dcp.metadata import DcpMetadata
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, MARKER
from ftckpt.formats.dcp.reader import DcpCheckpoint, open_dcp
from ftckpt.formats.dcp.state import unfinished, unnamed
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.progress import NULL
from ftckpt.progress import Counter as Progress
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse, shown
from ftckpt.workers.memory import no_gc

from .names import FlatShardPieces, logical, shard_shape
from .optimizer_buckets import is_bucket, unbucketed

if TYPE_CHECKING:
    from ftckpt.formats.state.paths import RecordedPaths

_JSON = JsonLimits(depth=4, objects=16, keys=256, items=256, naturals=False)
_MOST_BYTES = 1 << 20
# Of core's CheckpointingConfig, with the values that all known versions write.
_MEMBERS: Mapping[str, str | int] = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# pp.tp of PP.TP: an RNG state of each tensor rank of each stage; of each data rank too (pp.tp.dp of
# PP.TP.DP) where experts are divided.
_RNG = re.compile(
    r"rng_state/shard_(\d{1,7}(?:\.\d{1,7}){1,2})_(\d{1,7})\.(\d{1,7})(?:\.(\d{1,7}))?"
)
# Folders that Megatron puts beside the store.
FOLDERS = ("tokenizer/", "modelopt_state/")
_GATHERED = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/.*"
)


@dataclass(kw_only=True, repr=False)
class MegatronDistCheckpoint(DcpCheckpoint):
    """An opened torch_dist checkpoint; `meta` has the store's own names and shapes."""

    format: ClassVar[str] = "megatron-dist"
    unmapped: str = ""  # why the optimizer's state is not given to parameters; "" where it is
    bound: bool = False  # whether the optimizer's state lies in buffers of the ranks that wrote it
    common_beside: bool = False  # whether the common state was saved to a file beside the store
    other_grids: Sequence[Finding] = ()  # where objects are of other ranks than is recorded

    @property
    def loads_at_any_world(self) -> bool:
        """Megatron reshards all but buffers of ranks while it loads."""
        return not self.bound

    def recorded_paths(self) -> RecordedPaths:
        """Return nothing: the logical names are not the store's."""
        from ftckpt.formats.state.paths import RecordedPaths

        return RecordedPaths({}, {})

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return nothing, as for `recorded_paths`."""
        return {}

    def interpret(self) -> None:
        """Replace the stored tensors by the logical ones, and say what could not be."""
        self.commit = Commit(CommitState.COMMITTED, CONFIGURATION)
        self.other_grids = list(_other_grids(self.topology, self.objects))
        self.topology = _topology(self.topology, self.objects)
        stored = list(self.tensors.values())
        tensors = logical(_reformed(i, self.meta) for i in stored if not is_bucket(i))
        buckets = [info for info in stored if is_bucket(info)]
        layout = "buckets" if buckets else ""
        if buckets:
            model = [info for info in tensors.values() if info.component == "model"]
            try:
                found = unbucketed(buckets, model, self.topology)
                if found.keys() & tensors.keys():
                    raise UnsupportedError("the same state is stored outside of them too")
                tensors.update(found)
            except UnsupportedError as error:
                self.unmapped = f"the optimizer's buckets are kept as stored: {error.message}"
                self.notes = [*self.notes, finding("note", self.unmapped, tensor=error.tensor)]
                tensors.update({info.key: info for info in buckets})
        if any(_GATHERED.fullmatch(name) for name in self.objects):
            layout = "gathered buffers"
            self.unmapped = (
                "the optimizer's state is in objects (dp_zero_gather_scatter), which are kept whole"
                " and not given to parameters"
            )
            self.notes = [*self.notes, finding("note", self.unmapped)]
        self.bound = bool(layout)
        words = ["Megatron-Core torch_dist", *([f"optimizer in {layout}"] if layout else ())]
        self.dialect = ", ".join([*words, *([self.dialect] if self.dialect else ())])
        self.tensors = tensors
        views = Counter(info.stored_name for info in tensors.values())
        self.stored = {
            key: info.stored_name
            for key, info in tensors.items()
            if info.stored_name and views[info.stored_name] == 1
        }

    def check(self, counter: Progress = NULL) -> Iterator[Finding]:
        """Yield what a store's own checks do, and objects of other ranks than is recorded."""
        yield from super().check(counter)
        yield from self.other_grids

    def members(self) -> Iterable[str]:
        """The store, and what Megatron puts beside it."""
        yield from super().members()
        if self.common_beside and COMMON not in self.beside:
            yield COMMON  # no item names it: without this, nobody would miss it
        yield from (name for name in self.source.entries if name.startswith(FOLDERS))

    def payload(self, piece: Piece) -> Payload:
        """Open the item and find the elements of its tensor that are the piece's."""
        tensor, span, transforms, record = self._elements(piece)
        shape, nbytes = tensor.shape, tensor.dtype.nbytes
        if piece.flat is None:
            sizes = piece.box.sizes
            lead = len(shape) - len(sizes)
            volume = piece.box.volume
            rows = prod(shape[:lead]) if lead >= 0 else 0
            row = piece.first // volume if volume else 0
            if lead < 0 or shape[lead:] != sizes or (volume and row >= rows):
                raise misshapen(piece.extent, shape, sizes)
            at = _place(row, shape[:lead], tensor.strides)
            strides = None if tensor.dense else tensor.strides[lead:]
            reach = volume if strides is None else _reach(sizes, strides)
        else:
            at, reach, strides = piece.first, piece.flat[1] - piece.flat[0], None
            if at + reach > tensor.numel:
                raise misshapen(piece.extent, shape, (at + reach,))
            if not tensor.dense:
                raise UnsupportedError(
                    f"a record of {piece.extent.file} holds a strided tensor where a flat range "
                    "is needed",
                    file=piece.extent.file,
                    offset=piece.extent.offset,
                    length=piece.extent.length,
                )
        found = Extent(span.file, span.offset + nbytes(at), nbytes(reach))
        if transforms:
            return Payload(piece.extent, strides, transforms, (found.offset, found.length))
        return Payload(found, strides, record=record)

    def owner(self, stored: str, place: Extent | None) -> str:
        """Return the logical tensor that an item is of; the stored name where it is of several."""
        key = None if place is None else self._owners.get(place)
        return key or super().owner(stored, place)

    @cached_property
    def _owners(self) -> Mapping[Extent, str]:
        """Item -> the tensor that alone has pieces in it."""
        owners: dict[Extent, str] = {}
        for key, info in self.tensors.items():
            try:
                for piece in info.pieces:
                    if owners.setdefault(piece.extent, key) != key:
                        owners[piece.extent] = ""
            except FtckptError:
                continue  # a tensor without a place: the structure check reports it
        return owners


def open_dist(source: Source) -> MegatronDistCheckpoint:
    """Parse the metadata and say what the stored tensors stand for (see `MegatronDist.open`)."""
    if CONFIGURATION not in source.entries:
        raise unfinished()
    configuration = _configuration(source)
    if MARKER not in source.entries:
        source.entry(MARKER)  # it was written before: that it is not here is damage
    checkpoint = open_dcp(source, MegatronDistCheckpoint)
    # Since core 0.18 the common state is an object of the store, and no backend of it is named.
    stored = any(is_common(name) and name != COMMON for name in checkpoint.objects)
    checkpoint.common_beside = configuration.get("common_backend") == "torch" and not stored
    with no_gc():
        checkpoint.interpret()
    return checkpoint


def _configuration(source: Source) -> Mapping[str, Any]:
    """Return what `metadata.json` says.

    Raises:
        UnsupportedError: another backend or version.
        CorruptError, UnsafeError: it is not JSON that can be trusted, or not of this store; or one
            bit of a member is flipped.
    """
    size = source.size(CONFIGURATION)
    if size > _MOST_BYTES:
        raise UnsupportedError(f"{CONFIGURATION} has {size} bytes", file=CONFIGURATION)
    raw = source.read(CONFIGURATION)
    said = parse(raw, _JSON, file=CONFIGURATION, what="configuration", bad="bad-index",
                 unsafe="unsafe-index")  # fmt: skip
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if not isinstance(said, dict) or backend != "torch_dist":
        if MARKER in source.entries:
            raise unnamed(backend)
        raise UnsupportedError(f"{CONFIGURATION} names a backend other than torch_dist",
                               file=CONFIGURATION)  # fmt: skip
    for name in said.keys() - _MEMBERS.keys():  # Megatron's CheckpointingConfig fails on each
        _refuse_unknown(f"has a member {shown(name)}", name, _MEMBERS.keys() - said.keys())
    for name, usual in _MEMBERS.items():
        value = said.get(name, usual)
        if type(value) is not type(usual) or value != usual:
            what = f"says that {name} is {shown(value)}"
            _refuse_unknown(what, value, (str(usual),))
    return said


def _refuse_unknown(what: str, said: object, known: Collection[str]) -> NoReturn:
    """Refuse what no version is known to write: as damage where one bit makes it of a known one."""
    slip = one_bit_from(said, known) if isinstance(said, str) else ""
    if slip:
        raise CorruptError(f"{CONFIGURATION} {what} for {slip}", kind="bad-index",
                           file=CONFIGURATION)  # fmt: skip
    raise UnsupportedError(f"{CONFIGURATION} {what}", file=CONFIGURATION)


def _reformed(info: TensorInfo, meta: DcpMetadata) -> TensorInfo:
    """Give a tensor that is stored as a grid of flat shards its own shape."""
    shape = meta.reformulated.get(info.stored_name)
    pieces = info.pieces
    assert isinstance(pieces, LazyPieces)
    shard = None if shape is None else shard_shape(info.shape, shape)
    if shape is None or shard is None:
        return info
    for index in range(len(pieces)):
        sizes = pieces.box(index).sizes
        if len(sizes) != len(info.shape) or any(n != 1 for n in sizes[:-1]):
            return info
    return info._replace(shape=shape, pieces=FlatShardPieces(pieces, shard))


def _topology(known: Topology, objects: Mapping[str, object]) -> Topology:
    """Add tensor ranks and stages from the grid of RNG states where no arguments tell them."""
    grids = {(int(m[3]), int(m[2])) for name in objects if (m := _RNG.fullmatch(name))}
    if (known.tp is not None and known.pp is not None) or len(grids) != 1:
        return known
    tp, pp = grids.pop()
    evidence = ", ".join(filter(None, (known.evidence, "grid of RNG states")))
    return replace(known, tp=known.tp or tp, pp=known.pp or pp, evidence=evidence)


def _other_grids(known: Topology, objects: Mapping[str, object]) -> Iterator[Finding]:
    """Yield RNG states of some ranks alone, or of other stages and tensor ranks than recorded.

    The common state may be a file of its own, and then of another save. Megatron asks for those
    states where the arguments have the sizes of the run, and does not start without them.
    """
    grids: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for name in objects:
        if match := _RNG.fullmatch(name):
            grids[tuple(int(n) for n in match.groups()[1:] if n is not None)].add(match[1])
    for (pp, tp, *rest), places in grids.items():
        of = f"the RNG states are of {pp} pipeline stages and {tp} tensor ranks"
        if any(said not in (None, size) for said, size in ((known.pp, pp), (known.tp, tp))):
            what = f"{of}, the arguments record {known.pp} and {known.tp}"
            yield finding("state-unknown", f"{what}: one of them is of another save")
        elif len(places) != prod((pp, tp, *rest)):
            what = f"{of}{''.join(f', {n} data ranks' for n in rest)}, and {len(places)} are there"
            yield finding("state-unknown", what)


def _place(row: int, lead: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie before a row of the leading axes."""
    at = 0
    for size, stride in zip(reversed(lead), reversed(strides[: len(lead)]), strict=True):
        row, index = divmod(row, size)
        at += index * stride
    return at


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of a strided box."""
    return 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
