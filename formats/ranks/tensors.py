"""Put what the ranks hold of one tensor together: pieces of a global tensor, and replicas.

What decides is what the writer recorded (placements in the pickle, a spec beside a plain tensor, a
split in `metadata.json`) or a rule that the user gave. Equal shapes or equal values decide nothing:
a merger that concatenates what looks like shards, or drops what looks like a copy, makes wrong
models. A plain tensor with no record stays one tensor a rank, in the component `extra:rank<R>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.sharding import Split as Cut
from ftckpt.checkpoint.sharding import part_shape, slabs
from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.state.coded_shards import (
    CodedShard,
    CodedTensor,
    ReadMany,
    check_shards,
    joined,
)
from ftckpt.formats.state.paths import LEAVES
from ftckpt.formats.torch_files.dtensor import Patch, choose_rule, local_of
from ftckpt.formats.torch_files.inner import inner_kind
from ftckpt.formats.torch_files.sharded import Distributed, Held, Listed
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef, is_dense, reach

from .specs import Spec


class RankEntry(NamedTuple):
    """What one rank holds of one tensor; `rank` is None where its file does not say whose it is.

    Attributes:
        rank: see above.
        file: which file.
        held: what it holds.
        storages: of the file.
        spec: what is written down beside a plain tensor.
        part: its place among the shards of a plain tensor; the rank, unless replicas save too.
    """

    rank: int | None
    file: str
    held: Held
    storages: Mapping[str, StoredStorage]
    spec: Spec | None = None
    part: int = 0


class RankSplit(NamedTuple):
    """How a plain tensor is cut over the ranks.

    Attributes:
        shape: global shape.
        dim: the axis that is cut; None for a replica on each rank.
        blocks: relative sizes of the sub-blocks that the axis packs, each cut on its own.
    """

    shape: tuple[int, ...]
    dim: int | None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorIdentity:
    """What a tensor is, before its pieces are known."""

    component: str
    kind: Kind
    name: str
    stored_name: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Its key, as in `TensorInfo`."""
        return tensor_key(self.component, self.kind, self.name)


Report = Callable[[Finding], Any]


def assemble(
    identity: TensorIdentity,
    entries: Sequence[RankEntry],
    *,
    split: RankSplit | None,
    replicated: bool,
    report: Report,
) -> list[TensorInfo]:
    """Return the logical tensor that the entries make up, or one a rank where nothing says how.

    An entry that contradicts the others is reported and left out, so that the tensor shows a hole
    and can never be read as if it were whole.

    Args:
        identity: what it is.
        entries: what each rank holds, in order of rank.
        split: what a metadata file records of it, for plain tensors.
        replicated: whether plain tensors are known to be the same on every rank.
        report: takes findings.

    Raises:
        UnsupportedError: partial sums, conjugate views, bytes inside the pickle.
    """
    try:
        kinds = {type(e.held) for e in entries}
        if len(kinds) > 1:
            rest = [e for e in entries if type(e.held) is not type(entries[0].held)]
            report(odd("bad-metadata", identity, rest[0], "is sharded in some files, whole in"))
            entries = [e for e in entries if type(e.held) is type(entries[0].held)]
        first = entries[0].held
        if isinstance(first, Distributed):
            return [_distributed(identity, entries, report)]
        if isinstance(first, Listed):
            return [_listed(identity, entries, report)]
        if split is not None and any(e.spec is not None and e.spec.offsets for e in entries):
            return [_at_offsets(identity, entries, split, report)]
        if split is not None and split.dim is not None:
            return [_split(identity, entries, split, split.dim, report)]
        if replicated or split is not None:
            return [_replicated(identity, entries, split, report)]
        return [_of_one_rank(identity, e) for e in entries]
    except FtckptError as error:
        error.tensor = error.tensor or identity.key
        raise


def _distributed(
    identity: TensorIdentity, entries: Sequence[RankEntry], report: Report
) -> TensorInfo:
    entries = agreeing(identity, entries, report)
    head, boxes = entries[0].held, PieceBoxes()
    for entry, part, patches in _placed(identity, entries, report):
        boxes.add(entry, part.local, patches)
    return _info(identity, head.shape, head.dtype, boxes)


