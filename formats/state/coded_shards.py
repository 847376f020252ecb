"""Tensor subclasses that are cut over ranks: codes, their scales, and what all shards share.

FSDP2 cuts a parameter, and torchao codes what its optimizer keeps of each rank's shard by itself:
a DTensor whose local tensor is an `OptimState8bit`. Its parts are joined to tensors of the whole
parameter if that says the same: if every shard is in codes and begins where a block begins, the
blocks of the shards are those of the whole, as torchao's own `full_tensor` joins them. torchao
leaves a shard that is not made of whole blocks, or has fewer than 4096 elements, as plain numbers.
Where one shard is plain and another is not, each keeps its own: `exp_avg.0.codes`, `exp_avg.1`.

Source: `_new_buffer` in torchao 0.18 `optim/adam.py`, `tensor_attrs` and the operators in
`optim/subclass_*.py` (`aten.slice`, `all_gather_into_tensor`); the paths of its older releases have
the same classes. `WeightWithDynamicFloat8CastTensor` in `float8/fsdp_utils.py`. `nf4_split` in
`quantization/quantize_/workflows/nf4/nf4_tensor.py` (`dtypes/nf4tensor.py` before 0.15), which cuts
codes and both rows of scales, and leaves every rank the mean of the scales and the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import combinations, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ftckpt.checkpoint import Box, Extent, Piece
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.formats.torch_files.inner import InnerPart, inner_tensors, outer_view, shown_suffix
from ftckpt.formats.torch_files.sharded import hidden
from ftckpt.formats.torch_files.values import StoredStorage, SubclassRef, TensorRef


class CutBy(Enum):
    """How a part of a shard belongs to the part of the whole tensor."""

    SAME = auto()  # it has the shape of the shard
    FLAT = auto()  # it is a row, with one element for each block of the shard's
    EACH = auto()  # every shard has the same


_CODED = {"codes": CutBy.SAME, "scale": CutBy.FLAT, "qmap": CutBy.EACH}
_CLASSES: Mapping[str, Mapping[str, CutBy]] = {
    "OptimState8bit": _CODED,
    "OptimState4bit": _CODED | {"codes": CutBy.FLAT},
    "OptimStateFp8": {"codes": CutBy.SAME, "scale": CutBy.FLAT},
    "WeightWithDynamicFloat8CastTensor": {"_tensor": CutBy.SAME},
    "NF4Tensor": {
        "quantized_data": CutBy.FLAT,
        "quantized_scalers": CutBy.FLAT,
        "quantization_factor": CutBy.FLAT,
        "scaler_mean": CutBy.EACH,
        "nf4": CutBy.EACH,
    },
}
# The settings whose product says how many elements a row has one number for.
_PER: Mapping[str, tuple[str, ...]] = {
    "scale": ("block_size",),
    "quantized_scalers": ("block_size",),
    "quantization_factor": ("block_size", "scaler_block_size"),
}
_LIBRARY = "torchao."
# What a class records of the shard's own shape.
SHAPE = "_shape"
_BLOCK = "block_size"
# Bytes of the longest table of codes that is compared; torchao's has at most 1024.
_TABLE = 4096


class CodedShard(NamedTuple):
    """One rank's shard.

    Attributes:
        box: in the whole tensor.
        value: the subclass, or a plain tensor.
        storages: of the stream that holds it.
        rank: whose it is; None if that is not known.
        file: which file.
        moved: how many bytes later in that file its tensors lie than `storages` says, which are
            another shard's if its own record was not read.
    """

    box: Box
    value: SubclassRef | TensorRef
    storages: Mapping[str, StoredStorage]
    rank: int | None
    file: str
    moved: int = 0

    def span(self, ref: TensorRef) -> Extent:
        """Return where the bytes of a tensor inside are."""
        place = ref.span(self.storages)
        return Extent(self.file, place.offset + self.moved, place.length)


class OwnShard(NamedTuple):
    """A shard that keeps its own parts.

    Attributes:
        box: in the whole tensor.
        suffix: what follows the tensor's name in the names of its parts: `.0`.
        coded: whether it is in codes; else it is one plain tensor.
    """

    box: Box
    suffix: str
    coded: bool


class CodedTensor(NamedTuple):
    """A tensor subclass that is cut over ranks.

    Attributes:
        shape: of the whole tensor.
        dtype: that it shows.
        record: that of one shard: its class, and what it says beside its tensors.
        head: the box of that shard.
        cuts: how each part is cut.
        per: how many elements of the tensor stand for one of each part that is a row.
        boxes: of the shards, each once.
        own: the shards, if they are not joined.
        why: the reason for that.
        differs: the part that all shards must have the same of, and do not.
    """

    shape: tuple[int, ...]
    dtype: DType
    record: SubclassRef
    head: Box
    cuts: Mapping[str, CutBy]
    per: Mapping[str, int]
    boxes: tuple[Box, ...]
    own: tuple[OwnShard, ...] = ()
    why: str = ""
    differs: str = ""


@runtime_checkable
class HoldsCoded(Protocol):
    """A checkpoint with tensor subclasses that are cut over ranks."""

    @property
    def coded(self) -> Mapping[str, CodedParts]:
        """By the name of the object that is a record of it."""


class CodedParts(NamedTuple):
    """A tensor subclass of a checkpoint, and the keys of the tensors inside.

    Attributes:
        tensor: what it is.
        keys: by what follows its name.
    """

    tensor: CodedTensor
    keys: Mapping[str, str]


def cuts_of(value: SubclassRef) -> Mapping[str, CutBy]:
    """Return how the parts of a shard are cut.

    Raises:
        UnsupportedError: nothing is known of its class.
    """
    known = value.type_name.startswith(_LIBRARY)
    cuts = _CLASSES.get(value.type_name.rpartition(".")[2]) if known else None
    if cuts is None:
        raise hidden(value)
    return cuts


Refuse = Callable[[CodedShard, str], Any]
ReadMany = Callable[[Sequence[Extent]], Iterable[bytes]]


def joined(
    shape: tuple[int, ...],
    dtype: DType,
    shards: Sequence[CodedShard],
    refuse: Refuse,
    read: ReadMany,
) -> tuple[CodedTensor | None, list[InnerPart]]:
    """Return what shards make up, and its parts; None if none of them is whole.

    Args:
        shape: of the whole tensor.
        dtype: that it shows.
        shards: all that there are, at least one of them a subclass; replicas have equal boxes.
        refuse: is told of a shard that contradicts itself or the others, and is left out.
        read: returns bytes of the shards' files, where a short part must be compared.

    Raises:
        UnsupportedError: nothing is known of a class; a conjugate view, or bytes in the pickle.
    """
    held = [shard for shard in shards if 0 not in shard.box.sizes]
    coded: list[tuple[CodedShard, dict[str, int]]] = []
    plain: list[CodedShard] = []
    numbers = None  # the type of the plain shards
    known: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}  # many shards share a record
    for shard in held:
        if type(shard.value) is TensorRef:
            numbers = numbers or shard.value.dtype
            if shard.value.dtype is numbers:
                plain.append(shard)
            else:
                what = f"is {numbers.name} on another rank and {shard.value.dtype.name} in"
                refuse(shard, what)
            continue
        form = id(shard.value), shard.box.sizes
        per = known.get(form)
        if per is None:
            per = _elements_per_one(shard, refuse)
        if per is not None:
            known[form] = per
            coded.append((shard, per))
    if not coded:
        return None, []
    first, per = coded[0]
    assert type(first.value) is SubclassRef
    records = list({id(shard.value): shard for shard, _ in reversed(coded)}.values())[::-1]
    _require_one_form(records)
    kept = sorted([*(shard for shard, _ in coded), *plain], key=lambda s: s.box.offsets)
    boxes = tuple(dict.fromkeys(shard.box for shard in kept))
    tensor = CodedTensor(shape, dtype, first.value, first.box, cuts_of(first.value), per, boxes)
    why, differs = _why_apart(tensor, coded, plain), ""
    if not why:
        differs = _differing(tensor, records, read)
        why = f"its shards have different tables of codes ({differs})" if differs else ""
    if not why:
        return tensor, list(_whole_parts(tensor, kept))
    replicas: dict[Box, list[CodedShard]] = {box: [] for box in boxes}
    for shard in kept:
        replicas[shard.box].append(shard)
    parts: list[InnerPart] = []
    own: list[OwnShard] = []
    for number, (box, same) in enumerate(replicas.items()):
        head = same[0].value
        alike = [shard for shard in same if type(shard.value) is type(head)]
        for shard in same:
            if type(shard.value) is not type(head):
                refuse(shard, "is in codes on one rank and plain on its replica, in")
        own.append(OwnShard(box, f".{number}", type(head) is SubclassRef))
        parts += _own_parts(f".{number}", alike, refuse)
    return tensor._replace(own=tuple(own), why=why, differs=differs), parts


def check_shards(tensor: CodedTensor, key: str) -> Iterator[Finding]:
    """Yield what is wrong with the shards of a tensor as a whole."""
    if not is_covered(tensor):
        what = f"{key}: its shards do not hold each of its elements once"
        yield finding("hole", what, tensor=key)
    if tensor.differs:
        what = f"{key}: {tensor.why}, so that none of them decodes those of the others"
        yield finding("replica-differs", what, tensor=key)


def is_covered(tensor: CodedTensor) -> bool:
    """Whether shards that keep their own parts hold each element of the tensor once."""
    boxes = [one.box for one in tensor.own]
    if not boxes:
        return True
    if sum(prod(box.sizes) for box in boxes) != prod(tensor.shape):
        return False
    if all(is_run(box, tensor.shape) for box in boxes):
        runs = sorted(run_of(box, tensor.shape) for box in boxes)
        return all(a + n == b for (a, n), (b, _) in pairwise(runs)) and runs[0][0] == 0
    return not any(intersection(one, other) for one, other in combinations(boxes, 2))


def _elements_per_one(shard: CodedShard, refuse: Refuse) -> dict[str, int] | None:
    """Return how many elements each part that is a row has one for; None for a wrong shard."""
    value = shard.value
    assert type(value) is SubclassRef
    cuts, state = cuts_of(value), value.state
    view = outer_view(value)
    if type(state) is not dict or view is None:
        refuse(shard, "is a record without its tensors in")
        return None
    if view[0] != shard.box.sizes or state.get(SHAPE, view[0]) != view[0]:
        what = f"needs a shard of {list(shard.box.sizes)} and has {list(view[0])} in"
        refuse(shard, what)
        return None
    inside = dict(inner_tensors(value))
    if set(inside) - {f".{part}" for part in cuts}:
        more = min(set(inside) - {f".{part}" for part in cuts})
        raise UnsupportedError(f"a {value.type_name} has another tensor inside: {more[1:]}")
    numel, per = prod(view[0]), dict[str, int]()
    for part, how in cuts.items():
        ref = inside.get(f".{part}")
        if ref is None:
            refuse(shard, f"has no {part} in")
            return None
        if ref.conj or ref.neg or shard.storages[ref.key].inline is not None:
            raise UnsupportedError(
                f"the {part} of a tensor is a conjugate view, or has no bytes of its own",
                file=shard.file,
            )
        fits = how is CutBy.EACH or (how is CutBy.SAME and ref.shape == view[0])
        if how is CutBy.FLAT and len(ref.shape) == 1 and ref.shape[0] and numel % ref.shape[0] == 0:
            per[part] = numel // ref.shape[0]
            told = [state.get(name, 0) for name in _PER.get(part, ())]
            known = bool(told) and all(type(size) is int for size in told)
            fits = not known or prod(told) in (0, per[part])
        if not fits:
            refuse(shard, f"of {list(view[0])} cannot have a {part} of {list(ref.shape)}, in")
            return None
    return per


def _why_apart(
    tensor: CodedTensor,
    coded: Sequence[tuple[CodedShard, Mapping[str, int]]],
    plain: Sequence[CodedShard],
) -> str:
    """Return why shards cannot be joined to codes of the whole; "" if they can."""
    if plain:
        return (
            f"{len(plain)} of {len(plain) + len(coded)} shards are plain numbers, as torchao leaves"
            " one that is not made of whole blocks or is small, and the others are codes"
        )
    for shard, per in coded:
        if per != tensor.per:
            return "its shards have blocks of different sizes"
        if tensor.per and not is_run(shard.box, tensor.shape):
            return "its blocks run within the columns that a rank holds, and not in whole rows"
        start, length = run_of(shard.box, tensor.shape)
        if any(start % per or length % per for per in tensor.per.values()):
            return "a shard begins inside a block of the whole"
    return ""


def _differing(tensor: CodedTensor, shards: Sequence[CodedShard], read: ReadMany) -> str:
    """Return the part that all shards must have the same of, and do not; "" if there is none.

    One is kept of all, so if they differ, the codes of the other shards would mean other numbers.
    """
    for part, how in tensor.cuts.items():
        if how is CutBy.EACH and not _all_same(f".{part}", shards, read):
            return part
    return ""


def _all_same(inner: str, shards: Sequence[CodedShard], read: ReadMany) -> bool:
    """Whether a part is the same in all shards: by its checksums, else by its bytes."""
    told: dict[tuple[Any, ...], Extent] = {}
    for number, shard in enumerate(shards):
        ref = _inside(shard)[inner]
        storage = shard.storages[ref.key]
        # Without a checksum nothing stands for its bytes, and each one is read.
        bytes_ = number if storage.crc32 is None else (storage.crc32, storage.extent.length)
        view = ref.storage_offset, ref.shape, ref.strides
        told.setdefault((storage.crc32 is None, bytes_, view), shard.span(ref))
    extents = list(told.values())
    if len(extents) == 1:
        return True
    if len({strides for *_, (_, _, strides) in told}) > 1 or extents[0].length > _TABLE:
        return False
    try:
        return len(set(read(extents))) == 1
    except CorruptError:  # the checks report what is cut short
        return False


def _require_one_form(shards: Sequence[CodedShard]) -> None:
    wanted = None
    for shard in shards:
        assert type(shard.value) is SubclassRef
        form = _form(shard.value)
        if wanted is not None and form != wanted:
            raise UnsupportedError(
                f"the shards of a {shard.value.type_name} have different settings or types",
                file=shard.file,
            )
        wanted = form


def _form(value: SubclassRef) -> tuple[Any, ...]:
    """Return what must be equal in all shards: the class, its settings, types of its tensors."""
    state = value.state
    assert type(state) is dict
    inside = dict(inner_tensors(value))
    cuts = cuts_of(value)
    types = {
        suffix: (ref.dtype, ref.shape if cuts[suffix[1:]] is CutBy.EACH else None)
        for suffix, ref in inside.items()
    }
    own = {SHAPE, _BLOCK} | {suffix[1:] for suffix in inside}
    rest = {str(k): v for k, v in state.items() if k not in own}
    view = outer_view(value)
    # As it would be written: objects of the library say little of what is in them.
    from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled

    settings, _ = pickled(CopiedTree(rest, {}))
    return value.type_name, types, settings, view and view[1]


def is_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the elements of a box follow each other in the tensor."""
    cut = [n for n, size in enumerate(shape) if box.sizes[n] != size]
    return not cut or all(n == 1 for n in box.sizes[: cut[-1]])


