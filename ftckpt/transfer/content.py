"""The content of a transfer before it has files: logical tensors and other state.

`Content.of` is a checkpoint as it is. `convert` and `reshard` derive others from it: fewer
tensors, other names, other types, tensors joined or cut (a fused QKV and its three parts). A tensor
is always described by boxes of the source's tensors, so that nothing is read before the files are
laid out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, ObjectInfo, TensorInfo, Topology, tensor_key
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.dtypes import DType


class Copy(NamedTuple):
    """A box of a tensor that is to be written, and the equal box of a source tensor.

    Attributes:
        box: in the tensor that is to be written.
        key: of the source's tensor.
        source: where in it; the same sizes as `box`.
    """

    box: Box
    key: str
    source: Box


class TargetTensor(NamedTuple):
    """One logical tensor that is to be written.

    Attributes:
        component, name, kind, shape, dtype: as `ftckpt.checkpoint.TensorInfo` has them; where
            `dtype` is not the source's, the elements are cast.
        copies: boxes that do not overlap; elements in none of them are zero (padding).
    """

    component: str
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: DType
    copies: tuple[Copy, ...]

    @property
    def key(self) -> str:
        """Its key, as `ftckpt.checkpoint.tensor_key` spells it."""
        return tensor_key(self.component, self.kind, self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.dtype.nbytes(prod(self.shape))

    def moved(self, box: Box, row: int) -> Iterator[Copy]:
        """Yield what fills `box` as copies into another tensor, whose rows begin at `row`.

        Args:
            box: in this tensor.
            row: of the other tensor, where the box's first row lies; the other axes are equal.
        """
        for copy in self.copies:
            shared = intersection(box, copy.box)
            if shared is None:
                continue
            yield Copy(
                Box((shared.offsets[0] - box.offsets[0] + row, *shared.offsets[1:]), shared.sizes),
                copy.key,
                Box(_shift(copy.source.offsets, copy.box.offsets, shared.offsets), shared.sizes),
            )


class _Unchanged(Mapping[str, TargetTensor]):
    """A checkpoint's tensors as they are; each is described when it is asked for."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = infos

    def __getitem__(self, key: str) -> TargetTensor:
        info = self._infos[key]
        box = Box.whole(info.shape)
        return TargetTensor(
            info.component, info.name, info.kind, info.shape, info.dtype, (Copy(box, key, box),)
        )

    def __contains__(self, key: object) -> bool:
        return key in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


class SourceBox(NamedTuple):
    """A box of a shard, and the box of a source tensor that fills it.

    The sizes are equal but for leading axes of one, which a shard may have and the source not.
    """

    local: Box
    key: str
    source: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A dense tensor in C order as a file will hold it: all of a logical tensor or a part.

    Attributes:
        shape: of the shard.
        dtype: of its elements; the source's are cast where theirs differs.
        fills: boxes that do not overlap; elements in none of them are zero.
    """

    shape: tuple[int, ...]
    dtype: DType
    fills: tuple[SourceBox, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.dtype.nbytes(self.numel)


class ShardBox(NamedTuple):
    """A box of a shard, and the equal box of a tensor that is to be written."""

    local: Box
    key: str
    box: Box


class Known(NamedTuple):
    """A small tensor that is written and is not a tensor of the source: it keeps it as an object.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        data: their bytes.
    """

    shape: tuple[int, ...]
    dtype: DType
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that is to be written.

    Attributes:
        checkpoint: the source, opened.
        tensors: by key, in the order in which a writer should keep them.
        objects: non-tensor state by name; `checkpoint` loads it.
        aliases: key -> key of the tensor whose values it shares (tied weights).
        topology: of the job that wrote the source.
        dropped: what was left out on demand, in words.
        partial: whether weights of the model were: what holds the result to a model is told so.
        beside: small files that go with the tensors where the format has a place for them
            (`config.json`), by path; they replace the source's own.
        known: what the result lists as tensors beside `tensors`, by key; a writer says it, and only
            the proof asks.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, TargetTensor]
    objects: Mapping[str, ObjectInfo]
    aliases: Mapping[str, str] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    dropped: Sequence[str] = ()
    partial: bool = False
    beside: Mapping[str, bytes] = field(default_factory=dict)
    known: Mapping[str, Known] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Content:
        """Return all of a checkpoint, unchanged."""
        return cls(
            checkpoint=checkpoint,
            tensors=_Unchanged(checkpoint.tensors),
            objects=checkpoint.objects,
            aliases=checkpoint.aliases,
            topology=checkpoint.topology,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return sum(wanted.nbytes for wanted in self.tensors.values())

    def with_tensors(self, tensors: Iterable[TargetTensor]) -> Content:
        """Return the same with other tensors; aliases of or to what is gone are gone too."""
        kept = {wanted.key: wanted for wanted in tensors}
        aliases = {k: owner for k, owner in self.aliases.items() if k in kept and owner in kept}
        return replace(self, tensors=kept, aliases=aliases)

    def whole(self, key: str) -> Shard:
        """Return one tensor as one shard."""
        wanted = self.tensors[key]
        fills = (SourceBox(*copy) for copy in wanted.copies if copy.box.volume)
        return Shard(wanted.shape, wanted.dtype, tuple(fills))

    def part(self, key: str, box: Box) -> Shard:
        """Return one box of a tensor as a shard of the box's shape."""
        wanted = self.tensors[key]
        if box.sizes == wanted.shape:
            return self.whole(key)
        return self.shard(box.sizes, wanted.dtype, [ShardBox(Box.whole(box.sizes), key, box)])

    def shard(self, shape: Sequence[int], dtype: DType, parts: Iterable[ShardBox]) -> Shard:
        """Return a shard put together from boxes of tensors.

        Args:
            shape: of the shard.
            dtype: of its elements.
            parts: boxes of the shard that do not overlap, each with a box of `tensors`.
        """
        fills = [fill for part in parts for fill in self._fills(part)]
        return Shard(tuple(shape), dtype, tuple(fills))

    def _fills(self, part: ShardBox) -> Iterable[SourceBox]:
        lead = len(part.local.sizes) - len(part.box.sizes)
        for copy in self.tensors[part.key].copies:
            shared = intersection(part.box, copy.box) if part.box.sizes else part.box
            if shared is None or not shared.volume:
                continue
            local, source = part.local, shared
            if lead or shared != part.box:
                inside = _shift(local.offsets[lead:], part.box.offsets, shared.offsets)
                local = Box((*local.offsets[:lead], *inside), (*(1,) * lead, *shared.sizes))
            if copy.source != copy.box:
                begin = _shift(copy.source.offsets, copy.box.offsets, shared.offsets)
                source = Box(begin, shared.sizes)
            yield SourceBox(local, copy.key, source)


def _shift(base: Sequence[int], origin: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """Return `base + (place - origin)`."""
    return tuple(b + p - o for b, o, p in zip(base, origin, place, strict=True))