def is_coded(entries: Sequence[RankEntry]) -> bool:
    """Whether any rank holds a DTensor whose local tensor is of a subclass."""
    return any(isinstance(e.held, Distributed) and e.held.record is not None for e in entries)


def assemble_coded(
    identity: TensorIdentity, entries: Sequence[RankEntry], *, report: Report, read: ReadMany
) -> tuple[CodedTensor | None, dict[str, TensorInfo]]:
    """Return the tensor subclass that the entries make up, and the tensors inside by suffix.

    Args:
        identity: what it is.
        entries: what each rank holds, in order of rank; `is_coded` is true of them.
        report: takes findings.
        read: see `coded_shards.joined`.

    Raises:
        UnsupportedError: a shard of several boxes; and see `coded_shards.joined`.
    """
    try:
        return _coded(identity, entries, report, read)
    except FtckptError as error:
        error.tensor = error.tensor or identity.key
        raise


def _coded(
    identity: TensorIdentity, entries: Sequence[RankEntry], report: Report, read: ReadMany
) -> tuple[CodedTensor | None, dict[str, TensorInfo]]:
    for other in (e for e in entries if not isinstance(e.held, Distributed)):
        report(odd("bad-metadata", identity, other, "is sharded in some files, whole in"))
    entries = [e for e in entries if isinstance(e.held, Distributed)]
    # A subclass forgets the type that its plain neighbours show.
    entries = agreeing(identity, entries, report, dtypes=False)
    shards: list[CodedShard] = []
    by_shard: dict[int, RankEntry] = {}
    for entry, part, patches in _placed(identity, entries, report):
        if len(patches) != 1:
            raise UnsupportedError(
                f"a shard of a tensor in codes falls into {len(patches)} separate boxes",
                file=entry.file,
            )
        value = part.local if part.record is None else part.record
        shard = CodedShard(patches[0].box, value, entry.storages, entry.rank, entry.file)
        by_shard[id(shard)] = entry
        shards.append(shard)

    def refuse(shard: CodedShard, what: str) -> None:
        report(odd("bad-metadata", identity, by_shard[id(shard)], what))

    recorded = [e.held for e in entries if isinstance(e.held, Distributed) and e.held.record]
    if not recorded:
        return None, {}
    tensor, parts = joined(recorded[0].shape, recorded[0].dtype, shards, refuse, read)
    if tensor is not None:
        for found in check_shards(tensor, identity.key):
            report(found)
    made: dict[str, TensorInfo] = {}
    leaf = LEAVES.get(identity.kind, "")
    name = f"{identity.name}.{leaf}" if leaf else identity.name
    model = identity.component in ("model", "ema")
    stored = identity.stored_name or identity.name
    for suffix, shape, dtype, pieces, shown in parts:
        kind = inner_kind(suffix.rpartition(".")[2], identity.kind) if model else Kind.OTHER
        made[suffix] = TensorInfo(
            identity.component, name + shown, kind, shape, dtype, pieces, stored + suffix
        )
    return tensor, made


def _placed(
    identity: TensorIdentity, entries: Sequence[RankEntry], report: Report
) -> Iterator[tuple[RankEntry, Distributed, tuple[Patch, ...]]]:
    """Yield what each rank holds of a DTensor, with its boxes in the whole."""
    head = entries[0].held
    assert isinstance(head, Distributed)
    held: list[tuple[RankEntry, Distributed, tuple[int, ...]]] = []
    for entry in entries:
        part = entry.held
        assert isinstance(part, Distributed)
        if part.mesh.sizes != head.mesh.sizes or part.placements != head.placements:
            report(odd("bad-metadata", identity, entry, "has another mesh or placement in"))
        elif part.mesh.coordinate is not None:  # None: the rank stands outside the mesh
            held.append((entry, part, part.mesh.coordinate))
    stored = [(coordinate, part.local.shape) for _, part, coordinate in held]
    nominal = choose_rule(head.shape, head.mesh.sizes, head.placements, stored)
    for entry, part, coordinate in held:
        local = local_of(
            head.shape, head.mesh.sizes, head.placements, coordinate, nominal=bool(nominal)
        )
        if local.shape != part.local.shape:
            what = f"needs a shard of {list(local.shape)} and has {list(part.local.shape)} in"
            report(odd("shape-mismatch", identity, entry, what))
            continue
        yield entry, part, local.patches