def run_of(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first element and the number of those of a box whose elements are a run."""
    start = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        start = start * size + offset
    return start, prod(box.sizes)


def part_box(tensor: CodedTensor, part: str, box: Box, of: tuple[int, ...]) -> Box:
    """Return the box of a part of the whole tensor that belongs to a box of the tensor.

    Args:
        tensor: the tensor, whose shards are joined.
        part: which one.
        box: of the tensor.
        of: the shape of a part of which all have the same.
    """
    how = tensor.cuts[part]
    if how is CutBy.SAME:
        return box
    if how is CutBy.EACH:
        return Box.whole(of)
    start, length = run_of(box, tensor.shape)
    per = tensor.per[part]
    return Box((start // per,), (length // per,))


def _whole_parts(tensor: CodedTensor, shards: Sequence[CodedShard]) -> Iterator[InnerPart]:
    replicas: list[int] = []
    if len(tensor.boxes) < len(shards):
        before: dict[Box, int] = {}
        for shard in shards:
            replicas.append(before.get(shard.box, 0))
            before[shard.box] = replicas[-1] + 1
    inside: dict[int, Mapping[str, TensorRef]] = {}
    for shard in shards:
        if id(shard.value) not in inside:
            inside[id(shard.value)] = _inside(shard)
    first = inside[id(shards[0].value)]
    for part, how in tensor.cuts.items():
        dtype, shape = first[f".{part}"].dtype, tensor.shape
        if how is CutBy.FLAT:
            shape = (prod(tensor.shape) // tensor.per[part],)
        elif how is CutBy.EACH:
            shape = first[f".{part}"].shape
        refs = {number: held[f".{part}"] for number, held in inside.items()}
        pieces = _PartPieces(tensor, part, shards, refs, replicas)
        shown = shown_suffix(tensor.record.type_name, f".{part}")
        yield InnerPart(f".{part}", shape, dtype, pieces, shown)


class _PartPieces(LazyPieces):
    """One part of joined shards; `refs` is it by the `id` of a shard's record."""

    __slots__ = ("_part", "_refs", "_replicas", "_shards", "_tensor")

    def __init__(
        self,
        tensor: CodedTensor,
        part: str,
        shards: Sequence[CodedShard],
        refs: Mapping[int, TensorRef],
        replicas: Sequence[int],
    ) -> None:
        self._tensor, self._part, self._shards, self._refs = tensor, part, shards, refs
        # Of what all shards have the same, each is a copy of the first.
        every = tensor.cuts[part] is CutBy.EACH
        self._replicas = range(len(shards)) if every else replicas

    def __len__(self) -> int:
        return len(self._shards)

    def box(self, index: int) -> Box:
        """Return the box of one piece."""
        shard = self._shards[index]
        of = self._refs[id(shard.value)].shape
        return part_box(self._tensor, self._part, shard.box, of)

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        shard = self._shards[index]
        replica = self._replicas[index] if self._replicas else 0
        return _piece(self._refs[id(shard.value)], self.box(index), shard, replica)


def _own_parts(suffix: str, shards: Sequence[CodedShard], refuse: Refuse) -> Iterator[InnerPart]:
    """Yield the parts of one shard; `shards` are its replicas, all plain or all in codes."""
    held: list[tuple[CodedShard, dict[str, TensorRef]]] = []
    for shard in shards:
        refs = {"": shard.value} if type(shard.value) is TensorRef else _inside(shard)
        if not held or _sizes(refs) == _sizes(held[0][1]):
            held.append((shard, refs))
        else:
            refuse(shard, "has tensors of another shape or type inside than its replica, in")
    for inner, first in held[0][1].items():
        pieces = [
            _piece(refs[inner], Box.whole(first.shape), shard, replica)
            for replica, (shard, refs) in enumerate(held)
        ]
        own = suffix + inner
        yield InnerPart(own, first.shape, first.dtype, tuple(pieces), own)


def _inside(shard: CodedShard) -> dict[str, TensorRef]:
    assert type(shard.value) is SubclassRef
    return dict(inner_tensors(shard.value))


def _sizes(refs: Mapping[str, TensorRef]) -> Mapping[str, tuple[tuple[int, ...], DType]]:
    return {inner: (ref.shape, ref.dtype) for inner, ref in refs.items()}


def _piece(ref: TensorRef, box: Box, shard: CodedShard, replica: int) -> Piece:
    strides = None if ref.dense else ref.strides
    return Piece(box, shard.span(ref), None, strides, replica, shard.rank)


def require_same_record(
    shard: CodedShard, supposed: CodedShard, read: ReadMany, *, tables: bool
) -> None:
    """Require that a shard's own record is what it was supposed to be from another shard's.

    Args:
        shard: from its own record.
        supposed: from the other one.
        read: returns bytes of the shards' files, where a short part must be compared.
        tables: whether one is kept of what all shards must have the same of.

    Raises:
        UnsupportedError: it has other settings, another class or none, or another table.
        CorruptError: its tensors lie elsewhere (`bad-metadata`).
    """
    one, other = shard.value, supposed.value
    if type(one) is TensorRef and type(other) is TensorRef:
        same, of_all = one.dtype is other.dtype, []
        inside = [(one, other)]
    elif type(one) is SubclassRef and type(other) is SubclassRef:
        cuts = cuts_of(other)
        mine, theirs = _inside(shard), _inside(supposed)
        same = one.type_name == other.type_name and mine.keys() == theirs.keys()
        same = same and _form(one) == _form(other)
        inside = [(mine[key], theirs[key]) for key in theirs] if same else []
        of_all = [key for key in mine if same and cuts[key[1:]] is CutBy.EACH]
    else:
        same, inside, of_all = False, [], []
    if not same:
        raise UnsupportedError(
            f"the shards of a {_class_name(other)} have different settings or types",
            file=shard.file,
        )
    for ref, wanted in inside:
        alike = _view(ref) == _view(wanted) and shard.storages[ref.key].inline is None
        if not alike or shard.span(ref) != supposed.span(wanted):
            raise CorruptError(
                f"a shard's tensors do not lie in {shard.file} as those of the other shards do",
                kind="bad-metadata",
                file=shard.file,
            )
    for key in of_all if tables else ():
        if not _all_same(key, (shard, supposed._replace(file=_file(supposed), moved=0)), read):
            # The shard is whole, and decodes by its own table; only its codes cannot be joined.
            raise UnsupportedError(
                f"a shard in {shard.file} has another table of codes ({key[1:]}) than the first"
                " and the last one, so that their codes are not one tensor",
                file=shard.file,
            )


def _view(ref: TensorRef) -> tuple[Any, ...]:
    return ref.storage_offset, ref.shape, ref.strides, ref.dtype, ref.conj, ref.neg


def _file(shard: CodedShard) -> str:
    """Return the file of the record that a shard is known from."""
    return next(iter(shard.storages.values())).extent.file


def _class_name(value: SubclassRef | TensorRef) -> str:
    return value.type_name if type(value) is SubclassRef else "tensor"