def _listed(identity: TensorIdentity, entries: Sequence[RankEntry], report: Report) -> TensorInfo:
    entries = agreeing(identity, entries, report)
    head = entries[0].held
    assert isinstance(head, Listed)
    boxes = PieceBoxes()
    for entry in entries:
        part = entry.held
        assert isinstance(part, Listed)
        if part.boxes != head.boxes:
            report(odd("bad-metadata", identity, entry, "has another list of shards in"))
            continue
        for patch, local in part.shards:
            boxes.add(entry, local, (patch,))
    return _info(identity, head.shape, head.dtype, boxes)


def _split(
    identity: TensorIdentity,
    entries: Sequence[RankEntry],
    split: RankSplit,
    dim: int,
    report: Report,
) -> TensorInfo:
    entries = agreeing(identity, entries, report, shapes=False)
    head = entries[0].held
    parts = 1 + max(e.part for e in entries)
    boxes, at, sizes = PieceBoxes(), 0, list[int]()
    for entry in sorted(entries, key=lambda e: e.part):
        # Sizes of the ranks before give the offset, so after a missing one nothing has a place.
        if entry.part > len(sizes):
            break
        ref = entry.held
        assert isinstance(ref, TensorRef)
        rest = (ref.shape[:dim] + ref.shape[dim + 1 :], split.shape[:dim] + split.shape[dim + 1 :])
        replica = entry.part < len(sizes)
        if dim >= len(ref.shape) or rest[0] != rest[1]:
            what = f"of shape {list(split.shape)} cannot hold {list(ref.shape)} of"
        elif replica and ref.shape[dim] != sizes[entry.part]:
            what = f"has {ref.shape[dim]} rows where a replica has {sizes[entry.part]}, in"
        elif split.blocks and part_shape(split.shape, _cut(split), parts) != ref.shape:
            what = f"of shape {list(split.shape)} in blocks cannot hold {list(ref.shape)} of"
        else:
            begin = at - sizes[entry.part] if replica else at
            boxes.add(entry, ref, _patches(split, dim, begin, ref.shape, parts, entry.part))
            if not replica:
                at += ref.shape[dim]
                sizes.append(ref.shape[dim])
            continue
        report(odd("shape-mismatch", identity, entry, what))
        break
    assert isinstance(head, TensorRef)
    return _info(identity, split.shape, head.dtype, boxes)


def _cut(split: RankSplit) -> Cut:
    return Cut(split.dim, split.blocks)


def _patches(
    split: RankSplit, dim: int, at: int, shape: tuple[int, ...], parts: int, part: int
) -> tuple[Patch, ...]:
    if split.blocks:
        slabs_ = slabs(split.shape, _cut(split), parts, part)
        return tuple(Patch(slab.box, slab.local.offsets) for slab in slabs_)
    offsets = tuple(at if d == dim else 0 for d in range(len(shape)))
    return (Patch(Box(offsets, shape), (0,) * len(shape)),)


def _at_offsets(
    identity: TensorIdentity, entries: Sequence[RankEntry], split: RankSplit, report: Report
) -> TensorInfo:
    entries = agreeing(identity, entries, report, shapes=False)
    head = entries[0].held
    boxes = PieceBoxes()
    for entry in entries:
        ref, spec = entry.held, entry.spec
        assert isinstance(ref, TensorRef)
        if spec is None or spec.offsets is None or spec.shape != split.shape:
            report(odd("bad-metadata", identity, entry, "has another place recorded in"))
            continue
        boxes.add(entry, ref, (Patch(Box(spec.offsets, ref.shape), (0,) * len(ref.shape)),))
    assert isinstance(head, TensorRef)
    return _info(identity, split.shape, head.dtype, boxes)


def _replicated(
    identity: TensorIdentity, entries: Sequence[RankEntry], split: RankSplit | None, report: Report
) -> TensorInfo:
    entries = agreeing(identity, entries, report)
    head = entries[0].held
    assert isinstance(head, TensorRef)
    boxes = PieceBoxes()
    for entry in entries:
        assert isinstance(entry.held, TensorRef)
        boxes.add(entry, entry.held, (_whole(entry.held.shape),))
    return _info(identity, head.shape if split is None else split.shape, head.dtype, boxes)


def _of_one_rank(identity: TensorIdentity, entry: RankEntry) -> TensorInfo:
    assert isinstance(entry.held, TensorRef)
    boxes = PieceBoxes()
    boxes.add(entry, entry.held, (_whole(entry.held.shape),))
    # Moments and weights of one name differ in kind, so the component need not tell them apart.
    own = identity.component.removeprefix("extra:")
    name = identity.name if own in ("model", "optimizer") else f"{own}.{identity.name}"
    mine = TensorIdentity(f"extra:rank{entry.rank}", identity.kind, name, identity.stored_name)
    return _info(mine, entry.held.shape, entry.held.dtype, boxes)


def agreeing(
    identity: TensorIdentity,
    entries: Sequence[RankEntry],
    report: Report,
    *,
    shapes: bool = True,
    dtypes: bool = True,
) -> list[RankEntry]:
    """Return the entries of the first one's dtype and shape, unless either is False.

    The others are reported.
    """
    head = entries[0]
    agreeing = []
    for entry in entries:
        if shapes and entry.held.shape != head.held.shape:
            what = f"is {list(head.held.shape)} in {head.file} and {list(entry.held.shape)} in"
            report(odd("shape-mismatch", identity, entry, what))
        elif dtypes and entry.held.dtype is not head.held.dtype:
            what = f"is {head.held.dtype.name} in {head.file} and {entry.held.dtype.name} in"
            report(odd("dtype-mismatch", identity, entry, what))
        else:
            agreeing.append(entry)
    return agreeing


def odd(kind: str, identity: TensorIdentity, entry: RankEntry, what: str) -> Finding:
    """Return the finding that says `what` of a tensor as a file holds it."""
    return finding(
        kind,
        f"{identity.key} {what} {entry.file}",
        file=entry.file,
        tensor=identity.key,
        rank=entry.rank,
    )


def _whole(shape: tuple[int, ...]) -> Patch:
    return Patch(Box.whole(shape), (0,) * len(shape))


def _info(
    identity: TensorIdentity, shape: tuple[int, ...], dtype: DType, boxes: PieceBoxes
) -> TensorInfo:
    return TensorInfo(
        identity.component,
        identity.name,
        identity.kind,
        shape,
        dtype,
        tuple(boxes.pieces),
        identity.stored_name,
    )


class PieceBoxes:
    """Pieces in the order of their coming; a box that came before makes a replica."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._seen: dict[Box, int] = {}

    def add(self, entry: RankEntry, local: TensorRef, patches: Sequence[Patch]) -> None:
        """Add the boxes that a local tensor holds.

        Raises:
            UnsupportedError: a conjugate or negative view, or bytes inside the pickle.
        """
        if local.conj or local.neg:
            raise UnsupportedError(
                "a tensor is stored as a conjugate or negative view", file=entry.file
            )
        place = entry.storages[local.key].extent
        if place is None:
            raise UnsupportedError("a tensor's bytes lie inside the pickle", file=entry.file)
        itemsize = local.dtype.itemsize
        for box, start in patches:
            first = local.storage_offset
            first += sum(s * stride for s, stride in zip(start, local.strides, strict=True))
            dense = is_dense(box.sizes, local.strides)
            length = prod(box.sizes) if dense else reach(box.sizes, local.strides)
            replica = self._seen.get(box, 0)
            self._seen[box] = replica + 1
            self.pieces.append(
                Piece(
                    box,
                    Extent(place.file, place.offset + first * itemsize, length * itemsize),
                    None,
                    None if dense else local.strides,
                    replica,
                    entry.rank,
                )
            )


def wrong_rank(file: str, rank: int, world_size: int, held: Held) -> Finding | None:
    """Return a finding where a record says that another rank, or world, wrote the file."""
    if isinstance(held, Distributed):
        wrote, world = held.mesh.rank, None
    elif isinstance(held, Listed):
        wrote, world = held.rank, held.world_size
    else:
        return None
    if wrote is not None and wrote != rank:
        what = f"{file} was written by rank {wrote}: it is not the file of rank {rank}"
        return finding("wrong-rank", what, file=file, rank=rank)
    if world is not None and world != world_size:
        what = f"{file} was written in a world of {world} ranks, its name says {world_size}"
        return finding("world-size", what, file=file, rank=rank)
    return None
